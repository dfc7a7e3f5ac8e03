"""The comparison of two runs (`traceloom diff`): document, page and terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from html import escape
from typing import TYPE_CHECKING, Any, Literal, TextIO

from rich.text import Text

from traceloom import __version__
from traceloom.analyze import Comparison
from traceloom.report.document import Col, ReportOptions, Table
from traceloom.report.figure import draw_icicle, draw_stacked_bar, escape_html, render_legend
from traceloom.report.labels import fit_name
from traceloom.report.views import terminal
from traceloom.report.views.page import list_sections, render_key_numbers, render_page
from traceloom.report.views.page_table import render_html_table
from traceloom.report.views.terminal import render_declared_table
from traceloom.report.views.terminal_table import DIM_STYLE, render_paragraph
from traceloom.system import units
from traceloom.system.files import restore_addresses
from traceloom.trace.frames import to_rows
from traceloom.trace.session import Session

if TYPE_CHECKING:
    from traceloom.report.documents.comparison import (
        ComparedBoxRow,
        ComparedInputRow,
        ComparedOperatorRow,
        ComparedRunValue,
        ComparisonDocument,
    )
    from traceloom.report.documents.verdict import VerdictDocument


FORMAT = "traceloom-diff"
VERSION = 1


def build(comparison: Comparison, base: Session, new: Session) -> ComparisonDocument:
    """Builds the document.

    Times are integer nanoseconds per step; `base_kernel`, `new_kernel`, shapes and ranks are null
    where that side does not have or record them.

    Args:
        comparison: The comparison.
        base: The base run.
        new: The new run.
    """
    return {
        "format": FORMAT,
        "version": VERSION,
        "traceloom": __version__,
        "base": _run(base),
        "new": _run(new),
        "sentence": comparison.sentence,
        "comparable": comparison.comparable,
        "account": comparison.account,
        "base_ns": comparison.base_ns,
        "new_ns": comparison.new_ns,
        "difference_ns": comparison.difference_ns,
        "change": comparison.change,
        "conditions": to_rows(comparison.conditions),
        "breakdown": to_rows(comparison.breakdown),
        "kernels": to_rows(comparison.kernels),
        "operators": to_rows(comparison.operators),
        "tree": to_rows(comparison.tree),
        "steps": to_rows(comparison.steps),
    }


def _run(run: Session) -> ComparedRunValue:
    inputs: list[ComparedInputRow] = [
        {
            "path": restore_addresses(trace.meta.path),
            "rank": trace.rank,
            "world_size": trace.meta.world_size,
            "events": trace.events.height,
        }
        for trace in run.traces
    ]
    return {
        "name": run.name,
        "inputs": inputs,
        "notices": [notice.to_dict() for notice in run.all_notices()],
    }


_LAUNCHED_HINT = "of the GPU work that it launched itself, whenever it ran"
_ON_THREAD_HINT = "of the step's thread in it, not below it"
_SEPARATOR = " > "
_RENAME_WIDTH = 33  # characters of each name of a renamed pair
_MAX_PATH_NAMES = 3  # names of a path that are shown beside an operator


def build_tables(document: ComparisonDocument) -> Iterator[Table]:
    """Yields the differing conditions, then parts of the step, kernels and operators
    that changed.
    """
    note = "Where a decisive one differs, times cannot be held against each other."
    yield from build_conditions_table(document, "diff-conditions", note)
    parts = [
        {
            **row,
            "name": f"idle: {row['meaning']}"
            if row["part"].split(":")[0] == "idle"
            else row["part"],
        }
        for row in sorted(document["breakdown"], key=lambda row: -abs(row["difference_ns"]))
    ]
    step_times = {
        "base_ns": document["base_ns"],
        "new_ns": document["new_ns"],
        "difference_ns": document["difference_ns"],
        "change": document["change"],
    }
    unit = "window" if any(step["step"] is None for step in document["steps"]) else "step"
    subject = (
        "each device"
        if document["account"] == "device"
        else "the step's thread (not both sides have GPU work)"
    )
    yield Table(
        "diff-parts",
        "Where the difference lies",
        [*_build_time_columns("mean per step", adds_up=True), Col("name", "Part", "name")],
        [*parts, {"name": f"the {unit}", **step_times, "of_step": document["change"]}],
        note=f"Every nanosecond of {subject} in {'a usual step' if unit == 'step' else 'the window'}; the rows add up to the {unit}, and so do their "
        "differences.",
    )
    if rows := [row for row in document["kernels"] if row["status"] != "same"]:
        yield Table(
            "diff-kernels",
            "Kernels, copies and fills",
            [
                Col("status", "What"),
                *_build_time_columns("mean per step", adds_up=True),
                Col("operator", "Operator", hint="the operator that launched it"),
                Col("count", "Count", hint="launched per step", narrow=False),
                Col("name", "Kernel", "name"),
            ],
            [
                {
                    **row,
                    "name": _format_rename(row["base_kernel"], row["new_kernel"]),
                    "count": _format_call_counts(row["base_count"], row["new_count"]),
                }
                for row in rows
            ],
            note=f"Of {len(document['kernels'])}: {_format_status_counts(row['status'] for row in rows)}. Kernels of one operator "
            "stand for each other, whatever their names.",
        )
    operators = document["operators"]
    if document["account"] == "device":
        changed = [
            row
            for row in operators
            if row["status"] != "same" and (row["base_duration_ns"] or row["new_duration_ns"])
        ]
        yield from _build_operators_table(
            changed,
            len(operators),
            "diff-operators",
            "Operators by GPU work",
            prefix="duration_",
            hint=_LAUNCHED_HINT,
        )
    changed = [
        row
        for row in operators
        if row["host_status"] != "same" and (row["base_host_ns"] or row["new_host_ns"])
    ]
    yield from _build_operators_table(
        changed,
        len(operators),
        "diff-host",
        "Operators by host time",
        prefix="host_",
        hint=_ON_THREAD_HINT,
    )


def build_conditions_table(
    document: ComparisonDocument | VerdictDocument, key: str, note: str
) -> Iterator[Table]:
    """Yields the table of differing conditions, if any; with the note where a decisive
    one differs.
    """
    columns = [
        Col("condition", "Condition", kept=True),
        Col("base", "Base", kept=True),
        Col("new", "New", kept=True),
        Col("weight", "Weight", narrow=False),
    ]
    if differ := [row for row in document["conditions"] if not row["same"]]:
        yield Table(
            key,
            "Conditions that differ",
            columns,
            differ,
            note="" if document["comparable"] else note,
        )


def _build_time_columns(hint: str, prefix: str = "", *, adds_up: bool = False) -> list[Col]:
    """Returns the columns of both sides and the change; `prefix` is a prefix of the row's keys,
    which are then `base_{prefix}ns`.
    """
    difference = f"{prefix}difference_ns"
    return [
        Col(f"base_{prefix}ns", "Base", "time", hint, kept=True, scale="sides"),
        Col(f"new_{prefix}ns", "New", "time", hint, kept=True, scale="sides"),
        Col(difference, "Difference", "time", "new less base", kept=True, scale="sides"),
        Col(f"{prefix}change", "Change", "change", "of the row itself: new over base, less 1"),
        Col(
            f"{prefix}of_step",
            "Of step",
            "change",
            "the difference as a share of the base's step"
            + "; adds up to the change of the step" * adds_up,
        ),
        Col(difference, "faster │ slower", "delta", narrow=False),
    ]


def _build_operators_table(
    changed: Sequence[ComparedOperatorRow],
    count: int,
    key: str,
    title: str,
    *,
    prefix: str,
    hint: str,
) -> Iterator[Table]:
    """Returns a table of the operators that changed by one of their times, out of `count`, the
    largest differences first.
    """
    status: Literal["host_status", "status"] = "host_status" if prefix == "host_" else "status"
    difference: Literal["host_difference_ns", "duration_difference_ns"] = (
        "host_difference_ns" if prefix == "host_" else "duration_difference_ns"
    )
    summed = (
        *("base_count", "new_count", f"base_{prefix}ns", f"new_{prefix}ns"),
        *(difference, f"{prefix}of_step"),
    )
    by_operator: dict[str, list[dict[str, Any]]] = {}
    for place in changed:
        by_operator.setdefault(place["operator"], []).append({**place})
    rows: list[dict[str, Any]] = []
    for places in by_operator.values():
        row = {**places[0], **{name: sum(place[name] for place in places) for name in summed}}
        row[f"{prefix}change"] = (
            row[difference] / row[f"base_{prefix}ns"] if row[f"base_{prefix}ns"] else None
        )
        statuses = {place[status] for place in places}
        row[status] = (
            statuses.pop() if len(statuses) == 1 else "slower" if row[difference] > 0 else "faster"
        )
        # the operator first, then its enclosing scopes, the nearest first
        names = (row["path"].split(_SEPARATOR)[1:] or [row["path"]])[::-1]
        row["at"] = (
            " in ".join(names[:_MAX_PATH_NAMES]) + (" in …" if len(names) > _MAX_PATH_NAMES else "")
            if len(places) == 1
            else f"{names[0]} at {len(places)} places"
        )
        row["count"] = _format_call_counts(row["base_count"], row["new_count"])
        rows.append(row)
    rows.sort(key=lambda row: -abs(row[difference]))
    if rows:
        yield Table(
            key,
            title,
            [
                Col(status, "What"),
                *_build_time_columns(hint, prefix, adds_up=prefix == "host_"),
                Col("count", "Count", hint="calls per step", narrow=False),
                Col("at", "Operator", "name", "and what it stands in, the nearest first"),
            ],
            rows,
            note=f"Of {count}: {_format_status_counts(row[status] for row in changed)}. Times {hint}, summed by operator; "
            "the JSON has each place.",
        )


def _format_status_counts(statuses: Iterable[str]) -> str:
    return ", ".join(f"{count} {status}" for status, count in Counter(statuses).items())


def _format_call_counts(base: float, new: float) -> str:
    """Formats the calls per step, of both sides where they differ."""
    before, after = units.format_number(base), units.format_number(new)
    return before if before == after else f"{before} → {after}"


def _format_rename(base: str | None, new: str | None) -> str:
    if base == new or new is None:
        return base or units.UNKNOWN_TEXT
    return (
        new if base is None else f"{fit_name(base, _RENAME_WIDTH)} → {fit_name(new, _RENAME_WIDTH)}"
    )


RenderedSection = tuple[str, str, str, str]
"""Id, title, note, HTML."""

_COLOURS = {
    "compute": "compute",
    "communication": "communication",
    "copies": "memory",
    "operators": "op",
}
_UNKNOWN_REASONS = dict.fromkeys(
    ("change", "duration_change", "host_change"), "the base has none of it"
)
_MAX_BOXES = 1_000  # of the call tree; the JSON has all
_SIDES: tuple[tuple[Literal["base", "new"], Literal["base_ns", "new_ns"]], ...] = (
    ("base", "base_ns"),
    ("new", "new_ns"),
)
_TREE_NOTE = "The operators of a usual step, and what they call below them; as wide as the larger side of all they hold."


def render(document: ComparisonDocument) -> str:
    """Renders the comparison as one self-contained HTML page."""
    name = f"{document['base']['name']} → {document['new']['name']}"
    columns = [
        Col("side", "Side"),
        Col("rank", "Rank", "count"),
        Col("events", "Events", "count"),
        Col("path", "File", "name"),
    ]
    files = [{"side": side, **entry} for side, _ in _SIDES for entry in document[side]["inputs"]]
    data = render_table_section(Table("diff-inputs", "Data", columns, files, note="What was read."))
    # Both steps as bars of one scale
    longest = max(document["base_ns"], document["new_ns"], 1)
    out = []
    for side, time in _SIDES:
        sums: dict[str, int] = {}  # by kind: idle time is one kind
        for row in document["breakdown"]:
            kind = row["part"].split(":")[0]
            sums[kind] = sums.get(kind, 0) + row[time]
        parts = [(kind, _COLOURS.get(kind, "idle"), ns) for kind, ns in sums.items()]
        total_ns = document[time]
        out.append(
            f'<p class="quiet">{side}: {units.format_duration(total_ns)}</p>{draw_stacked_bar(parts, total_ns, longest)}{render_legend(parts, total_ns)}'
        )

    def steps(side: str) -> str:
        count = sum(row["side"] == side for row in document["steps"])
        return f"mean of {count} steps" if count > 1 else "one step"

    return render_page(
        title=f"{document['sentence']} – {name}",
        name=name,
        headline=f'<h1>{escape_html(document["sentence"])}</h1><div class="answer-bar">'
        + "".join(out)
        + "</div>",
        numbers=render_key_numbers(
            (label, units.format_duration(ns), f"{ns} ns", detail)
            for label, ns, detail in [
                ("Base step", document["base_ns"], steps("base")),
                ("New step", document["new_ns"], steps("new")),
                (
                    "Difference",
                    document["difference_ns"],
                    f"{units.format_change(document['change'])} of the base",
                ),
            ]
        ),
        footer=(
            f"<p>Traceloom {escape_html(document['traceloom'])}</p>"
            "<p>The same numbers for programs: <code>traceloom diff … -o diff.json</code></p>"
        ),
        **list_sections([*render_sections(document), data]),
    )


def render_sections(document: ComparisonDocument) -> Iterator[RenderedSection]:
    """Yields the tables of a comparison; the call tree follows the parts of the step."""
    for table in build_tables(document):
        yield render_table_section(table)
        if table.key == "diff-parts" and (picture := call_tree(document["tree"])):
            yield "diff-tree-section", "Call tree", _TREE_NOTE, picture


def render_table_section(data_table: Table) -> RenderedSection:
    return (
        f"{data_table.key}-section",
        escape(data_table.title),
        escape_html(data_table.note),
        render_html_table(
            data_table.key, data_table.columns, data_table.rows, _UNKNOWN_REASONS, data_table.title
        ),
    )


def call_tree(tree: list[ComparedBoxRow]) -> str:
    """Draws both runs in one flame graph: the largest boxes; smaller ones are part of the boxes
    above them.
    """
    host = [(row["base_host_ns"], row["new_host_ns"]) for row in tree]
    device = [(row["base_duration_ns"], row["new_duration_ns"]) for row in tree]
    wide: list[list[int]] = []  # per box: the larger side of its own time, and all boxes below it
    for times in (host, device):
        self_times = [list(both) for both in times]
        for row, both in zip(tree, times, strict=True):
            if (parent := row["parent"]) is not None:
                self_times[parent] = [
                    had - nested_ns for had, nested_ns in zip(self_times[parent], both, strict=True)
                ]
        widths = [max(both) for both in self_times]
        for index in range(len(tree) - 1, 0, -1):
            if (parent := tree[index]["parent"]) is not None:
                widths[parent] += widths[index]
        wide.append(widths)
    weight = [max(sizes[index] / max(sizes[0], 1) for sizes in wide) for index in range(len(tree))]
    # A box is at most as large as its parent, which precedes it: the parent of a selected box is
    # selected too.
    visible = [index for index in range(len(tree)) if weight[index] > 0]
    selected = sorted(sorted(visible, key=lambda at: -weight[at])[:_MAX_BOXES])
    number = {index: k for k, index in enumerate(selected)}
    nodes, sides = [], []
    for index in selected:
        row = tree[index]
        parent = row["parent"]
        parent_number = None if parent is None else number.get(parent)
        nodes.append((parent_number, row["name"], 0, wide[0][index], wide[1][index]))
        sides.append(
            {
                "count": (row["base_count"], row["new_count"]),
                "host": host[index],
                "device": device[index],
            }
        )
    legend = (("faster", "less than in the base"), ("idle", "the same"), ("slower", "more, or new"))
    colours = "".join(
        f'<li><i class="swatch b-{colour}"></i>{description}</li>' for colour, description in legend
    )
    small = len(visible) - len(selected)
    note = (
        f"{units.format_count(small)} smaller boxes are counted to those above them; the JSON has all."
        if small
        else ""
    )
    picture = draw_icicle(nodes, label="Call tree of both runs by time", note=note, sides=sides)
    return f'<ul class="legend changes">{colours}</ul>{picture}' if nodes else ""


def show(document: ComparisonDocument, top: int, stream: TextIO) -> None:
    """Writes the comparison to a stream.

    Args:
        document: The result of `traceloom.report.comparison.build`.
        top: Rows of each table.
        stream: The output; with colours where it is a terminal.
    """
    terminal.print_lines(partial(render_terminal, document, top), stream)


def render_terminal(document: ComparisonDocument, top: int, width: int) -> Iterator[Text]:
    """Yields the lines, none wider than `width`."""
    yield from render_sides((document["base"]["name"], 1), (document["new"]["name"], 1), width)
    yield from render_paragraph(document["sentence"], width, "bold")
    for table in build_tables(document):
        # Differing conditions and parts are never truncated: they decide how the rest is read.
        rows = len(table.rows) if table.key in ("diff-conditions", "diff-parts") else top
        yield from render_declared_table(table, ReportOptions(top=rows), width)


def render_sides(base: tuple[str, int], new: tuple[str, int], width: int) -> Iterator[Text]:
    """Yields the names of the base and the new side, with the number of runs where there are
    several.
    """
    for side, (name, runs) in (("base", base), ("new", new)):
        run_count = f" ({units.format_quantity(runs, 'run')})" if runs > 1 else ""
        label = fit_name(name, width - 6 - len(run_count))
        yield Text.assemble((f"{side:<5}", DIM_STYLE), (label, "bold"), run_count)
    yield Text("")
