"""When a run ends for want of memory: what was alive then, written before the process is gone."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path
from typing import Any

from traceloom.capture.census import census
from traceloom.capture.messages import say_once
from traceloom.capture.writing import write_json

FORMAT = "traceloom-out-of-memory"
VERSION = 1
_CPU = re.compile(
    r"DefaultCPUAllocator: (?:can't allocate memory|not enough memory): you tried to allocate (\d+) bytes"
)
_CUDA = re.compile(r"Tried to allocate ([\d.]+) (GiB|MiB|KiB|bytes)")
_UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "bytes": 1}
MOST_FRAMES = 40


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an exception says that memory ran out: PyTorch's own kind, or the plain one of the CPU's allocator."""
    return error is not None and (type(error).__name__ == "OutOfMemoryError" or bool(_CPU.search(str(error))))


def asked_bytes(error: BaseException) -> int | None:
    """What was asked for in vain; None where the message does not say."""
    text = str(error)
    cpu = _CPU.search(text)
    if cpu:
        return int(cpu[1])
    cuda = _CUDA.search(text)
    return round(float(cuda[1]) * _UNITS[cuda[2]]) if cuda else None


def write(path: Path, error: BaseException, steps: int) -> None:
    """Write who holds the memory now, and where in the program it ran out.

    Args:
        path: The file.
        error: The exception, with its traceback: its frames still hold their tensors.
        steps: How many steps the run has ended.
    """
    stack = []  # where it happened, outermost frame first, as `file(line): function`
    at = error.__traceback__
    while at is not None:
        code = at.tb_frame.f_code
        stack.append(f"{code.co_filename}({at.tb_lineno}): {code.co_name}")
        at = at.tb_next
    document = {
        "format": FORMAT,
        "version": VERSION,
        "time_ns": time.time_ns(),
        "step": steps,
        "asked_bytes": asked_bytes(error),
        "message": str(error)[:4000],
        "stack": stack[-MOST_FRAMES:],
        "devices": devices(),
        "live_storages": census(),
    }
    try:
        write_json(path, document)
    except OSError as problem:
        say_once("no-memory-report", f"the memory report could not be written: {problem.strerror or problem}")


def devices() -> list[dict[str, Any]]:
    """What the allocators and the devices say of themselves."""
    import torch

    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return []
    out = []
    for number in range(torch.cuda.device_count()):
        stats = torch.cuda.memory_stats(number)
        if not stats:
            continue
        free, total = torch.cuda.mem_get_info(number)
        out.append(
            {
                "device_type": "cuda",
                "device": number,
                "allocated_bytes": stats.get("allocated_bytes.all.current", 0),
                "reserved_bytes": stats.get("reserved_bytes.all.current", 0),
                "free_bytes": free,
                "total_bytes": total,
                "retries": stats.get("num_alloc_retries", 0),
            }
        )
    return out


def last_error() -> BaseException | None:
    """The exception that ends the process, as Python's interpreter leaves it for those who run at exit."""
    error = getattr(sys, "last_value", None)
    return error if isinstance(error, BaseException) else None
