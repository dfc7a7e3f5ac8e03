"""A simulation as files: the document, the page, the timeline, and its tables as data."""

from __future__ import annotations

from functools import partial
from typing import BinaryIO

from traceloom.packed import gzipped
from traceloom.plain_text import encoded
from traceloom.report.exports.tables import ResultFiles
from traceloom.report.simulation import build, write_json
from traceloom.simulate.simulation import Simulation


def _html(answer: Simulation, handle: BinaryIO) -> None:
    from traceloom.report.before_after import simulated

    handle.write(encoded(simulated.render(build(answer), answer)))


def _perfetto(answer: Simulation, handle: BinaryIO) -> None:
    from traceloom.report.exports.perfetto.simulation import write_simulation

    write_simulation(answer, handle)


SIMULATION = ResultFiles(
    "simulation",
    ("ranks", "nodes", "collectives", "links", "path", "became_critical"),
    {
        ".json": write_json,
        ".html": _html,
        ".htm": _html,
        ".perfetto.json": _perfetto,
        ".perfetto.json.gz": lambda answer, handle: gzipped(partial(_perfetto, answer))(handle),
    },
)
