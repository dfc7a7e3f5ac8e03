"""Flame graph, modules, blocking calls and threads on public traces, counted again by plain loops over the JSON."""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter, defaultdict
from decimal import Decimal
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from support.public_traces import CALLS, GPU_WORK, OPERATORS
from traceloom import analyze, load
from traceloom.findings import findings
from traceloom.trace import vocabulary as vocab
from traceloom.trace.session import Session
from traceloom.trace.trace import Trace

HOST = {"user_annotation", "python_function", "mtia_runtime", *OPERATORS, *CALLS}
NAMES = sorted(
    path.name
    for path in (Path(__file__).parents[3] / "shared" / "data" / "kineto").glob("*.json.gz")
)


def events_of(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path) as file:
        read = json.load(file, parse_float=Decimal)
    return [
        one for one in read["traceEvents"] if one.get("ph") == "X" and one.get("dur") is not None
    ]


def ns(value: Any) -> int:
    return int((Decimal(value) * 1000).to_integral_value())


class Call:
    """One host event with its parent, by a stack per thread; ends are shortened to the parent's."""

    def __init__(self, event: dict[str, Any], parent: Call | None) -> None:
        self.event, self.parent, self.name = event, parent, event["name"]
        self.start, self.end = ns(event["ts"]), ns(event["ts"]) + max(ns(event["dur"]), 0)
        if parent is not None:
            self.end = min(self.end, parent.end)
        self.self_ns = self.end - self.start

    def above(self) -> list[Call]:
        found, at = [], self.parent
        while at is not None:
            found.append(at)
            at = at.parent
        return found


def nested(events: list[dict[str, Any]]) -> list[Call]:
    """All host events as calls; for traces whose spans do not cross."""
    threads: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["cat"] in HOST:
            threads[event["pid"], event["tid"]].append(event)
    calls: list[Call] = []
    for members in threads.values():
        members.sort(key=lambda one: (ns(one["ts"]), -ns(one["dur"])))
        open_calls: list[Call] = []
        for event in members:
            while open_calls and open_calls[-1].end <= ns(event["ts"]):
                open_calls.pop()
            crossed(open_calls, event)
            call = Call(event, open_calls[-1] if open_calls else None)
            if call.parent is not None:
                call.parent.self_ns -= call.end - call.start
            open_calls.append(call)
            calls.append(call)
    return calls


def crossed(open_calls: list[Call], event: dict[str, Any]) -> None:
    """Where spans cross, the one that loses less is shortened (docs/concepts/reading.md): here the open ones."""
    start, end = ns(event["ts"]), ns(event["ts"]) + max(ns(event["dur"]), 0)
    while open_calls and end - open_calls[-1].end > open_calls[-1].end - start:
        cut = open_calls.pop()
        lost = cut.end - start
        cut.end, cut.self_ns = start, cut.self_ns - lost
        if cut.parent is not None:
            cut.parent.self_ns += lost


@pytest.fixture(scope="module")
def traces(shared_data: Path) -> Any:
    kept: dict[str, tuple[Trace, list[dict[str, Any]], list[Call]]] = {}

    def get(name: str) -> tuple[Trace, list[dict[str, Any]], list[Call]]:
        if name not in kept:
            path = shared_data / "kineto" / f"{name}.json.gz"
            events = events_of(path)
            kept[name] = (load(path).traces[0], events, nested(events))
        return kept[name]

    return get


def plain(name: str) -> str:
    name = re.sub(r" (?:object )?at 0x[0-9a-fA-F]+", "", name)
    return re.sub(r"^ProfilerStep#.*$", "ProfilerStep#", name)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "name", ["mi300_vllm_piecewise_graphs", "mi300_bert_small", "h100_bert_small", "mi210_gpu_only"]
)
def test_the_flame_graph_is_what_a_plain_loop_over_the_file_counts(traces: Any, name: str) -> None:
    trace, _, calls = traces(name)
    found = analyze.flame(trace).functions
    counted: Counter[str] = Counter()
    spent: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for call in calls:
        known = plain(call.name)
        counted[known] += 1
        spent[known] += call.self_ns
        if all(plain(other.name) != known for other in call.above()):
            total[known] += call.end - call.start
    spelled = (
        pl.when(pl.col("file").is_null())
        .then("name")
        .otherwise(pl.format("{}({}): {}", "file", "line", "name"))
    )
    rows = found.select(spelled, "calls", "self_ns", "total_ns").rows()
    assert {key: calls for key, calls, _, _ in rows} == counted
    assert {key: own for key, _, own, _ in rows} == spent
    assert {key: whole for key, _, _, whole in rows} == total


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["mi300_vllm_piecewise_graphs", "h100_owlv2"])
def test_gpu_time_reaches_the_frames_above_its_launch(traces: Any, name: str) -> None:
    trace, events, calls = traces(name)
    launches = {
        call.event["args"]["correlation"]: call
        for call in calls
        if call.event["cat"] in CALLS and "correlation" in call.event.get("args", {})
    }
    modules: Counter[str] = Counter()
    whole = 0
    for event in events:
        launch = (
            launches.get(event.get("args", {}).get("correlation"))
            if event["cat"] in GPU_WORK
            else None
        )
        if launch is not None:
            whole += max(ns(event["dur"]), 0)
            for known in {
                call.name for call in launch.above() if call.name.startswith("nn.Module: ")
            }:
                modules[known] += max(ns(event["dur"]), 0)
    found = analyze.flame(trace)
    rows = found.functions.filter((pl.col("kind") == "module") & (pl.col("device_ns") > 0)).select(
        "name", "device_ns"
    )
    assert dict(rows.rows()) == modules
    assert found.gpu_work_ns - found.unattributed_device_ns == whole


