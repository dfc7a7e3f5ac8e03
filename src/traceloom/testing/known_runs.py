"""Recordings of made runs whose figures are known in closed form."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from statistics import median
from typing import Any

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


@dataclass(frozen=True)
class KnownJob:
    """A job of several ranks, and what is true of it.

    Attributes:
        builders: Write the recording of each rank.
        kernel_ns: Time in which the kernels of each rank compute.
        straggler: The rank whose kernels are the slowest.
    """

    builders: list[TraceBuilder]
    kernel_ns: list[int]
    straggler: int


def build_straggler(seed: int) -> KnownJob:
    """Builds a job whose ranks run the same program, with the same ids, and meet in an all-reduce
    for which they wait for the slowest.
    """
    chance = random.Random(seed)  # noqa: S311  (no secret)
    world, steps, kernels = chance.randint(2, 6), chance.randint(3, 5), chance.randint(2, 6)
    straggler, one_device = chance.randrange(world), chance.random() < 0.5
    lengths = [40 + chance.randint(0, 4) for _ in range(world)]
    lengths[straggler] = 70
    meeting_us = 200 + kernels * 80
    builders = []
    for rank, length in enumerate(lengths):
        builder = TraceBuilder(
            rank=rank, world_size=world, process=4000 + rank, devices=world, base_ns=17 * 10**17
        )
        device = 0 if one_device else rank
        for step in range(steps):
            start = step * (meeting_us + 100)
            builder.step(step, start, meeting_us + 100)
            for index in range(kernels + 1):
                number = step * (kernels + 1) + index
                called = start + 10 + 15 * index
                builder.op("aten::mm", called, 12, external_id=number)
                builder.launch("cudaLaunchKernel", called + 2, 6, correlation=number)
                if index < kernels:
                    at = start + 100 + index * 80
                    builder.kernel("gemm", at, length, correlation=number, device=device)
                else:
                    at = start + 100 + (index - 1) * 80 + length
                    builder.kernel(
                        "ncclDevKernel_AllReduce_Sum_f32_RING_LL",
                        at,
                        start + meeting_us - at,
                        correlation=number,
                        device=device,
                        stream=20,
                        **builder.collective_args("allreduce", "0", world, 1024, "Float"),
                    )
        builders.append(builder)
    return KnownJob(builders, [length * kernels * steps * 1000 for length in lengths], straggler)


def merge_ranks(builders: list[TraceBuilder], how: str) -> dict[str, Any]:
    """Returns one document with the events of all ranks, as mergers write it.

    Args:
        builders: Of the ranks, in their order.
        how: `label`: before each process id, as SGLang does; `name`: of processes that are numbered
            anew; `list`: the lists of events one after the other, as they are.
    """
    events: list[dict[str, Any]] = []
    for rank, builder in enumerate(builders):
        own = [json.loads(text) for text in builder.events()]
        if how == "list":
            process = next(event["pid"] for event in own if event["cat"] == "user_annotation")
            for pid, label in ((process, "CPU"), (rank, f"GPU {rank}")):
                args = {"name": "python", "labels": label}
                events += [
                    {"ph": "M", "name": name, "pid": pid, "tid": 0, "args": args}
                    for name in ("process_name", "process_labels")
                ]
        for event in own:
            if how == "label":
                event["pid"] = f"[TP{rank:02d}-EP00] {event['pid']}"
            elif how == "name":
                event["pid"] = rank + 1
        if how == "name":
            args = {"name": f"Rank {rank}"}
            own.append({"ph": "M", "name": "process_name", "pid": rank + 1, "tid": 0, "args": args})
        events += own
    return {**builders[0].header(), "traceEvents": events}
