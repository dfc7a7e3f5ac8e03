"""What findings owe to the run: nothing to its clock, to orders and numbers of the file, to the order of its ranks."""

from __future__ import annotations

from dataclasses import asdict
from functools import cache
from typing import Any

import pytest

from support.odd_traces import odd_builder, odd_trace
from traceloom.findings import findings
from traceloom.findings.ranking import Ranked
from traceloom.testing import TraceBuilder
from traceloom.trace.session import Session
from traceloom.trace.trace import Trace

SEEDS = (0, 5, 7)


@cache
def of_seed(seed: int) -> Ranked:
    return findings(Session((odd_trace(seed),), "run"))


def plain(ranked: Ranked, earlier_ns: int = 0) -> dict[str, Any]:
    """All that is said, with moments that are so much earlier."""
    parts = ("time", "memory", "abstentions")
    document: dict[str, Any] = {
        name: [asdict(entry) for entry in getattr(ranked, name)] for name in parts
    }
    document["limit"] = ranked.limit
    for finding in (*document["time"], *document["memory"]):
        for evidence in finding["evidence"]:
            if evidence["start_ns"] is not None:
                evidence["start_ns"] -= earlier_ns
    return document


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", SEEDS)
def test_the_same_run_later_has_the_same_findings_later(seed: int) -> None:
    later = findings(Session((odd_trace(seed, shift_us=8.0e9),), "run"))
    assert plain(later, 8 * 10**12) == plain(of_seed(seed))


@pytest.mark.parametrize("seed", SEEDS)
def test_neither_the_order_of_entries_nor_their_numbers_are_in_a_finding(seed: int) -> None:
    expected = plain(of_seed(seed))
    for changed in (odd_builder(seed).shuffled(seed), odd_builder(seed).renumbered(seed)):
        assert plain(findings(Session((changed.build(),), "run"))) == expected


@cache
def job() -> tuple[Trace, Trace]:
    """Two ranks of one job with steps at the same time, the second slower."""
    traces = []
    for rank in range(2):
        made = TraceBuilder(rank, 2)
        for step in range(5):
            at = 10_000 * step
            made.step(step, at, 9_900).op("aten::mm", at + 100, 3_000 + 2_000 * rank)
            made.launch("cudaLaunchKernel", at + 200, 10, correlation=2 * step + 1)
            made.kernel("gemm", at + 300, 2_000 + 2_500 * rank, correlation=2 * step + 1)
            made.collective("allreduce", at + 6_000, 60, sequence=step)
            made.launch("cudaLaunchKernel", at + 6_010, 10, correlation=2 * step + 2)
            made.kernel(
                "ncclDevKernel_AllReduce_Sum", at + 6_100, 1_500, stream=8, correlation=2 * step + 2
            )
            made.launch(
                "cudaDeviceSynchronize", at + 6_200, 1_400, correlation=100 + step, flow=False
            )
        traces.append(made.build())
    return traces[0], traces[1]


def test_the_order_of_the_ranks_changes_no_finding() -> None:
    first, second = job()
    first, other = (
        plain(findings(Session(traces, "run"))) for traces in ((first, second), (second, first))
    )
    for finding in (
        *first["time"],
        *other["time"],
    ):  # what is as long stands in the order of the ranks
        finding["evidence"] = sorted(finding["evidence"], key=str)
    assert first["time"] == other["time"]
    assert first["memory"] == other["memory"]
    assert sorted(map(str, first["abstentions"])) == sorted(map(str, other["abstentions"]))
    assert first["time"], "there is something to mend"


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_shown_of_a_finding_lies_in_the_trace(seed: int) -> None:
    trace, ranked = odd_trace(seed), of_seed(seed)
    shown = [
        (each, finding) for finding in (*ranked.time, *ranked.memory) for each in finding.evidence
    ]
    assert shown, "the findings have evidence"
    names = set(trace.events["name"].to_list())
    for evidence, finding in shown:
        assert evidence.count >= 1
        assert evidence.what
        if evidence.rank is not None:
            assert evidence.rank == trace.rank
        if evidence.lane is not None:
            assert 0 <= evidence.lane < trace.lanes.height
        if evidence.start_ns is not None:
            assert trace.start_ns <= evidence.start_ns <= trace.end_ns, finding.slug
            assert evidence.start_ns + (evidence.duration_ns or 0) <= trace.end_ns, finding.slug
        if evidence.start_ns is not None and evidence.lane is not None and evidence.what in names:
            rows = trace.events.filter(lane=evidence.lane, name=evidence.what)
            assert evidence.start_ns in rows["start_ns"].to_list(), finding.slug


@pytest.mark.parametrize("seed", SEEDS)
def test_savings_are_parts_of_the_step_and_their_severity_follows_from_them(seed: int) -> None:
    for finding in of_seed(seed).time:
        saving, fraction = finding.saving_ns, finding.saving_fraction
        assert saving is not None
        assert fraction is not None
        assert (saving == 0) == (fraction == 0)
        assert 0 <= fraction <= 1
        expected = "high" if fraction >= 0.1 else "medium" if fraction >= 0.03 else "low"
        assert finding.severity == expected
        steps = {
            round(other.saving_ns / other.saving_fraction)
            for other in of_seed(seed).time
            if other.saving_fraction
        }
        assert max(steps) - min(steps) <= 1, "all are parts of one step"
        document = finding.to_dict()
        assert document["saving_ns"] == saving
        assert [entry["what"] for entry in document["evidence"]] == [
            entry.what for entry in finding.evidence
        ]


def test_a_run_without_anything_to_mend_has_reasons_and_no_findings() -> None:
    ranked = findings(Session((TraceBuilder().op("aten::mm", 0, 10).build(),), "run"))
    assert [finding for finding in ranked.time if finding.saving_ns] == []
    slugs = [abstention.slug for abstention in ranked.abstentions]
    assert len(slugs) == len(set(slugs)) > 10
    assert all(
        abstention.reason[0].islower() or abstention.reason[0].isdigit()
        for abstention in ranked.abstentions
    )
