"""Whatever a trace holds: no rule trips over it, and no finding promises what cannot be."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import HealthCheck, given, settings, strategies as st

from support.strategies import builders, waiting_builders
from traceloom.changes.changes import parse
from traceloom.changes.whatif import whatif
from traceloom.errors import UsageError
from traceloom.findings import RULES, Context, rank
from traceloom.testing import TraceBuilder
from traceloom.trace.session import Session

CHANGES = (
    "gpu * 0.3",
    "idle remove",
    "kernels fuse",
    "gpu graph",
    "copies overlap",
    "network * 3",
    "syncs remove",
    "ops remove",
)
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def of_job(traces: list[TraceBuilder], *, steps: bool) -> Session:
    """The ranks of one job, with three steps each where asked for."""
    built = []
    for number, builder in enumerate(traces):
        trace = (
            builder.step(1, 0, 100).step(2, 100, 150).step(3, 250, 90) if steps else builder
        ).build()
        built.append(replace(trace, meta=replace(trace.meta, rank=number, world_size=len(traces))))
    return Session(tuple(built), "whatever")


RANKS = st.lists(st.one_of(builders(max_events=20), waiting_builders()), min_size=1, max_size=2)


@unhurried
@given(traces=RANKS, steps=st.booleans())
def test_findings_of_anything_are_disjoint_and_possible(
    traces: list[TraceBuilder], steps: bool
) -> None:
    context = Context.of(of_job(traces, steps=steps))
    ranked = rank(context, RULES)
    savings = [finding.saving_ns or 0 for finding in ranked.time]
    assert savings == sorted(savings, reverse=True)
    assert sum(savings) <= context.step_ns
    for finding in (*ranked.time, *ranked.memory):
        assert 0 <= finding.confidence <= 1
        assert finding.title
        assert finding.severity in {"high", "medium", "low"}
    for finding in ranked.time:
        assert finding.saving_ns is not None
        assert finding.saving_ns >= 0
        if finding.saving_low_ns is not None and finding.saving_high_ns is not None:
            assert finding.saving_low_ns <= finding.saving_ns <= finding.saving_high_ns
    assert all(abstention.reason for abstention in ranked.abstentions)


@unhurried
@given(traces=RANKS)
def test_what_takes_less_makes_nothing_later_in_anything(traces: list[TraceBuilder]) -> None:
    graph = Context.of(of_job(traces, steps=False)).graph
    measured = graph.point_times()
    for text in CHANGES:
        try:
            answer = whatif(graph, [parse(text)])
        except UsageError as error:  # there is nothing of the kind
            if error.slug != "nothing-chosen":
                raise
            continue
        rounding = graph.nodes.height  # half a nanosecond for each node that is scaled
        assert (answer.times <= measured + rounding).all(), text
        assert answer.path["before_ns"].sum() == answer.before_ns == int(np.ptp(measured))
        assert answer.after_ns >= 0
