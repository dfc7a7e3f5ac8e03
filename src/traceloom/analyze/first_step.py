"""What the first step of a run cost: it compiles, loads code and allocates, and is in no usual window."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from traceloom.model import Trace
from traceloom.read.step_log import all_steps

_FEWEST = 4  # steps that tell what a usual one takes


class FirstStep(NamedTuple):
    """The first step of a run.

    Attributes:
        rank: Whose.
        first_ns: How long it took.
        usual_ns: The median of the steps after it that the recorder did not disturb.
        over_ns: By how much it is longer than that; 0 where it is shorter.
        run_ns: All steps of the run together.
        recorded: Whether it is in the trace.
    """

    rank: int | None
    first_ns: int
    usual_ns: int
    over_ns: int
    run_ns: int
    recorded: bool


def first_step(trace: Trace) -> FirstStep | None:
    """The first step of the run of a trace; None where nobody kept its steps, or there are too few of them."""
    steps = all_steps(trace.meta)
    if steps is None or steps.duration_ns.size < _FEWEST:
        return None
    plain = [took for took, state in zip(steps.duration_ns[1:].tolist(), steps.state[1:], strict=True)
             if state in ("unrecorded", "recorded")]  # fmt: skip
    if not plain:
        return None
    first, usual = int(steps.duration_ns[0]), int(np.median(plain))
    recorded = steps.state[0] == "recorded"
    return FirstStep(trace.rank, first, usual, max(first - usual, 0), int(steps.duration_ns.sum()), recorded)
