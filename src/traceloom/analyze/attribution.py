"""Whose GPU work it is: kernels, copies and fills joined to the host event that launched them."""

from __future__ import annotations

import numpy as np
import polars as pl
from msgspec import Struct

from traceloom.analyze.ancestry import forest
from traceloom.analyze.classify import gpu_work
from traceloom.analyze.remembered import per_trace
from traceloom.array_types import Bools, Ints
from traceloom.model import Trace
from traceloom.model import category as cat


class GpuWork(Struct, frozen=True):
    """The GPU work of a trace; arrays of shape (GPU work,).

    Attributes:
        origin: Position (in the forest) of the launch, else of the op it is known to belong to; -1 for orphans.
        duration_ns: Durations; a negative one in a damaged file counts as 0.
        kernel: True for kernels, False for copies and fills.
    """

    origin: Ints
    duration_ns: Ints
    kernel: Bools

    def by_owner(self, owner_of: Ints) -> tuple[Ints, Ints, Ints]:
        """Time, kernels and count of the work that each host event owns; arrays of shape (host events,).

        `owner_of` names for each host event the one that owns what is launched there; -1 for nobody.
        """
        owner = np.append(owner_of, -1)[self.origin]
        owned = owner >= 0
        sums = []
        for values in (self.duration_ns, self.kernel.astype(np.int64), np.ones(owner.size, dtype=np.int64)):
            total = np.zeros(owner_of.size, dtype=np.int64, like=owner_of)
            np.add.at(total, owner[owned], values[owned])
            sums.append(total)
        return sums[0], sums[1], sums[2]


@per_trace
def launched_work(trace: Trace) -> GpuWork:
    """All GPU work of the trace with its origin on the host."""
    tree = forest(trace)
    work = gpu_work(trace)
    origin = work.select(pl.coalesce("launch", "op").cast(pl.Int64).fill_null(-1)).to_series().to_numpy()
    position = np.where(origin >= 0, tree.position[origin] if tree.position.size else -1, -1)
    return GpuWork(position, (work["end_ns"] - work["start_ns"]).to_numpy(), (work["kind"] == cat.KERNEL).to_numpy())
