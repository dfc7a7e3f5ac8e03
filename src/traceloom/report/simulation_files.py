"""A simulation as files: the document, the page, the timeline, and its tables as data."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import BinaryIO

from traceloom.packed import gzipped
from traceloom.plain_text import encoded
from traceloom.report.exports.tables import OURS, TABLE_ENDINGS, ResultTables
from traceloom.report.simulation import build, write_json
from traceloom.simulate.simulation import Simulation

TABLES = ("ranks", "nodes", "collectives", "links", "path", "became_critical")

_RESULT_TABLES = ResultTables("simulation", TABLES)
fill = _RESULT_TABLES.fill
Writer = Callable[[Simulation, BinaryIO], object]

__all__ = ["ENDINGS", "OURS", "TABLES", "fill", "writer"]


def writer(path: Path, ending: str) -> Writer:
    """What writes a file.

    Args:
        path: Its name; that of a table says which.
        ending: One of `ENDINGS`.

    Raises:
        UsageError: slug `no-such-table`.
    """
    return _WRITERS.get(ending) or _RESULT_TABLES.writer(path, ending)


def _html(answer: Simulation, handle: BinaryIO) -> None:
    from traceloom.report.before_after import simulated

    handle.write(encoded(simulated.render(build(answer), answer)))


def _perfetto(answer: Simulation, handle: BinaryIO) -> None:
    from traceloom.report.exports.perfetto.simulation import write_simulation

    write_simulation(answer, handle)


_WRITERS: dict[str, Writer] = {
    ".json": write_json,
    ".html": _html,
    ".htm": _html,
    ".perfetto.json": _perfetto,
    ".perfetto.json.gz": lambda answer, handle: gzipped(partial(_perfetto, answer))(handle),
}
ENDINGS = (*_WRITERS, *TABLE_ENDINGS)
