"""One process of a measurement: collectives, kernels, repetitions."""

from __future__ import annotations

import contextlib
import math
import platform
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from traceloom.analyze.bandwidth import compute_bus_factor
from traceloom.analyze.placed_calls import Peak, find
from traceloom.errors import InputError, PartialError
from traceloom.trace.array_types import Array, Floats, Ints
from traceloom.workload.replay.ranks import StatusCallback, take_part
from traceloom.workload.simulate.machine import Span

if TYPE_CHECKING:
    import torch


SMALLEST = 1 << 10
"""Bytes of the smallest collective."""
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send")


@dataclass(frozen=True)
class Task:
    """The task of every process of a measurement.

    Attributes:
        ranks: Number of processes.
        per_host: Processes on each host; they are numbered host by host.
        device: Device type: `cpu`, `cuda`, `xpu`.
        backend: Of torch.distributed: `gloo`, `nccl` ...
        max_bytes: The largest message.
        factor: Ratio of consecutive sizes.
        precision: Max half width of the confidence interval of a median, relative to it.
        timeout_s: How long a rank waits for the others.
        meeting: An `init_method` of torch.distributed.
        threads: Threads for the operators of each process; None for torch's default.
    """

    ranks: int
    per_host: int
    device: str
    backend: str
    max_bytes: int
    factor: int
    precision: float
    timeout_s: float
    meeting: str
    threads: int | None = None

    @property
    def sizes(self) -> list[int]:
        sizes = [SMALLEST]
        while sizes[-1] * self.factor <= self.max_bytes:
            sizes.append(sizes[-1] * self.factor)
        return sizes

    def groups(self) -> Iterator[Group]:
        """Yields the groups that communicate, one at a time.

        These are the ranks of the first host, one rank of every host, and all; for messages the
        first two ranks of a host, and the first ranks of two hosts.
        """
        hosts = self.ranks // self.per_host
        kinds = COLLECTIVES[:-1]
        if self.per_host > 1:
            yield Group("inside", tuple(range(self.per_host)), kinds)
            yield Group("inside", (0, 1), ("send",))
        if hosts > 1:
            yield Group("between", tuple(range(0, self.ranks, self.per_host)), kinds)
            yield Group("between", (0, self.per_host), ("send",))
        if hosts > 1 and self.per_host > 1:
            yield Group("between", tuple(range(self.ranks)), kinds)


class Group(NamedTuple):
    """A group of ranks and the collectives to measure in it.

    Attributes:
        span: Whether they are on one host or on several.
        ranks: Their numbers.
        kinds: Kinds of collectives.
    """

    span: Span
    ranks: tuple[int, ...]
    kinds: tuple[str, ...]


class Series(NamedTuple):
    """Repeated measurements of one collective or kernel.

    Attributes:
        what: A collective or a kernel.
        variety: The span of a collective, the element type of a kernel.
        ranks: Size of the group; for a kernel the number of ranks that ran it concurrently.
        size: Bytes of a message or of a buffer, rows of a matrix.
        amount: Bytes on the bus of a collective; FLOPs or moved bytes of a kernel.
        times_ns: Times of the slowest rank.
    """

    what: str
    variety: str
    ranks: int
    size: int
    amount: float
    times_ns: list[float]


class Recorded(NamedTuple):
    """The results of a measurement, which are equal in all processes.

    Attributes:
        transfers: Series of collectives.
        kernels: Series of kernels; empty if the peaks of the device are published.
        omitted: What could not be measured -> why.
        device: The name of the device.
        one_clock: Whether all ranks read the same clock.
    """

    transfers: list[Series]
    kernels: list[Series]
    omitted: dict[str, str]
    device: str
    one_clock: bool


_ELEMENT = 4  # bytes of a float32


