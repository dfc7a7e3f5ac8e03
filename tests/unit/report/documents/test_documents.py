"""Reports of every sort of input are of the type of their document; and the check of that finds what is wrong."""

from __future__ import annotations

from typing import Any, TypedDict

import pytest

from support.documents import check_document
from support.public_traces import NEEDS_TRACES, trace_of
from support.reports import check_schema
from support.sessions import empty, made, stages
from traceloom.report import ReportOptions, build, build_runs
from traceloom.trace.session import Session

NAMES = (
    "a100_ddp_nccl",
    "cpu_only_gloo_rank34",
    "h100_bert_small",
    "mi300_vllm_piecewise_graphs",
    "mtia_inference",
)


class InnerValue(TypedDict):
    """Part of a document."""

    count: int
    share: float | None


class WholeDocument(TypedDict):
    """A document with a value of every sort."""

    name: str
    rows: list[InnerValue]
    inner: InnerValue | None
    by_name: dict[str, InnerValue]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(
            f"kineto/{name}.json.gz",
            marks=[*NEEDS_TRACES, *[pytest.mark.thorough] * (name == "a100_ddp_nccl")],
            id=name,
        )
        for name in NAMES
    ],
)
def test_reports_of_public_traces_are_of_their_type(path: str) -> None:
    check_schema(build(Session((trace_of(path),), path)))


def test_a_part_of_a_report_and_a_list_of_runs_are_of_its_type_too() -> None:
    session = made(stages)[0]
    check_schema(build(session, ReportOptions(only=("kernels", "across_ranks"), steps=(0, 0))))
    check_schema(
        build_runs([session, empty()], "two", ["traceloom report a", "traceloom report b"])
    )


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"name": None}, "$.name"),
        ({"more": 1}, "$.more"),
        (
            {"rows": [{"count": 1, "share": None}, {"count": 1, "share": 0.5, "ms": 1}]},
            "$.rows[1].ms",
        ),
        ({"rows": [{"count": 1}]}, "`share`"),
        ({"inner": {"count": 1, "share": None, "ms": 1}}, "$.inner.ms"),
        ({"inner": {"count": 1.5, "share": None}}, "$.inner.count"),
        ({"by_name": {"a": {"count": 1, "share": 0.5, "ms": 1}}}, "$.by_name.a.ms"),
    ],
)
def test_what_is_not_of_the_type_is_named(changes: dict[str, Any], where: str) -> None:
    good = {"name": "n", "rows": [], "inner": None, "by_name": {}}
    check_document(good, WholeDocument)
    with pytest.raises(AssertionError) as refusal:
        check_document(good | changes, WholeDocument)
    assert where in str(refusal.value)
