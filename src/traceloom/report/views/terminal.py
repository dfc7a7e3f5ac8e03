"""A document on a terminal."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, takewhile, zip_longest
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console
from rich.text import Text

from traceloom.report import memory as tables
from traceloom.report.document import PICTURES, Bar, Col, ReportOptions, Table, ordered, written
from traceloom.report.labels import merge_notices, of_answer, rank_label, short
from traceloom.report.memory import growth_unknown
from traceloom.report.memory_sources import MemoryOptions
from traceloom.report.sections import CORE, FINDINGS, NAMES, core, shown, summaries
from traceloom.report.views import terminal_findings
from traceloom.report.views.terminal_findings import notice_lines
from traceloom.report.views.terminal_table import (
    ASCII,
    CURVE,
    DIM,
    FILLS,
    SEVERITY,
    Cell,
    TextColumn,
    fitted,
    heading,
    lines,
    paragraph,
    plain,
    signed_bar,
    sparkline,
    stacked,
    with_bars,
)
from traceloom.system import units
from traceloom.system.sanitize import sanitize, unsanitized

if TYPE_CHECKING:
    from traceloom.report.documents import MemoryDocument, ReportDocument
    from traceloom.report.documents.graph import GraphDocument
    from traceloom.report.documents.memory import MemoryMemoryRow, MemoryNodeRow, MemoryPartRow, MemoryRankRow
    from traceloom.report.documents.short import ShortReport
    from traceloom.report.sections.section import Section


_NARROWEST, _WIDEST = 60, 140
_CONTROLS = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f]")


def show(document: ReportDocument, options: ReportOptions, stream: TextIO) -> None:
    """Write the report to a stream: with colours where it is a terminal that wants them, in ASCII where it must be."""

    put(partial(render, document, options), stream)


def show_short(document: ShortReport, stream: TextIO) -> None:
    """Write the short report of a document that was kept, as `show` does."""

    put(partial(render_short, document), stream)


def show_graph(document: GraphDocument, stream: TextIO) -> None:
    """Write the summary of a graph (`report.graph_document`) to a stream, as `show` does."""
    from traceloom.report import graph

    put(partial(graph.render, document), stream)


class _SteeredConsole(Console):
    """A console that leaves it to the command line what a reader who stops reading means; Rich would end with 1."""

    def on_broken_pipe(self) -> None:
        raise  # noqa: PLE0704  (Rich calls this while it handles the BrokenPipeError)


def put(rendered: Callable[[int], Iterable[Text]], stream: TextIO) -> None:
    """Write the lines that `rendered` gives for the stream's width; where it is too narrow for them, say so first."""
    stream.flush()  # what went through another layer comes first
    # In a notebook Rich would show every line as an output of its own, and write nothing to the stream.
    console = _SteeredConsole(
        file=unsanitized(stream), highlight=False, markup=False, emoji=False, soft_wrap=False, force_jupyter=False
    )
    width = max(_NARROWEST, min(console.width, _WIDEST))
    plain = not (stream.encoding or "utf-8").lower().replace("-", "").startswith("utf")
    if console.width < width:
        warning = f"This needs {width} columns, the terminal has {console.width}: lines run on."
        for part in textwrap.wrap(warning, max(console.width, 1)):
            console.print(part, no_wrap=True, overflow="ignore", crop=False)
    for line in fitted(rendered(width), width):
        shown = line.copy()
        if plain:
            shown.plain = shown.plain.translate(ASCII).encode("ascii", "replace").decode()
        # Styles are ours, letters are not; those that are spelled out keep the width of the line.
        shown.plain = _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", shown.plain)
        console.print(shown, no_wrap=True, overflow="ignore", crop=False)


_UNIT = re.compile(r"(?<=\d) (?=%|[a-zA-Zµ]{1,2}\b)")
_WIDE = 100  # from here on all columns are tried
_LEAST_NAME = 16
_MOST_TEXT = 40
_MOST_NAME = 400
_WIDEST_SPARK = 72
_DELTA = 15  # cells of a bar from the middle


