"""Other devices: planted jobs whose kernels reach a known share of a roofline worked out here, on both devices."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from support.jobs import Change, Recipe, training_job
from support.reports import check_schema
from traceloom.analyze.placed_calls import Peak, parse_peak
from traceloom.cli import main
from traceloom.errors import UsageError
from traceloom.formats import load
from traceloom.graph import Plan, link_session
from traceloom.report.simulation import describe_simulation
from traceloom.testing import TraceBuilder
from traceloom.trace.session import Session
from traceloom.trace.trace import Trace
from traceloom.workload.simulate import run
from traceloom.workload.simulate.device import RULES, Rescaled, rescale

BF16 = "c10::BFloat16"


@dataclass(frozen=True)
class Device:
    """A data sheet: FLOP/s of bf16 on matrix units and of fp32 on vector units, bytes/s."""

    name: str
    in_traces: str
    bf16: float
    fp32: float
    memory: float


H100 = Device("H100 SXM", "NVIDIA H100 80GB HBM3", 989.4e12, 66.9e12, 3.35e12)
A100 = Device("A100 SXM 80GB", "NVIDIA A100-SXM4-80GB", 312e12, 19.5e12, 2.039e12)
MI300 = Device("MI300X", "AMD Instinct MI300X", 1307.4e12, 163.4e12, 5.3e12)
LAUNCH_US, LATENCY_US, GAP_US = 6.0, 8.0, 1.5
EFFICIENCY = (0.62, 0.35, 0.8, 0.5)


def product_us(device: Device, size: int) -> float:
    """A product of square bf16 matrices at the roofline."""
    return 1e6 * max(2 * size**3 / device.bf16, 3 * 2 * size**2 / device.memory)


def sum_us(device: Device, size: int) -> float:
    """The sum of two bf16 tensors at the roofline."""
    return 1e6 * 3 * 2 * size / device.memory


def planted(
    device: Device, *, host: float = 1.0, unmodelled: float = 0.0, layers: int = 12
) -> tuple[Trace, float]:
    """The trace of a job on a device, and how long it takes there (us): each stage knows only what it waits for.

    Args:
        device: Where it runs.
        host: Host work takes so many times as long.
        unmodelled: us of a kernel of each layer that no model covers.
        layers: Each has two products, one bound by bytes, a sum and a copy to the host.
    """
    made = TraceBuilder(device_name=device.in_traces)
    now, free, number = 0.0, 0.0, 0
    for layer in range(layers):
        efficiency = EFFICIENCY[layer % len(EFFICIENCY)]
        work = [
            ("aten::mm", [[4096, 4096]] * 2, "gemm_bf16", product_us(device, 4096) / efficiency),
            ("aten::mm", [[256, 256]] * 2, "gemm_bf16", product_us(device, 256) / 0.06),
            (
                "aten::add",
                [[1 << 26], [1 << 26]],
                "vectorized_elementwise",
                sum_us(device, 1 << 26) / efficiency,
            ),
        ]
        if unmodelled:
            work.append(("mine::special", [[4]], "somebody's kernel", unmodelled))
        for name, shapes, kernel, duration in work:
            number += 1
            began, now = now, now + host * LAUNCH_US
            made.op(name, began, host * LAUNCH_US, shapes=shapes, types=[BF16] * len(shapes))
            made.launch("cudaLaunchKernel", began, host * LAUNCH_US, correlation=number)
            start = max(began + LATENCY_US, free + GAP_US)
            made.kernel(kernel, start, duration, correlation=number)
            free = start + duration
        now += host * 10
    return made.build(), max(now, free)


def moved(trace: Trace, device: str | None, **options: float | str) -> Rescaled:
    session = Session((trace,), "planted")
    return rescale(link_session(session), session, device, **options)  # type: ignore[arg-type]


def of_device(answer: Rescaled) -> pl.DataFrame:
    return answer.account.account.filter(~pl.col("rule").is_in(["host", "communication"]))


@pytest.mark.parametrize("there", [A100, MI300])
def test_a_planted_job_takes_as_long_as_on_the_other_device(there: Device) -> None:
    trace, here_us = planted(H100)
    truth, there_us = planted(there)
    answer = moved(trace, there.name)
    account = answer.account
    assert (account.device, account.recorded) == (there.name, ("H100 SXM",))
    assert account.before_ns == pytest.approx(1000 * here_us, rel=1e-3)
    assert account.after_ns == pytest.approx(1000 * there_us, rel=0.02)
    assert account.low_ns <= account.after_ns <= account.high_ns
    kernels = of_device(answer)
    assert kernels["there_ns"].sum() == pytest.approx(
        truth.gpu_work()["duration_ns"].sum(), rel=0.01
    )
    assert set(kernels["rule"]) == {"roofline", "short of roofline"}
    assert not set(kernels["rule"]) - set(RULES)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(ranks=2, steps=3, kernel_us=60, autograd=True, delay_us={1: 700}),
        Recipe(ranks=3, steps=3, kernel_us=150, side_stream=True, sync="stream", seed=1),
        Recipe(steps=4, kernel_us=8, sync="device", seed=2),  # what the host launches decides
        Recipe(ranks=2, steps=3, kernel_us=90, sharded=True, transfer_us=300, seed=3),
    ],
)
def test_whole_jobs_take_as_long_as_their_simulation_says(recipe: Recipe) -> None:
    """On a device with everything twice as fast all kernels take half as long, whatever rule they go by."""
    job = training_job(recipe)
    session = Session(tuple(builder.build() for builder in job.run().traces()), "job")
    h100 = parse_peak("H100 SXM")
    twice = Peak(
        "twice", {name: 2 * rate for name, rate in h100.flops.items()}, 2 * (h100.memory or 0)
    )
    answer = rescale(link_session(session), session, twice, host_factor=0.7)
    truth = job.run(Change(kernels=0.5, host=0.7)).window_ns
    assert answer.account.after_ns == pytest.approx(truth, rel=0.02)


def test_host_work_goes_by_its_own_factor() -> None:
    trace, _ = planted(H100, host=40)  # the host is what takes long
    _, there_us = planted(A100, host=20)
    assert moved(trace, "A100 SXM 80GB", host_factor=0.5).account.after_ns == pytest.approx(
        1000 * there_us, rel=0.02
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(20))
def test_the_interval_covers_a_host_that_nobody_named(seed: int) -> None:
    chance = random.Random(seed)
    here_host, factor = chance.uniform(0.5, 120), chance.uniform(0.8, 1.25)
    trace, _ = planted(H100, host=here_host, layers=chance.randint(4, 12))
    layers = trace.events.filter(pl.col("name") == "aten::add").height
    there, _ = planted(A100, host=here_host * factor, layers=layers)
    account = moved(trace, A100.name).account
    assert account.low_ns * 0.98 <= moved(there, None).account.before_ns <= account.high_ns * 1.02


def test_a_job_on_the_cpu_is_not_put_on_another_device() -> None:
    trace = TraceBuilder().op("aten::mm", 0, 5).op("aten::add", 10, 5).build()
    with pytest.raises(UsageError) as refused:
        moved(trace, A100.name, recorded=H100.name)
    assert refused.value.slug == "no-device-work"


def test_the_sentence_tells_what_stays_and_quotes_no_error_of_the_method_as_its_own() -> None:
    trace, _ = planted(H100)
    session = Session((trace,), "planted")
    sentence = describe_simulation(run(session, device=A100.name))
    assert "Work of the host stays as recorded." in sentence
    assert "Simulated on its own machine, the recording comes back within" in sentence
    assert "give or take" not in sentence
    named = describe_simulation(run(session, device=A100.name, host_factor=0.9))
    assert "Work of the host" not in named


def test_the_host_alone_can_be_another_one_whatever_the_device_is() -> None:
    made = (
        TraceBuilder(device_name="nobody's GPU")
        .op("aten::mm", 0, 5)
        .launch("cudaLaunchKernel", 0, 5, correlation=1)
    )
    answer = moved(made.kernel("gemm", 10, 100, correlation=1).build(), None, host_factor=2.0)
    rows = answer.account.account.select("rule", "kind", "here_ns", "there_ns").rows()
    assert rows == [("same device", "gemm", 100_000, 100_000), ("host", None, 5_000, 10_000)]


def test_the_same_device_changes_nothing() -> None:
    trace, _ = planted(H100, unmodelled=30)
    session = Session((trace,), "planted")
    graph = link_session(session)
    answer = rescale(graph, session, "H100 SXM")
    for same in (answer.graph, answer.low, answer.high):
        assert same.nodes.select("start_ns", "duration_ns").equals(
            graph.nodes.select("start_ns", "duration_ns")
        )
        assert (Plan(same).evaluate() == graph.point_times()).all()
    rows = answer.account.account
    assert all((rows["here_ns"] == rows[name]).all() for name in ("there_ns", "low_ns", "high_ns"))


def test_all_ranks_of_a_job_stay_as_they_are_on_the_same_device() -> None:
    session = Session(
        tuple(made.build() for made in training_job(Recipe(ranks=2, steps=2)).run().traces()), "job"
    )
    graph = link_session(session)
    answer = rescale(graph, session, "H100 SXM", recorded="H100 SXM")
    assert (answer.graph.point_times() == graph.point_times()).all()
    communication = answer.account.account.row(
        by_predicate=pl.col("rule") == "communication", named=True
    )
    measured = graph.nodes.filter(pl.col("kind") == "collective")["duration_ns"]
    assert (communication["count"], communication["here_ns"]) == (measured.len(), measured.sum())
    slower = rescale(graph, session, "A100 SXM 80GB")
    kinds = answer.graph.nodes["kind"] == "collective"
    before, after = (each.filter(kinds) for each in (graph.nodes, slower.graph.nodes))
    assert (
        after["duration_ns"].max() <= before["duration_ns"].max() * 4
    )  # waits change; transfers do not
    assert slower.account.after_ns > slower.account.before_ns


def test_work_without_a_model_goes_by_its_kind_with_an_interval() -> None:
    made = TraceBuilder(device_name=H100.in_traces)
    names = (
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32",
        "vectorized_elementwise_kernel",
        "somebody's kernel",
    )
    for number, name in enumerate(names, 1):
        made.launch("cudaLaunchKernel", 10 * number, 5, correlation=number)
        made.kernel(name, 1000 * number, 600, correlation=number)
    for number, name in enumerate(
        ("Memcpy DtoD (Device -> Device)", "Memcpy HtoD (Pinned -> Device)"), 4
    ):
        made.launch("cudaMemcpyAsync", 10 * number, 5, correlation=number)
        made.copy(name, 1000 * number, 600, bytes=1 << 20, correlation=number)
    rows = of_device(moved(made.build(), MI300.name)).rows_by_key(
        ["rule", "kind"], named=True, unique=True
    )
    bandwidth, matrix, vector = (
        H100.memory / MI300.memory,
        H100.bf16 / MI300.bf16,
        H100.fp32 / MI300.fp32,
    )
    expected = {
        ("peak", "gemm"): (matrix, bandwidth, 1.0),
        ("bandwidth", "elementwise"): (bandwidth, vector, 1.0),
        ("bandwidth", "other"): (bandwidth, vector, 1.0),
        ("device copy", "copy"): (bandwidth, bandwidth, 1.0),
        ("link copy", "copy"): (1.0, 1.0, 1.0),
    }
    assert {
        key: tuple(round(row[name] / 600_000, 4) for name in ("there_ns", "low_ns", "high_ns"))
        for key, row in rows.items()
    } == {key: tuple(round(value, 4) for value in values) for key, values in expected.items()}


def test_a_saved_graph_goes_by_the_names_of_its_kernels() -> None:
    trace, _ = planted(H100)
    graph = link_session(Session((trace,), "planted"))
    answer = rescale(graph, None, A100.name, recorded=H100.name)
    assert set(of_device(answer)["rule"]) == {"peak", "bandwidth"}
    assert (
        rescale(graph, None, H100.name, recorded=H100.name).graph.point_times()
        == graph.point_times()
    ).all()
    with pytest.raises(UsageError, match="recorded device") as error:
        rescale(graph, None, A100.name)
    assert error.value.slug == "no-recorded-device"


def test_a_slower_device_is_not_said_to_beat_its_roofline() -> None:
    trace, _ = planted(H100)
    answer = moved(trace, "bf16=100e12,fp32=10e12,memory=0.5e12")
    low = of_device(answer).filter(pl.col("rule") == "roofline")["low_ns"].sum()
    slow = Device("given", "", 100e12, 10e12, 0.5e12)
    at_peak_us = 12 * (product_us(slow, 4096) + sum_us(slow, 1 << 26))
    assert low == pytest.approx(1000 * at_peak_us, rel=1e-3)


@pytest.mark.parametrize(
    ("device", "options", "slug"),
    [
        ("no such thing", {}, "no-such-device"),
        ("bf16=1e12", {}, "bad-peak"),
        ("A100 SXM 80GB", {"host_factor": 0.0}, "bad-host-factor"),
        ("A100 SXM 80GB", {"host_factor": float("nan")}, "bad-host-factor"),
    ],
)
def test_what_cannot_be_asked_is_said(device: str, options: dict[str, float], slug: str) -> None:
    trace, _ = planted(H100, layers=1)
    with pytest.raises(UsageError) as error:
        moved(trace, device, **options)
    assert error.value.slug == slug


def test_a_device_that_the_trace_does_not_name_must_be_named() -> None:
    made = TraceBuilder(device_name="nobody's GPU").launch("cudaLaunchKernel", 0, 5, correlation=1)
    trace = made.kernel("gemm", 10, 100, correlation=1).build()
    with pytest.raises(UsageError, match="nobody's GPU") as error:
        moved(trace, "A100 SXM 80GB")
    assert error.value.slug == "no-recorded-device"
    assert moved(trace, "A100 SXM 80GB", recorded="H100 SXM").account.recorded == ("H100 SXM",)


@pytest.mark.thorough
@pytest.mark.parametrize("pair", ["bert_small", "qwen_0.5b"])
def test_the_measured_kernel_time_of_public_pairs_is_in_the_interval(
    shared_data: Path, pair: str
) -> None:
    here, there = (
        load(shared_data / "kineto" / f"{device}_{pair}.json.gz") for device in ("h100", "mi300")
    )
    rows = of_device(rescale(link_session(here), here, "MI300X"))
    measured = there.traces[0].gpu_work()["duration_ns"].sum()
    assert rows["low_ns"].sum() <= measured <= rows["high_ns"].sum()
    assert np.isclose(rows["here_ns"].sum(), here.traces[0].gpu_work()["duration_ns"].sum())


def test_the_verb_says_how_much_work_each_rule_covers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, _ = planted(H100, unmodelled=200)
    link_session(Session((trace,), "planted")).save(tmp_path / "job.graph")
    asked = ["simulate", str(tmp_path / "job.graph"), "--device", "A100 SXM 80GB"]
    assert main(asked) == 2
    assert "no-recorded-device" in capsys.readouterr().err
    assert main([*asked, "--recorded-device", "H100 SXM"]) == 0
    lines = capsys.readouterr().out.splitlines()
    table = lines[next(number for number, line in enumerate(lines) if line.startswith("Device")) :]
    # by name: 24 products, 12 sums, and 12 kernels of somebody's
    rows = [(line.split()[0], line.split()[-1]) for line in table[2:5]]
    assert rows[:2] == [("24", "peak"), ("24", "bandwidth")]
    assert rows[2][1] == "host"
    assert main([*asked, "--recorded-device", "H100 SXM", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    check_schema(document, "simulation.schema.json")
    assert document["device"]["recorded"] == ["H100 SXM"]
    account = document["device"]["account"]
    assert [
        sum(row["count"] for row in account if row["rule"] == rule)
        for rule in ("peak", "bandwidth")
    ] == [24, 24]
