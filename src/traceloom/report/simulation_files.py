"""A simulation as files: the document, the page, the timeline, and its tables as data."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import BinaryIO

from traceloom.errors import UsageError, nearest
from traceloom.packed import gzipped
from traceloom.plain_text import encoded
from traceloom.report.exports.tables import OURS, write
from traceloom.report.simulation import build, write_json
from traceloom.simulate.simulation import Simulation

TABLES = ("ranks", "nodes", "collectives", "links", "path", "became_critical")

_TABLE_ENDINGS = (".csv", ".parquet")
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
    if ending not in _TABLE_ENDINGS:
        return _WRITERS[ending]
    name = path.stem.replace("-", "_")
    if name not in TABLES:
        hint = nearest(name, TABLES) + f"name the file after one of {', '.join(TABLES)}; or write all with -o DIR/"
        raise UsageError(f"a simulation has no table `{path.stem}`", slug="no-such-table", hint=hint)
    return partial(_write, name, ending)


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
ENDINGS = (*_WRITERS, *_TABLE_ENDINGS)


def _write(name: str, ending: str, answer: Simulation, handle: BinaryIO) -> None:
    write(getattr(answer, name), ending, handle)


def fill(answer: Simulation, directory: Path) -> None:
    """Write all tables as CSV into a directory that is there."""
    for name in TABLES:
        with (directory / f"{name}.csv").open("wb") as handle:
            _write(name, ".csv", answer, handle)
