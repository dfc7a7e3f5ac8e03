"""A workload, or one node of it, on a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

from rich.text import Text

from traceloom.harmless import harmless
from traceloom.model import units
from traceloom.report.names import short
from traceloom.report.views.terminal.columns import Column, heading, lines
from traceloom.report.views.terminal.look import DIM, FILLS, SEVERITY

Row = dict[str, Any]
_MOST_RANKS = 8
_MOST_NEIGHBOURS = 40
_LOOKS = {
    **dict.fromkeys(("kernel", "compute"), FILLS["compute"]),
    **dict.fromkeys(("collective", "send", "receive"), FILLS["communication"]),
    **dict.fromkeys(("copy", "fill", "load", "store"), FILLS["memory"]),
}


def render(summary: Row, width: int) -> Iterator[Text]:
    """The lines of a summary."""
    yield from _head(summary, width)
    yield from _table("Nodes", "by kind", summary["kinds"], "kind", width)
    yield from _table("Names", "the most time", summary["names"], "name", width)
    yield from _communication(summary, width)
    yield from _dependencies(summary, width)
    yield from _ranks(summary, width)
    yield from _notices(summary, width)


def _head(summary: Row, width: int) -> Iterator[Text]:
    ranks = len(summary["ranks"])
    facts = [
        "graph" if summary["form"] == "graph" else "Chakra",
        *summary["facts"],
        f"{ranks} rank{'' if ranks == 1 else 's'}",
        f"{units.count(summary['nodes'])} nodes",
        f"{units.count(summary['edges'])} dependencies",
    ]
    facts += [units.duration(summary["window_ns"])] if summary["window_ns"] is not None else ["no times of day"]
    text = " · ".join(facts)
    yield Text.assemble((short(summary["name"], max(width - len(text) - 3, 16)), "bold"), (f"  {text}", DIM))
    first, last = summary["first_nodes"], summary["last_nodes"]
    text = f"{units.count(first)} node{' waits' if first == 1 else 's wait'} for nothing, "
    text += f"nothing waits for {units.count(last)}"
    text += f"; {units.count(summary['dangling'])} dependencies lead nowhere" if summary["dangling"] else ""
    yield Text(" " + text, DIM)


def _table(title: str, note: str, rows: list[Row], key: str, width: int) -> Iterator[Text]:
    if not rows:
        return
    yield from heading(title, note, width)
    with_bytes = any(row["bytes"] is not None for row in rows)
    cells: list[list[str | Text]] = [
        [
            units.count(row["count"]),
            units.duration(row["time_ns"]),
            units.duration(row["longest_ns"]),
            *([units.size(row["bytes"])] if with_bytes else []),
        ]
        for row in rows
    ]
    columns = [Column("count"), Column("time"), Column("longest"), *([Column("bytes")] if with_bytes else [])]

    def name(i: int, room: int) -> Text:
        mark = _LOOKS.get(rows[i]["kind"], ("·", DIM))
        return Text.assemble(mark, " ", short(rows[i][key] or "(no name)", room - 2))

    yield from lines(columns, cells, (key, name), width)


def _communication(summary: Row, width: int) -> Iterator[Text]:
    rows = summary["communication"]
    if not rows:
        return
    yield from heading("Communication", "by kind and group", width)
    cells: list[list[str | Text]] = [
        [units.count(r["count"]), units.size(r["bytes"]), units.duration(r["time_ns"]), units.count(r["ranks"])]
        for r in rows[:_MOST_NEIGHBOURS]
    ]

    def name(i: int, room: int) -> Text:
        group = rows[i]["group"]
        return Text(short(f"{rows[i]['what']}" + (f", group {group}" if group not in (None, "") else ""), room))

    columns = [Column("count"), Column("bytes"), Column("time"), Column("ranks")]
    yield from lines(columns, cells, ("what", name), width)
    yield from _more(len(rows) - _MOST_NEIGHBOURS)


def _dependencies(summary: Row, width: int) -> Iterator[Text]:
    rows = summary["dependencies"]
    if not rows:
        return
    yield from heading("Dependencies", "by kind" + (" and evidence" if rows[0]["evidence"] else ""), width)

    def name(i: int, room: int) -> Text:
        evidence = rows[i]["evidence"]
        return Text(short(rows[i]["kind"] + (f", {evidence}" if evidence else ""), room))

    yield from lines([Column("count")], [[units.count(row["count"])] for row in rows], ("kind", name), width)


def _ranks(summary: Row, width: int) -> Iterator[Text]:
    rows = summary["ranks"]
    if len(rows) < 2:
        return
    yield from heading("Ranks", "", width)
    shown = rows[:_MOST_RANKS]
    cells: list[list[str | Text]] = [
        [str(r["rank"]), units.count(r["nodes"]), units.count(r["edges"]), units.duration(r["compute_ns"])]
        for r in shown
    ]
    columns = [Column("rank"), Column("nodes"), Column("dependencies"), Column("compute")]
    yield from lines(columns, cells, ("sent", lambda i, _: units.size(shown[i]["sent_bytes"])), width)
    yield from _more(len(rows) - len(shown))


def _notices(summary: Row, width: int) -> Iterator[Text]:
    if not summary["notices"]:
        return
    yield from heading("Notices", "what to know about the data", width)
    for notice in summary["notices"]:
        sign, style = SEVERITY[notice["severity"]]
        message = harmless(f"{notice['message']} [{notice['slug']}]")
        first, *rest = textwrap.wrap(message, max(width - 4, 20), break_on_hyphens=False)
        yield Text.assemble(" ", (sign, style), " ", first)
        yield from (Text("   " + line) for line in rest)


def _more(count: int) -> Iterator[Text]:
    if count > 0:
        yield Text(f" … and {units.count(count)} more", DIM)


def render_node(document: Row, width: int) -> Iterator[Text]:
    """One node: its facts, its attributes, and its neighbours."""
    node = document["node"]
    yield Text.assemble((short(node["name"] or "(no name)", width - 24), "bold"), (f"  node {node['id']}", DIM))
    facts = [node["kind"], *([f"rank {node['rank']}"] if node["rank"] is not None else [])]
    facts += [str(node[key]) for key in ("what",) if node.get(key)]
    facts += [f"group {harmless(str(node['group']))}"] if node.get("group") else []
    facts += [units.duration(node["time_ns"])]
    facts += [f"starts at {units.duration(node['start_ns'])}"] if node["start_ns"] is not None else []
    facts += [units.size(node["bytes"])] if node["bytes"] is not None else []
    yield Text(" " + " · ".join(facts))
    for name, value in document["attributes"].items():
        yield Text.assemble(" ", (harmless(name), DIM), " ", short(value, max(width - len(name) - 3, 16)))
    for key, title in (("before", "Waits for"), ("after", "Is awaited by")):
        yield from _beside(document[key], title, width)


def _beside(rows: list[Row], title: str, width: int) -> Iterator[Text]:
    yield from heading(title, "" if rows else "nothing", width)
    shown = rows[:_MOST_NEIGHBOURS]
    if not shown:
        return
    cells: list[list[str | Text]] = [
        [
            f"{row['id']}" + (f" of rank {row['rank']}" if row["rank"] is not None else ""),
            row["edge"] + (f", {row['evidence']}" if row["evidence"] else ""),
            row["kind"],
            units.duration(row["time_ns"]),
        ]
        for row in shown
    ]
    columns = [Column("node"), Column("dependency", right=False), Column("kind", right=False), Column("time")]
    yield from lines(columns, cells, ("name", lambda i, room: short(shown[i]["name"], room)), width)
    yield from _more(len(rows) - len(shown))
