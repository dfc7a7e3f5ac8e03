"""A comparison as a page of its own, in the frame of the report's page."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING, Literal

from traceloom.model import units
from traceloom.report.comparison.tables import tables
from traceloom.report.icicle import figure
from traceloom.report.table import Col, Table
from traceloom.report.views.html.bars import bar, legend
from traceloom.report.views.html.frame import framed, key_numbers, one_after_the_other
from traceloom.report.views.html.table import table
from traceloom.report.views.html.text import text

if TYPE_CHECKING:
    from traceloom.report.documents.comparison import ComparedBoxRow, ComparisonDocument

Section = tuple[str, str, str, str]
"""Id, title, note, HTML."""

_COLOURS = {"compute": "compute", "communication": "communication", "copies": "memory", "operators": "op"}
_UNKNOWN = dict.fromkeys(("change", "duration_change", "host_change"), "the base has none of it")
_MOST_BOXES = 1_000  # of the call tree; the JSON has all
_SIDES: tuple[tuple[Literal["base", "new"], Literal["base_ns", "new_ns"]], ...] = (
    ("base", "base_ns"),
    ("new", "new_ns"),
)
_TREE_NOTE = (
    "The operators of a usual step, and what they call below them; as wide as the larger side of all they hold."
)


def render(document: ComparisonDocument) -> str:
    """The comparison as one HTML page that needs nothing but itself."""
    name = f"{document['base']['name']} → {document['new']['name']}"
    columns = [
        Col("side", "Side"),
        Col("rank", "Rank", "count"),
        Col("events", "Events", "count"),
        Col("path", "File", "name"),
    ]
    files = [{"side": side, **entry} for side, _ in _SIDES for entry in document[side]["inputs"]]
    data = standing(Table("diff-inputs", "Data", columns, files, note="What was read."))
    # Both steps as bars of one scale
    longest = max(document["base_ns"], document["new_ns"], 1)
    out = []
    for side, time in _SIDES:
        sums: dict[str, int] = {}  # by kind: idle time as one
        for row in document["breakdown"]:
            kind = row["part"].split(":")[0]
            sums[kind] = sums.get(kind, 0) + row[time]
        parts = [(kind, _COLOURS.get(kind, "idle"), ns) for kind, ns in sums.items()]
        whole = document[time]
        out.append(
            f'<p class="quiet">{side}: {units.duration(whole)}</p>{bar(parts, whole, longest)}{legend(parts, whole)}'
        )

    def steps(side: str) -> str:
        count = sum(row["side"] == side for row in document["steps"])
        return f"mean of {count} steps" if count > 1 else "one step"

    shown = [
        ("Base step", document["base_ns"], steps("base")),
        ("New step", document["new_ns"], steps("new")),
        ("Difference", document["difference_ns"], f"{units.change(document['change'])} of the base"),
    ]
    return framed(
        title=f"{document['sentence']} – {name}",
        name=name,
        headline=f'<h1>{text(document["sentence"])}</h1><div class="answer-bar">' + "".join(out) + "</div>",
        numbers=key_numbers((label, units.duration(ns), f"{ns} ns", more) for label, ns, more in shown),
        footer=(
            f"<p>Traceloom {text(document['traceloom'])}</p>"
            "<p>The same numbers for programs: <code>traceloom diff … -o diff.json</code></p>"
        ),
        **one_after_the_other([*sections(document), data]),
    )


def sections(document: ComparisonDocument) -> Iterator[Section]:
    """The tables of a comparison, with the call tree behind where the difference lies."""
    for each in tables(document):
        yield standing(each)
        if each.key == "diff-parts" and (picture := call_tree(document["tree"])):
            yield "diff-tree-section", "Call tree", _TREE_NOTE, picture


def standing(data_table: Table) -> Section:
    """A table as a section of its own."""
    drawn = table(data_table.key, data_table.columns, data_table.rows, _UNKNOWN, data_table.title)
    return f"{data_table.key}-section", escape(data_table.title), text(data_table.note), drawn


def call_tree(tree: list[ComparedBoxRow]) -> str:
    """Both runs in one flame graph: the largest boxes; what the others hold is held by those above them."""
    host = [(row["base_host_ns"], row["new_host_ns"]) for row in tree]
    device = [(row["base_duration_ns"], row["new_duration_ns"]) for row in tree]
    wide: list[list[int]] = []  # the larger side of what a box took itself, and all boxes below it
    for times in (host, device):
        own = [list(both) for both in times]
        for row, both in zip(tree, times, strict=True):
            if (parent := row["parent"]) is not None:
                own[parent] = [had - taken for had, taken in zip(own[parent], both, strict=True)]
        widths = [max(both) for both in own]
        for at in range(len(tree) - 1, 0, -1):
            if (parent := tree[at]["parent"]) is not None:
                widths[parent] += widths[at]
        wide.append(widths)
    weight = [max(sizes[at] / max(sizes[0], 1) for sizes in wide) for at in range(len(tree))]
    # A box is no larger than that above it, which stands before it: what is above a chosen box is chosen as well.
    drawn = [at for at in range(len(tree)) if weight[at] > 0]
    chosen = sorted(sorted(drawn, key=lambda at: -weight[at])[:_MOST_BOXES])
    number = {at: k for k, at in enumerate(chosen)}
    nodes, sides = [], []
    for at in chosen:
        row = tree[at]
        parent = row["parent"]
        above = None if parent is None else number.get(parent)
        nodes.append((above, row["name"], 0, wide[0][at], wide[1][at]))
        sides.append({"count": (row["base_count"], row["new_count"]), "host": host[at], "device": device[at]})
    words = (("faster", "less than in the base"), ("idle", "the same"), ("slower", "more, or new"))
    colours = "".join(f'<li><i class="swatch b-{colour}"></i>{meaning}</li>' for colour, meaning in words)
    small = len(drawn) - len(chosen)
    note = f"{units.count(small)} smaller boxes are counted to those above them; the JSON has all." if small else ""
    picture = figure(nodes, label="Call tree of both runs by time", note=note, sides=sides)
    return f'<ul class="legend changes">{colours}</ul>{picture}' if nodes else ""
