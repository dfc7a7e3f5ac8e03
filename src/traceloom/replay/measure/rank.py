"""One process of a measurement. All of them do the same in the same order, and know the same in the end."""

from __future__ import annotations

import contextlib
import platform
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from traceloom.analyze.collective.bandwidth import bus_factor
from traceloom.analyze.peaks import Peak, find
from traceloom.array_types import Array, Floats, Ints
from traceloom.errors import InputError, PartialError
from traceloom.replay.measure.collectives import collective
from traceloom.replay.measure.kernels import kernels
from traceloom.replay.measure.repeating import FEWEST, enough
from traceloom.replay.measure.task import Group, Recorded, Series, Task
from traceloom.replay.processes import Say, take_part

if TYPE_CHECKING:
    import torch

_BURST_NS = 2e5  # of kernels between two readings of a clock
_MOST_CALLS = 1000
_SLOW_NS = 1e8  # a kernel that takes longer is the last of its kind
FAILED_HINT = "another --backend or a smaller --max-size may do"
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def main() -> None:
    """What a process of ours does: one rank."""
    take_part(
        lambda job, say: {
            "recorded": msgspec.to_builtins(measure_here(msgspec.convert(job["task"], Task), job["process"], say))
        }
    )


def measure_here(task: Task, rank: int, say: Say) -> Recorded:
    """Take part in a measurement.

    Args:
        task: The same on all ranks.
        rank: Of this process.
        say: Is told what is being measured.

    Raises:
        InputError: slug `no-rendezvous`: the ranks do not find each other.
        PartialError: slug `rank-failed`: a kernel or the communication failed.
    """
    import torch

    if task.threads is not None:
        torch.set_num_threads(task.threads)
    device = torch.device(task.device)
    if task.device != "cpu":
        module = getattr(torch, task.device)
        module.set_device(rank % task.per_host)
        device = torch.device(task.device, rank % task.per_host)
    name = _name(device)
    with warnings.catch_warnings(), _met(task, rank) as control:
        warnings.simplefilter("ignore")
        try:
            process = _Process(task, rank, device, control)
            left_out: dict[str, str] = {}
            known = process.gathered(np.array([isinstance(find(name), Peak)])).all()
            of_kernels = [] if known else list(process.kernels(say))
            transfers = [series for group in task.groups() for series in process.transfers(group, left_out, say)]
            one_clock = process.one_clock
        except RuntimeError as error:  # as torch says whatever fails
            message = f"rank {rank} failed: {first_line(error)}"
            raise PartialError(message, slug="rank-failed", hint=FAILED_HINT) from error
    return Recorded(transfers, of_kernels, left_out, name, one_clock)


