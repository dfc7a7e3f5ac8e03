"""A comparison as a page of its own, in the frame of the report's page."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from traceloom.model import units
from traceloom.report.comparison.tables import tables
from traceloom.report.icicle import figure
from traceloom.report.table import Col, Row, Table
from traceloom.report.views.html.bars import bar, legend
from traceloom.report.views.html.frame import framed, key_numbers, one_after_the_other
from traceloom.report.views.html.table import table
from traceloom.report.views.html.text import text

Section = tuple[str, str, str, str]
"""Id, title, note, HTML."""

_COLOURS = {"compute": "compute", "communication": "communication", "copies": "memory", "operators": "op"}
_UNKNOWN = dict.fromkeys(("change", "duration_change", "host_change"), "the base has none of it")
_MOST_BOXES = 1_000  # of the call tree; the JSON has all
_KINDS = {"count": "count", "host": "host_ns", "device": "duration_ns"}
_TREE_NOTE = (
    "The operators of a usual step, and what they call below them; as wide as the larger side of all they hold."
)


def render(document: Row) -> str:
    """The comparison as one HTML page that needs nothing but itself."""
    name = f"{document['base']['name']} → {document['new']['name']}"
    columns = [
        Col("side", "Side"),
        Col("rank", "Rank", "count"),
        Col("events", "Events", "count"),
        Col("path", "File", "name"),
    ]
    files = [{"side": side, **entry} for side in ("base", "new") for entry in document[side]["inputs"]]
    data = standing(Table("diff-inputs", "Data", columns, files, note="What was read."))
    # Both steps as bars of one scale
    longest = max(document["base_ns"], document["new_ns"], 1)
    out = []
    for side in ("base", "new"):
        sums: dict[str, int] = {}  # by kind: idle time as one
        for row in document["breakdown"]:
            kind = row["part"].split(":")[0]
            sums[kind] = sums.get(kind, 0) + row[f"{side}_ns"]
        parts = [(kind, _COLOURS.get(kind, "idle"), ns) for kind, ns in sums.items()]
        whole = document[f"{side}_ns"]
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


def sections(document: Row) -> Iterator[Section]:
    """The tables of a comparison, with the call tree behind where the difference lies."""
    for each in tables(document):
        yield standing(each)
        if each.key == "diff-parts" and (picture := call_tree(document["tree"])):
            yield "diff-tree-section", "Call tree", _TREE_NOTE, picture


def standing(data_table: Table) -> Section:
    """A table as a section of its own."""
    drawn = table(data_table.key, data_table.columns, data_table.rows, _UNKNOWN, data_table.title)
    return f"{data_table.key}-section", escape(data_table.title), text(data_table.note), drawn


def call_tree(tree: list[Row]) -> str:
    """Both runs in one flame graph: the largest boxes; what the others hold is held by those above them."""
    wide: dict[str, list[int]] = {}
    for key in ("host_ns", "duration_ns"):  # the larger side of what a box took itself, and all boxes below it
        own = [[row[f"base_{key}"], row[f"new_{key}"]] for row in tree]
        for row in tree[1:]:
            for at, side in enumerate(("base", "new")):
                own[row["parent"]][at] -= row[f"{side}_{key}"]
        wide[key] = [max(sides) for sides in own]
        for at in range(len(tree) - 1, 0, -1):
            wide[key][tree[at]["parent"]] += wide[key][at]
    weight = [max(sizes[at] / max(sizes[0], 1) for sizes in wide.values()) for at in range(len(tree))]
    # A box is no larger than that above it, which stands before it: what is above a chosen box is chosen as well.
    drawn = [at for at in range(len(tree)) if weight[at] > 0]
    chosen = sorted(sorted(drawn, key=lambda at: -weight[at])[:_MOST_BOXES])
    number = {at: k for k, at in enumerate(chosen)}
    nodes, sides = [], []
    for at in chosen:
        row = tree[at]
        nodes.append((number.get(row["parent"]), row["name"], 0, wide["host_ns"][at], wide["duration_ns"][at]))
        sides.append({name: (row[f"base_{key}"], row[f"new_{key}"]) for name, key in _KINDS.items()})
    words = (("faster", "less than in the base"), ("idle", "the same"), ("slower", "more, or new"))
    colours = "".join(f'<li><i class="swatch b-{colour}"></i>{meaning}</li>' for colour, meaning in words)
    small = len(drawn) - len(chosen)
    note = f"{units.count(small)} smaller boxes are counted to those above them; the JSON has all." if small else ""
    picture = figure(nodes, label="Call tree of both runs by time", note=note, sides=sides)
    return f'<ul class="legend changes">{colours}</ul>{picture}' if nodes else ""
