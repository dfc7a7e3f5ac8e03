"""The verdict of `traceloom diff --fail-if` and `traceloom baseline compare`: document, page and
terminal.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, TextIO

import numpy as np
from rich.text import Text

from traceloom import __version__
from traceloom.analyze.gate import OVER_PAIRS, WITHIN_RUN, Verdict, compute_power
from traceloom.analyze.gate_summary import Baseline, RunSummary
from traceloom.report import comparison
from traceloom.report.comparison import render_sides, render_table_section
from traceloom.report.document import Col, ReportOptions, Table
from traceloom.report.figure import escape_html
from traceloom.report.views import terminal
from traceloom.report.views.markdown import (
    escape_markdown as markdown_text,
    format_code_span,
    render_markdown_table,
)
from traceloom.report.views.page import list_sections, render_page
from traceloom.report.views.terminal import render_declared_table
from traceloom.report.views.terminal_table import render_paragraph
from traceloom.system import units
from traceloom.trace.frames import to_rows

if TYPE_CHECKING:
    from traceloom.report.documents.comparison import ComparisonDocument
    from traceloom.report.documents.verdict import (
        BaselineRow,
        CheckRow,
        JudgedRunRow,
        JudgedSideValue,
        VerdictDocument,
    )


FORMAT = "traceloom-verdict"
VERSION = 1


def build(
    verdict: Verdict,
    base: tuple[str, Sequence[RunSummary]],
    new: tuple[str, Sequence[RunSummary]],
    *,
    strict: bool,
    comparison: ComparisonDocument | None = None,
    effect: float | None = None,
) -> VerdictDocument:
    """Builds the verdict as one JSON object. Keys: docs/how-to/gate.md.

    Args:
        verdict: The verdict.
        base: Name of the base, and its runs.
        new: The same of the new side.
        strict: Whether `inconclusive` fails the check.
        comparison: The result of `traceloom.report.comparison.build`, where the traces of both
            sides are available.
        effect: A change, as a fraction of the base: the number of runs that would show it is
            included.
    """
    return {
        "format": FORMAT,
        "version": VERSION,
        "traceloom": __version__,
        "passed": verdict.verdict == "pass" or (verdict.verdict == "inconclusive" and not strict),
        "strict": strict,
        "base": _build_side(*base),
        "new": _build_side(*new),
        "verdict": verdict.verdict,
        "sentence": verdict.sentence,
        "comparable": verdict.comparable,
        "checks": to_rows(verdict.checks),
        "conditions": to_rows(verdict.conditions),
        "causes": to_rows(verdict.causes),
        "power": [] if effect is None else to_rows(compute_power(verdict.checks, effect)),
        "comparison": comparison,
    }


def _build_side(name: str, runs: Sequence[RunSummary]) -> JudgedSideValue:
    entries: list[JudgedRunRow] = [
        {
            "name": run.name,
            "recorded_steps": len(run.steps),
            "undisturbed_steps": None if run.wall_ns is None else len(run.wall_ns),
        }
        for run in runs
    ]
    return {"name": name, "runs": entries}


_MINUS = "-"


def build_tables(document: VerdictDocument) -> Iterator[Table]:
    """Yields the checks, differing conditions, causes; then the comparison, where there is one."""
    rows = []
    for row in document["checks"]:
        measure = row["measure"]
        rows.append(
            {
                **row,
                "said_base": format_amount(row["base"], measure),
                "said_new": format_amount(row["new"], measure),
                "said_change": format_change(row["change"], row),
                "interval": units.UNKNOWN_TEXT
                if row["low"] is None
                else f"{format_change(row['low'], row)} to {format_change(row['high'], row)}",
                "samples": " / ".join(
                    f"{units.format_quantity(runs, 'run')} ({units.format_count(steps)})"
                    for runs, steps in (
                        (row["base_runs"], row["base_steps"]),
                        (row["new_runs"], row["new_steps"]),
                    )
                ),
                "effect": units.UNKNOWN_TEXT
                if row["effect_size"] is None
                else f"{row['effect_size']:+.2f}",
            }
        )
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
    yield from comparison.build_conditions_table(document, "verdict-conditions", note)
    if document["causes"]:
        columns = [
            Col("what", "What"),
            Col(
                "difference_ns",
                "Difference",
                "time",
                "new less base, per recorded step",
                kept=True,
                scale="sides",
            ),
            Col("base_ns", "Base", "time", "mean per recorded step", kept=True, scale="sides"),
            Col("new_ns", "New", "time", "mean per recorded step", kept=True, scale="sides"),
            Col("name", "Name", "name"),
        ]
        note = "The largest differences by name."
        yield Table("verdict-causes", "Causes", columns, document["causes"], note=note)
    if document["comparison"]:
        yield from (
            table
            for table in comparison.build_tables(document["comparison"])
            if table.key != "diff-conditions"
        )


def describe_verdict(document: VerdictDocument) -> str:
    return f"{document['sentence']}."


def list_reasons(document: VerdictDocument) -> list[str]:
    """Returns notes on the checks: why they are inconclusive, and what their samples are."""
    checks = document["checks"]
    out = [f"{row['condition']}: {row['reason']}." for row in checks if row["reason"]]
    if any(row["sample"] == OVER_PAIRS for row in checks):
        out.append(
            "Runs of both sides took turns, so each is held against its neighbour: what the machine did to both is no "
            "change."
        )
    if any(row["sample"] == WITHIN_RUN for row in checks):
        out.append(
            "Within one run only: each side is one run, so that nothing is known of how runs differ from each other. "
            "Several runs a side make a verdict that holds."
        )
    if any(
        row["metric"].endswith("step_time") and row["source"] == "recorded steps" for row in checks
    ):
        out.append(
            "step_time is of recorded steps: no wall times of at least 5 undisturbed steps were kept."
        )
    for row in document["power"]:  # the number of runs that show a change of a size
        size = units.format_share(row["effect"], 1)
        out.append(
            f"{row['condition']}: how many runs show a change of {size} is not known: {row['reason']}."
            if row["runs"] is None or row["scatter"] is None
            else f"{row['condition']}: a change of {size} is found eight times of ten with {row['runs']} runs a side "
            f"(a run scatters by {units.format_share(row['scatter'], 1)})."
        )
    return out


def format_amount(amount: float | None, measure: str) -> str:
    if amount is None:
        return units.UNKNOWN_TEXT
    if measure == "time":
        return units.format_duration(round(amount))
    return (
        units.format_size(round(amount))
        if measure == "bytes"
        else units.format_number(round(amount, 3))
    )


def format_change(amount: float | None, row: CheckRow) -> str:
    """Formats a change with its sign: in percent, or in the unit of the measure."""
    if amount is None:
        return units.UNKNOWN_TEXT
    if row["relative"]:
        return f"{100 * amount:+.2f} %"
    sign = "+" if amount >= 0 else _MINUS
    return f"{sign}{format_amount(abs(amount), row['measure'])}"


def build_baseline_row(name: str, baseline: Baseline) -> BaselineRow:
    runs = baseline.runs
    wall = [run.wall_ns for run in runs if run.wall_ns]
    step_times = (
        wall if len(wall) == len(runs) else [run.scalars["step_time"] for run in runs if run.steps]
    )
    devices = {
        value
        for run in runs
        for fact in run.stated
        if fact.condition == "device"
        for value in [fact.value]
    }
    return {
        "name": name,
        "saved_unix_s": baseline.saved_unix_s,
        "runs": len(runs),
        "steps": sum(len(values) for values in step_times),
        "step_ns": round(float(np.mean([np.mean(values) for values in step_times])))
        if step_times
        else None,
        "device": ", ".join(sorted(devices)),
        "traceloom": baseline.traceloom,
    }


def render_baselines(rows: list[BaselineRow], top: int, width: int) -> Iterator[Text]:
    display_rows = [
        {
            **entry,
            "when": f"{dt.datetime.fromtimestamp(entry['saved_unix_s'], dt.timezone.utc):%Y-%m-%d %H:%M}",
        }
        for entry in rows
    ]
    columns = [
        Col("when", "Saved (UTC)"),
        Col("runs", "Runs", "count"),
        Col("steps", "Steps", "count"),
        Col("step_ns", "Mean step", "time"),
        Col("device", "Device", narrow=False),
        Col("name", "Name", "name"),
    ]
    yield from render_declared_table(
        Table("baselines", "Baselines", columns, display_rows), ReportOptions(top=top), width
    )


def render_verdict_page(document: VerdictDocument) -> str:
    name = f"{document['base']['name']} → {document['new']['name']}"
    paragraphs = "".join(
        f'<p class="quiet">{escape_html(line)}</p>' for line in list_reasons(document)
    )
    sides = (("base", document["base"]), ("new", document["new"]))
    runs = [{"side": name, **run} for name, side in sides for run in side["runs"]]
    run_columns = [
        Col("side", "Side"),
        Col("undisturbed_steps", "Undisturbed steps", "count"),
        Col("recorded_steps", "Recorded steps", "count"),
        Col("name", "Run", "name"),
    ]
    sections = [
        render_table_section(table)
        for table in (*build_tables(document), Table("verdict-runs", "Runs", run_columns, runs))
    ]
    return render_page(
        title=f"{describe_verdict(document)} – {name}",
        name=name,
        headline=f"<h1>{escape_html(describe_verdict(document))}</h1>{paragraphs}",
        footer=f"<p>Traceloom {escape_html(document['traceloom'])}</p>",
        **list_sections(sections),
    )


_UNCUT_TABLES = ("verdict-checks", "verdict-conditions", "diff-parts")  # never truncated
_SKIPPED_TABLES = (
    "diff-kernels",
    "diff-operators",
    "diff-host",
)  # the causes include the largest of them; files have all
_COLOURS = {"pass": "bold green", "fail": "bold red", "inconclusive": "bold yellow"}


def show(document: VerdictDocument, top: int, stream: TextIO) -> None:
    """Writes the verdict to a stream; tables have at most `top` rows."""
    terminal.print_lines(partial(render, document, top), stream)


def render(document: VerdictDocument, top: int, width: int) -> Iterator[Text]:
    """Yields the lines, none wider than `width`."""
    base, new = ((side["name"], len(side["runs"])) for side in (document["base"], document["new"]))
    yield from render_sides(base, new, width)
    yield from render_paragraph(describe_verdict(document), width, _COLOURS[document["verdict"]])
    for line in list_reasons(document):
        yield from render_paragraph(line, width)
    for table in build_tables(document):
        if table.key in _SKIPPED_TABLES:
            continue
        rows = len(table.rows) if table.key in _UNCUT_TABLES else top
        yield from render_declared_table(table, ReportOptions(top=rows), width)


def print_sentence(document: VerdictDocument, stream: TextIO) -> None:
    terminal.print_lines(
        lambda width: render_paragraph(
            describe_verdict(document), width, _COLOURS[document["verdict"]]
        ),
        stream,
    )


_MAX_ROWS = 10
_COMPLETE_TABLES = ("verdict-checks", "verdict-conditions")
_OMITTED_TABLES = ("diff-operators", "diff-host")  # a comment is read by people; the page has all
_SIGNS = {"pass": "✅", "fail": "❌", "inconclusive": "❔"}


def render_verdict_markdown(document: VerdictDocument) -> str:
    """Renders the document as GitHub-flavored Markdown that ends with a newline."""
    base, new = (
        format_code_span(side["name"], cell=False) for side in (document["base"], document["new"])
    )
    lines = [f"### Traceloom: {base} → {new}", ""]
    lines.append(f"{_SIGNS[document['verdict']]} **{markdown_text(describe_verdict(document))}**")
    for line in list_reasons(document):
        lines += ["", markdown_text(line)]
    for table in build_tables(document):
        if table.key not in _OMITTED_TABLES:
            is_complete = table.key in _COMPLETE_TABLES
            lines += render_markdown_table(
                table, len(table.rows) if is_complete else _MAX_ROWS, all_columns=is_complete
            )
    return "\n".join([*lines, "", f"<sub>traceloom {document['traceloom']}</sub>"]) + "\n"
