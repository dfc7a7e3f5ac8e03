"""A simulation as a document, and on a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text

from traceloom import __version__
from traceloom.model import units
from traceloom.report.names import rank_label, short
from traceloom.report.table import Row
from traceloom.report.views.terminal.columns import TextColumn, heading, lines, paragraph
from traceloom.report.whatif import part_name
from traceloom.simulate.simulation import Simulation

FORMAT = "traceloom-simulation"
VERSION = 1
_ROWS = 8
_KINDS = {
    "compute_ns": "compute", "exposed_communication_ns": "exposed", "communication_ns": "communication",
    "memory_ns": "copies", "host_ns": "host", "other_ns": "other",
}  # fmt: skip


def build(answer: Simulation) -> Row:
    """The document: the answer, how far it can be trusted, and its tables but that of the nodes."""
    plain = answer.to_dict()
    head = {"format": FORMAT, "version": VERSION, "traceloom": __version__, "sentence": sentence(answer)}
    return {
        **head,
        **{key: value for key, value in plain.items() if key != "nodes"},
    }


def sentence(answer: Simulation) -> str:
    """The answer in words."""
    scope = "The window" if answer.step is None else f"Step {answer.step}"
    after = units.duration(answer.after_ns)
    if answer.before_ns is None:
        return f"{scope} takes {after} on {answer.machine}."
    before = units.duration(answer.before_ns)
    if not answer.machine:
        return f"{scope} takes {after} on the recorded machine."
    error = "" if answer.identity_error is None else f" ± {abs(answer.identity_error) * 100:.1f} %"
    change = (answer.after_ns - answer.before_ns) / max(answer.before_ns, 1)
    return f"{scope} would take {after}{error} on {answer.machine}, {before} before ({change * 100:+.1f} %)."


def render(document: Row, width: int) -> Iterator[Text]:
    """The lines on a terminal."""
    yield Text(short(document["name"], width), "bold")
    yield Text("")
    yield from paragraph(document["identity"], width)
    yield from paragraph(document["sentence"], width, "bold")
    yield from heading("Ranks", "communication counts whatever else runs; the others add up", width)
    rows: list[list[str | Text]] = [
        [rank_label(r["rank"]), *(units.duration(r[key]) for key in ("before_ns", "end_ns", *_KINDS))]
        for r in document["ranks"][:_ROWS]
    ]
    names = ("before", "after", *_KINDS.values())
    columns = [TextColumn("", right=False), *(TextColumn(name) for name in names)]
    yield from lines(columns, rows, ("", lambda *_: ""), width)
    yield from heading("Critical path", "what decides how long it takes", width)
    parts = document["path"][:_ROWS]
    cells: list[list[str | Text]] = [[units.duration(p["before_ns"]), units.duration(p["after_ns"])] for p in parts]
    columns = [TextColumn("before"), TextColumn("after")]
    yield from lines(columns, cells, ("of", lambda i, room: short(part_name(parts[i]), room)), width)
