"""What a change would save, against made jobs that are simulated again with that change."""

from __future__ import annotations

import re
from functools import cache

import polars as pl
import pytest

from support.jobs import Change, Job, ParallelRecipe, Recipe, parallel_job, training_job
from support.jobs.hosted import HostedRecipe, hosted_job
from support.jobs.training import DELAY
from traceloom.changes.changes import parse
from traceloom.changes.scenario import Scenario
from traceloom.changes.whatif import scenario_of, sweep, whatif, whatif_many
from traceloom.errors import UsageError
from traceloom.graph import Plan, calibrate
from traceloom.graph.graph import Graph
from traceloom.graph.job import join_ranks
from traceloom.graph.rank import link_rank
from traceloom.testing.trace_builder import TraceBuilder

ALLOWED = 0.02  # of the new time
RECIPES = {
    "launch-bound": Recipe(kernel_us=6, op_us=14),
    "GPU-bound": Recipe(kernel_us=80),
    "copies that block": Recipe(kernel_us=30, pageable_input=True),
    "one late": Recipe(ranks=4, kernel_us=40, delay_us={2: 1500.0}, item=True),
    "sharded": Recipe(ranks=3, kernel_us=50, transfer_us=60, sharded=True, item=True),
    "programmatic launches": ParallelRecipe(programmatic=True),
}
FASTER = ("gpu * 0.5", Change(kernels=0.5))
HOST = ("host * 0.7", Change(host=0.7))
NETWORK = ("network * 2", Change(collectives=0.5))
IN_TIME = ("rank 2 delay remove", Change(without=frozenset({DELAY})))
CASES = [
    *((name, *change) for name in RECIPES for change in (FASTER, HOST)),
    ("one late", *NETWORK),
    ("sharded", *NETWORK),
    ("one late", *IN_TIME),
]


@cache
def made(name: str) -> tuple[Job, Graph, Plan]:
    recipe = RECIPES[name]
    job = parallel_job(recipe) if isinstance(recipe, ParallelRecipe) else training_job(recipe)
    graph = calibrate(join_ranks([link_rank(builder.build()) for builder in job.run().traces()]))
    return job, graph, Plan(graph)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("name", "text", "change"), CASES)
def test_the_new_time_is_that_of_the_job_with_the_change(
    name: str, text: str, change: Change
) -> None:
    job, graph, plan = made(name)
    found = whatif(graph, [parse(text)], plan=plan)
    assert found.after_ns == pytest.approx(job.run(change).window_ns, rel=ALLOWED)
    assert found.saved_ns == found.before_ns - found.after_ns
    assert found.path["before_ns"].sum() == found.before_ns
    assert found.path["after_ns"].sum() == found.after_ns


@pytest.mark.parametrize("text", ["idle remove", "kernels fuse", "kernels graph"])
def test_without_pauses_kernels_overlap_no_more_than_they_did(text: str) -> None:
    _, graph, plan = made("programmatic launches")
    edges = graph.edges.filter(pl.col("kind") == "stream", ~pl.col("from_end"), ~pl.col("to_end"))
    source, target = (2 * edges[end].to_numpy().astype(int) for end in ("source", "target"))
    after, before = whatif(graph, [parse(text)], plan=plan).times, graph.point_times()
    assert source.size > 10
    assert (after[target] - after[source] >= (before[target] - before[source]) * 0.98).all()


def test_a_programmatic_kernel_waits_for_the_kernel_before_however_short_it_is_itself() -> None:
    _, graph, plan = made("programmatic launches")
    edges = graph.edges.filter(pl.col("kind") == "stream", pl.col("to_end"))
    small = graph.nodes["name"].gather(edges["target"]).unique()
    assert set(small) & set(graph.nodes["name"].gather(edges["source"])) == set()
    pattern = "|".join(re.escape(name) for name in small)
    found = whatif(graph, [parse(f"kernels ~ ^({pattern})$ * 0.1")], plan=plan)
    assert (
        found.saved_fraction < 0.01
    )  # what runs beside nothing; a tenth of the time if nothing were awaited


def test_a_batch_says_the_same_as_each_alone_and_changes_add_up_to_at_least_the_larger() -> None:
    _, graph, plan = made("launch-bound")
    host, gpu = parse("host * 0.7"), parse("gpu * 0.5")
    alone = [whatif(graph, [change], plan=plan).saved_ns for change in (host, gpu)]
    both = whatif(graph, [host, gpu], plan=plan)
    assert both.saved_ns >= max(alone)
    scenarios = [
        scenario_of(graph, [host]),
        scenario_of(graph, [gpu]),
        scenario_of(graph, [host, gpu]),
    ]
    times = whatif_many(graph, scenarios, plan)
    assert [both.before_ns - time for time in times.tolist()] == [*alone, both.saved_ns]


def test_nothing_changed_is_the_measurement() -> None:
    _, graph, plan = made("GPU-bound")
    before = whatif(graph, [parse("kernels * 1")], plan=plan)
    assert before.saved_ns == 0
    assert (before.times == graph.point_times()).all()
    assert whatif_many(graph, [Scenario.of(graph)], plan).tolist() == [before.before_ns]


