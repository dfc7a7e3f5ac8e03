"""Runs recorded here and now with PyTorch on the CPU: checkpointing, torch.compile, .item(), by their real events."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from traceloom import analyze, load
from traceloom.trace.trace import Trace

pytestmark = pytest.mark.torch

# It imports PyTorch once; each program runs in a fork of it.
FORKING = """
import json, os, sys, traceback
import torch, torch._dynamo, torch.profiler, torch.utils.checkpoint

for line in sys.stdin:
    if (child := os.fork()) == 0:
        try:
            sys.argv = json.loads(line)
            with open(sys.argv[0]) as program:
                exec(compile(program.read(), sys.argv[0], "exec"), {"__name__": "__main__"})
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    print(os.waitpid(child, 0)[1], flush=True)
"""

HEAD = """
import sys
import torch
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.checkpoint import checkpoint

torch.set_num_threads(1)


def recorded(step, path, stacks, count=3, warm=0):
    for _ in range(warm):
        step()
    verbose = torch._C._profiler._ExperimentalConfig(verbose=True) if stacks else None
    with profile(activities=[ProfilerActivity.CPU], with_stack=stacks, experimental_config=verbose) as prof:
        for _ in range(count):
            step()
            prof.step()
    prof.export_chrome_trace(path)
"""

CHECKPOINT = """
class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)

    def forward(self, x):
        return self.b(torch.relu(self.a(x)))


class Net(torch.nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.first, self.second, self.reentrant = Block(), Block(), reentrant

    def forward(self, x):
        with record_function("first"):
            x = checkpoint(self.first, x, use_reentrant=self.reentrant)
        with record_function("second"):
            return self.second(x)


net = Net(sys.argv[3] == "reentrant")


def step():
    net(torch.randn(4, 32, requires_grad=True)).sum().backward()


# The first step imports modules, and PyTorch 2.13 names the frames of code that was freed after it ran by what lies in
# its place then: garbage, or another function.
recorded(step, sys.argv[1], sys.argv[2] == "stacks", warm=1)
"""

COMPILE = """
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)

    def forward(self, x):
        x = torch.relu(self.a(x))
        torch._dynamo.graph_break()
        return self.b(x)


net = torch.compile(Net(), backend="aot_eager")
rows = [8]


def step():
    if sys.argv[3] == "changing":
        rows[0] += 1
    net(torch.randn(rows[0], 16)).sum().backward()


