"""The wall time of every step of a recorded run, from its part of capture.json."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

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


def undisturbed_steps(meta: Meta) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
    """Steps after the warm-up that ran while nothing was recorded.

    Returns:
        Their numbers, ascending, and their wall times in nanoseconds; None where the run kept no such table.
    """
    table = _table(meta)
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


def _table(meta: Meta) -> dict[str, Any] | None:
    """The columns: in the part itself, or in a file beside the trace where they are long."""
    table = (meta.capture or {}).get("steps")
    if not isinstance(table, dict):
        return None
    name = table.get("file")
    if not isinstance(name, str):
        return table
    if Path(name).name != name:  # a name from a stranger's file never leaves the directory
        return None
    try:
        data = read_small(Path(meta.path).parent / name, _MOST_BYTES)
        if data[:2] == b"\x1f\x8b":
            data = zlib.decompressobj(wbits=31).decompress(data, max(_FEW_BYTES, _MOST_EXPANSION * len(data)))
        found: dict[str, Any] = msgspec.json.decode(data, type=dict)
    except (OSError, zlib.error, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return found
