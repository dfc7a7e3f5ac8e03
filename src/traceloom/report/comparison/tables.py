"""The tables of a comparison, declared once for every view."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from traceloom.report.names import short
from traceloom.report.table import Col, Table

Row = dict[str, Any]

_TIMES = [
    Col("base_ns", "Base", "time", "mean per step"),
    Col("new_ns", "New", "time", "mean per step"),
    Col("difference_ns", "Difference", "time", "new less base; adds up to the difference of the step"),
]
_LAUNCHED = "of the GPU work that it launched itself, whenever it ran"
_SEPARATOR = " > "
_HALF = 33  # letters of each of two names that stand for each other
_LEAST = 0.05  # per cent; less is not told as a number
_DEEP = 3  # names of a path that are shown beside an operator


def tables(document: Row) -> Iterator[Table]:
    """Conditions that differ, then parts of the step, kernels and operators that changed."""
    differ = [row for row in document["conditions"] if not row["same"]]
    if differ:
        yield Table(
            "diff-conditions",
            "Conditions that differ",
            [
                Col("condition", "Condition"),
                Col("base", "Base"),
                Col("new", "New"),
                Col("weight", "Weight", narrow=False),
            ],
            differ,
            note=""
            if document["comparable"]
            else "Where a decisive one differs, times cannot be held against each other.",
        )
    parts = [
        row | {"said": f"idle: {row['meaning']}" if row["part"].split(":")[0] == "idle" else row["part"]}
        for row in document["breakdown"]
    ]
    parts.sort(key=lambda row: -abs(row["difference_ns"]))
    parts.append({"said": "the step", **{key: document[key] for key in ("base_ns", "new_ns", "difference_ns")}})
    for row in parts:  # with the sign of the change
        part, share = row["difference_ns"], 100 * row["difference_ns"] / max(document["base_ns"], 1)
        row["change"] = f"{share:+.1f} %" if part else "0 %"
        if part and abs(share) < _LEAST:
            row["change"] = "<0.1 %" if part > 0 else ">-0.1 %"
    subject = "each device" if document["account"] == "device" else "the step's thread (not both sides have GPU work)"
    yield Table(
        "diff-parts",
        "Where the difference lies",
        [Col("said", "Part", "name"), *_TIMES, Col("change", "Change", hint="of the base's step")],
        parts,
        note=f"Every nanosecond of {subject} in a usual step; the rows add up to the step, and so do their "
        "differences.",
    )
    if kernels := [row for row in document["kernels"] if row["status"] != "same"]:
        shown = [
            row | {"said": _renamed(row["base_kernel"], row["new_kernel"]), "at": _near(row["path"])} for row in kernels
        ]
        of = len(document["kernels"])
        yield Table(
            "diff-kernels",
            "Kernels, copies and fills",
            [
                Col("status", "What"),
                Col("said", "Kernel", "name"),
                *_TIMES,
                Col("operator", "Operator", hint="the operator that launched it"),
                Col("base_count", "Base count", "number", "launched per step", narrow=False),
                Col("new_count", "New count", "number", "launched per step", narrow=False),
            ],
            shown,
            note=f"Of {of}: {_count(kernels)}. Kernels of one operator stand for each other, whatever their names.",
        )
    if operators := [row for row in document["operators"] if row["status"] != "same"]:
        yield _operators(operators, document)


def _count(rows: list[Row]) -> str:
    """How many rows of each status, as words."""
    counts: dict[str, int] = {}
    for row in rows:
        counts[row["status"]] = counts.get(row["status"], 0) + 1
    return ", ".join(f"{number} {status}" for status, number in counts.items())


def _operators(rows: list[Row], document: Row) -> Table:
    shown = [
        row | {"at": _near(row["path"]), "shapes": _renamed(row["base_shapes"], row["new_shapes"])} for row in rows
    ]
    device = document["account"] == "device"
    gpu = [
        Col("base_duration_ns", "Base GPU", "time", _LAUNCHED, narrow=False),
        Col("new_duration_ns", "New GPU", "time", _LAUNCHED, narrow=False),
        Col("duration_difference_ns", "GPU difference", "time", _LAUNCHED),
    ]
    host = [
        Col("base_host_ns", "Base host", "time", "of the step's thread in it, not below it", narrow=False),
        Col("new_host_ns", "New host", "time", "of the step's thread in it, not below it", narrow=False),
        Col("host_difference_ns", "Host difference", "time", "adds up to the step's difference"),
    ]
    return Table(
        "diff-operators",
        "Operators",
        [
            Col("status", "What"),
            Col("at", "Operator", "name", "and what it stands in, the nearest first"),
            *(gpu if device else []),
            *host,
            Col("base_count", "Base count", "number", "calls per step", narrow=False),
            Col("new_count", "New count", "number", "calls per step", narrow=False),
        ],
        shown,
        note=f"Of {len(document['operators'])}: {_count(rows)}. Aligned by place, shapes and order.",
    )


def _renamed(base: str | None, new: str | None) -> str:
    if base == new or new is None:
        return base or "-"
    return new if base is None else f"{short(base, _HALF)} → {short(new, _HALF)}"


def _near(path: str) -> str:
    """The operator first, then what it stands in, the nearest first."""
    names = path.split(_SEPARATOR)[1:] or [path]
    near = names[::-1][:_DEEP]
    return " in ".join(near) + (" in …" if len(names) > _DEEP else "")
