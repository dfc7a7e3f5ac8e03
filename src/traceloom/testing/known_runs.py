"""Recordings of made runs whose figures are known in closed form."""

import random
from dataclasses import dataclass
from statistics import median
from typing import Any

from traceloom.testing.trace_builder import TraceBuilder

FAULTS_US = {
    "overlap": (0.1, 0.9),
    "lost": (1, 1),
    "overrun": (100_000, 1_770_000),
    "wait": (300, 600_000),
    "early": (1.1, 900),
}
"""What may be wrong with a recording, and by how much at least and at most, in microseconds."""


@dataclass(frozen=True)
class KnownRun:
    """A recording and what is true of it; times in nanoseconds.

    Attributes:
        builder: Writes the recording.
        periods_ns: How long each step keeps the device, one after the other.
        host_ns: How long the host launches each step.
        busy_ns: Time in which the device works, in all steps.
        wrong_count: Events that are recorded wrong.
        largest_ns: By how much at most.
    """

    builder: TraceBuilder
    periods_ns: list[int]
    host_ns: list[int]
    busy_ns: int
    wrong_count: int = 0
    largest_ns: int = 0

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
            builder.op("aten::mm", called, launch_us - 2).launch(
                "cudaLaunchKernel", called + 2, 6, correlation=correlation
            )
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


def build_faulty(seed: int, fault: str) -> KnownRun:
    """Builds steps of kernels in a row, after which the host waits for the device, and records some
    of their events wrong.

    Args:
        seed: Of the number and lengths of steps and kernels, and of what is wrong.
        fault: A key of FAULTS_US. `overlap`: kernels seem to begin before the one before has ended;
            `lost`: they have no times; `overrun`: they seem to go on for long; `wait`: the wait
            returns late; `early`: kernels are launched after they began.
    """
    return build_ranks(seed, 1, fault)[0]


def build_ranks(seed: int, world: int, fault: str | None = None) -> list[KnownRun]:
    """Builds the same for the ranks of a job, which run the same program, with the same ids, and
    meet in an all-reduce for which they wait for the one whose kernels are the slowest.

    `busy_ns` is the time in which their kernels compute.
    """
    chance = random.Random(seed)  # noqa: S311  (no secret)
    lengths = [chance.randint(50, 400) for _ in range(chance.randint(3, 12))]
    count, idle_us = chance.randint(5, 32), chance.randint(100, 600)
    wrong = {step: chance.randrange(1, len(lengths)) for step in chance.sample(range(count), 2)}
    slowest, one_device, runs = chance.randrange(world), chance.random() < 0.5, []
    for rank in range(world):
        builder = TraceBuilder(rank, world, devices=world, process=4000 + rank, base_ns=17 * 10**17)
        host_ns, largest_us, start, busy_us = [], 0.0, 1000.0, 0
        where: dict[str, Any] = {"device": 0 if one_device else rank}
        for step in range(count):
            device, late, first = start + 60, 0.0, step * (len(lengths) + 1)
            met = device + sum(lengths) + 31 * len(lengths)
            for index, fastest in enumerate(lengths):
                length = fastest + 30 * (rank == slowest)
                off = dict.fromkeys(FAULTS_US, 0.0)
                if fault and wrong.get(step) == index:
                    off[fault] = round(chance.uniform(*FAULTS_US[fault]), 1)
                    largest_us = max(largest_us, off[fault])
                called = device + off["early"] if off["early"] else start + 2 + 3 * index
                builder.op("aten::mm", called - 1, 2.5, external_id=first + index).launch(
                    "cudaLaunchKernel", called, 1, correlation=first + index
                )
                recorded = 0 if off["lost"] else 1
                builder.kernel(
                    f"gemm_{index}",
                    recorded * (device - off["overlap"]),
                    recorded * (length + off["overlap"] + off["overrun"]),
                    correlation=first + index,
                    **where,
                )
                device, late = device + length, late + off["wait"]
                busy_us += recorded * length
            if world > 1:
                number = first + len(lengths)
                builder.launch("cudaLaunchKernel", start + 50, 1, correlation=number).kernel(
                    "ncclDevKernel_AllReduce_Sum_f32_RING_LL",
                    device,
                    met - device,
                    correlation=number,
                    stream=20,
                    **where,
                    **builder.collective_args("allreduce", "0", world, 1024, "Float"),
                )
                device = met
            builder.launch(
                "cudaDeviceSynchronize",
                start + 55,
                device + late - start - 50,
                correlation=step - count,
            )
            host_ns.append(round((device + late + idle_us - start) * 1000))
            builder.step(step, start, host_ns[-1] / 1000)
            start += host_ns[-1] / 1000
        runs.append(
            KnownRun(
                builder, host_ns, host_ns, busy_us * 1000, len(wrong), round(largest_us * 1000)
            )
        )
    return runs