def test_module_times_of_owlv2_are_those_of_its_module_calls(traces: Any) -> None:
    trace, _, calls = traces("h100_owlv2")
    host: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for call in calls:
        if call.name.startswith("nn.Module: "):
            host[call.name] += call.end - call.start
            count[call.name] += 1
    tree = analyze.modules(trace).tree.filter(pl.col("kind") == "module")
    rows = tree.group_by("name").agg(pl.col("count", "host_ns").sum()).rows()
    assert {f"nn.Module: {name}": number for name, number, _ in rows} == count
    crossing = sum(abs(host[f"nn.Module: {name}"] - spent) for name, _, spent in rows)
    assert crossing <= 1000 * len(
        rows
    )  # the reader shortens crossing spans; the loop above does not undo that


def in_backward(call: Call) -> bool:
    """Whether the call is a node of autograd: it names its forward thread, or the engine that runs it."""
    named = call.name.startswith("autograd::engine::evaluate_function: ")
    return call.event["cat"] == "cpu_op" and (
        named or call.event.get("args", {}).get("Fwd thread id", 0) > 0
    )


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["v100_ns_resolution", "a100_ddp_nccl", "mi250_minitoy"])
def test_backward_time_goes_where_the_arrows_of_the_file_point(
    traces: Any, name: str, shared_data: Path
) -> None:
    """Forward-backward arrows are written by PyTorch: each joins an operator to its backward."""
    trace, events, calls = traces(name)
    with gzip.open(shared_data / "kineto" / f"{name}.json.gz") as file:
        raw = [
            one
            for one in json.load(file, parse_float=Decimal)["traceEvents"]
            if one.get("cat") == "fwdbwd"
        ]
    at = {
        (call.event["pid"], call.event["tid"], call.start): call
        for call in calls
        if call.event["cat"] == "cpu_op"
    }
    start = {
        one["id"]: at[one["pid"], one["tid"], ns(one["ts"])] for one in raw if one["ph"] == "s"
    }
    ends = {one["id"]: at[one["pid"], one["tid"], ns(one["ts"])] for one in raw if one["ph"] == "f"}
    forward = {}  # sequence number of every backward node -> annotations around its forward operator
    for number, one in start.items():
        around = [call.name for call in one.above() if call.event["cat"] == "user_annotation"]
        assert ends[number].event["args"]["Sequence number"] == one.event["args"]["Sequence number"]
        forward[one.event["args"]["Sequence number"]] = [
            name for name in around if not name.startswith("ProfilerStep")
        ]
    host: Counter[str] = Counter()
    device: Counter[str] = Counter()
    launched = defaultdict(int)
    for event in events:
        if event["cat"] in GPU_WORK:
            launched[event["args"].get("correlation")] += max(ns(event["dur"]), 0)
    for call in calls:
        node = next((one for one in (call, *call.above()) if in_backward(one)), None)
        if node is None:
            continue
        line = [call, *call.above()]
        own = [
            one.name for one in line[: line.index(node)] if one.event["cat"] == "user_annotation"
        ]
        number = node.event["args"].get("Sequence number")
        for annotation in own + forward.get(number, []):
            host[annotation] += call.self_ns
            if call.event["cat"].startswith("cuda_"):
                device[annotation] += launched.get(call.event["args"].get("correlation"), 0)
    tree = analyze.modules(trace).tree
    rows = tree.group_by("name").agg(pl.col("backward_host_ns", "backward_device_ns").sum()).rows()
    assert {name: spent for name, spent, _ in rows if spent} == {k: v for k, v in host.items() if v}
    assert {name: spent for name, _, spent in rows if spent} == {
        k: v for k, v in device.items() if v
    }