def test_a_sweep_is_monotone() -> None:
    _, graph, plan = made("sharded")
    table = sweep(graph, "network * {}", [1, 2, 4, 8], plan=plan).table
    assert table["saved_ns"].to_list() == sorted(table["saved_ns"].to_list())
    assert table["saved_ns"][0] == 0


@pytest.mark.parametrize(
    "text",
    [
        "kernels ~ gemm * 0.5",
        "copies async",
        "rank 7 delay remove",
        "network * 2",
        "loading workers 4",
        "idle remove",
        "syncs ~ cudaDeviceSynchronize remove",
        "kernels fuse",
        "rank 1,3 host * 0.9",
        "collectives ~ all_reduce overlap",
        "kernels graph",
        "kernels balance",
        "ops ~ aten::copy_ remove",
    ],
)
def test_changes_are_written_as_they_are_read(text: str) -> None:
    assert str(parse(text)) == text
    assert parse(str(parse(text))) == parse(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "gemm * 2",
        "kernels",
        "kernels faster",
        "delay remove",
        "loading workers",
        "kernels * -1",
        "network * 0",
    ],
)
def test_what_is_no_change_is_refused(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(text)
    assert caught.value.slug == "bad-change"


@pytest.mark.parametrize(
    "text", ["collectives remove", "kernels ~ nothing_like_this * 0.5", "rank 9 delay remove"]
)
def test_a_change_of_nothing_is_refused(text: str) -> None:
    _, graph, plan = made("GPU-bound")
    with pytest.raises(UsageError) as caught:
        whatif(graph, [parse(text)], plan=plan)
    assert caught.value.slug == "nothing-chosen"


def test_a_kind_of_kernels_takes_those_that_are_not_called_so() -> None:
    made = TraceBuilder()
    for number, name in enumerate(
        ("Cijk_Alik_Bljk_B_BS_BH", "nvjet_hsh_64x32", "vectorized_elementwise_kernel")
    ):
        made.launch("cudaLaunchKernel", 10 * number, 2, correlation=number + 1)
        made.kernel(name, 100 + 50 * number, 50, correlation=number + 1)
    graph = calibrate(join_ranks([link_rank(made.build())]))
    assert parse("kernels ~ gemm * 0.5").selection.nodes(graph).sum() == 2
    with pytest.raises(UsageError) as caught:
        Scenario.of(graph).apply(parse("kernels ~ elementwize * 0.5"))
    assert caught.value.hint == "there are, for example: `vectorized_elementwise_kernel`"
    with pytest.raises(UsageError) as caught:
        Scenario.of(graph).apply(parse("collectives remove"))
    assert caught.value.hint == "the run has no collectives at all"


def test_a_pattern_that_is_none_is_refused() -> None:
    _, graph, plan = made("GPU-bound")
    with pytest.raises(UsageError) as caught:
        whatif(graph, [parse("kernels ~ ( * 0.5")], plan=plan)
    assert caught.value.slug == "bad-change"


def test_savings_of_the_host_are_told_without_what_recording_cost_it() -> None:
    _, graph, plan = made("launch-bound")
    ratio = 1.25
    cost = (1 - 1 / ratio) * whatif(graph, [parse("gpu * 1")], plan=plan).before_ns

    def less(*texts: str, ratio: float | None = ratio) -> int:
        found = whatif(graph, [parse(text) for text in texts], plan=plan, host_ratio=ratio)
        return found.saved_ns - found.rescaled_saved_ns

    assert less("host * 0.7") == pytest.approx(0.3 * cost, abs=1)
    assert less("host * 0.7", ratio=None) == less("host * 0.7", ratio=0.9) == 0
    # the device is not recorded by the host, and what it saves beside the host stays
    assert less("gpu * 0.5") == 0
    assert less("host * 0.7", "gpu * 0.5") == pytest.approx(0.3 * cost, abs=1)
    # parts of the host add up to the whole, and one after the other is their product
    parts = [less(f"{part} * 0.7") for part in ("ops", "launches")]
    assert less("ops * 0.7", "launches * 0.7") == pytest.approx(sum(parts), abs=2)
    assert less("host * 0.9", "host * 0.8") == pytest.approx(0.28 * cost, abs=1)
    # what costs time costs less without recording
    assert less("host * 1.5") == pytest.approx(-0.5 * cost, abs=1)


def test_the_delay_of_a_rank_that_records_as_much_as_the_others_is_no_recording() -> None:
    builders = hosted_job(HostedRecipe(late_ns=20_000_000)).run().traces()
    graph = calibrate(join_ranks([link_rank(builder.build()) for builder in builders]))
    found = whatif(graph, [parse("rank 1 delay remove")], host_ratio=1.25)
    assert found.saved_ns > 30_000_000
    assert found.rescaled_saved_ns == pytest.approx(found.saved_ns, rel=0.01)


def test_what_recording_cost_is_never_more_than_the_saving() -> None:
    _, graph, plan = made("launch-bound")
    found = whatif(graph, [parse("ops ~ aten::linear remove")], plan=plan, host_ratio=50.0)
    assert 0 <= found.rescaled_saved_ns < found.saved_ns
