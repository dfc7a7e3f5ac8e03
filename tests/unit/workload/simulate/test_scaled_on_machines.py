"""Other scales on machines: transfers by closed forms, devices that machines name, and what does not matter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from support.jobs import ParallelRecipe, parallel_job
from support.scaled import ShownJob, scaled_recipe, shown
from traceloom.formats import load
from traceloom.graph import link_session
from traceloom.workload.simulate.inputs import open_input
from traceloom.workload.simulate.machine import AlgorithmRule, Dimension, Machine, MeasuredTransfer
from traceloom.workload.simulate.machine_file import read_machine
from traceloom.workload.simulate.native import build_device_cases, run
from traceloom.workload.simulate.scale import RecordedJob, make_transfer_model, scale
from traceloom.workload.simulate.sweep import SweepEvaluator, SweepQuestion

RATE, LATENCY = 25.0, 1_500.0


@pytest.fixture(scope="module")
def job() -> ShownJob:
    return shown((0, 1, 2, 3), scaled_recipe(data=4, steps=3, layers=1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of eight ranks, two of them recorded per host of a preset."""
    home = tmp_path_factory.mktemp("scaled") / "run"
    return parallel_job(ParallelRecipe(data=8, steps=3, layers=1)).run().write(home)


def switch(ranks: int, algorithm: str, kind: str) -> Machine:
    rules = (AlgorithmRule(kind, algorithm),)  # type: ignore[arg-type]
    return Machine((Dimension("switch", ranks, RATE, LATENCY),), algorithms=rules)


@pytest.mark.parametrize("ranks", [8, 128])
def test_an_all_reduce_of_more_ranks_takes_the_form_of_its_algorithm(
    job: ShownJob, ranks: int
) -> None:
    forms = {
        "ring": lambda size: 2 * (ranks - 1) * (2 * LATENCY + size / ranks / RATE),
        "direct": lambda size: 2 * (2 * LATENCY + size * (ranks - 1) / ranks / RATE),
        "tree": lambda size: 2 * (ranks.bit_length() - 1) * (2 * LATENCY + size / RATE),
    }
    recorded = RecordedJob(job.graph, job.roles, varied=False)
    for algorithm, form in forms.items():
        answer = recorded.at(
            ranks=ranks, transfers=make_transfer_model(switch(ranks, algorithm, "all_reduce"))
        )
        row = answer.collectives.row(by_predicate=pl.col("kind") == "all_reduce", named=True)
        assert (row["ranks_before"], row["ranks_after"]) == (4, ranks)
        assert row["in_bytes_after"] == row["in_bytes_before"]
        assert row["transfer_after_ns"] == pytest.approx(form(row["in_bytes_after"]), rel=1e-3)
        assert not answer.notices


def test_shards_shrink_and_their_gathering_takes_as_many_steps_as_ranks() -> None:
    sharded = shown((0, 1, 2), scaled_recipe(steps=3, layers=1, data=3, sharded=True))
    ranks = 12
    answer = RecordedJob(sharded.graph, sharded.roles, varied=False).at(
        ranks=ranks, transfers=make_transfer_model(switch(ranks, "ring", "all_gather"))
    )
    for kind in (
        "all_gather",
        "reduce_scatter",
    ):  # the usual algorithm of the second is a ring, too
        row = answer.collectives.row(by_predicate=pl.col("kind") == kind, named=True)
        part = row["in_bytes_after"] if kind == "all_gather" else row["in_bytes_after"] / ranks
        expected = (ranks - 1) * (2 * LATENCY + part / RATE)
        assert row["transfer_after_ns"] == pytest.approx(expected, rel=2e-3)


def test_measured_transfers_of_the_group_go_before_the_links(job: ShownJob) -> None:
    measured = MeasuredTransfer("all_reduce", "inside", 16, 0, 1 << 40, 77_000.0)
    machine = replace(switch(16, "ring", "all_reduce"), transfers=(measured,))
    answer = RecordedJob(job.graph, job.roles, varied=False).at(
        ranks=16, transfers=make_transfer_model(machine)
    )
    row = answer.collectives.row(by_predicate=pl.col("kind") == "all_reduce", named=True)
    assert row["transfer_after_ns"] == 77_000
    other = replace(measured, ranks=4)
    machine = replace(machine, transfers=(other,))
    answer = RecordedJob(job.graph, job.roles, varied=False).at(
        ranks=16, transfers=make_transfer_model(machine)
    )
    row = answer.collectives.row(by_predicate=pl.col("kind") == "all_reduce", named=True)
    assert row["transfer_after_ns"] == pytest.approx(
        77_000 * 15 / 3
    )  # five times the steps of a ring
    assert "group not among those measured" in answer.notices[0].message