def first_line(error: Exception) -> str:
    """What an error of a library says, without the lines that only its authors need."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


@contextlib.contextmanager
def _met(task: Task, rank: int) -> Iterator[Any]:
    """All ranks together, for what is done inside: the group by which they tell each other times."""
    if task.ranks == 1:
        yield None
        return
    import torch.distributed as dist

    timeout = timedelta(seconds=task.timeout_s)
    try:
        dist.init_process_group(
            task.backend, init_method=task.meeting, rank=rank, world_size=task.ranks, timeout=timeout
        )
        control = dist.group.WORLD if task.backend == "gloo" else dist.new_group(backend="gloo", timeout=timeout)
    except (RuntimeError, ValueError, OSError) as error:
        message = f"rank {rank} does not find the others: {first_line(error)}"
        hint = "give torchrun another --master-port; GLOO_SOCKET_IFNAME names the network to use"
        raise InputError(message, slug="no-rendezvous", hint=hint) from error
    try:
        yield control
    finally:
        dist.destroy_process_group()


def _name(device: torch.device) -> str:
    """What the device calls itself."""
    import torch

    if device.type != "cpu":
        return str(getattr(torch, device.type).get_device_name(device))
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if Path("/proc/cpuinfo").exists() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or platform.machine())


@dataclass
class _Process:
    """One rank at work.

    Attributes:
        task: What is measured.
        rank: Of this process.
        device: Where.
        control: The group by which ranks tell each other their times; None of a rank that is alone.
    """

    task: Task
    rank: int
    device: torch.device
    control: Any

    @cached_property
    def one_clock(self) -> bool:
        """Whether all ranks read the same clock: those of one host do, but no event of a device is on it."""
        boot = _BOOT.read_text(encoding="ascii") if _BOOT.exists() else platform.node()
        own = np.frombuffer(boot.strip().encode()[:40].ljust(40), dtype=np.int64)
        return self.device.type == "cpu" and bool((self.gathered(own) == own).all())

    def transfers(self, group: Group, left_out: dict[str, str], say: Say) -> Iterator[Series]:
        """The collectives of a group, of all sizes; the reason of a kind that fails goes to `left_out`."""
        import torch.distributed as dist

        count = len(group.ranks)
        joined = dist.new_group(list(group.ranks), backend=self.task.backend)
        for kind in group.kinds:
            say(f"{kind} of {count} ranks")
            for nominal in self.task.sizes:
                call, size, reason = None, 0, ""
                if self.rank in group.ranks:
                    try:
                        call, size = collective(kind, nominal, group.ranks, joined, self.device)
                        call()
                    except (RuntimeError, ValueError) as error:
                        reason = first_line(error)
                states = self.gathered(np.array([bool(reason), size]))
                if states[:, 0].any():
                    left_out[f"{kind} of {count} ranks"] = reason or f"it failed on rank {states[:, 0].argmax()}"
                    break
                times = self.repeated(partial(self.burst, call, joined), group.ranks, one_clock=self.one_clock)
                size = int(states[:, 1].max())
                yield Series(kind, group.span, count, size, size * bus_factor(kind, count), times.tolist())

    def burst(self, call: Callable[[], object] | None, group: Any) -> Ints:
        """When collectives began and ended on this rank, all ranks being ready; shape (calls, 2), ns."""
        import torch
        import torch.distributed as dist

        spans = np.zeros((FEWEST, 2), dtype=np.int64)
        if call is None:  # of others
            return spans
        if self.device.type == "cpu":
            for span in spans:
                dist.barrier(group)
                span[0] = time.monotonic_ns()
                call()
                span[1] = time.monotonic_ns()
            return spans
        module = getattr(torch, self.device.type)
        ready = torch.zeros(1, device=self.device)
        events = [[module.Event(enable_timing=True) for _ in range(2)] for _ in spans]
        for begin, end in events:
            dist.all_reduce(ready, group=group)  # on the stream, as a barrier that no host waits for
            begin.record()
            call()
            end.record()
        module.synchronize()
        spans[:, 1] = [round(begin.elapsed_time(end) * 1e6) for begin, end in events]
        return spans

    def kernels(self, say: Say) -> Iterator[Series]:
        """The kernels, on all ranks at the same time, as they compute in a job."""
        ranks = range(self.task.ranks)
        ended = ("", "")
        for kernel in kernels(self.device):
            kind = kernel.name, kernel.element_type
            if kind == ended:
                continue
            say(f"{kernel.name.replace('_', ' ')} {kernel.element_type}")
            self.per_call(kernel.call, 1)
            calls = int(np.clip(_BURST_NS / self.per_call(kernel.call, 1), 1, _MOST_CALLS))
            times = self.repeated(partial(self.bursts, kernel.call, calls), ranks, one_clock=False)
            yield Series(*kind, self.task.ranks, kernel.size, kernel.amount, times.tolist())
            if np.median(times) > _SLOW_NS:
                ended = kind

    def bursts(self, call: Callable[[], object], calls: int) -> Floats:
        """Time of a call in several bursts of so many, as if each began at 0; shape (bursts, 2), ns."""
        return np.array([(0.0, self.per_call(call, calls)) for _ in range(FEWEST)])

    def per_call(self, call: Callable[[], object], calls: int) -> float:
        """What one of so many calls takes, ns."""
        import torch

        if self.device.type == "cpu":
            begin = time.monotonic_ns()
            for _ in range(calls):
                call()
            return max(time.monotonic_ns() - begin, 1) / calls
        module = getattr(torch, self.device.type)
        first, last = (module.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(calls):
            call()
        last.record()
        module.synchronize()
        return max(float(first.elapsed_time(last)) * 1e6, 1.0) / calls

    def repeated(self, burst: Callable[[], Ints | Floats], members: Sequence[int], *, one_clock: bool) -> Floats:
        """Times until their median is known: on one clock from the last beginning to the last end, else the longest."""
        times = np.empty(0)
        burst()
        while not enough(times, self.task.precision):
            begin, end = np.moveaxis(self.gathered(burst())[list(members)], 2, 0)  # (members, calls) each
            taken = end.max(axis=0) - begin.max(axis=0) if one_clock else (end - begin).max(axis=0)
            times = np.concatenate([times, np.maximum(taken, 1)])
        return times

    def gathered(self, own: Array) -> Array:
        """An array of every rank, all of the same shape; shape (ranks, ...)."""
        if self.control is None:
            return own[None]
        import torch
        import torch.distributed as dist

        sent = torch.from_numpy(own.copy())
        received = [torch.empty_like(sent) for _ in range(self.task.ranks)]
        dist.all_gather(received, sent, group=self.control)
        stacked: Array = torch.stack(received).numpy()
        return stacked