recorded(step, sys.argv[1], sys.argv[2] == "stacks", warm=0 if sys.argv[3] == "changing" else 2)
"""

Make = Callable[..., Trace]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Make]:
    folder = tmp_path_factory.mktemp("recorded")
    kept: dict[tuple[str, ...], Trace] = {}

    with (
        (folder / "errors").open("w") as errors,
        subprocess.Popen(
            [sys.executable, "-c", FORKING],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as forking,
    ):

        def recorded(code: str, *arguments: str) -> Trace:
            key = (code, *arguments)
            if key not in kept:
                path = folder / f"{len(kept)}.json"
                script = folder / "program.py"
                script.write_text(HEAD + code, encoding="utf-8")
                assert forking.stdin is not None
                assert forking.stdout is not None
                forking.stdin.write(json.dumps([str(script), str(path), *arguments]) + "\n")
                forking.stdin.flush()
                while not (line := forking.stdout.readline()).strip().isdigit():
                    assert line, (folder / "errors").read_text()  # else what the program prints
                assert line == "0\n", (folder / "errors").read_text()
                kept[key] = load(path).traces[0]
            return kept[key]

        yield recorded


def names(trace: Trace) -> list[str]:
    raw: Any = json.loads(Path(trace.meta.path).read_text(encoding="utf-8"))
    return [event["name"] for event in raw["traceEvents"] if event.get("ph") == "X"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("way", "stacks"),
    [
        ("reentrant", "stacks"),
        ("newer", "plain"),
        pytest.param("reentrant", "plain", marks=pytest.mark.thorough),
        pytest.param("newer", "stacks", marks=pytest.mark.thorough),
    ],
)
def test_a_checkpointed_block_is_told_as_repeated(make: Make, way: str, stacks: str) -> None:
    trace = make(CHECKPOINT, stacks, way)
    result = analyze.modules(trace)
    rows = {row["path"]: row for row in result.tree.to_dicts()}
    assert result.recompute_evidence == (
        "operators" if (way, stacks) == ("newer", "plain") else "frames"
    )
    first = "Net_0/first" if stacks == "stacks" else "first"
    second = first.replace("first", "second")
    assert rows[first]["recompute_host_ns"] > 0
    assert rows[second]["recompute_host_ns"] == 0
    assert min(rows[one]["backward_host_ns"] for one in (first, second)) > 0
    if stacks == "stacks":
        assert (rows[f"{first}/Block_0"]["count"], rows[f"{first}/Block_0"]["recompute_count"]) == (
            3,
            3,
        )
        for part in ("Linear_0", "Linear_1"):
            assert rows[f"{first}/Block_0/{part}"]["recompute_host_ns"] > 0
            assert rows[f"{first}/Block_0/{part}"]["backward_host_ns"] > 0


def test_repeated_time_is_that_of_the_frame_that_repeats(make: Make) -> None:
    trace = make(CHECKPOINT, "stacks", "newer")
    frames = trace.events.filter(
        pl.col("name").str.contains(r"checkpoint\.py\(\d+\): recompute_fn$")
    )
    spent = (frames["nested_end_ns"] - frames["start_ns"]).sum()
    tree = analyze.modules(trace).tree
    assert frames.height == 3
    assert tree.filter(pl.col("path") == "Net_0")["recompute_host_ns"].item() == spent


@pytest.mark.thorough
def test_without_checkpoints_nothing_is_repeated(make: Make) -> None:
    trace = make(COMPILE, "plain", "same")
    assert analyze.modules(trace).recompute_evidence == "none"


@pytest.mark.thorough
def test_graph_breaks_and_lookups_of_warm_code(make: Make) -> None:
    trace = make(COMPILE, "stacks", "same")
    found = analyze.compiled(trace)
    assert found.regions.select("region", "count", "graph_break_count").rows() == [
        ("0/0", 3, 3),
        ("1/0", 3, 0),
    ]
    assert (found.lookup_count, found.miss_count, found.compilations.height) == (6, 0, 0)
    assert found.lookup_count == names(trace).count("TorchDynamo Cache Lookup")
    row = found.breaks.row(0, named=True)
    assert (row["region"], row["resumed"], row["count"]) == ("0/0", "1/0", 3)
    assert row["place"].startswith("program.py:") or "program.py:" in row["place"]
    assert row["between_ns"] >= row["lookup_ns"] > 0
    parts = dict(found.time.group_by("part").agg(pl.col("ns").sum()).rows())
    assert parts["graph"] > 0
    assert "compile" not in parts
    assert found.regions["backward_host_ns"].min() > 0


@pytest.mark.thorough
def test_compilations_in_the_window_are_numbered_and_their_stages_add_up(make: Make) -> None:
    trace = make(COMPILE, "plain", "changing")
    found = analyze.compiled(trace)
    forward = found.compilations.filter(pl.col("direction") == "forward")
    assert forward.select("region", "recompile").rows() == [
        ("0/0", False),
        ("1/0", False),
        ("0/1", True),
        ("1/1", True),
    ]
    assert found.recompile_count == 2
    assert found.miss_count == 2  # a first compilation has no code to look up
    stages = found.compilations.select(
        pl.sum_horizontal("dynamo_ns", "guards_ns", "autograd_ns", "inductor_ns", "code_ns")
    )
    assert stages.to_series().to_list() == found.compilations["duration_ns"].to_list()
    parts = dict(found.time.group_by("part").agg(pl.col("ns").sum()).rows())
    assert parts["compile"] == found.compilations["duration_ns"].sum()
    assert sum(parts.values()) == trace.end_ns - trace.start_ns


def test_the_exports_of_a_recorded_run_hold_its_program(make: Make, tmp_path: Path) -> None:
    from traceloom.cli import main

    trace = make(CHECKPOINT, "stacks", "newer")
    out = tmp_path / "x.speedscope.json"
    assert main(["report", trace.meta.path, "-o", str(out), "--quiet", "--no-cache"]) == 0
    frames = json.loads(out.read_text(encoding="utf-8"))["shared"]["frames"]
    assert any(frame["name"] == "step" and frame["file"].endswith("program.py") for frame in frames)
