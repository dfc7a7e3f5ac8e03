"""Documents of comparisons, verdicts, what-ifs and graphs are of their types, with and without every optional part."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from support.documents import check_document
from support.pairs import compared, run
from support.sessions import (
    empty,
    gpu_only,
    host_only,
    hostile,
    no_steps,
    several_devices,
    training,
    unknown_ranks,
)
from traceloom.analyze import compare, gate, gate_summary
from traceloom.changes.changes import parse
from traceloom.changes.whatif import whatif as evaluate
from traceloom.graph import law, link_session
from traceloom.report import (
    comparison,
    graph as graph_document,
    verdict,
    verdict as baselines,
    whatif,
)
from traceloom.report.documents.comparison import ComparisonDocument
from traceloom.report.documents.graph import GraphDocument
from traceloom.report.documents.predictions import WhatIfDocument
from traceloom.report.documents.verdict import BaselinesDocument, VerdictDocument
from traceloom.trace.session import Session

of_every_sort = pytest.mark.parametrize(
    "sort",
    [host_only, gpu_only, no_steps, several_devices, unknown_ranks, training, hostile],
    ids=lambda sort: sort.__name__,
)


@pytest.mark.sampled(2)
@of_every_sort
def test_comparisons_are_of_their_type(sort: Callable[[], Session]) -> None:
    one, other = sort(), run("work", 20, "H100")
    check_document(comparison.build(compare(one, other), one, other), ComparisonDocument)
    check_document(comparison.build(compare(other, one), other, one), ComparisonDocument)


def test_verdicts_and_baselines_are_of_their_type() -> None:
    check_document(
        compared("work")[1], VerdictDocument
    )  # with the comparison and the runs that are needed
    base, new = (
        [gate_summary.summarise(session)] for session in (run("work", 20, "H100"), host_only())
    )
    conditions = [
        gate.parse("step_time > 3%"),
        gate.parse("gpu_time > 1ms"),
        gate.parse("kernel:gemm > 1%"),
    ]
    for sides in ((base, new), (new, base), (base * 4, base * 4)):
        judged = gate.judge(*sides, conditions)
        for effect in (None, 0.05):
            named = [(name, side) for name, side in zip(("base", "new"), sides, strict=True)]
            check_document(
                verdict.build(judged, *named, strict=True, effect=effect), VerdictDocument
            )
    summary = gate_summary
    rows = [
        baselines.build_baseline_row(
            "main", summary.Baseline(summary.FORMAT, summary.VERSION, "0.0.0", "main", 1, runs)
        )
        for runs in (base, [gate_summary.summarise(no_steps())])
    ]
    check_document({"store": "here", "baselines": rows}, BaselinesDocument)


@pytest.mark.parametrize(
    ("sort", "change"),
    [
        pytest.param(host_only, "ops * 0.5", id="host only"),
        pytest.param(gpu_only, "kernels * 2", id="gpu only"),
        pytest.param(several_devices, "gpu * 0.5", id="several devices"),
        pytest.param(training, "rank 3 delay remove", id="ranks"),
        pytest.param(empty, "", id="empty"),
    ],
)
def test_graphs_and_what_ifs_are_of_their_type(sort: Callable[[], Session], change: str) -> None:
    graph = link_session(sort())
    kept = law(graph)
    check_document(graph_document.build(graph), GraphDocument)
    check_document(graph_document.build(graph, kept), GraphDocument)
    changes = [parse(change)] if change else []
    for host_ratio in (None, 1.5):
        answer = evaluate(graph, changes, kept=kept, host_ratio=host_ratio)
        check_document(
            whatif.build("a run", 0 if host_ratio else None, changes, answer, kept), WhatIfDocument
        )
