"""The tables of a verdict, declared once for every view."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from traceloom.analyze.gate.verdict import ONE, PAIRS
from traceloom.model import units
from traceloom.report.comparison import tables as comparison
from traceloom.report.table import Col, Table

if TYPE_CHECKING:
    from traceloom.report.documents.verdict import CheckRow, VerdictDocument

_MINUS = "-"


def tables(document: VerdictDocument) -> Iterator[Table]:
    """Checks, conditions that differ, causes; then the comparison, where there is one."""
    rows = []
    for row in document["checks"]:
        measure = row["measure"]
        rows.append(
            {
                **row,
                "said_base": value(row["base"], measure),
                "said_new": value(row["new"], measure),
                "said_change": change(row["change"], row),
                "interval": units.NONE
                if row["low"] is None
                else f"{change(row['low'], row)} to {change(row['high'], row)}",
                "samples": " / ".join(
                    f"{units.counted(runs, 'run')} ({units.count(steps)})"
                    for runs, steps in ((row["base_runs"], row["base_steps"]), (row["new_runs"], row["new_steps"]))
                ),
                "effect": units.NONE if row["effect_size"] is None else f"{row['effect_size']:+.2f}",
            }
        )  # fmt: skip
    checked = [
        Col("verdict", "Verdict"),
        Col("said_change", "Change", hint="new less base", kept=True),
        Col("interval", "95 % interval", hint="of the change"),
        Col("said_base", "Base", hint="per step", kept=True),
        Col("said_new", "New", hint="per step", kept=True),
        Col("effect", "Effect", hint="the change in standard deviations of a sample", narrow=False),
        Col("samples", "Samples", hint="runs (steps) of the base / of the new side", narrow=False),
        Col("sample", "Sample is", narrow=False),
        Col("source", "Taken from", narrow=False),
        Col("condition", "Fails if", "name"),
    ]
    yield Table("verdict-checks", "Checks", checked, rows)
    note = "Where a decisive one differs, there is no verdict."
    yield from comparison.conditions(document, "verdict-conditions", note)
    if document["causes"]:
        columns = [
            Col("what", "What"),
            Col("difference_ns", "Difference", "time", "new less base, per recorded step", kept=True, scale="sides"),
            Col("base_ns", "Base", "time", "mean per recorded step", kept=True, scale="sides"),
            Col("new_ns", "New", "time", "mean per recorded step", kept=True, scale="sides"),
            Col("name", "Name", "name"),
        ]
        note = "The largest differences by name."
        yield Table("verdict-causes", "Causes", columns, document["causes"], note=note)
    if document["comparison"]:
        yield from (table for table in comparison.tables(document["comparison"]) if table.key != "diff-conditions")


def headline(document: VerdictDocument) -> str:
    """The verdict in one line."""
    return f"{document['sentence']}."


def reasons(document: VerdictDocument) -> list[str]:
    """What is to know about the checks: why they are inconclusive, and what their samples are."""
    checks = document["checks"]
    out = [f"{row['condition']}: {row['reason']}." for row in checks if row["reason"]]
    if any(row["sample"] == PAIRS for row in checks):
        out.append(
            "Runs of both sides took turns, so each is held against its neighbour: what the machine did to both is no "
            "change."
        )
    if any(row["sample"] == ONE for row in checks):
        out.append(
            "Within one run only: each side is one run, so that nothing is known of how runs differ from each other. "
            "Several runs a side make a verdict that holds."
        )
    if any(row["metric"].endswith("step_time") and row["source"] == "recorded steps" for row in checks):
        out.append("step_time is of recorded steps: no wall times of at least 5 undisturbed steps were kept.")
    for row in document["power"]:  # how many runs show a change of a size
        size = units.share(row["effect"], 1)
        out.append(
            f"{row['condition']}: how many runs show a change of {size} is not known: {row['reason']}."
            if row["runs"] is None or row["scatter"] is None
            else f"{row['condition']}: a change of {size} is found eight times of ten with {row['runs']} runs a side "
            f"(a run scatters by {units.share(row['scatter'], 1)})."
        )
    return out


def value(amount: float | None, measure: str) -> str:
    """An amount in its unit."""
    if amount is None:
        return units.NONE
    if measure == "time":
        return units.duration(round(amount))
    return units.size(round(amount)) if measure == "bytes" else units.number(round(amount, 3))


def change(amount: float | None, row: CheckRow) -> str:
    """A change with its sign: in per cent, or in the unit of the measure."""
    if amount is None:
        return units.NONE
    if row["relative"]:
        return f"{100 * amount:+.2f} %"
    sign = "+" if amount >= 0 else _MINUS
    return f"{sign}{value(abs(amount), row['measure'])}"
