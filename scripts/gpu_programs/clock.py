"""A clock of the device: CUDA events, or on a CPU the host's clock."""

from __future__ import annotations

import time

import torch


class Clock:
    """Runs from when it is made."""

    def __init__(self, device: str) -> None:
        self.on_gpu = device == "cuda"
        if self.on_gpu:
            torch.cuda.synchronize()
            self.begin = torch.cuda.Event(enable_timing=True)
            self.begin.record()
        else:
            self.began_ns = time.perf_counter_ns()

    def read_ns(self) -> int:
        """Wait for the device, and say how long it was."""
        if not self.on_gpu:
            return time.perf_counter_ns() - self.began_ns
        end = torch.cuda.Event(enable_timing=True)
        end.record()
        end.synchronize()
        return round(1e6 * self.begin.elapsed_time(end))
