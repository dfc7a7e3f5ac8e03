"""The names of a trace, alone and beside those of others that are looked at together with it."""

from __future__ import annotations

import re

import pytest

from traceloom.analyze.names import Vocabulary, _sort_names, build_vocabulary
from traceloom.testing import TraceBuilder
from traceloom.trace.trace import Trace

NAMES = (
    ("aten::mm", "aten::b", "aten::mm"),
    (),
    ("zz", "cudaLaunchKernel", "aten::b"),
    ("aten::mm",),
    ("é", "b"),
)
PATTERNS = (r"^aten::", r"(?i)LAUNCH", r"b$", r"never")


def made(names: tuple[str, ...]) -> Trace:
    builder = TraceBuilder()
    for number, name in enumerate(names):
        builder = builder.op(name, 10 * number, 5)
    return builder.build()


def of(traces: list[Trace]) -> list[Vocabulary]:
    alone = map(build_vocabulary, traces)
    return [
        Vocabulary(each.names, each.code, *own)
        for each, own in zip(alone, _sort_names.__wrapped__(traces), strict=True)
    ]


@pytest.mark.parametrize("at_once", [True, False], ids=["together", "alone"])
def test_names_are_those_of_the_events_and_match_as_regular_expressions_do(at_once: bool) -> None:
    traces = [made(names) for names in NAMES]
    vocabularies = of(traces) if at_once else [each for trace in traces for each in of([trace])]
    for trace, words in zip(traces, vocabularies, strict=True):
        names = trace.events["name"].to_list()
        assert words.names[words.code].to_list() == names
        assert words.ordered[words.place].to_list() == words.names.to_list()
        distinct = {name for each in NAMES for name in each} if at_once else set(names)
        assert words.ordered.to_list() == sorted(distinct)
        for pattern in PATTERNS:
            assert words.events(pattern).tolist() == [
                re.search(pattern, name) is not None for name in names
            ]
