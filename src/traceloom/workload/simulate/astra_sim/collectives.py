"""Chunks, phases, links.

Definitions: astra-sim 518bd51 with its analytical network 599a047; what differs from the textbook is said here.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from heapq import heappop, heappush
from typing import Any

import numpy as np

from traceloom.errors import UsageError
from traceloom.graph.evaluate import MAX_DURATION_NS
from traceloom.trace.array_types import Floats, Ints
from traceloom.workload.collective_algorithms import (
    Schedule,
    build_direct,
    build_halving_doubling,
    build_ring,
    build_single_tree,
    compute_parents,
)

FAST_DELAY_NS = 10  # of a group's endpoints, whatever the configuration says


@dataclass(frozen=True, eq=False, slots=True)
class CollectivePhase:
    """A part of a collective that stays within one dimension.

    Attributes:
        dimension: Whose queue it waits in.
        schedule: Its messages, among positions of the dimension.
        stride: Ranks between neighbours of the dimension; 0 where the positions are those of a group.
        delay_ns: What an endpoint needs before its first message, and after each one it receives.
        window: How many messages a rank has under way at most, where it sends the next one for each that is reduced;
            0 where it goes from round to round.
        reduced: Bytes that are reduced, of each message in the order of arrival, where there is a window.
        backwards: Whether the ring goes the other way round, as the last half of an all_reduce over dimensions does.
    """

    dimension: int
    schedule: Schedule
    stride: int
    delay_ns: int
    window: int = 0
    reduced: tuple[int, ...] = ()
    backwards: bool = False


@dataclass(frozen=True, slots=True)
class Dimensions:
    """The machine as collectives see it.

    Attributes:
        sizes: Ranks of each dimension, innermost first.
        implementations: Of each kind (all_reduce, ...): the algorithm of each dimension.
        splits: Into how many chunks a collective is cut.
        baseline: Whether an all_reduce is done in full in each dimension.
        delay_ns: Of an endpoint.
    """

    sizes: tuple[int, ...]
    implementations: dict[str, tuple[str, ...]]
    splits: int
    baseline: bool
    delay_ns: int

    @property
    def ranks(self) -> int:
        """All ranks."""
        return math.prod(self.sizes)

    @property
    def windows(self) -> bool:
        """Whether an algorithm limits how many messages of a rank are under way."""
        return any(name[-1].isdigit() for names in self.implementations.values() for name in names)

    def chunks(self, kind: str, size: int) -> tuple[int, int]:
        """How many chunks, and their bytes: no chunk but an all_gather's has fewer bytes than there
        are ranks.

        Raises:
            UsageError: `bad-collective`: an all_gather of fewer bytes than chunks, which ASTRA-sim never ends.
        """
        chunk = size // self.splits
        if kind != "all_gather" and self.ranks > chunk:
            chunk, size = self.ranks, self.ranks * self.splits
        if not chunk:
            raise UsageError(
                f"ASTRA-sim never ends an all_gather of {size} bytes in {self.splits} chunks",
                slug="bad-collective",
                hint="set preferred-dataset-splits to 1",
            )
        return -(-size // chunk), chunk

    def phases(
        self,
        kind: str,
        chunk: int,
        members: int,
        trees: Counter[tuple[str, int]],
        dimensions: Sequence[bool] | None,
    ) -> list[CollectivePhase]:
        """The phases of one chunk.

        Args:
            kind: all_reduce, all_gather, reduce_scatter, all_to_all.
            chunk: Its bytes.
            members: Ranks of the group; all ranks use the dimensions, fewer a single one.
            trees: How many trees of a kind and dimension came before, which decides the tree; counted on.
            dimensions: Which dimensions take part; all where not given.

        Raises:
            UsageError: slugs `bad-collective`, `no-such-schedule`, `bad-astra-sim-config`: ASTRA-sim stops at it, or
                never ends it.
        """
        names = self.implementations.get(kind)
        if not names:
            raise UsageError(
                f"the system file has no {kind.replace('_', '-')}-implementation",
                slug="bad-astra-sim-config",
            )
        if members < self.ranks:
            return [
                self._phase(
                    kind, names[0] if len(names) == 1 else "ring", chunk, (0, members, 0), 0
                )
            ]
        along = self._along(names)
        order = [
            d
            for d in range(len(along))
            if dimensions is None or (d < len(dimensions) and dimensions[d])
        ]
        if not order:
            raise UsageError(
                f"ASTRA-sim never ends an {kind} along none of its dimensions",
                slug="bad-collective",
                hint="leave involved_dim out",
            )
        phase_order = [(kind, d) for d in (reversed(order) if kind == "all_gather" else order)]
        if kind == "all_reduce" and not self.baseline:
            phase_order = [("reduce_scatter", d) for d in order[:-1]] + [("all_reduce", order[-1])]
            phase_order += [("all_gather", d) for d in reversed(order[:-1])]
        phases = []
        for part, d in phase_order:
            ranks, stride = along[d]
            phase = self._phase(part, names[d], chunk, (d, ranks, stride), trees[kind, d])
            if (
                names[d] == "doubleBinaryTree"
            ):  # an all_reduce of the chunk, whatever the phase should be
                phases.append(phase)
                trees[kind, d] += 1
            else:
                phases.append(
                    replace(phase, backwards=kind == "all_reduce" and part == "all_gather")
                )
                chunk = {"reduce_scatter": chunk // ranks, "all_gather": chunk * ranks}.get(
                    part, chunk
                )
        return phases

    def _along(self, names: Sequence[str]) -> list[tuple[int, int]]:
        """Ranks of each dimension, and the step between neighbours; a `one...` takes all ranks, and
        is the last.
        """
        along: list[tuple[int, int]] = []
        stride = 1
        for name, size in zip(names, self.sizes, strict=False):
            if name.startswith("one"):
                return [*along, (self.ranks, 1)]
            along.append((size, stride))
            stride *= size
        return along

    def _phase(
        self, kind: str, name: str, chunk: int, along: tuple[int, int, int], tree: int
    ) -> CollectivePhase:
        """One phase along (dimension, ranks, stride)."""
        dimension, ranks, stride = along
        if name == "doubleBinaryTree" and (not stride or ranks & (ranks - 1)):
            raise UsageError(
                f"ASTRA-sim crashes at a doubleBinaryTree of {ranks} ranks"
                + ("" if stride else ", which are not all ranks"),
                slug="bad-collective",
                hint=f"set {kind.replace('_', '-')}-implementation to ring",
            )
        algorithm = name[3].lower() + name[4:] if name.startswith("one") else name
        if not algorithm.startswith("direct"):
            schedule = _build_phase(kind, algorithm, ranks, chunk, tree=tree % 2)
            return CollectivePhase(
                dimension, schedule, stride, self.delay_ns if stride else FAST_DELAY_NS
            )
        peer_count = ranks - 1
        window = min(int(algorithm.removeprefix("direct") or peer_count), peer_count)
        schedule, reduced = _build_direct_phase(kind, ranks, chunk, window, is_whole=bool(stride))
        rounds = window == peer_count and kind != "all_reduce"
        return CollectivePhase(
            dimension,
            schedule,
            stride,
            self.delay_ns if stride else FAST_DELAY_NS,
            0 if rounds else window,
            reduced,
        )


@lru_cache(maxsize=256)
def _build_direct_phase(
    kind: str, ranks: int, chunk: int, window: int, *, is_whole: bool
) -> tuple[Schedule, tuple[int, ...]]:
    """Messages to all others, and the bytes that are reduced of each one that arrives.

    The first messages of a window follow from nothing. ASTRA-sim takes all that follow in turns of
    a window for nothing and a window of reductions (in a group, of as many windows of them as there
    are others); an all_reduce reduces in every second turn only.
    """
    schedule = build_direct(kind, ranks, chunk if kind == "all_gather" else chunk // ranks * ranks)
    if not window:
        text = (
            "with direct0"
            if ranks > 1
            else f"a direct {kind} of one rank, which has nothing to send"
        )
        hint = "use direct" if ranks > 1 else "use ring, or leave the collective out"
        raise UsageError(f"ASTRA-sim never begins {text}", slug="bad-collective", hint=hint)
    peer_count = ranks - 1
    round_number, position = np.divmod(
        window + np.arange(len(schedule.rounds) * peer_count), window * (2 if is_whole else ranks)
    )
    reduces = (position >= window) & (
        (kind == "reduce_scatter") | ((kind == "all_reduce") & (round_number % 2 == 0))
    )
    reduced = np.where(reduces, chunk // ranks, 0)
    rounds = tuple(
        replace(part, reduced=np.repeat(reduced_bytes, ranks))
        for part, reduced_bytes in zip(
            schedule.rounds, reduced.reshape(-1, peer_count), strict=True
        )
    )
    return replace(schedule, rounds=rounds), tuple(reduced.tolist())


@lru_cache(maxsize=256)
def _build_phase(kind: str, name: str, ranks: int, chunk: int, *, tree: int) -> Schedule:
    """The schedule of one phase; all messages of a round have the same bytes, rounded down."""
    size = chunk if kind == "all_gather" else chunk // ranks * ranks
    if name == "ring":
        return build_ring(kind, ranks, size)
    if name == "halvingDoubling":
        return _build_halving_phase(kind, ranks, chunk)
    if name == "doubleBinaryTree":
        parent = compute_parents(ranks, 0 if tree else ranks - 1)
        schedule = build_single_tree(parent, chunk)
        inner = np.isin(np.arange(ranks), parent)
        return replace(  # who hands on what comes from above pays for a reduction of it
            schedule,
            rounds=tuple(
                part
                if part.reduced.any()
                else replace(part, reduced=np.where(inner[part.target], chunk, 0))
                for part in schedule.rounds
            ),
        )
    raise UsageError(
        f"ASTRA-sim does no {kind} with {name}", slug="bad-collective", hint="use ring or direct"
    )


def _build_halving_phase(kind: str, ranks: int, chunk: int) -> Schedule:
    """Halving and doubling: a message is reduced at the price of the next, smaller one, the last
    one for nothing.

    Raises:
        UsageError: slugs `bad-collective`, `no-such-schedule`.
    """
    if ranks < 2:
        text = f"a halvingDoubling {kind} of one rank has no messages"
        raise UsageError(text, slug="bad-collective", hint="use ring, or leave the collective out")
    schedule = build_halving_doubling(kind, ranks, ranks)
    steps = len(schedule.rounds) // (2 if kind == "all_reduce" else 1)
    halves = [chunk >> (k + 1) for k in range(steps)]
    sizes = {
        "reduce_scatter": halves,
        "all_reduce": [
            *halves,
            *(chunk >> (steps + 1) << (k + 1) for k in range(steps)),
        ],  # what was rounded is lost
        "all_gather": [chunk << k for k in range(steps)],
    }[kind]
    if not min(sizes):
        raise UsageError(
            f"ASTRA-sim stops at a halvingDoubling {kind} of {chunk} bytes among {ranks} ranks, which comes to "
            "messages of no bytes",
            slug="bad-collective",
            hint="use ring",
        )
    reduced = (
        [0] * len(sizes)
        if kind == "all_gather"
        else [*halves[1:], 0, *([0] * (len(sizes) - steps))]
    )
    return replace(
        schedule,
        rounds=tuple(
            replace(part, bytes=np.full(ranks, size), reduced=np.full(ranks, reduced_bytes))
            for part, size, reduced_bytes in zip(schedule.rounds, sizes, reduced, strict=True)
        ),
    )


def get_members(phase: CollectivePhase, rank: int, group: Sequence[int]) -> Ints:
    """The ranks at the positions of a phase's schedule, for one rank of the group."""
    if not phase.stride:
        return np.asarray(group, np.int64)
    position = rank // phase.stride % phase.schedule.ranks
    members = rank + (np.arange(phase.schedule.ranks) - position) * phase.stride
    return members[::-1] if phase.backwards else members


