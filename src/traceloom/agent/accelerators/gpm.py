"""GPM: what the pipes of NVIDIA's devices did between two samples, from Hopper on."""

from __future__ import annotations

import math
from collections import deque
from contextlib import suppress
from typing import Any

from traceloom.agent.accelerators.nvml_calls import why_not

MIB = 1 << 20

# GPM: metric id -> metric, labels, factor. From 248 on they count since the host started.
GPM: dict[int, tuple[str, tuple[str, ...], float]] = {
    1: ("gpu_graphics_active_ratio", (), 0.01),
    2: ("gpu_sm_active_ratio", (), 0.01),
    3: ("gpu_sm_occupancy_ratio", (), 0.01),
    4: ("gpu_pipe_active_ratio", ("int",), 0.01),
    5: ("gpu_pipe_active_ratio", ("tensor",), 0.01),
    6: ("gpu_pipe_active_ratio", ("dfma",), 0.01),
    7: ("gpu_pipe_active_ratio", ("hmma",), 0.01),
    8: ("gpu_pipe_active_ratio", ("dmma",), 0.01),
    9: ("gpu_pipe_active_ratio", ("imma",), 0.01),
    10: ("gpu_dram_active_ratio", (), 0.01),
    11: ("gpu_pipe_active_ratio", ("fp64",), 0.01),
    12: ("gpu_pipe_active_ratio", ("fp32",), 0.01),
    13: ("gpu_pipe_active_ratio", ("fp16",), 0.01),
    20: ("gpu_link_bytes_per_second", ("pcie", "transmit"), MIB),
    21: ("gpu_link_bytes_per_second", ("pcie", "receive"), MIB),
    60: ("gpu_link_bytes_per_second", ("nvlink", "receive"), MIB),
    61: ("gpu_link_bytes_per_second", ("nvlink", "transmit"), MIB),
    248: ("gpu_cycles_total", ("elapsed",), 1.0),
    249: ("gpu_cycles_total", ("active",), 1.0),
    250: ("gpu_cycles_total", ("tensor",), 1.0),
    251: ("gpu_cycles_total", ("dmma",), 1.0),
    252: ("gpu_cycles_total", ("hmma",), 1.0),
    253: ("gpu_cycles_total", ("imma",), 1.0),
    254: ("gpu_cycles_total", ("dfma",), 1.0),
    255: ("gpu_link_bytes_total", ("pcie", "transmit"), 1.0),
    256: ("gpu_link_bytes_total", ("pcie", "receive"), 1.0),
    257: ("gpu_cycles_total", ("int",), 1.0),
    258: ("gpu_cycles_total", ("fp64",), 1.0),
    259: ("gpu_cycles_total", ("fp32",), 1.0),
    260: ("gpu_cycles_total", ("fp16",), 1.0),
}
GPM_APART_S = 0.1  # the hardware refreshes its sample no faster
GPM_KEPT = 4


class GpmRing:
    """The last samples of the pipes of one device or partition: ratios are those between two of them."""

    def __init__(self, nvml: Any, handle: Any, instance: int | None) -> None:
        self._nvml = nvml
        self._handle = handle  # of the whole device, also for a partition
        self._instance = instance
        self._samples: deque[tuple[float, Any]] = deque()

    def take(self, now: float) -> None:
        """Take a sample.

        Raises:
            NVMLError: The device has none now.
        """
        full = len(self._samples) >= GPM_KEPT
        sample = self._samples.popleft()[1] if full else self._nvml.nvmlGpmSampleAlloc()
        try:
            if self._instance is None:
                self._nvml.nvmlGpmSampleGet(self._handle, sample)
            else:
                self._nvml.nvmlGpmMigSampleGet(self._handle, self._instance, sample)
        except Exception:
            self._nvml.nvmlGpmSampleFree(sample)
            raise
        self._samples.append((now, sample))

    def __len__(self) -> int:
        return len(self._samples)

    def values(self) -> dict[int, float | str]:
        """GPM metric -> its value since the sample before, or why there is none; empty with less than two samples.

        Raises:
            NVMLError: The driver cannot compare the samples.
        """
        now, newest = self._samples[-1]
        before = [sample for taken, sample in self._samples if now - taken >= GPM_APART_S]
        if not before:
            return {}
        wanted = self._nvml.c_nvmlGpmMetricsGet_t()
        wanted.version = self._nvml.NVML_GPM_METRICS_GET_VERSION
        wanted.numMetrics = len(GPM)
        wanted.sample1, wanted.sample2 = before[-1], newest
        for metric, number in zip(wanted.metrics, GPM, strict=False):
            metric.metricId = number
        self._nvml.nvmlGpmMetricsGet(wanted)
        return {
            metric.metricId: why_not(self._nvml, metric.nvmlReturn)
            if metric.nvmlReturn
            else metric.value
            if math.isfinite(metric.value)
            else "the device gave no number"
            for metric in wanted.metrics[: len(GPM)]
        }

    def free(self) -> None:
        """Let go of all samples."""
        while self._samples:
            with suppress(self._nvml.NVMLError):
                self._nvml.nvmlGpmSampleFree(self._samples.pop()[1])