def test_deepseek_repeats_a_norm_and_a_linear_in_each_of_four_backward_passes(traces: Any) -> None:
    trace, _, calls = traces("h800_deepseek_train")
    again = [
        call
        for call in calls
        if call.name == "DropoutAddLayerNormFn"
        and any(other.name == "LinearWithGradAccumulationFP8Backward" for other in call.above())
    ]
    assert len(again) == 4
    result = analyze.modules(trace)
    assert result.recompute_evidence == "operators"


@pytest.mark.parametrize(
    ("name", "call", "count"),
    [
        ("h100_owlv2", "cudaStreamSynchronize", 80),
        ("h100_owlv2", "cudaDeviceSynchronize", 2),
        ("mi300_bert_small", "hipDeviceSynchronize", 2),
        ("mi300_bert_small", "hipMemcpyWithStream", 1),
        ("a100_ddp_nccl", "cudaEventSynchronize", 24),
        ("mtia_inference", "synchronizeStream", 113),
    ],
)
def test_every_synchronising_call_of_the_file_is_a_blocking_call(
    traces: Any, name: str, call: str, count: int
) -> None:
    trace, _, calls = traces(name)
    sites = analyze.blocking_calls(trace).sites.filter(pl.col("call") == call)
    mine = [one for one in calls if one.name == call]
    assert (sites["count"].sum(), len(mine)) == (count, count)
    assert sites["blocked_ns"].sum() == sum(one.end - one.start for one in mine)


def test_who_asks_to_wait_in_owlv2_and_what_the_gpu_does(traces: Any) -> None:
    trace, events, calls = traces("h100_owlv2")
    top = analyze.blocking_calls(trace).sites.row(0, named=True)
    assert (top["kind"], top["call"], top["count"]) == (
        "copy_to_device",
        "cudaStreamSynchronize",
        5,
    )
    assert top["frame"] == "transformers/models/owlv2/modeling_owlv2.py(1421): box_predictor"
    work = sorted(
        (ns(e["ts"]), ns(e["ts"]) + max(ns(e["dur"]), 0)) for e in events if e["cat"] in GPU_WORK
    )
    busy = 0
    for call in calls:
        if call.name != "cudaStreamSynchronize" or not any(
            "box_predictor" in one.name for one in call.above()
        ):
            continue
        reached = call.start
        for low, high in work:
            low, high = max(low, reached), min(high, call.end)  # noqa: PLW2901
            busy += max(high - low, 0)
            reached = max(reached, high)
    assert top["gpu_busy_ns"] == busy


def test_the_item_of_an_amd_run_names_its_line(traces: Any) -> None:
    trace, _, _ = traces("mi300_bert_small")
    row = analyze.blocking_calls(trace).sites.filter(pl.col("kind") == "item").row(0, named=True)
    assert row["op"] == "aten::is_nonzero > aten::item > aten::_local_scalar_dense"
    assert row["frame"].startswith("transformers/modeling_attn_mask_utils.py(")


def test_data_loading_is_the_bottleneck_of_owlv2(traces: Any) -> None:
    trace, events, _ = traces("h100_owlv2")
    waits = [e for e in events if e["name"].startswith("enumerate(DataLoader)#")]
    result = analyze.data_loading(trace)
    assert result.total_ns == sum(ns(e["dur"]) for e in waits) == result.spent["ns"].sum()
    assert result.steps.select("bottleneck", "gpu_idle_ns").rows() == [(True, result.total_ns)]
    assert set(result.waits["maker"]) == {"main_thread"}


def test_frames_that_hold_the_waits_of_owlv2_are_those_of_a_plain_loop(traces: Any) -> None:
    trace, events, calls = traces("h100_owlv2")
    finding = next(
        finding
        for finding in findings(Session((trace,), "owlv2")).time
        if finding.slug == "data-starved"
    )
    assert finding.host_ns == sum(
        ns(e["dur"]) for e in events if e["name"].startswith("enumerate(DataLoader)#")
    )
    spent: Counter[str] = Counter()
    for call in calls:
        around = [call, *call.above()]
        if any(other.name.startswith("enumerate(DataLoader)#") for other in around):
            own = next(
                other for other in around if other.name.startswith(("transformers/", "moca/"))
            )
            spent[own.name] += call.self_ns
    largest = [
        (f"{frame.file}({frame.line}): {frame.name}", frame.time_ns) for frame in finding.frames
    ]
    assert largest == [
        (name, time) for name, time in spent.most_common(3) if time >= 0.05 * finding.host_ns
    ]
    zoom_shift = [e for e in events if e["name"] == "<built-in function zoom_shift>"]
    hottest = finding.frames[0]
    assert (hottest.name, hottest.inside) == ("resize", "zoom_shift")
    assert hottest.inside_ns == sum(ns(e["dur"]) for e in zoom_shift) == 528_679_836
    assert finding.advice.startswith(
        "532 ms of 619 ms are resize (image_processing_owlv2.py:301), mostly zoom_shift: make it faster"
    )