def sections(document: ReportDocument, options: ReportOptions, width: int) -> Iterator[Text]:
    """The core and a line for each other section; with `options.only` these sections in full."""
    only = options.only
    for section in core():
        if only is not None and section.key in only:
            yield from _full(section, document, options, width)
        elif only is None or CORE in only:
            value = section.value(document)  # nothing where there is nothing to show
            if sentence := section.summary(value):
                yield from heading(section.title, "", width)
                for part in wrapped(sentence, width - 2):
                    yield Text(" " + part)
            for table in section.tables(value):
                if table.brief:
                    yield from table_lines(table, options, width)
    if only is None:
        candidates = [
            (section.key, section.summary(value)) for section in shown(document) if (value := section.value(document))
        ]
        summaries = [(key, sentence) for key, sentence in candidates if sentence]
        if summaries:
            yield from heading("More", "add --only NAME to see one in full", width)
        widest = max((len(key) for key, _ in summaries), default=0)
        for key, sentence in summaries:
            for number, part in enumerate(wrapped(sentence, max(width - widest - 3, 20))):
                yield Text.assemble((f" {key if number == 0 else '':<{widest}}  ", "bold"), part)
        return
    for section in shown(document):
        if section.key in only:
            yield from _full(section, document, options, width)


def wrapped(sentence: str, width: int) -> list[str]:
    """Lines of a sentence; numbers stay with their units."""
    kept = _UNIT.sub("\u00a0", sanitize(sentence))
    return [line.replace("\u00a0", " ") for line in textwrap.wrap(kept, width, break_on_hyphens=False)]


def _full(section: Section[Any, Any], document: ReportDocument, options: ReportOptions, width: int) -> Iterator[Text]:
    value = section.value(document)
    sentence = section.summary(value) if value else None
    yield from heading(section.title, section.note, width)
    tables = list(section.tables(value)) if value else []
    if not tables:
        # The reason for the section, else for what would stand in it.
        reasons = {entry["path"]: entry["reason"] for entry in document["absent"]}
        at = section.path or section.key
        inside = next((why for path, why in reasons.items() if path.startswith(at)), "not recorded")
        yield from paragraph(f"Nothing to show: {reasons.get(at) or inside}.", width)
    for part in wrapped(sentence or "", width - 2):
        yield Text(" " + part)
    for table in tables:
        yield from table_lines(table, options, width)


def table_lines(table: Table, options: ReportOptions, width: int) -> Iterator[Text]:
    """A declared table: heading, as many columns as there is room for, the first `options.top` rows."""
    rows = ordered(table, options)
    if not rows:
        return
    note = f"{len(rows)} of {units.count(len(table.rows))}" if len(rows) < len(table.rows) else ""
    yield from heading(table.title, " · ".join(part for part in (note, table.note) if part), width)
    last = next((c for c in reversed(table.columns) if c.kind in ("name", *PICTURES)), None)
    tried = [_Column(c, rows) for c in table.columns if c is not last and (c.narrow or width >= _WIDE)]
    # What is kept, else the first; of the others as many, from the left, as the width has room for.
    kept = [column for column in tried if column.declared.kept] or tried[:1]
    room = width - 1 - (_LEAST_NAME if last and last.kind == "name" else 0) - sum(column.size for column in kept)
    while room < 0 and last is None and (widest := max(kept, key=lambda column: column.size)).size > _LEAST_NAME:
        widest.size -= 1  # its texts wrap
        room += 1
    columns = []
    for column in tried:
        room -= 0 if column in kept else column.size
        if column in kept or room >= 0:
            columns.append(column)
    heads = [column.head for column in columns]
    cell_rows = list(zip(*(column.cells for column in columns), strict=True)) or [()] * len(rows)
    if last is None:
        wrapped: list[tuple[Cell, ...]] = []
        for row in cell_rows:  # texts that have too little room take several lines
            rooms = [column.size - 2 for column in columns]
            pieces = [
                textwrap.wrap(cell, room) if isinstance(cell, str) and len(cell) > room else [cell]
                for cell, room in zip(row, rooms, strict=True)
            ]
            wrapped += zip_longest(*pieces, fillvalue="")
        cell_rows = wrapped
    if last is not None and last.kind in PICTURES:
        key = last.key

        def bar(i: int, room: int) -> Text:
            value = rows[i].get(key)
            if isinstance(value, Bar):
                return stacked(value, room)
            return Text(sparkline(value or [], min(room, _WIDEST_SPARK)), CURVE)

        yield from with_bars(heads, cell_rows, bar, width)
        return

    def name(i: int, room: int) -> str:
        return short(_cell(last, rows[i].get(last.key)), room) if last else ""

    yield from lines(heads, cell_rows, (last.title if last else "", name), width)


