"""Jobs of a few ranks over gloo, as processes of their own: one rank may stop before a collective."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PROGRAM = """
    import datetime, os, time
    import torch
    import torch.distributed as dist


    def load_batch():
        time.sleep(3600)


    def train(rank, hanging):
        for step in range(1_000_000):
            if rank == hanging and step == 3:
                print("hangs", flush=True)
                load_batch()  # HANGS
            gradient = torch.ones(4)
            if rank == 0:
                dist.all_reduce(gradient, async_op=True).wait()
            else:
                dist.all_reduce(gradient)
            if step == 2:
                print("steps", flush=True)


    dist.init_process_group("gloo", timeout=datetime.timedelta(hours=1))
    train(dist.get_rank(), int(os.environ["HANGING"]))
"""


@contextmanager
def hanging_job(
    directory: Path, ranks: int, hanging: int, name: str
) -> Iterator[list[subprocess.Popen[str]]]:
    """A job whose ranks wait in a collective for the one that never comes; it is ended afterwards."""
    program = directory / "train.py"
    program.write_text(textwrap.dedent(PROGRAM), encoding="utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "HANGING": str(hanging),
        "TRACELOOM_JOB": name,
        "OMP_NUM_THREADS": "1",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, str(program)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(ranks)
    ]
    try:
        for rank, process in enumerate(processes):
            assert process.stdout is not None
            assert process.stdout.readline() == "steps\n"
            if rank == hanging:
                assert process.stdout.readline() == "hangs\n"
        yield processes
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.communicate()


def line_of_hang(directory: Path) -> int:
    """Where the rank hangs, in `load_batch`: the line of its sleep."""
    lines = (directory / "train.py").read_text(encoding="utf-8").splitlines()
    return next(number for number, line in enumerate(lines, 1) if "time.sleep(3600)" in line)
