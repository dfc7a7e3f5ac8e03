"""A simulation as Chrome JSON: its timeline, and how much of its bandwidth each busy link gives."""

from __future__ import annotations

from typing import BinaryIO

from traceloom.errors import UsageError
from traceloom.report.exports.perfetto.graph import write_graph
from traceloom.simulate.simulation import Simulation


def write_simulation(answer: Simulation, handle: BinaryIO) -> None:
    """Write the workload as it would have been recorded on the machine, and counters of its busiest links.

    Args:
        answer: What was simulated.
        handle: Where to write; uncompressed JSON.

    Raises:
        UsageError: `no-timeline`: the mode has none.
    """
    if answer.graph is None:
        raise UsageError(
            f"the mode {answer.mode} has no timeline to write",
            slug="no-timeline",
            hint="write .json, or simulate in the mode native",
        )
    loads = answer.load.join(answer.links.select("link", "name"), on="link", maintain_order="left")
    write_graph(answer.graph, handle, loads.select("name", "time_ns", value="share"))