class _Column:
    """A column that is tried: `size` cells of the terminal with the gap before it."""

    def __init__(self, declared: Col, rows: Sequence[Mapping[str, Any]]) -> None:
        values = [row.get(declared.key) for row in rows]
        # Before a heading stands the pattern of its part of the bar beside it.
        fill = (FILLS[declared.swatch], " ") if declared.swatch else ()
        self.declared = declared
        self.head = TextColumn(Text.assemble(*fill, (declared.title, "bold")), right=declared.numeric)
        self.cells: list[Cell] = [_cell(declared, value) for value in values]
        if declared.kind == "delta":
            differences: list[int] = [row[declared.key] for row in rows]
            largest = max(map(abs, differences))
            self.cells = [signed_bar(difference, largest, _DELTA) for difference in differences]
        self.size = 2 + max(len(self.head.heading), *map(len, self.cells))


def _cell(column: Col, value: Any) -> str:
    shown_value = written(column, value)
    long = column.kind == "name" or column.kept
    return shown_value if column.numeric else short(shown_value, _MOST_NAME if long else _MOST_TEXT)


_LABELS = {"memory": "copies"}  # as short as in the answer
_MOST_LINES = 2  # of a sentence
_MOST_NAMES = 3  # lines with names of sections
_WIDEST_SPARKLINE = 40


def in_short(document: ReportDocument) -> ShortReport:
    """What the short report draws of a document: the sentences of sections instead of what they are made of."""
    return {
        "name": document["name"],
        "answer": document["answer"],
        "inputs": document["inputs"],
        "findings": document["findings"],
        "findings_ground": document.get("findings_ground"),
        "notices": document["notices"],
        "runs": document["runs"],
        "ranks": [
            {
                "rank": rank["rank"],
                "world_size": rank["world_size"],
                "event_count": rank["event_count"],
                "start_ns": rank["start_ns"],
                "window_ns": rank["window_ns"],
            }
            for rank in document["ranks"]
        ],
        "summaries": summaries(document),
    }


def render(document: ReportDocument, options: ReportOptions, width: int) -> Iterator[Text]:
    """The lines of the report, none wider than `width` but for commands, which stand whole."""
    if options.only is None and not options.full and not document["runs"]:
        yield from render_short(in_short(document), width)
        return
    yield from fitted(_lines(document, options, width), width)
    for run in document["runs"]:  # the answer of each, and the command that reports it
        yield Text("")
        yield from paragraph(run["sentence"], width)
        yield Text(" " + sanitize(run["command"]), DIM, overflow="ignore")


def render_short(document: ShortReport, width: int) -> Iterator[Text]:
    """The same of the short report, which is of one run."""
    yield from fitted(chain(_head(document, width), render_summary(document, width)), width)


def _lines(document: ReportDocument, options: ReportOptions, width: int) -> Iterator[Text]:
    yield from _head(document, width)
    if options.wants(FINDINGS):
        yield from terminal_findings.findings(document, width, full=options.only is not None)
    yield from _runs(document, width)
    if not document["runs"]:
        yield from sections(document, options, width)
    if options.wants(CORE):
        yield from recording(document, width)
        yield from terminal_findings.notices(document["notices"], len(document["ranks"]), options, width)


def _head(document: ReportDocument | ShortReport, width: int) -> Iterator[Text]:
    """What it is about, and the answer."""
    facts = []
    if ranks := document["ranks"]:
        world = max((rank["world_size"] for rank in ranks if rank["world_size"]), default=None)
        many = len({rank["rank"] for rank in ranks})
        if many > 1 or ranks[0]["rank"] is not None:
            facts.append(
                (f"{many} ranks" if many > 1 else rank_label(ranks[0]["rank"])) + (f" of {world}" if world else "")
            )
        facts.append(f"{units.count_of(sum(rank['event_count'] for rank in ranks), 'event')}")
        end = max(rank["start_ns"] + rank["window_ns"] for rank in ranks)
        facts.append(units.duration(end - min(rank["start_ns"] for rank in ranks)))
    shown = " · ".join(facts)
    name = short(document["name"], max(width - len(shown) - 3, 16))
    yield Text.assemble((name, "bold"), (f"  {shown}", DIM))
    yield Text("")
    yield from paragraph(document["answer"]["sentence"], width, "bold")


