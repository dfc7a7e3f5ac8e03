"""A what-if as a document, and on a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.text import Text

from traceloom import __version__
from traceloom.harmless import harmless
from traceloom.model import units
from traceloom.model.frames import rows
from traceloom.report.names import rank_label, short
from traceloom.report.views.terminal.columns import TextColumn, heading, lines, paragraph
from traceloom.retime.law import Law
from traceloom.simulate.changes import ASSUMES, Change
from traceloom.simulate.whatif import WhatIf

if TYPE_CHECKING:
    from traceloom.report.documents.whatif import PathPart, WhatIfDocument

FORMAT = "traceloom-whatif"
VERSION = 1
_ROWS = 8
_WORK = {
    "host": "operators, other work on the host", "think": "host time that nothing names", "wait": "waiting on the host",
    "launch": "launch calls", "block": "calls that wait for the device", "kernel": "kernels", "copy": "copies",
    "fill": "fills", "collective": "communication", "send": "sends", "receive": "receives",
    "rendezvous": "meetings of ranks", "arrival": "peers that were not recorded", "origin": "the beginning",
}  # fmt: skip
_DELAYS = {
    "call": "into and out of calls", "thread": "between events of a thread", "launch": "from launch to start",
    "stream": "between pieces of work of a stream", "wait": "after another stream", "queue": "full launch queue",
    "synchronize": "from the end of GPU work to the call that waits for it", "occupancy": "full device",
    "cross-thread": "from thread to thread", "rendezvous": "in meetings of ranks", "origin": "before a lane begins",
}  # fmt: skip
_HINT = "The change is smaller than the error of the graph, or the graph misses the law: take it as a hint."


def build(name: str, step: int | None, changes: list[Change], result: WhatIf, kept: Law) -> WhatIfDocument:
    """The document: what was asked, what it would do, how far it can be trusted."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "traceloom": __version__,
        "name": name,
        "step": step,
        "sentence": sentence(result, step),
        "changes": [{"change": str(change), "assumes": ASSUMES[change.action]} for change in changes],
        "before_ns": result.before_ns,
        "after_ns": result.after_ns,
        "saved_ns": result.saved_ns,
        "saved_fraction": result.saved_fraction,
        "host_ratio": result.host_ratio,
        "rescaled_saved_ns": result.rescaled_saved_ns,
        "ranks": rows(result.ranks),
        "path": rows(result.path),
        "law": {"sentence": kept.sentence, "holds": kept.holds, "honest_error": kept.honest_error,
                "point_error": kept.point_error, "residual_share": kept.residual_share},
        "trusted": result.trusted,
        "lower_bound": result.lower_bound,
    }  # fmt: skip


def sentence(result: WhatIf, step: int | None) -> str:
    """What it would do, in words."""
    scope = "the window" if step is None else f"step {step}"
    before, after = units.duration(result.before_ns), units.duration(result.after_ns)
    if not result.saved_ns:
        return f"{scope[0].upper()}{scope[1:]} would take {after} as before: none of this is on the critical path."
    word = "save" if result.saved_ns > 0 else "cost"
    word += " at least" if result.lower_bound and result.saved_ns > 0 else ""
    share = units.share(abs(result.saved_ns), result.before_ns)
    text = f"This would {word} {units.duration(abs(result.saved_ns))} ({share}) of {scope}: {before} to {after}"
    if result.rescaled_saved_ns != result.saved_ns:
        text += (
            f"; without the profiler, which makes steps {result.host_ratio:.2f} × as long, about "
            f"{units.duration(abs(result.rescaled_saved_ns))}"
        )
    return f"{text}."


def render(document: WhatIfDocument, width: int) -> Iterator[Text]:
    """The lines on a terminal."""
    yield Text(short(document["name"], width), "bold")
    yield Text("")
    yield from paragraph(document["sentence"], width, "bold")
    for change in document["changes"]:
        yield Text("")
        yield Text.assemble(" ", (harmless(change["change"]), "bold"))
        yield from paragraph(f"Assumed: {change['assumes']}.", width)
    if len(document["ranks"]) > 1:
        yield from heading("Ranks", "", width)
        ranks: list[list[str | Text]] = [
            [rank_label(r["rank"]), units.duration(r["before_ns"]), units.duration(r["after_ns"]),
             units.duration(r["saved_ns"])]
            for r in document["ranks"]
        ]  # fmt: skip
        columns = [TextColumn("", right=False), TextColumn("before"), TextColumn("after"), TextColumn("saved")]
        yield from lines(columns, ranks, ("", lambda *_: ""), width)
    yield from heading("Critical path", "what decides how long it takes", width)
    parts = document["path"][:_ROWS]
    cells: list[list[str | Text]] = [[units.duration(p["before_ns"]), units.duration(p["after_ns"])] for p in parts]
    columns = [TextColumn("before"), TextColumn("after")]

    def name(i: int, room: int) -> str:
        return short(part_name(parts[i]), room)

    yield from lines(columns, cells, ("of", name), width)
    yield Text("")
    yield from paragraph(trust(document), width)


def trust(document: WhatIfDocument) -> str:
    """How far the answer can be trusted, in words."""
    return ("" if document["trusted"] else f"{_HINT} ") + document["law"]["sentence"]


def part_name(part: PathPart) -> str:
    """What a part of the critical path is, in words."""
    what, kind = part["what"], part["kind"]
    if what == "before":
        return "before the path begins"
    if what == "work" or not kind:
        return _WORK.get(kind, kind or what)
    return f"{'unexplained' if what == 'residual' else what}: {_DELAYS.get(kind) or _WORK.get(kind, kind)}"
