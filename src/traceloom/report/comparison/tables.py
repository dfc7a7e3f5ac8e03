"""The tables of a comparison, declared once for every view."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal

from traceloom.model import units
from traceloom.report.names import short
from traceloom.report.table import Col, Table

if TYPE_CHECKING:
    from traceloom.report.documents.comparison import ComparedOperatorRow, ComparisonDocument
    from traceloom.report.documents.verdict import VerdictDocument

_LAUNCHED = "of the GPU work that it launched itself, whenever it ran"
_ON_THREAD = "of the step's thread in it, not below it"
_SEPARATOR = " > "
_HALF = 33  # letters of each of two names that stand for each other
_DEEP = 3  # names of a path that are shown beside an operator


def tables(document: ComparisonDocument) -> Iterator[Table]:
    """Conditions that differ, then parts of the step, kernels and operators that changed."""
    note = "Where a decisive one differs, times cannot be held against each other."
    yield from conditions(document, "diff-conditions", note)
    parts = [
        {**row, "name": f"idle: {row['meaning']}" if row["part"].split(":")[0] == "idle" else row["part"]}
        for row in sorted(document["breakdown"], key=lambda row: -abs(row["difference_ns"]))
    ]
    whole = {
        "base_ns": document["base_ns"],
        "new_ns": document["new_ns"],
        "difference_ns": document["difference_ns"],
        "change": document["change"],
    }
    subject = "each device" if document["account"] == "device" else "the step's thread (not both sides have GPU work)"
    yield Table(
        "diff-parts",
        "Where the difference lies",
        [*_times("mean per step", adds_up=True), Col("name", "Part", "name")],
        [*parts, {"name": "the step", **whole, "of_step": document["change"]}],
        note=f"Every nanosecond of {subject} in a usual step; the rows add up to the step, and so do their "
        "differences.",
    )
    if rows := [row for row in document["kernels"] if row["status"] != "same"]:
        yield Table(
            "diff-kernels",
            "Kernels, copies and fills",
            [
                Col("status", "What"),
                *_times("mean per step", adds_up=True),
                Col("operator", "Operator", hint="the operator that launched it"),
                Col("count", "Count", hint="launched per step", narrow=False),
                Col("name", "Kernel", "name"),
            ],
            [
                {
                    **row,
                    "name": _renamed(row["base_kernel"], row["new_kernel"]),
                    "count": _counts(row["base_count"], row["new_count"]),
                }
                for row in rows
            ],
            note=f"Of {len(document['kernels'])}: {_statuses(row['status'] for row in rows)}. Kernels of one operator "
            "stand for each other, whatever their names.",
        )
    operators = document["operators"]
    if document["account"] == "device":
        changed = [
            row for row in operators if row["status"] != "same" and (row["base_duration_ns"] or row["new_duration_ns"])
        ]
        title = "Operators by GPU work"
        yield from _operators(changed, len(operators), "diff-operators", title, of="duration_", hint=_LAUNCHED)
    changed = [row for row in operators if row["host_status"] != "same" and (row["base_host_ns"] or row["new_host_ns"])]
    yield from _operators(changed, len(operators), "diff-host", "Operators by host time", of="host_", hint=_ON_THREAD)


def conditions(document: ComparisonDocument | VerdictDocument, key: str, note: str) -> Iterator[Table]:
    """The conditions that differ, where there are any; the note where a decisive one does."""
    columns = [
        Col("condition", "Condition", kept=True),
        Col("base", "Base", kept=True),
        Col("new", "New", kept=True),
        Col("weight", "Weight", narrow=False),
    ]
    if differ := [row for row in document["conditions"] if not row["same"]]:
        yield Table(key, "Conditions that differ", columns, differ, note="" if document["comparable"] else note)


def _times(hint: str, of: str = "", *, adds_up: bool = False) -> list[Col]:
    """Both sides and what changed; `of` is the prefix of the row's keys, which are of `base_{of}ns` then."""
    difference = f"{of}difference_ns"
    return [
        Col(f"base_{of}ns", "Base", "time", hint, kept=True, scale="sides"),
        Col(f"new_{of}ns", "New", "time", hint, kept=True, scale="sides"),
        Col(difference, "Difference", "time", "new less base", kept=True, scale="sides"),
        Col(f"{of}change", "Change", "change", "of the row itself: new over base, less 1"),
        Col(
            f"{of}of_step",
            "Of step",
            "change",
            "the difference as a share of the base's step" + "; adds up to the change of the step" * adds_up,
        ),
        Col(difference, "faster │ slower", "delta", narrow=False),
    ]


def _operators(
    changed: Sequence[ComparedOperatorRow], count: int, key: str, title: str, *, of: str, hint: str
) -> Iterator[Table]:
    """The operators that changed by one of their times, of so many, the largest differences first."""
    status: Literal["host_status", "status"] = "host_status" if of == "host_" else "status"
    difference: Literal["host_difference_ns", "duration_difference_ns"] = (
        "host_difference_ns" if of == "host_" else "duration_difference_ns"
    )
    rows: list[dict[str, object]] = []
    for row in sorted(changed, key=lambda row: -abs(row[difference])):
        # the operator first, then what it stands in, the nearest first
        names = (row["path"].split(_SEPARATOR)[1:] or [row["path"]])[::-1]
        at = " in ".join(names[:_DEEP]) + (" in …" if len(names) > _DEEP else "")
        rows.append({**row, "at": at, "count": _counts(row["base_count"], row["new_count"])})
    if rows:
        yield Table(
            key,
            title,
            [
                Col(status, "What"),
                *_times(hint, of, adds_up=of == "host_"),
                Col("count", "Count", hint="calls per step", narrow=False),
                Col("at", "Operator", "name", "and what it stands in, the nearest first"),
            ],
            rows,
            note=f"Of {count}: {_statuses(row[status] for row in changed)}. Times {hint}; aligned by place (with "
            "a replay: by name), shapes and order.",
        )


def _statuses(statuses: Iterable[str]) -> str:
    """How many of each status, as words."""
    return ", ".join(f"{count} {status}" for status, count in Counter(statuses).items())


def _counts(base: float, new: float) -> str:
    """How often per step, on both sides where they differ."""
    before, after = units.number(base), units.number(new)
    return before if before == after else f"{before} → {after}"


def _renamed(base: str | None, new: str | None) -> str:
    if base == new or new is None:
        return base or units.NONE
    return new if base is None else f"{short(base, _HALF)} → {short(new, _HALF)}"