def _runs(document: ReportDocument, width: int) -> Iterator[Text]:
    """One line per run."""
    if not document["runs"]:
        return
    yield from heading("Runs", "", width)
    rows: list[list[str | Text]] = [
        [
            str(run["ranks"]) + (f" of {run['world_size']}" if run["world_size"] else ""),
            units.duration(run["window_ns"]),
            str(run["steps"]),
            units.count(run["events"]),
        ]
        for run in document["runs"]
    ]
    columns = [TextColumn("ranks"), TextColumn("time"), TextColumn("steps"), TextColumn("events")]
    # Paths without the folders that all of them share.
    paths = [PurePath(run["name"]) for run in document["runs"]]
    folders = zip(*(path.parts[:-1] for path in paths), strict=False)
    shared = len(list(takewhile(lambda parts: len(set(parts)) == 1, folders)))
    names = [str(PurePath(*path.parts[shared:])) for path in paths]
    yield from lines(columns, rows, ("run", lambda i, room: short(names[i], room)), width)


def render_summary(document: ShortReport, width: int) -> Iterator[Text]:
    """What stands below the answer, in some twenty lines."""
    times: dict[str, int] = {}
    for _, group, ns in of_answer(document["answer"]):
        times[group] = times.get(group, 0) + ns
    if whole := sum(times.values()):
        bar = Bar([(_LABELS.get(group, group), group, ns) for group, ns in times.items()], whole)
        yield Text(" ") + stacked(bar, width - 2)
        legend = Text("")
        for label, group, ns in bar.parts:
            entry = Text.assemble(" ", FILLS[group], f" {label} {units.share(ns, whole)} ")
            if legend.cell_len + entry.cell_len > width:
                yield legend
                legend = Text("")
            legend = legend + entry
        yield legend
    yield from terminal_findings.brief(document["findings"], document["findings_ground"], width)
    sentences = document["summaries"]
    widest = max((len(title) for title, _ in sentences), default=0)
    if sentences:
        yield Text("")
    for title, sentence in sentences:
        for number, part in enumerate(_cut(wrapped(sentence, width - widest - 4), _MOST_LINES)):
            yield Text.assemble((f" {title if number == 0 else '':<{widest}}  ", "bold"), part)
    distinct = merge_notices(document["notices"], len(document["ranks"]))
    errors = [notice for notice in distinct if notice.severity == "error"]
    yield from notice_lines([(each.severity, f"{each.sentence} [{each.slug}]") for each in errors[:_MOST_LINES]], width)
    if distinct := [notice for notice in distinct if notice not in errors]:
        slugs = ", ".join(dict.fromkeys(notice.slug for notice in distinct))
        words = f"{units.count_of(len(distinct), 'notice')} about the data: {slugs}"
        for line, part in enumerate(_cut(textwrap.wrap(words, width - 4, break_on_hyphens=False), _MOST_LINES)):
            yield Text.assemble(" ", SEVERITY[distinct[0].severity] if line == 0 else " ", " ", part)
    names = ", ".join(key for key in NAMES if key != CORE)
    yield from heading("More", "--full: the tables, too; --only NAME: one of these in full", width)
    for part in _cut(textwrap.wrap(names, width - 2, break_on_hyphens=False), _MOST_NAMES):
        yield Text(" " + part, DIM)


def _cut(lines: Sequence[str], most: int) -> Sequence[str]:
    """The first lines; an ellipsis ends the last of them where there are more."""
    return lines if len(lines) <= most else [*lines[: most - 1], lines[most - 1].rstrip(" ,.") + " …"]


def recording(document: ReportDocument, width: int) -> Iterator[Text]:
    """The recording as the first rank saw it; nothing where the run was not recorded by traceloom."""
    ranks = _at(document["capture"], list, "ranks") or []
    first = ranks[0] if ranks and isinstance(ranks[0], dict) else None
    if first is None:
        return
    versions = _at(first, dict, "versions") or {}
    note = ", ".join(sanitize(f"{name} {version}") for name, version in sorted(versions.items()))
    yield from heading("Recording", note if len(note) < width - 12 else "", width)
    command = _at(document["capture"], list, "run", "command")
    if command:
        yield Text(" " + short(shlex.join(map(str, command)), width - 2))
    first_step, count = _at(first, int, "window", "first_step"), _at(first, int, "window", "step_count")
    steps = _at(first, list, "steps", "duration_ns") or []
    facts = []
    if first_step is not None and count:
        window = f"step {first_step}" if count == 1 else f"steps {first_step} to {first_step + count - 1}"
        facts.append(f"recorded {window}" + (f" of {len(steps)}" if steps else ""))
    ratio = _at(first, (int, float), "overhead", "ratio")
    if ratio is not None:
        facts.append(f"a recorded step took {ratio:.2f} × an unrecorded one")
    if facts:
        yield Text(" " + short("; ".join(facts), width - 2))
    durations = [ns for ns in steps if isinstance(ns, int) and ns >= 0]
    if len(durations) > 1:
        spark = sparkline(durations, _WIDEST_SPARKLINE)
        longest = units.duration(max(durations))
        yield Text.assemble(" every step of the run  ", (spark, DIM), f"  up to {longest}")