@pytest.mark.sampled(7)
@pytest.mark.parametrize(
    "name", [name for name in NAMES if "owlv2" not in name] or ["(no public traces here)"]
)
def test_frames_hold_no_more_than_the_host_time_of_a_finding(shared_data: Path, name: str) -> None:
    session = load(shared_data / "kineto" / name)
    stacks = any((trace.events["category"] == vocab.PYTHON).any() for trace in session.traces)
    most = sum(
        (trace.end_ns - trace.start_ns) * (trace.lanes["kind"] == "host").sum()
        for trace in session.traces
    )
    for finding in findings(session).time:
        held = sum(frame.time_ns for frame in finding.frames)
        assert held <= (finding.host_ns or 0) <= most
        assert stacks or not finding.frames
        assert all((frame.inside_ns or 0) <= frame.time_ns for frame in finding.frames)
        assert sum(frame.share for frame in finding.frames) == pytest.approx(
            held / (finding.host_ns or 1)
        )


def test_roles_of_threads(traces: Any) -> None:
    assert analyze.threads(traces("v100_ns_resolution")[0]).threads["role"].to_list() == [
        "main",
        "autograd",
        "runtime",
    ]
    owl = analyze.threads(traces("h100_owlv2")[0]).threads
    assert owl.select("role", "says").rows() == [
        ("main", None),
        ("python", "tqdm/_monitor.py(60): run"),
    ]


def test_compiled_code_of_public_traces(traces: Any, shared_data: Path) -> None:
    example = analyze.compiled(traces("triton_example")[0])
    assert example.regions.select("region", "count", "device_ns").rows() == [("0/0", 1, 1760)]
    assert example.lookup_count == 1
    path = shared_data / "diff" / "v100_test.json.gz"
    events = events_of(path)
    found = analyze.compiled(load(path).traces[0])
    graphs = {
        name: (count, host)
        for name, count, host in found.graphs.select("name", "count", "host_ns").rows()
    }
    for name in ("CompiledFunction", "CompiledFunctionBackward"):
        mine = [event for event in events if event["name"] == name]
        assert graphs[name] == (len(mine), sum(ns(event["dur"]) for event in mine))


@pytest.mark.parametrize("name", NAMES or ["(no public traces here)"])
def test_everything_adds_up_on_every_public_trace(shared_data: Path, name: str) -> None:
    trace = load(shared_data / "kineto" / name).traces[0]
    busy = int(trace.lanes.filter(pl.col("kind") == "host")["busy_ns"].fill_null(0).sum())
    gpu = int(trace.gpu_work()["duration_ns"].clip(lower_bound=0).sum())
    window = trace.end_ns - trace.start_ns
    flame = analyze.flame(trace)
    assert (flame.busy_ns, flame.gpu_work_ns) == (busy, gpu)
    assert flame.functions["self_ns"].sum() == busy
    assert flame.frames.filter(pl.col("parent").is_null())["total_ns"].sum() == busy
    assert flame.frames["self_device_ns"].sum() + flame.unattributed_device_ns == gpu
    modules = analyze.modules(trace)
    for what, whole in (("host", busy), ("device", gpu)):
        parts = [
            modules.tree[f"{part}self_{what}_ns"].sum() for part in ("", "backward_", "recompute_")
        ]
        assert sum(parts) + getattr(modules, f"outside_{what}_ns") == whole
    waits = analyze.blocking_calls(trace)
    assert waits.sites["blocked_ns"].sum() == waits.calls["blocked_ns"].sum() == waits.blocked_ns
    if gpu:
        assert (waits.calls["gpu_busy_ns"] + waits.calls["gpu_idle_ns"]).equals(
            waits.calls["blocked_ns"]
        )
    threads = analyze.threads(trace)
    if threads.threads.height:
        assert threads.concurrency["ns"].sum() == window
    for _, spent in analyze.compiled(trace).time.group_by("lane"):
        assert spent["ns"].sum() == window
