"""GPU work beside the calls that submitted it: what every question about launching starts from."""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from traceloom.analyze.gaps import gpu_rows
from traceloom.analyze.remembered import per_trace
from traceloom.array_types import Bools, Ints
from traceloom.model import Trace
from traceloom.model.arrays import column
from traceloom.model.category import CATEGORIES, KERNEL

UNKNOWN = -1
_KERNEL = CATEGORIES.index(KERNEL)


class Submissions(Struct, frozen=True):
    """All GPU work, by device, stream, start; arrays of shape (GPU work,). Shared between analyses: do not change.

    Attributes:
        row: Row of `trace.events`.
        device: Device; -1 where the file gives no number.
        stream: Stream; -1 where the file gives no number.
        lane: Number of the (device, stream), from 0.
        start: Start of the work, ns.
        end: Its end; a negative duration in a damaged file counts as 0.
        launch: Row of the call that submitted it; -1 where that is not recorded.
        call_start: Start of that call; the start of the work where it is not recorded.
        call_end: End of that call; the start of the work where it is not recorded.
        kernel: True for kernels, False for copies and fills.
        first: True for the first work of its launch on its device: the one that a launch delay is of.
        many: True where the launch submitted other work to the device, too (graphs).
        step: Row of `trace.steps` of the launch; -1 outside.
    """

    row: Ints
    device: Ints
    stream: Ints
    lane: Ints
    start: Ints
    end: Ints
    launch: Ints
    call_start: Ints
    call_end: Ints
    kernel: Bools
    first: Bools
    many: Bools
    step: Ints

    @property
    def known(self) -> Bools:
        """Where the launch is recorded."""
        return self.launch >= 0

    def bounds(self) -> Ints:
        """Where each lane begins, and the end of the last; shape (lanes + 1,)."""
        return np.searchsorted(self.lane, np.arange((int(self.lane[-1]) if self.lane.size else -1) + 2))


def plain(values: NDArray[Any]) -> NDArray[Any]:
    """The same array; what is computed from it lies in memory, also where the array is that of a very large trace."""
    return values.view(np.ndarray)


@per_trace
def submissions(trace: Trace) -> Submissions:
    """All GPU work of the trace with its launches."""
    row = plain(gpu_rows(trace))
    device, stream, launch = (plain(column(trace, name, UNKNOWN)[row]) for name in ("device", "stream", "launch"))
    order = np.lexsort((stream, device))  # stable: by start within a stream
    row, device, stream, launch = row[order], device[order], stream[order], launch[order]
    opens = np.ones(row.size, dtype=np.bool_)
    opens[1:] = (device[1:] != device[:-1]) | (stream[1:] != stream[:-1])
    starts, durations = plain(column(trace, "start_ns")), plain(column(trace, "duration_ns"))
    start = starts[row]
    has_launch = launch >= 0
    call = np.where(has_launch, launch, row)
    call_start = starts[call]
    call_end = call_start + np.where(has_launch, np.maximum(durations[call], 0), 0)
    # which work is the first of its launch on its device, and which launch has several
    first, many = np.zeros((2, row.size), dtype=np.bool_)
    turn = np.lexsort((start, device, launch))
    new = np.ones(row.size, dtype=np.bool_)
    new[1:] = (launch[turn][1:] != launch[turn][:-1]) | (device[turn][1:] != device[turn][:-1])
    first[turn] = new
    group = np.cumsum(new) - 1
    many[turn] = np.bincount(group)[group] > 1 if group.size else False
    # step numbers are unique and ascending
    numbers = trace.steps["step"].to_numpy()
    step_row = np.full(row.size, UNKNOWN)
    if numbers.size:
        none = np.iinfo(np.int32).min
        step = plain(column(trace, "step", none)[row])
        at = np.minimum(np.searchsorted(numbers, step), numbers.size - 1)
        step_row = np.where((step != none) & (numbers[at] == step), at, UNKNOWN)
    return Submissions(
        row=row,
        device=device,
        stream=stream,
        lane=np.cumsum(opens) - 1,
        start=start,
        end=start + np.maximum(durations[row], 0),
        launch=launch,
        call_start=call_start,
        call_end=call_end,
        kernel=plain(column(trace, "category")[row]) == _KERNEL,
        first=first & has_launch,
        many=many & has_launch,
        step=step_row,
    )