def _at(value: Any, kind: Any, *keys: str) -> Any:
    """What stands below these keys of `capture.json`, which others may have touched: None if it is of another kind."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, kind) and not isinstance(value, bool) else None


_BAR = 12
_COLOR = "#3b82d6"
_DEEPEST = 3  # of what was alive when memory ran out
_MOST = 3  # ends that are shown; more ranks mostly say the same
_SMALL = 0.01  # of the instant; smaller branches are not opened


def render_memory(document: MemoryDocument, options: MemoryOptions, width: int) -> Iterator[Text]:
    """The lines, none wider than `width`."""
    yield from fitted(_memory_lines(document, options, width), width)


def _memory_lines(document: MemoryDocument, options: MemoryOptions, width: int) -> Iterator[Text]:
    yield Text(short(document["name"], width), "bold")
    yield Text("")
    yield from paragraph(document["sentence"], width, "bold")
    # Where memory ran out, what was alive then and what to try first, the most useful first
    ends = document["out_of_memory"]
    for end in ends[:_MOST]:
        name = "Out of memory" if end["rank"] is None else f"Out of memory, {rank_label(end['rank'])}"
        facts = []
        if end["asked_bytes"] is not None:
            facts.append(f"{units.size(end['asked_bytes'])} were asked for")
        facts.append(f"{units.size(end['bytes'])} were alive")
        if end["step"] is not None:
            facts.append(f"step {end['step']}")
        yield from heading(name, " · ".join(facts), width)
        if end["where"]:
            yield from paragraph(f"at {end['where']}", width)
        for device in end["devices"]:
            index = "" if device["device"] is None or device["device"] < 0 else f":{device['device']}"
            retries = (
                f", {units.count_of(device['retries'], 'retry')} of the allocator before" if device["retries"] else ""
            )
            sentence = (
                f"{device['device_type']}{index}: {units.size(device['allocated_bytes'])} allocated of "
                f"{units.size(device['reserved_bytes'])} reserved, {units.size(device['free_bytes'])} of "
                f"{units.size(device['total_bytes'])} free, {units.size(device['outside_bytes'])} outside this "
                f"allocator{retries}"
            )
            yield from paragraph(sentence, width)
        # What was alive when memory ran out: the heaviest branches, down to modules.
        table = tables.alive_at_out_of_memory(end, "alive")
        rows = [row for row in table.rows if 0 < row["depth"] <= (options.depth or _DEEPEST)]
        yield from table_lines(replace(table, rows=rows, weight="bytes"), ReportOptions(top=options.top), width)
        if end["advice"]:
            yield Text("")
            yield Text(" What to try first", "bold")
        for number, row in enumerate(end["advice"], start=1):
            frees = "" if row["bytes"] is None else f" – frees up to {units.size(row['bytes'])}"
            first, *rest = textwrap.wrap(
                sanitize(f"{number}. {row['text']}{frees} ({row['why']})"), width - 5, break_on_hyphens=False
            )
            yield Text("  " + first)
            for line in rest:
                yield Text("     " + line)
    if len(ends) > _MOST:
        yield from paragraph(f"... and {len(ends) - _MOST} more times; --rank shows each, --json all", width)
    if not document["ranks"] and not document["out_of_memory"]:
        reasons = {row["path"]: row["reason"] for row in document["absent"]}
        yield from paragraph(f"{reasons.get('ranks', 'nothing was recorded')}.".capitalize(), width)
    for sentence in tables.job(document):
        yield from paragraph(sentence, width)
    for entry in document["ranks"]:
        for memory in tables.select_memories(entry["memories"]):
            yield from _memory(entry, memory, document, options, width)
    untold = [why for entry in document["ranks"] if (why := growth_unknown(entry)) is not None]
    if untold:  # that nothing is said of growth does not mean that nothing grows
        yield Text("")
        yield from paragraph(f"What grows from step to step cannot be determined: {untold[0]}.", width)
    messages = [(row["severity"], f"{row['message']} [{row['slug']}]") for row in document["notices"]]
    yield from notice_lines(messages, width)


def _memory(
    entry: MemoryRankRow, memory: MemoryMemoryRow, document: MemoryDocument, options: MemoryOptions, width: int
) -> Iterator[Text]:
    kind = memory["device_type"] + (f":{memory['device']}" if memory["device"] >= 0 else "")
    whose = f"{rank_label(entry['rank'])}, {kind}" if len(document["ranks"]) > 1 else kind
    instant = memory["instant"]
    at = document["at"]
    if at == "peak":
        when = "the peak" if memory["peak_step"] is None else f"the peak, in step {memory['peak_step']}"
    else:
        when = units.duration(int(at)) if at.isdigit() else at
    facts = [f"{units.size(instant['bytes'])} at {when}"]
    if at != "peak":
        facts.append(f"peak {units.size(memory['peak_bytes'])}")
    if memory["reserved_at_peak_bytes"]:
        facts.append(f"{units.size(memory['reserved_at_peak_bytes'])} reserved at the peak")
    yield from heading(whose, " · ".join(facts), width)
    levels = [sum(values) for values in zip(*(kind["bytes"] for kind in memory["curve"]["categories"]), strict=True)]
    if levels:
        yield Text.assemble(" ", (sparkline(levels, width - 2), _COLOR))
    categories = [
        f"{row['category'].replace('_', ' ')} {units.size(row['bytes'])} ({units.share(row['fraction'], 1)}"
        + (", inferred)" if row["evidence"] == "inferred" else ")")
        for row in memory["categories"]
    ]
    yield from paragraph(" · ".join(categories), width)
    yield from paragraph(tables.state_of_allocator(memory), width)
    by_scope = document["by"] == "scope"
    drawn: Sequence[tuple[int, str, MemoryNodeRow | MemoryPartRow]]
    if by_scope:
        title, drawn = "scope and operator", _opened(memory["tree"], options)
    else:
        title, drawn = document["by"], [(0, row["name"], row) for row in memory["parts"][: options.top]]

    def name(i: int, room: int) -> str | Text:
        depth, label, _ = drawn[i]
        indent = "  " * min(depth, 10)
        return (
            Text.assemble((indent, DIM), short(label, max(room - len(indent), 8))) if by_scope else short(label, room)
        )

    cells: list[list[str | Text]] = [
        [
            units.size(row["bytes"]),
            units.share(row["fraction"], 1),
            plain(row["fraction"], _BAR, _COLOR),
            units.count(row["block_count"] or None),
        ]
        for _, _, row in drawn
    ]
    columns = (TextColumn("bytes"), TextColumn("share"), TextColumn("", right=False), TextColumn("blocks"))
    yield from lines(columns, cells, (title, name), width)
    yield from table_lines(tables.growth(memory, "growth"), ReportOptions(top=options.top), width)
    fewer = ReportOptions(top=max(options.top // 2, 1))
    yield from table_lines(tables.activations(memory, "activations"), fewer, width)
    yield from table_lines(tables.largest(memory, "largest"), fewer, width)


def _opened(rows: list[MemoryNodeRow], options: MemoryOptions) -> list[tuple[int, str, MemoryNodeRow]]:
    """The tree opened where it is heavy: the largest branches first, chains of one as one line.

    Returns:
        Indentation, label, row.
    """
    whole = max(rows[0]["bytes"], 1)
    chosen = {0}
    for row in sorted(rows[1:], key=lambda row: (-row["bytes"], row["depth"])):
        deep = options.depth is None or row["depth"] <= options.depth
        if row["parent"] in chosen and deep and row["bytes"] >= _SMALL * whole and len(chosen) <= 2 * options.top:
            chosen.add(row["node"])
    shown = [row for row in rows[1:] if row["node"] in chosen]
    children: dict[int | None, list[MemoryNodeRow]] = {}
    for row in shown:
        children.setdefault(row["parent"], []).append(row)
    drawn: list[tuple[int, str, MemoryNodeRow]] = []
    labels: dict[int | None, tuple[int, str]] = {0: (0, "")}
    for row in shown:
        depth, above = labels[row["parent"]]
        label = f"{above}.{row['name']}" if above else row["name"]
        inside = children.get(row["node"], [])
        if len(inside) == 1 and inside[0]["bytes"] == row["bytes"]:
            labels[row["node"]] = (depth, label)
        else:
            labels[row["node"]] = (depth + 1, "")
            drawn.append((depth, label, row))
    return drawn
