"""The wall time of every step of a recorded run, from its part of capture.json."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from traceloom.files import read_small
from traceloom.model.trace import Meta

WARM_UP = 3
"""Steps at the beginning of a run that stand for no other, as in `overhead` of capture.json."""
_PLAIN = "unrecorded"
_MOST_BYTES = 1 << 27  # of a file
_FEW_BYTES = 1 << 24
_MOST_EXPANSION = 100  # what is larger is cut, and read as nothing


class RunSteps(NamedTuple):
    """All steps of a run in order.

    Attributes:
        duration_ns: Wall times, shape (steps,).
        state: What the recorder did in each.
        ran_ns: How long the thread that makes them ran in each; None where unknown.
    """

    duration_ns: NDArray[np.int64]
    state: list[str]
    ran_ns: list[int | None]


def all_steps(meta: Meta) -> RunSteps | None:
    """Every complete step of the run, from the first; None where it kept no such table, or an invalid one."""
    table = captured_table(meta.capture, meta.path, "steps") or {}
    durations, states = table.get("duration_ns"), table.get("state")
    if not isinstance(durations, list) or not isinstance(states, list) or len(durations) != len(states):
        return None
    if not all(isinstance(took, int) and 0 <= took < 1 << 53 for took in durations):
        return None
    ran = table.get("cpu_ns")
    ran = ran if isinstance(ran, list) and len(ran) == len(durations) else [None] * len(durations)
    cpu_times = [value if isinstance(value, int) and 0 <= value < 1 << 53 else None for value in ran]
    return RunSteps(np.array(durations, dtype=np.int64), [str(state) for state in states], cpu_times)


def undisturbed_steps(meta: Meta) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
    """Steps after the warm-up that ran while nothing was recorded.

    Returns:
        Their numbers, ascending, and their wall times in nanoseconds; None where the run kept no such table.
    """
    table = captured_table(meta.capture, meta.path, "steps")
    if table is None:
        return None
    durations, states = table.get("duration_ns"), table.get("state")
    if not isinstance(durations, list) or not isinstance(states, list) or len(durations) != len(states):
        return None
    kept = [
        (step, took)
        for step, (took, state) in enumerate(zip(durations, states, strict=True))
        if step >= WARM_UP and state == _PLAIN and isinstance(took, int) and 0 <= took < 1 << 62
    ]
    columns = np.array(kept, dtype=np.int64).reshape(-1, 2)
    return columns[:, 0], columns[:, 1]


def captured_table(capture: dict[str, Any] | None, path: str, key: str) -> dict[str, Any] | None:
    """A table of capture.json as columns: in the part itself, or in a file beside the trace where they are long.

    Args:
        capture: A rank's part of capture.json.
        path: The path of its trace.
        key: Name of the table.
    """
    table = (capture or {}).get(key)
    if not isinstance(table, dict):
        return None
    name = table.get("file")
    if not isinstance(name, str):
        return table
    if Path(name).name != name:  # a name from a stranger's file never leaves the directory
        return None
    try:
        data = read_small(Path(path).parent / name, _MOST_BYTES)
        if data[:2] == b"\x1f\x8b":
            data = zlib.decompressobj(wbits=31).decompress(data, max(_FEW_BYTES, _MOST_EXPANSION * len(data)))
        columns: dict[str, Any] = msgspec.json.decode(data, type=dict)
    except (OSError, zlib.error, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return columns