def collective(
    kind: str, size_bytes: int, members: Sequence[int], group: Any, device: torch.device
) -> tuple[Callable[[], object], int]:
    """Returns a call of a collective with its own buffers, and its size as in the column
    `size_bytes`.

    Args:
        kind: One of `COLLECTIVES`.
        size_bytes: Approximate size.
        members: Ranks of the group; the first is the root, or the sender.
        group: Of torch.distributed.
        device: Device of the buffers.
    """
    import torch
    import torch.distributed as dist

    part = max(size_bytes // _ELEMENT // len(members), 1)
    buffer = torch.zeros(part * len(members), device=device)
    calls: dict[str, Callable[[], object]] = {}
    if kind in {"all_gather", "reduce_scatter"}:
        summarize_rank = torch.zeros(part, device=device)
        # the newer names do not emit warnings
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        calls["all_gather"] = lambda: gather(buffer, summarize_rank, group=group)
        calls["reduce_scatter"] = lambda: scatter(summarize_rank, buffer, group=group)
    elif kind == "all_to_all":
        received = torch.empty_like(buffer)
        calls["all_to_all"] = lambda: dist.all_to_all_single(received, buffer, group=group)
    elif kind == "send":
        sends = dist.get_rank() == members[0]
        calls["send"] = lambda: (
            dist.send(buffer, members[1], group=group)
            if sends
            else dist.recv(buffer, members[0], group=group)
        )
    calls["all_reduce"] = lambda: dist.all_reduce(buffer, group=group)
    calls["broadcast"] = lambda: dist.broadcast(buffer, members[0], group=group)
    return calls[kind], buffer.numel() * _ELEMENT


_ROWS = {"cpu": (128, 1024)}
_ROWS_ON_DEVICES = 256, 8192
_MOVED = {"cpu": 1 << 28}  # bytes that exceed every cache
_MOVED_ON_DEVICES = 1 << 30
_PRODUCTS = {"cpu": {"fp32": "float32", "fp64": "float64", "bf16": "bfloat16"}}
_MATRIX_UNITS = {"fp32": "float32", "tf32": "float32", "bf16": "bfloat16", "fp16": "float16"}


class Kernel(NamedTuple):
    """A kernel with its own buffers.

    Attributes:
        name: `matrix_product`, `copy` or `triad`.
        element_type: As named by peaks.
        size: Rows and columns of each matrix, or bytes of each buffer.
        amount: FLOPs, or bytes that it reads and writes.
        call: Runs it.
    """

    name: str
    element_type: str
    size: int
    amount: int
    call: Callable[[], object]


def kernels(device: torch.device) -> Iterator[Kernel]:
    """Yields the kernels of a device, matrix products from the smallest to the largest; only the
    buffers of one exist at a time.
    """
    import torch

    size = _MOVED.get(device.type, _MOVED_ON_DEVICES)
    first, second, third = (
        torch.ones(size // torch.float32.itemsize, device=device) for _ in range(3)
    )
    yield Kernel("copy", "fp32", size, 2 * size, partial(third.copy_, first))
    yield Kernel(
        "triad", "fp32", size, 3 * size, partial(torch.add, first, second, alpha=3.0, out=third)
    )
    del first, second, third
    low, high = _ROWS.get(device.type, _ROWS_ON_DEVICES)
    before = torch.get_float32_matmul_precision()
    for name, dtype in _PRODUCTS.get(device.type, _MATRIX_UNITS).items():
        torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
        rows = low
        while rows <= high:
            left, right, out = (
                torch.rand(rows, rows, device=device).to(getattr(torch, dtype)) for _ in range(3)
            )
            yield Kernel(
                "matrix_product", name, rows, 2 * rows**3, partial(torch.mm, left, right, out=out)
            )
            rows *= 2
    torch.set_float32_matmul_precision(before)


FEWEST = 8
"""Number of times before a median is estimated."""
MOST = 400
LONGEST_NS = 3e8
"""Time budget for all repetitions of one measurement."""
_SIGMAS = 1.96  # for a 95 % confidence interval


def half_width(times: Floats) -> float:
    """Returns half the width of the 95 % confidence interval of the median, relative to the median;
    needs at least `FEWEST` times.

    The interval ends at values of the sample, so it makes no assumption about the distribution.

    Example:
        >>> half_width(np.array([9.0, 10, 10, 10, 10, 10, 10, 10, 10, 11]))
        0.0
    """
    ordered = np.sort(times)
    skipped_count = math.floor(times.size / 2 - _SIGMAS * math.sqrt(times.size) / 2)
    low, high = ordered[max(skipped_count, 0)], ordered[-1 - max(skipped_count, 0)]
    return float((high - low) / 2 / np.median(times))


def enough(times: Floats, precision: float) -> bool:
    """Returns whether the median is precise enough, or the time budget is spent.

    The times are those of all ranks, so all ranks decide equally.
    """
    if times.size < FEWEST:
        return False
    return times.size >= MOST or times.sum() >= LONGEST_NS or half_width(times) <= precision


_BURST_NS = 2e5  # duration of kernels between two clock readings
_MOST_CALLS = 1000
_SLOW_NS = 1e8  # a kernel that takes longer is the last measured size of its kind
FAILED_HINT = "another --backend or a smaller --max-size may do"
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def main() -> None:
    """Runs one rank of a measurement in a process of its own."""
    take_part(
        lambda job, report_progress: {
            "recorded": msgspec.to_builtins(
                measure_here(msgspec.convert(job["task"], Task), job["process"], report_progress)
            )
        }
    )


def measure_here(task: Task, rank: int, on_status: StatusCallback) -> Recorded:
    """Takes part in a measurement.

    Args:
        task: The task, the same on all ranks.
        rank: Rank of this process.
        on_status: Called with a status message.

    Raises:
        InputError: slug `no-rendezvous`: the ranks cannot connect.
        PartialError: slug `rank-failed`: a kernel or the communication failed.
    """
    import torch

    if task.threads is not None:
        torch.set_num_threads(task.threads)
    device = torch.device(task.device)
    if task.device != "cpu":
        getattr(torch, task.device).set_device(rank % task.per_host)
        device = torch.device(task.device, rank % task.per_host)
    name = _name(device)
    with warnings.catch_warnings(), _add_meetings(task, rank) as control:
        warnings.simplefilter("ignore")
        try:
            process = _Process(task, rank, device, control)
            omitted: dict[str, str] = {}
            is_known = process.gathered(np.array([isinstance(find(name), Peak)])).all()
            kernel_series = [] if is_known else list(process.kernels(on_status))
            transfers = [
                series
                for group in task.groups()
                for series in process.transfers(group, omitted, on_status)
            ]
            one_clock = process.one_clock
        except RuntimeError as error:  # torch's type of any failure
            raise PartialError(
                f"rank {rank} failed: {first_line(error)}", slug="rank-failed", hint=FAILED_HINT
            ) from error
    return Recorded(transfers, kernel_series, omitted, name, one_clock)


def first_line(error: Exception) -> str:
    """Returns the first line of a library's error message."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


@contextlib.contextmanager
def _add_meetings(task: Task, rank: int) -> Iterator[Any]:
    """Context with all ranks connected; yields the group over which they exchange times."""
    if task.ranks == 1:
        yield None
        return
    import torch.distributed as dist

    timeout = timedelta(seconds=task.timeout_s)
    try:
        dist.init_process_group(
            task.backend,
            init_method=task.meeting,
            rank=rank,
            world_size=task.ranks,
            timeout=timeout,
        )
        control = (
            dist.group.WORLD
            if task.backend == "gloo"
            else dist.new_group(backend="gloo", timeout=timeout)
        )
    except (RuntimeError, ValueError, OSError) as error:
        raise InputError(
            f"rank {rank} does not find the others: {first_line(error)}",
            slug="no-rendezvous",
            hint="give torchrun another --master-port; GLOO_SOCKET_IFNAME names the network to use",
        ) from error
    try:
        yield control
    finally:
        dist.destroy_process_group()


def _name(device: torch.device) -> str:
    import torch

    if device.type != "cpu":
        return str(getattr(torch, device.type).get_device_name(device))
    lines = (
        Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if Path("/proc/cpuinfo").exists()
        else []
    )
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or platform.machine())


@dataclass
class _Process:
    """One rank of a measurement.

    Attributes:
        task: The task.
        rank: Rank of this process.
        device: Its device.
        control: The group over which ranks exchange their times; None for a single rank.
    """

    task: Task
    rank: int
    device: torch.device
    control: Any

    @cached_property
    def one_clock(self) -> bool:
        """Whether all ranks read the same clock: those on one host do, but device events are not on
        it.
        """
        boot = _BOOT.read_text(encoding="ascii") if _BOOT.exists() else platform.node()
        boot_id = np.frombuffer(boot.strip().encode()[:40].ljust(40), dtype=np.int64)
        return self.device.type == "cpu" and bool((self.gathered(boot_id) == boot_id).all())

    def transfers(
        self, group: Group, omitted: dict[str, str], on_status: StatusCallback
    ) -> Iterator[Series]:
        """Yields the collectives of a group, of all sizes; the reason of a kind that fails goes to
        `omitted`.
        """
        import torch.distributed as dist

        count = len(group.ranks)
        joined = dist.new_group(list(group.ranks), backend=self.task.backend)
        for kind in group.kinds:
            on_status(f"{kind} of {count} ranks")
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
                    omitted[f"{kind} of {count} ranks"] = (
                        reason or f"it failed on rank {states[:, 0].argmax()}"
                    )
                    break
                times = self.repeated(
                    partial(self.burst, call, joined), group.ranks, one_clock=self.one_clock
                )
                size = int(states[:, 1].max())
                yield Series(
                    kind,
                    group.span,
                    count,
                    size,
                    size * compute_bus_factor(kind, count),
                    times.tolist(),
                )

    def burst(self, call: Callable[[], object] | None, group: Any) -> Ints:
        """Returns start and end times of collectives on this rank after all ranks are ready; shape
        (calls, 2), ns.
        """
        import torch
        import torch.distributed as dist

        spans = np.zeros((FEWEST, 2), dtype=np.int64)
        if call is None:  # this rank is not a member
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
        for start, end in events:
            dist.all_reduce(ready, group=group)  # on the stream, as a barrier without a host wait
            start.record()
            call()
            end.record()
        module.synchronize()
        spans[:, 1] = [round(start.elapsed_time(end) * 1e6) for start, end in events]
        return spans

    def kernels(self, on_status: StatusCallback) -> Iterator[Series]:
        """Yields the kernels, run on all ranks concurrently, as in a job."""
        ranks = range(self.task.ranks)
        ended = ("", "")
        for kernel in kernels(self.device):
            kind = kernel.name, kernel.element_type
            if kind == ended:
                continue
            on_status(f"{kernel.name.replace('_', ' ')} {kernel.element_type}")
            self.per_call(kernel.call, 1)
            calls = int(np.clip(_BURST_NS / self.per_call(kernel.call, 1), 1, _MOST_CALLS))
            times = self.repeated(partial(self.bursts, kernel.call, calls), ranks, one_clock=False)
            yield Series(*kind, self.task.ranks, kernel.size, kernel.amount, times.tolist())
            if np.median(times) > _SLOW_NS:
                ended = kind

    def bursts(self, call: Callable[[], object], calls: int) -> Floats:
        """Returns the time of a call in several bursts of `calls`, as if each started at 0; shape
        (bursts, 2), ns.
        """
        return np.array([(0.0, self.per_call(call, calls)) for _ in range(FEWEST)])

    def per_call(self, call: Callable[[], object], calls: int) -> float:
        """Returns the time of one of several calls, ns."""
        import torch

        if self.device.type == "cpu":
            start_ns = time.monotonic_ns()
            for _ in range(calls):
                call()
            return max(time.monotonic_ns() - start_ns, 1) / calls
        module = getattr(torch, self.device.type)
        first, last = (module.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(calls):
            call()
        last.record()
        module.synchronize()
        return max(float(first.elapsed_time(last)) * 1e6, 1.0) / calls

    def repeated(
        self, burst: Callable[[], Ints | Floats], members: Sequence[int], *, one_clock: bool
    ) -> Floats:
        """Returns times until their median is precise: on one clock from the last start to the last
        end, else the longest.
        """
        times = np.empty(0)
        burst()
        while not enough(times, self.task.precision):
            start_ns, end = np.moveaxis(
                self.gathered(burst())[list(members)], 2, 0
            )  # (members, calls) each
            durations_ns = (
                end.max(axis=0) - start_ns.max(axis=0)
                if one_clock
                else (end - start_ns).max(axis=0)
            )
            times = np.concatenate([times, np.maximum(durations_ns, 1)])
        return times

    def gathered(self, local: Array) -> Array:
        """Gathers an array from every rank, all of the same shape; shape (ranks, ...)."""
        if self.control is None:
            return local[None]
        import torch
        import torch.distributed as dist

        sent = torch.from_numpy(local.copy())
        received = [torch.empty_like(sent) for _ in range(self.task.ranks)]
        dist.all_gather(received, sent, group=self.control)
        stacked: Array = torch.stack(received).numpy()
        return stacked
