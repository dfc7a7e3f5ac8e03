"""The two networks of ASTRA-sim's analytical back end: one that knows no other messages, one whose links are queues."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from traceloom.array_types import Floats, Ints
from traceloom.simulate.astra_sim.clock import Clock, whole_ns

Arrive = Callable[[Any], None]
Link = tuple[int, int]


@dataclass(frozen=True, slots=True)
class AnalyticalNetwork:
    """What the network file says.

    Attributes:
        topologies: Ring, FullyConnected or Switch, of each dimension.
        sizes: Ranks of each dimension.
        bandwidths: Of a link of each dimension, in 2^30 B/s ("GB/s").
        latencies: Of a link of each dimension, in ns.
    """

    topologies: tuple[str, ...]
    sizes: tuple[int, ...]
    bandwidths: tuple[float, ...]
    latencies: tuple[float, ...]

    def bytes_per_ns(self, dimension: int) -> float:
        """Bandwidth of a dimension's links."""
        return self.bandwidths[dimension] * (1 << 30) / 1_000_000_000

    def delays(self, source: Ints, target: Ints, size: Ints) -> Ints:
        """How long messages take that meet no others, in ns: each within the first dimension that it must cross."""
        delay = np.zeros(len(source), np.float64)
        stride = 1
        open_yet = np.ones(len(source), np.bool_)
        for d, count in enumerate(self.sizes):
            forward = (target // stride - source // stride) % count
            crosses = open_yet & (forward != 0)
            open_yet &= ~crosses
            hops = {"Ring": np.minimum(forward, count - forward), "FullyConnected": 1, "Switch": 2}[self.topologies[d]]
            time: Floats = hops * self.latencies[d] + size / self.bytes_per_ns(d)
            delay = np.where(crosses, time, delay)
            stride *= count
        return whole_ns(delay)

    def delay(self, source: int, target: int, size: int) -> int:
        """How long one message takes that meets no others, in ns."""
        for d, count in enumerate(self.sizes):
            forward = (target - source) % count
            if forward:
                hops = {"Ring": min(forward, count - forward), "FullyConnected": 1, "Switch": 2}[self.topologies[d]]
                return int(hops * self.latencies[d] + size / self.bytes_per_ns(d))
            source, target = source // count, target // count
        return 0

    def route(self, source: int, target: int) -> list[Link]:
        """The links from one rank to another in one dimension; the switch is the rank after the last one."""
        count = self.sizes[0]
        if self.topologies[0] == "FullyConnected":
            return [(source, target)]
        if self.topologies[0] == "Switch":
            return [(source, count), (count, target)]
        forward = (target - source) % count
        step, hops = (1, forward) if forward <= count - forward else (-1, count - forward)
        return [((source + k * step) % count, (source + (k + 1) * step) % count) for k in range(hops)]


class Links:
    """The links of a one-dimensional machine: each serves one message after the other, in the order they come.

    A message occupies a link for its bytes over the bandwidth, rounded down, and is at the other end of it that time
    and the latency after it was taken, rounded down together; then it asks for its next link.

    Args:
        fabric: One dimension.
        clock: When things happen.
    """

    def __init__(self, fabric: AnalyticalNetwork, clock: Clock) -> None:
        self._clock, self._fabric = clock, fabric
        self._rate, self._latency = fabric.bytes_per_ns(0), fabric.latencies[0]
        self._waiting: dict[Link, deque[_Travel]] = {}
        self.in_flight = 0
        self.usage: dict[Link, list[int]] = {}  # bytes, time busy, time that messages waited for it

    def route(self, source: int, target: int) -> list[Link]:
        """The links from one rank to another."""
        return self._fabric.route(source, target)

    def send(self, source: int, target: int, size: int, arrive: Arrive, what: Any) -> None:
        """Send a message now; `arrive(what)` is called when it is there."""
        self.in_flight += 1
        self._take(_Travel(size, self.route(source, target), 0, arrive, what, self._clock.now))

    def occupied_ns(self, size: int) -> int:
        """How long a message occupies a link."""
        return int(size / self._rate)

    def _take(self, travel: _Travel) -> None:
        link = travel.links[travel.next]
        waiting = self._waiting.get(link)
        if waiting is not None:
            travel.since = self._clock.now
            waiting.append(travel)
        else:
            self._waiting[link] = deque()
            self._serve(link, travel)

    def _serve(self, link: Link, travel: _Travel) -> None:
        now = self._clock.now
        occupied = travel.size / self._rate
        self._clock.at(now + int(self._latency + occupied), self._there, travel)
        self._clock.at(now + int(occupied), self._free, link)
        used = self.usage.setdefault(link, [0, 0, 0])
        used[0] += travel.size
        used[1] += int(occupied)
        used[2] += now - travel.since

    def _there(self, travel: _Travel) -> None:
        travel.next += 1
        travel.since = self._clock.now
        if travel.next < len(travel.links):
            self._take(travel)
        else:
            self.in_flight -= 1
            travel.arrive(travel.what)

    def _free(self, link: Link) -> None:
        waiting = self._waiting[link]
        if waiting:
            self._serve(link, waiting.popleft())
        else:
            del self._waiting[link]

    def add(self, usage: Mapping[Link, Sequence[int]]) -> None:
        """Count what links did elsewhere."""
        for link, values in usage.items():
            total = self.usage.setdefault(link, [0, 0, 0])
            total[:] = [before + more for before, more in zip(total, values, strict=True)]

    @property
    def idle(self) -> bool:
        """Whether no message is under way."""
        return not self.in_flight and not self._waiting


@dataclass(slots=True)
class _Travel:
    """A message on its way: `next` is the link that it asks for, since when."""

    size: int
    links: Sequence[Link]
    next: int
    arrive: Arrive
    what: Any
    since: int
