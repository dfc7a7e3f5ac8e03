"""Where a capture comes from: host, devices, versions."""

from __future__ import annotations

import contextlib
import os
import platform
import socket
import sys
from typing import Any

import torch


def describe() -> dict[str, Any]:
    """Host, processor, devices and versions of this process. Never initialises a device."""
    processor = None
    with (
        contextlib.suppress(OSError),
        open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file,  # noqa: PTH123
    ):
        processor = next(
            (line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), None
        )
    if processor is None:  # not Linux, or no processor of a PC; this may start a process
        processor = platform.processor() or None
    version = torch.version
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": getattr(version, "cuda", None),
        "hip": getattr(version, "hip", None),
        "xpu": getattr(version, "xpu", None),
    }
    nccl = getattr(torch.cuda, "nccl", None)
    if version.cuda and nccl is not None and torch.distributed.is_available():
        versions["nccl"] = ".".join(map(str, nccl.version()))
    return {
        "host": socket.gethostname(),
        "process": os.getpid(),
        "command": list(getattr(sys, "orig_argv", sys.argv)),
        "platform": platform.platform(),
        "processor": processor,
        "logical_cpus": os.cpu_count(),
        "usable_cpus": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "devices": describe_devices(),
        "versions": {name: str(value) for name, value in versions.items() if value},
    }


def describe_devices() -> list[dict[str, Any]]:
    """The accelerators this process uses; empty where none was initialised."""
    described = []
    for kind in ("cuda", "xpu"):
        backend = getattr(torch, kind, None)
        if backend is None or not getattr(backend, "is_initialized", lambda: False)():
            continue
        for index in range(backend.device_count()):
            properties = backend.get_device_properties(index)
            described.append(
                {
                    "device": index,
                    "kind": kind,
                    "name": str(properties.name),
                    "memory_bytes": int(properties.total_memory),
                    "multiprocessors": getattr(properties, "multi_processor_count", None),
                    "current": index == backend.current_device(),
                }
            )
    return described