def test_a_slower_network_is_waited_for_where_nothing_runs_meanwhile(job: ShownJob) -> None:
    """Latency is on the critical path as often as there are transfers that nothing hides: never more than all of them."""
    recorded = RecordedJob(job.graph, job.roles, varied=False)
    times = []
    for extra in (0.0, 10_000.0, 20_000.0):
        machine = Machine((Dimension("switch", 8, RATE, LATENCY + extra),))
        times.append(recorded.at(ranks=8, transfers=make_transfer_model(machine)).after_ns)
    calls = recorded.at(ranks=8).collectives["calls"].sum()
    steps = 2 * 7  # of a ring of 8, over two links each
    first, second = times[1] - times[0], times[2] - times[1]
    assert 0 < first <= second  # what hides it is used up
    assert second <= calls * steps * 2 * 10_000


@pytest.mark.parametrize("shift", [10**12, -(10**9)])
def test_when_the_recording_began_does_not_matter(job: ShownJob, shift: int) -> None:
    nodes = job.graph.nodes.with_columns(pl.col("start_ns") + shift)
    moved = replace(job.graph, nodes=nodes)
    first, second = (
        scale(graph, ranks=16, roles=job.roles, draws=5) for graph in (job.graph, moved)
    )
    assert first.to_dict() == second.to_dict()


def test_draws_of_a_step_lie_around_their_quantiles(job: ShownJob) -> None:
    answer = scale(job.graph, ranks=64, roles=job.roles, draws=40)
    table = dict(answer.quantiles.iter_rows())
    assert (table[10], table[50], table[90]) == (answer.p10_ns, answer.after_ns, answer.p90_ns)
    assert list(table.values()) == sorted(table.values())
    assert answer.equal_ns < answer.after_ns
    assert f"{answer.ranks} ranks" in answer.sentence
    assert "wait for the slowest rank" in answer.sentence


@pytest.mark.thorough
def test_a_machine_that_names_a_device_computes_with_it_at_every_scale(folder: Path) -> None:
    """As `--machine` does at the recorded size: the network and the device are the machine's."""
    evaluator = SweepEvaluator(SweepQuestion((str(folder),), machine="dgx-a100", draws=5))
    described = read_machine("dgx-a100").device
    assert described is not None
    for ranks in (8, 16):
        own = evaluator({"ranks": ranks})
        assert own["time_ns"] == evaluator({"ranks": ranks, "device": described.name})["time_ns"]
        assert own["time_ns"] > 1.2 * evaluator({"ranks": ranks, "device": "H100 SXM"})["time_ns"]
    # What the whole run takes more on it, a step takes more.
    whole = [run(folder, "dgx-a100", device=device).after_ns for device in (None, "H100 SXM")]
    steps = [
        evaluator(point)["time_ns"] for point in ({"ranks": 8}, {"ranks": 8, "device": "H100 SXM"})
    ]
    assert steps[0] / steps[1] == pytest.approx(whole[0] / whole[1], rel=0.1)


@pytest.mark.thorough
def test_work_stays_where_nobody_knows_the_recorded_device(folder: Path, tmp_path: Path) -> None:
    link_session(load(folder)).save(
        tmp_path / "job.graph"
    )  # without the traces, which name the device
    graph, traces = (
        SweepEvaluator(SweepQuestion((str(path),), machine="dgx-a100", draws=5))
        for path in (tmp_path / "job.graph", folder)
    )
    assert graph({"ranks": 16})["time_ns"] == traces({"ranks": 16, "device": "H100 SXM"})["time_ns"]
    source = open_input(tmp_path / "job.graph")
    cases = build_device_cases(source, read_machine("dgx-a100"), None, 1.0, None)
    job = RecordedJob(cases.graphs[0], draws=5, notices=cases.notices)
    assert "device-kept" in {notice.slug for notice in job.at(ranks=16).notices}
    assert run(tmp_path / "job.graph", "dgx-a100").notices[-1].slug == "device-kept"


def test_points_of_a_sweep_are_the_single_answers(folder: Path) -> None:
    evaluator = SweepEvaluator(SweepQuestion((str(folder),), machine="dgx-h100", draws=5, seed=3))
    job = RecordedJob(link_session(load(folder)), {"0": "data"}, draws=5, seed=3)
    for ranks, bandwidth in ((16, 50.0), (32, 12.5)):
        point = evaluator({"ranks": ranks, "network.1.bandwidth": bandwidth})
        machine = read_machine("dgx-h100", [f"network.1.bandwidth={bandwidth}"]).for_ranks(ranks)
        single = job.at(ranks=ranks, transfers=make_transfer_model(machine))
        assert (point["time_ns"], point["p10_ns"], point["p90_ns"]) == (
            single.after_ns,
            single.p10_ns,
            single.p90_ns,
        )
        assert point["samples"] == ranks / 8
    refused = evaluator({"ranks": 12})
    assert refused["time_ns"] is None
    assert "multiple" in refused["reason"] or "machine" in refused["reason"]
    assert np.isfinite(evaluator({"host_factor": 2.0, "data_parallel": 8})["time_ns"])
