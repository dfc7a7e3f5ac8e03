"""What is measured, and by how many processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from traceloom.simulate.machine.parts import Span

SMALLEST = 1 << 10
"""Bytes of the smallest collective."""
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send")


@dataclass(frozen=True)
class Task:
    """What every process of a measurement does.

    Attributes:
        ranks: Processes.
        per_host: Of them on each host, which are numbered host by host.
        device: What they compute with: `cpu`, `cuda`, `xpu`.
        backend: What they communicate with: `gloo`, `nccl` ...
        max_bytes: The largest message.
        factor: From one size to the next.
        precision: A median is known well enough when half the width of its interval is no larger part of it.
        timeout_s: How long a rank waits for the others.
        meeting: Where they meet, an `init_method` of torch.distributed.
        threads: For the operators of each process; None: as many as torch takes.
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
        """Bytes of the messages."""
        sizes = [SMALLEST]
        while sizes[-1] * self.factor <= self.max_bytes:
            sizes.append(sizes[-1] * self.factor)
        return sizes

    def groups(self) -> Iterator[Group]:
        """The groups that communicate, one after the other, while nobody else does.

        The ranks of the first host, one rank of every host, and all; of messages the first two ranks of a host, and the
        first ranks of two hosts.
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
    """Ranks that communicate, and how.

    Attributes:
        span: Whether they are on one host or on several.
        ranks: Their numbers.
        kinds: Of collectives.
    """

    span: Span
    ranks: tuple[int, ...]
    kinds: tuple[str, ...]


class Series(NamedTuple):
    """One thing that was measured again and again.

    Attributes:
        what: A collective or a kernel.
        variety: Of a collective its span, of a kernel its element type.
        ranks: Of the group; of a kernel all that ran it at the same time.
        size: Bytes of a message or of a buffer, rows of a matrix.
        amount: Of a collective bytes on the bus, of a kernel operations or bytes that it moves.
        times_ns: Each time, of the slowest rank.
    """

    what: str
    variety: str
    ranks: int
    size: int
    amount: float
    times_ns: list[float]


class Recorded(NamedTuple):
    """What a process knows in the end; all know the same.

    Attributes:
        transfers: Of collectives.
        kernels: Of kernels; none where the peaks of the device are published.
        left_out: What could not be measured -> why.
        device: The name of the device.
        one_clock: Whether all ranks read the same clock.
    """

    transfers: list[Series]
    kernels: list[Series]
    left_out: dict[str, str]
    device: str
    one_clock: bool
