"""All-reduces between the processes of a launcher: torchrun --nproc-per-node 2 collectives.py
BACKEND

Rank 0 prints as JSON how many, of how many bytes, and how long the fastest took by its clock or by
CUDA events.
"""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.distributed as dist
from clock import Clock

CALLS = 12


def main() -> None:
    """Work, and print."""
    backend = sys.argv[1]
    device = (
        torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        if backend == "nccl"
        else torch.device("cpu")
    )
    if backend == "nccl":
        torch.cuda.set_device(device)
    dist.init_process_group(backend)
    values = torch.ones((1 << 24) if backend == "nccl" else (1 << 20), device=device)
    times_ns = []
    for _ in range(CALLS):
        clock = Clock(device.type)
        dist.all_reduce(values)
        times_ns.append(clock.read_ns())
    if dist.get_rank() == 0:
        print(
            json.dumps(
                {"count": CALLS, "bytes": CALLS * values.nbytes, "fastest_ns": min(times_ns)}
            )
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
