"""Which row of the allocations an instant means."""

from __future__ import annotations

import numpy as np

from traceloom.analyze.allocations.blocks import Blocks
from traceloom.errors import UsageError
from traceloom.model import Trace


def row_of(at: str, trace: Trace, blocks: Blocks, pool: int) -> int:
    """The row of `trace.allocations` just after which a memory is looked at; -1 for before the first.

    Raises:
        UsageError: slugs `bad-instant`, `no-such-step`.
    """
    rows = trace.allocations
    levels = blocks.levels(pool, rows.height)
    if at == "peak":
        return int(levels.argmax()) - 1
    if at in ("start", "end"):
        return -1 if at == "start" else rows.height - 1
    word, _, number = at.partition(" ")
    if word == "step" and number.isascii() and number.isdigit():
        inside = np.flatnonzero((rows["step"] == int(number)).fill_null(False).to_numpy())
        if not inside.size:
            steps = trace.steps["step"].to_list()
            have = f"it has {steps[0]} to {steps[-1]}" if steps else "it has no steps"
            raise UsageError(f"nothing was allocated in step {number} of this run; {have}", slug="no-such-step")
        return int(inside[levels[inside + 1].argmax()])
    if at.isascii() and at.isdigit():
        return int(np.searchsorted(rows["time_ns"].to_numpy(), trace.start_ns + int(at), side="right")) - 1
    raise UsageError(
        f"`{at}` is no instant", slug="bad-instant", hint="give peak, start, end, `step 3`, or a time as 12.5ms"
    )
