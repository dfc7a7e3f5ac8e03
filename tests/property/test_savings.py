"""Whatever a job or a public trace is asked: no answer is below what is left to do, or saves what nobody waited for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

import traceloom
from support.job_strategies import parallel_recipes, training_recipes
from support.jobs import ParallelRecipe, Recipe, parallel_job, training_job
from support.public_traces import DATA
from traceloom.changes.bounds import compute_busiest_lane_ns, max_saved_ns
from traceloom.changes.changes import NODE_TARGETS, parse
from traceloom.changes.scenario import Scenario
from traceloom.errors import UsageError
from traceloom.graph import Plan, calibrate, link_session
from traceloom.graph.graph import Graph
from traceloom.graph.job import join_ranks
from traceloom.graph.rank import link_rank

PUBLIC = sorted((DATA / "kineto").glob("*.json.gz")) + sorted((DATA / "diff").glob("*.json.gz"))
USUAL = (
    "cpu_only_gloo_rank34.json.gz",
    "h100_bert_small.json.gz",
    "mi300_vllm_piecewise_graphs.json.gz",
    "mi250_minitoy.json.gz",
    "mtia_inference.json.gz",
    "rtx3060_runs_ahead_05.json.gz",
    "triton_example.json.gz",
)
CHANGES = (
    *(f"{target} {action}" for target in NODE_TARGETS for action in ("* 0.3", "* 1.7", "remove")),
    *(f"{target} overlap" for target in ("copies", "collectives", "kernels", "gpu")),
    "copies async",
    "network * 3",
    "idle remove",
    "kernels fuse",
    "kernels graph",
    "kernels balance",
    "loading workers 3",
    "rank 0 delay remove",
    "rank 1 delay remove",
)


def check(graph: Graph, *texts: str) -> bool:
    """Whether the graph has what the changes are about; what they come to is possible."""
    plan, scenario = Plan(graph), Scenario.of(graph)
    whole = int(np.ptp(graph.point_times()))
    try:
        for text in texts:
            scenario = scenario.apply(parse(text))
    except UsageError:
        return False
    after = int(np.ptp(scenario.times(plan)))
    rounding = graph.nodes.height  # half a nanosecond at each node that is scaled
    assert after >= compute_busiest_lane_ns(scenario) - rounding, texts
    assert whole - after <= max_saved_ns(graph, scenario) + rounding, texts
    return True


def linked(recipe: Recipe | ParallelRecipe) -> Graph:
    job = parallel_job(recipe) if isinstance(recipe, ParallelRecipe) else training_job(recipe)
    return calibrate(join_ranks([link_rank(builder.build()) for builder in job.run().traces()]))


@given(
    recipe=st.one_of(training_recipes(), parallel_recipes()),
    pairs=st.lists(st.tuples(st.sampled_from(CHANGES), st.sampled_from(CHANGES)), max_size=8),
)
def test_no_change_of_a_job_saves_more_than_can_be_saved(
    recipe: Recipe | ParallelRecipe, pairs: list[tuple[str, str]]
) -> None:
    graph = linked(recipe)
    assert sum(check(graph, text) for text in CHANGES) > len(CHANGES) // 2
    for texts in pairs:
        check(graph, *texts)


@pytest.mark.sampled(3)
@pytest.mark.data
@pytest.mark.parametrize(
    "path",
    [
        path if path.name in USUAL else pytest.param(path, marks=pytest.mark.thorough)
        for path in PUBLIC
    ],
    ids=lambda path: path.name.split(".")[0],
)
def test_no_change_of_a_public_trace_saves_more_than_can_be_saved(path: Path) -> None:
    graph = link_session(traceloom.load(path))
    for text in CHANGES:
        check(graph, text)
