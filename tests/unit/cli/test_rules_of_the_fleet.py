"""Rules of the fleet as rows of a terminal, and the line about what may still be spent."""

from __future__ import annotations

from typing import Any

import pytest

from traceloom.cli.fleet import TRIGGER_HEADS, build_trigger_rows, format_budget

FIRED = {"request": "r1", "target": "job a", "what": "its turn"}
REFUSED = {"target": "", "what": "its turn", "reason": "budget", "detail": "nothing is left"}


def rule(**changes: Any) -> dict[str, Any]:
    return {
        "name": "daily",
        "on": "cadence",
        "target": "job",
        "fired": 0,
        "refusals": {},
        "kept_bytes": 0,
        "last": None,
        "last_refusal": None,
        **changes,
    }


@pytest.mark.parametrize(
    ("fired_ns", "refused_ns", "last"),
    [
        (None, None, "–"),
        (5, None, "r1: job a: its turn"),
        (None, 5, "no job not, as nothing is left"),
        (6, 5, "r1: job a: its turn"),
        (5, 6, "no job not, as nothing is left"),
        (5, 5, "r1: job a: its turn"),
    ],
)
def test_what_happened_last_is_what_happened_later(
    fired_ns: int | None, refused_ns: int | None, last: str
) -> None:
    changes = {
        "last": None if fired_ns is None else {"at_ns": fired_ns, **FIRED},
        "last_refusal": None if refused_ns is None else {"at_ns": refused_ns, **REFUSED},
    }
    [row] = build_trigger_rows({"rules": [rule(**changes)]})
    assert dict(zip(TRIGGER_HEADS, row, strict=True))["last"] == last


def test_a_rule_that_did_nothing_cost_nothing() -> None:
    rows = build_trigger_rows(
        {"rules": [rule(), rule(refusals={"busy": 2, "budget": 1}, kept_bytes=1_500_000, fired=3)]}
    )
    heads = [dict(zip(TRIGGER_HEADS, row, strict=True)) for row in rows]
    assert [(of["traces"], of["refused"], of["kept"]) for of in heads] == [
        ("0", "–", "0 B"),
        ("3", "2 busy, 1 budget", "1.50 MB"),
    ]


def test_what_is_left_is_said_and_what_is_wrong_below_it() -> None:
    budget = {
        "traces_left": 3,
        "traces_per_day": 50,
        "bytes_left": 1_500_000,
        "bytes_per_day": 2_000_000,
        "last_error": "",
    }
    line = "left of 24 hours: 3 of 50 traces, 1.50 MB of 2.00 MB"
    assert format_budget(budget) == line
    assert (
        format_budget({**budget, "last_error": "\x1b[31mred\u202e"})
        == f"{line}\n\\x1b[31mred\\u202e"
    )
