"""A workload, or one node of it, on a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.text import Text

from traceloom.harmless import harmless
from traceloom.model import units
from traceloom.report.names import short
from traceloom.report.options import ReportOptions
from traceloom.report.table import Cells, Col, Table
from traceloom.report.views.terminal.columns import heading, paragraph
from traceloom.report.views.terminal.look import DIM
from traceloom.report.views.terminal.notices import notice_lines
from traceloom.report.views.terminal.sections import table_lines

if TYPE_CHECKING:
    from traceloom.report.documents.workload import NodeDocument, WorkloadSummaryDocument

_MOST_ROWS = 40  # of a table


def render(summary: WorkloadSummaryDocument, width: int) -> Iterator[Text]:
    """The lines of a summary."""
    ranks = len(summary["ranks"])
    facts = [
        "graph" if summary["form"] == "graph" else "Chakra",
        *summary["facts"],
        units.counted(ranks, "rank"),
        f"{units.counted(summary['nodes'], 'node')}",
        units.counted(summary["edges"], "dependency"),
    ]
    facts += [units.duration(summary["window_ns"])] if summary["window_ns"] is not None else ["no times of day"]
    text = " · ".join(facts)
    yield Text.assemble((short(summary["name"], max(width - len(text) - 3, 16)), "bold"), (f"  {text}", DIM))
    first, last = summary["first_nodes"], summary["last_nodes"]
    text = f"{units.count(first)} node{' waits' if first == 1 else 's wait'} for nothing, "
    text += f"nothing waits for {units.count(last)}"
    if dangling := summary["dangling"]:
        text += f"; {units.counted(dangling, 'dependency')} lead{'s' if dangling == 1 else ''} nowhere"
    yield Text(" " + text, DIM)
    for table in _tables(summary):
        yield from table_lines(table, ReportOptions(top=_MOST_ROWS), width)
    yield from notice_lines(
        [(row["severity"], f"{row['message']} [{row['slug']}]") for row in summary["notices"]], width
    )


def _tables(summary: WorkloadSummaryDocument) -> Iterator[Table]:
    """Nodes by kind and by name, communication, dependencies, ranks."""
    held = [
        Col("count", "Count", "count"),
        Col("time_ns", "Time", "time"),
        Col("longest_ns", "Longest", "time"),
        Col("bytes", "Bytes", "bytes"),
    ]
    yield Table("kinds", "Nodes", [*held, Col("kind", "Kind", "name")], summary["kinds"], note="by kind")
    named: list[Cells] = [{**row, "name": row["name"] or "(no name)"} for row in summary["names"]]
    columns = [*held, Col("kind", "Kind"), Col("name", "Name", "name")]
    yield Table("names", "Names", columns, named, note="the most time")
    columns = [*held[:2], held[3], Col("ranks", "Ranks", "count"), Col("group", "Group"), Col("what", "What", "name")]
    yield Table("communication", "Communication", columns, summary["communication"], note="by kind and group")
    evidence = any(row["evidence"] for row in summary["dependencies"])
    columns = [held[0], *([Col("evidence", "Evidence")] if evidence else []), Col("kind", "Kind", "name")]
    note = "by kind" + (" and evidence" if evidence else "")
    yield Table("dependencies", "Dependencies", columns, summary["dependencies"], note=note)
    if len(summary["ranks"]) > 1:
        columns = [
            Col("rank", "Rank", "count"),
            Col("nodes", "Nodes", "count"),
            Col("edges", "Dependencies", "count"),
            Col("compute_ns", "Compute", "time"),
            Col("sent_bytes", "Sent", "bytes"),
        ]
        yield Table("ranks", "Ranks", columns, summary["ranks"])


def render_node(document: NodeDocument, width: int) -> Iterator[Text]:
    """One node: its facts, its attributes, and its neighbours."""
    node = document["node"]
    yield Text.assemble((short(node["name"] or "(no name)", width - 24), "bold"), (f"  node {node['id']}", DIM))
    facts = [node["kind"], *([f"rank {node['rank']}"] if node["rank"] is not None else [])]
    facts += [what] if (what := node.get("what")) else []
    facts += [f"group {group}"] if (group := node.get("group")) else []
    facts += [units.duration(node["time_ns"])]
    facts += [f"starts at {units.duration(node['start_ns'])}"] if node["start_ns"] is not None else []
    facts += [units.size(node["bytes"])] if node["bytes"] is not None else []
    yield from paragraph(" · ".join(facts), width)
    for name, value in document["attributes"].items():
        yield Text.assemble(" ", (harmless(name), DIM), " ", short(value, max(width - len(name) - 3, 16)))
    for key, title, nodes in (
        ("before", "Waits for", document["before"]),
        ("after", "Is awaited by", document["after"]),
    ):
        rows: list[Cells] = [
            {
                **row,
                "node": f"{row['id']}" + (f" of rank {row['rank']}" if row["rank"] is not None else ""),
                "dependency": row["edge"] + (f", {row['evidence']}" if row["evidence"] else ""),
            }
            for row in nodes
        ]
        columns = [
            Col("node", "Node"),
            Col("dependency", "Dependency"),
            Col("kind", "Kind"),
            Col("time_ns", "Time", "time"),
            Col("name", "Name", "name"),
        ]
        if not rows:
            yield from heading(title, "nothing", width)
        yield from table_lines(Table(key, title, columns, rows), ReportOptions(top=_MOST_ROWS), width)
