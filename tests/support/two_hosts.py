"""What holds of a trace of two hosts, node1 and node2, whose clocks are three seconds apart."""

from __future__ import annotations

from pathlib import Path

from traceloom.formats import load
from traceloom.graph import link_session


def check_trace_of_both(output: Path) -> None:
    """It has a rank of each host, on one clock, and the telemetry of both."""
    session = load(output, cache=False)
    session.check()
    assert session.ranks == (0, 1)
    assert {trace.meta.host for trace in session.traces} == {"node1", "node2"}
    starts = [trace.start_ns for trace in session.traces]
    assert abs(starts[0] - starts[1]) < 1_000_000_000, (
        "each began by its own clock, three seconds apart"
    )
    # Gradients are exchanged in every step and end together: what is left between the clocks is far below 50 ms.
    offsets = link_session(session).ranks["clock_offset_ns"].to_list()
    assert max(map(abs, offsets)) < 50_000_000, offsets
    assert set(session.telemetry["host"].unique()) == {"node1", "node2"}
