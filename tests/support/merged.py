"""Jobs of several ranks of which everything is known, and their files merged into one, as tools in use write it."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

from traceloom.testing import TraceBuilder


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
    chance = random.Random(seed)
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
            anew; `list`: the lists of events one after the other, as they are; `rank`: each event
            with its rank as process.
    """
    events: list[dict[str, Any]] = []
    for rank, builder in enumerate(builders):
        own = [json.loads(text) for text in builder.events()]
        if how in {"list", "rank"}:  # with the profiler's own names of processes
            process = next(event["pid"] for event in own if event["cat"] == "user_annotation")
            for pid, label in ((process, "CPU"), (rank, f"GPU {rank}")):
                args = {"name": "python", "labels": label}
                own += [
                    {"ph": "M", "name": name, "pid": pid, "tid": 0, "args": args}
                    for name in ("process_name", "process_labels")
                ]
        for event in own:
            if how == "label":
                event["pid"] = f"[TP{rank:02d}-EP00] {event['pid']}"
            elif how != "list":
                event["pid"] = rank + (how == "name")
        if how == "name":
            args = {"name": f"Rank {rank}"}
            own.append({"ph": "M", "name": "process_name", "pid": rank + 1, "tid": 0, "args": args})
        events += own
    return {**builders[0].header(), "traceEvents": events}
