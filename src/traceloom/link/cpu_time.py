"""Which stretches of host threads were spent running, by the processor time of the threads."""

from __future__ import annotations

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from traceloom.model import Trace
from traceloom.model.thread_cpu import ThreadClock, thread_samples

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

_WORKED = 0.5  # in which it ran at least: it worked


class CpuTime(Struct, frozen=True):
    """ThreadClock of the threads of a trace.

    Attributes:
        lanes: By lane, of the threads that were sampled.
    """

    lanes: dict[int, ThreadClock]

    @classmethod
    def of(cls, trace: Trace) -> CpuTime:
        """The samples of a trace; of no lane where its clock is not that of the samples, or nobody took any."""
        if trace.meta.clock != "unix":
            return cls({})
        samples = thread_samples(trace.meta)
        hosts = trace.lanes.filter(trace.lanes["kind"] == "host").select("lane", "thread").rows() if samples else []
        return cls({lane: samples[thread] for lane, thread in hosts if thread in samples})

    def worked(self, lane: Ints, low: Ints, high: Ints) -> Bools:
        """Stretches in which the thread certainly ran most of the time."""
        least = np.zeros_like(low)
        for number, samples in self.lanes.items():
            at = np.flatnonzero(lane == number)
            least[at] = samples.ran(low[at], high[at])[0]
        mostly_ran: Bools = least >= _WORKED * (high - low)
        return mostly_ran & (high > low)
