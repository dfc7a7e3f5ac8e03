"""Recordings of made runs whose figures are known in closed form."""

import random
from dataclasses import dataclass
from statistics import median

from traceloom.testing.trace_builder import TraceBuilder


@dataclass(frozen=True)
class KnownRun:
    """A recording and what is true of it; times in nanoseconds.

    Attributes:
        builder: Writes the recording.
        periods_ns: How long each step keeps the device, one after the other.
        host_ns: How long the host launches each step.
        busy_ns: Time in which the device works, in all steps.
    """

    builder: TraceBuilder
    periods_ns: list[int]
    host_ns: list[int]
    busy_ns: int

    @property
    def step_ns(self) -> int:
        """The step that is told: the median of the periods."""
        return int(median(self.periods_ns))


def build_run_ahead(seed: int, slower: float = 1.0) -> KnownRun:
    """Builds a training in which the host runs ahead and synchronises once, after the last step.

    Args:
        seed: Of the number of steps and kernels, their durations and the gaps between them.
        slower: Factor on the duration of each kernel.
    """
    chance = random.Random(seed)  # noqa: S311  (no secret)
    count, kernels = chance.randint(3, 9), chance.randint(2, 12)
    device = chance.randrange(2)
    generation = chance.choice(["2022", "2024", "2026", "rocm"])
    launch_us = chance.randint(20, 90)
    host_us = [kernels * launch_us + chance.randint(5, 200) for _ in range(count)]
    kernel_us = [
        max(round(sum(host_us) / count * chance.uniform(1.3, 9) / kernels), 1)
        for _ in range(kernels)
    ]
    builder = TraceBuilder(devices=2, generation=generation)
    start = chance.randint(0, 5_000)
    device_end = start + launch_us + 5
    periods: list[int] = []
    busy, correlation = 0, 0
    for number in range(count):
        builder.step(number + 1, start, host_us[number])
        begun = device_end
        for index in range(kernels):
            correlation += 1
            called = start + index * launch_us
            builder.op("aten::mm", called, launch_us - 2)
            builder.launch("cudaLaunchKernel", called + 2, 6, correlation=correlation)
            gap = chance.randint(0, 2) if correlation > 1 else 0
            length = round(kernel_us[index] * slower)
            builder.kernel(
                f"gemm_{index}", device_end + gap, length, correlation=correlation, device=device
            )
            device_end += gap + length
            busy += length
        periods.append((device_end - begun) * 1000)
        start += host_us[number]
    builder.launch("cudaDeviceSynchronize", start, device_end + 5 - start, correlation=10**6)
    return KnownRun(builder, periods, [us * 1000 for us in host_us], busy * 1000)