Event = Callable[[Any], None]


def make_too_long_error() -> UsageError:
    """The error for what takes longer than anybody can wait."""
    return UsageError(
        "these times add up to more than 100 days",
        slug="times-too-long",
        hint="bandwidths are in 2^30 B/s, latencies in ns, durations in microseconds",
    )


def convert_to_ns(times: Floats) -> Ints:
    """Times in whole ns, rounded down.

    Raises:
        UsageError: slug `times-too-long`.
    """
    if times.size and not times.max() < MAX_DURATION_NS:
        raise make_too_long_error()
    return times.astype(np.int64)


class Clock:
    """Events to come.

    Attributes:
        now: Time of the event that is happening, in ns.
    """

    def __init__(self) -> None:
        self.now = 0
        self._times: list[int] = []
        self._events: dict[int, list[tuple[Event, Any]]] = {}

    def at(self, time: int, event: Event, payload: Any = None) -> None:
        """Call `event(what)` at a time that is not before now.

        Raises:
            UsageError: slug `times-too-long`.
        """
        events = self._events.get(time)
        if events is None:
            if not self.now <= time < MAX_DURATION_NS:
                raise make_too_long_error()
            self._events[time] = [(event, payload)]
            heappush(self._times, time)
        else:
            events.append((event, payload))

    def run(self) -> None:
        """Let everything happen."""
        while self._times:
            self.now = time = self._times[0]
            for event, payload in self._events[
                time
            ]:  # grows while it runs: what is asked for at once
                event(payload)
            heappop(self._times)
            del self._events[time]


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
        """How long messages take that meet no others, in ns: each within the first dimension that
        it must cross.
        """
        delay = np.zeros(len(source), np.float64)
        stride = 1
        open_yet = np.ones(len(source), np.bool_)
        for d, count in enumerate(self.sizes):
            forward = (target // stride - source // stride) % count
            crosses = open_yet & (forward != 0)
            open_yet &= ~crosses
            hops = {"Ring": np.minimum(forward, count - forward), "FullyConnected": 1, "Switch": 2}[
                self.topologies[d]
            ]
            time: Floats = hops * self.latencies[d] + size / self.bytes_per_ns(d)
            delay = np.where(crosses, time, delay)
            stride *= count
        return convert_to_ns(delay)

    def delay(self, source: int, target: int, size: int) -> int:
        """How long one message takes that meets no others, in ns."""
        for d, count in enumerate(self.sizes):
            forward = (target - source) % count
            if forward:
                hops = {"Ring": min(forward, count - forward), "FullyConnected": 1, "Switch": 2}[
                    self.topologies[d]
                ]
                return int(hops * self.latencies[d] + size / self.bytes_per_ns(d))
            source, target = source // count, target // count
        return 0

    def route(self, source: int, target: int) -> list[Link]:
        """The links from one rank to another in one dimension; the switch is the rank after the
        last one.
        """
        count = self.sizes[0]
        if self.topologies[0] == "FullyConnected":
            return [(source, target)]
        if self.topologies[0] == "Switch":
            return [(source, count), (count, target)]
        forward = (target - source) % count
        step, hops = (1, forward) if forward <= count - forward else (-1, count - forward)
        return [
            ((source + k * step) % count, (source + (k + 1) * step) % count) for k in range(hops)
        ]


class Links:
    """The links of a one-dimensional machine: each serves one message after the other, in the order
    they come.

    A message occupies a link for its bytes over the bandwidth, rounded down, and is at the other
    end of it that time and the latency after it was taken, rounded down together; then it asks for
    its next link.

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

    def send(self, source: int, target: int, size: int, arrive: Arrive, payload: Any) -> None:
        """Send a message now; `arrive(what)` is called when it is there."""
        self.in_flight += 1
        self._take(_Travel(size, self.route(source, target), 0, arrive, payload, self._clock.now))

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
            total[:] = [before + extra for before, extra in zip(total, values, strict=True)]

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
