"""Run a program and measure it from inside its process: python measured.py DIRECTORY PROGRAM
[ARGUMENT ...]

Writes rank<N>.json into the directory: when each optimizer step ended, by the host's clock, by the
processor time of its thread and of the process, and by CUDA events; the bytes of the gradients;
what PyTorch's CUDA allocator counted. It uses PyTorch alone.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook


class Measures:
    """What is noted at the end of each optimizer step."""

    def __init__(self) -> None:
        self.wall_ns: list[int] = []
        self.cpu_ns: list[int] = []
        self.process_ns: list[int] = []
        self.events: list[torch.cuda.Event] = []
        self.gradient_bytes = 0

    def note(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Note the end of a step."""
        if torch.cuda.is_initialized():
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.events.append(event)
        if not self.gradient_bytes:
            parameters = [
                parameter for group in optimizer.param_groups for parameter in group["params"]
            ]
            self.gradient_bytes = sum(one.grad.nbytes for one in parameters if one.grad is not None)
        self.wall_ns.append(time.perf_counter_ns())
        self.cpu_ns.append(time.thread_time_ns())
        self.process_ns.append(time.process_time_ns())

    def write(self, directory: Path) -> None:
        """Write all of it."""
        document: dict[str, Any] = {
            "wall_ns": self.wall_ns,
            "cpu_ns": self.cpu_ns,
            "process_ns": self.process_ns,
            "gradient_bytes": self.gradient_bytes,
        }
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
            document["event_ns"] = [
                round(1e6 * self.events[0].elapsed_time(event)) for event in self.events
            ]
            document["device_peak_bytes"] = torch.cuda.max_memory_allocated()
            document["device_allocations"] = torch.cuda.memory_stats()["allocation.all.allocated"]
        (directory / f"rank{os.environ.get('RANK', '0')}.json").write_text(
            json.dumps(document), encoding="utf-8"
        )


def main() -> None:
    """Run the program as if it were called alone."""
    directory, program = Path(sys.argv[1]), sys.argv[2]
    sys.argv = sys.argv[2:]
    sys.path[0] = str(Path(program).parent)
    # Two runs must print the same numbers.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    measures = Measures()
    register_optimizer_step_post_hook(measures.note)
    try:
        runpy.run_path(program, run_name="__main__")
    finally:
        measures.write(directory)


if __name__ == "__main__":
    main()
