"""Chunks and phases of collectives, the event clock, and the network of ASTRA-sim.

Definitions: astra-sim 518bd51 with its analytical network 599a047; deviations from textbook
algorithms are documented here.
"""

from __future__ import annotations

import itertools
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
from traceloom.system.process import MIN_FREE_BYTES, require_memory
from traceloom.trace.array_types import Floats, Ints
from traceloom.workload.collective_algorithms import (
    Schedule,
    build_direct,
    build_ring,
    build_round,
    build_single_tree,
    compute_log2,
    compute_parents,
)

FAST_DELAY_NS = 10  # delay of a group's endpoints, whatever the configuration says


@dataclass(frozen=True, eq=False, slots=True)
class CollectivePhase:
    """A phase of a collective within one dimension.

    Attributes:
        dimension: The dimension whose queue it waits in.
        schedule: Its messages, among positions of the dimension.
        stride: Ranks between neighbors of the dimension; 0 if the positions are those of a group.
        delay_ns: Delay of an endpoint before its first message, and after each one it receives.
        window: Max messages of a rank in flight, each replaced by the next when it is reduced; 0 to
            go from round to round.
        reduced: Bytes to reduce of each message, in order of arrival, if there is a window.
        backwards: Whether the ring runs in reverse, as in the last half of an all_reduce over
            several dimensions.
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
    """The machine as seen by collectives.

    Attributes:
        sizes: Ranks of each dimension, innermost first.
        implementations: Kind (all_reduce, ...) -> the algorithm of each dimension.
        splits: Number of chunks of a collective.
        baseline: Whether an all_reduce runs in full in each dimension.
        delay_ns: Delay of an endpoint.
    """

    sizes: tuple[int, ...]
    implementations: dict[str, tuple[str, ...]]
    splits: int
    baseline: bool
    delay_ns: int

    @property
    def ranks(self) -> int:
        return math.prod(self.sizes)

    @property
    def windows(self) -> bool:
        """Whether an algorithm limits how many messages of a rank are in flight."""
        return any(name[-1].isdigit() for names in self.implementations.values() for name in names)

    def chunks(self, kind: str, size: int) -> tuple[int, int]:
        """Returns the number of chunks and their bytes; except for all_gather, a chunk has at least
        as many bytes as there are ranks.

        Raises:
            UsageError: `bad-collective`: an all_gather with fewer bytes than chunks, which never
                ends in ASTRA-sim.
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
        """Returns the phases of one chunk.

        Args:
            kind: all_reduce, all_gather, reduce_scatter, all_to_all.
            chunk: Its bytes.
            members: Ranks of the group; all ranks use the dimensions, smaller groups a single one.
            trees: Number of earlier trees of a kind and dimension, which selects the tree;
                incremented.
            dimensions: Which dimensions take part; None for all.

        Raises:
            UsageError: slugs `bad-collective`, `no-such-schedule`, `bad-astra-sim-config`:
                ASTRA-sim aborts, or never ends.
        """
        names = self.implementations.get(kind)
        if not names:
            raise UsageError(
                f"the system file has no {kind.replace('_', '-')}-implementation",
                slug="bad-astra-sim-config",
            )
        if members < 2:
            raise UsageError(
                f"ASTRA-sim never ends an {kind} of a group of one rank",
                slug="bad-collective",
                hint="leave it out",
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
            if names[d] == "doubleBinaryTree":  # an all_reduce of the chunk, whatever the phase is
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
        """Returns the ranks of each dimension, and the stride between neighbors; a `one...`
        algorithm takes all ranks and ends the list.
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
        """Returns one phase along (dimension, ranks, stride)."""
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
            _check_sizes(schedule, f"{algorithm} {kind} of {chunk} bytes")
            return CollectivePhase(
                dimension, schedule, stride, self.delay_ns if stride else FAST_DELAY_NS
            )
        peer_count = ranks - 1
        window = min(int(algorithm.removeprefix("direct") or peer_count), peer_count)
        schedule, reduced = _build_direct_phase(kind, ranks, chunk, window, is_whole=bool(stride))
        _check_sizes(schedule, f"{algorithm} {kind} of {chunk} bytes")
        return CollectivePhase(
            dimension,
            schedule,
            stride,
            self.delay_ns if stride else FAST_DELAY_NS,
            0 if window == peer_count and kind != "all_reduce" else window,
            reduced,
        )


@lru_cache(maxsize=256)
def _build_direct_phase(
    kind: str, ranks: int, chunk: int, window: int, *, is_whole: bool
) -> tuple[Schedule, tuple[int, ...]]:
    """Returns the messages to all others, and the bytes to reduce of each one that arrives.

    The first messages of a window have no dependencies. ASTRA-sim processes the following ones
    alternately: a window without reductions, then a window with (in a group, as many windows as
    there are other ranks); an all_reduce reduces in every second turn only.
    """
    schedule = build_direct(kind, ranks, chunk if kind == "all_gather" else chunk // ranks * ranks)
    if not window:
        raise UsageError(
            "ASTRA-sim never begins with direct0", slug="bad-collective", hint="use direct"
        )
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
    """Returns the schedule of one phase; all messages of a round have the same bytes, rounded
    down.
    """
    size = chunk if kind == "all_gather" else chunk // ranks * ranks
    if name == "ring":
        return build_ring(kind, ranks, size)
    if name == "halvingDoubling":
        return _build_halving_phase(kind, ranks, chunk)
    if name == "doubleBinaryTree":
        parent = compute_parents(ranks, 0 if tree else ranks - 1)
        schedule = build_single_tree(parent, chunk)
        inner = np.isin(np.arange(ranks), parent)
        return replace(  # forwarding data from the parent costs a reduction
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
    one for free.

    Raises:
        UsageError: slugs `bad-collective`, `no-such-schedule`.
    """
    steps = ranks.bit_length() - 1
    halves = [chunk >> (k + 1) for k in range(steps)]
    near = [1 << k for k in range(steps)]
    # Distances and bytes of the messages; rounded-off bytes are lost.
    plans = {
        "reduce_scatter": (near, halves),
        "all_reduce": (
            [*near, *reversed(near)],
            [*halves, *(chunk >> (steps + 1) << (k + 1) for k in range(steps))],
        ),
        "all_gather": (
            [ranks >> (k + 1) for k in range(steps)],
            [chunk << k for k in range(steps)],
        ),
    }
    if kind not in plans:
        raise UsageError(
            f"ASTRA-sim stops at a halvingDoubling {kind}",
            slug="bad-collective",
            hint=f"set {kind.replace('_', '-')}-implementation to ring or direct",
        )
    distances, sizes = plans[kind]
    position = np.arange(ranks)
    rounds = []
    for distance, size in zip(distances, sizes, strict=True):
        target = (position + np.where(position // distance % 2, -distance, distance)) % ranks
        if (target[target] != position).any():
            compute_log2(ranks, "halving-doubling")  # two ranks send to one: it never ends
        rounds.append(build_round(position, target, size))
    reduced = (
        [0] * len(sizes)
        if kind == "all_gather"
        else [*halves[1:], 0, *([0] * (len(sizes) - steps))]
    )
    return Schedule(
        ranks,
        tuple(
            replace(part, reduced=np.full(ranks, reduced_bytes))
            for part, reduced_bytes in zip(rounds, reduced, strict=True)
        ),
    )


@lru_cache(maxsize=256)
def _check_sizes(schedule: Schedule, name: str) -> None:
    """Raises UsageError `bad-collective` where a message has no bytes."""
    if any(not part.bytes.all() for part in {id(part): part for part in schedule.rounds}.values()):
        raise UsageError(
            f"ASTRA-sim stops at a {name} among {schedule.ranks} ranks, which comes to messages of no bytes",
            slug="bad-collective",
            hint="communicate more bytes, or set preferred-dataset-splits to 1",
        )


def get_members(phase: CollectivePhase, rank: int, group: Sequence[int]) -> Ints:
    """Returns the ranks at the positions of a phase's schedule, for one rank of the group."""
    if not phase.stride:
        return np.asarray(group, np.int64)
    position = rank // phase.stride % phase.schedule.ranks
    members = rank + (np.arange(phase.schedule.ranks) - position) * phase.stride
    return members[::-1] if phase.backwards else members


Event = Callable[[Any], None]


def make_too_long_error() -> UsageError:
    """Returns the error for times that exceed the clock's range."""
    return UsageError(
        "these times add up to more than 100 days",
        slug="times-too-long",
        hint="bandwidths are in 2^30 B/s, latencies in ns, durations in microseconds",
    )


def convert_to_ns(times: Floats) -> Ints:
    """Returns times in whole ns, rounded down.

    Raises:
        UsageError: slug `times-too-long`.
    """
    if times.size and not times.max() < MAX_DURATION_NS:
        raise make_too_long_error()
    return times.astype(np.int64)


class Clock:
    """The event queue.

    Attributes:
        now: Time of the current event, in ns.
    """

    def __init__(self) -> None:
        self.now = 0
        self._times: list[int] = []
        self._events: dict[int, list[tuple[Event, Any]]] = {}

    def at(self, time: int, event: Event, payload: Any = None) -> None:
        """Calls `event(payload)` at a time that is not before now.

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
        """Processes all events.

        Raises:
            UsageError: `no-memory-left`: so many messages are under way that memory runs out.
        """
        for number in itertools.count():
            if not self._times:
                break
            if not number % _TIMES_PER_CHECK:
                require_memory(
                    MIN_FREE_BYTES,
                    "so many messages under way need",
                    "simulate fewer ranks, smaller collectives, or with preferred-dataset-splits 1",
                )
            self.now = time = self._times[0]
            for event, payload in self._events[
                time
            ]:  # grows while it runs, by events for the current time
                event(payload)
            heappop(self._times)
            del self._events[time]


_TIMES_PER_CHECK = 1 << 12
_MAX_SIZES = 64  # arrays of sizes whose times are kept


Arrive = Callable[[Any], None]
Link = tuple[int, int]


@dataclass(frozen=True, slots=True)
class AnalyticalNetwork:
    """The network of a network file.

    Attributes:
        topologies: Ring, FullyConnected or Switch, per dimension.
        sizes: Ranks of each dimension.
        bandwidths: Of a link, per dimension, in 2^30 B/s ("GB/s").
        latencies: Of a link, per dimension, in ns.
    """

    topologies: tuple[str, ...]
    sizes: tuple[int, ...]
    bandwidths: tuple[float, ...]
    latencies: tuple[float, ...]

    def bytes_per_ns(self, dimension: int) -> float:
        """Returns the bandwidth of a dimension's links."""
        return self.bandwidths[dimension] * (1 << 30) / 1_000_000_000

    def delays(self, source: Ints, target: Ints, size: Ints) -> Ints:
        """Returns the durations of messages without contention, in ns; each stays within the first
        dimension that it must cross.
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
        """Returns the duration of one message without contention, in ns."""
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
        """Returns the links between two ranks in one dimension; a switch is numbered after the last
        rank.
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
    """The links of a one-dimensional machine; each serves its messages in order of arrival.

    A message occupies a link for its bytes over the bandwidth, rounded down. It arrives at the
    other end after that time plus the latency, rounded down together, and then requests its next
    link.

    Args:
        fabric: One dimension.
        clock: The event queue.
    """

    def __init__(self, fabric: AnalyticalNetwork, clock: Clock) -> None:
        self._clock, self._fabric = clock, fabric
        self._rate, self._latency = fabric.bytes_per_ns(0), fabric.latencies[0]
        self._links: dict[Link, _Link] = {}
        self._routes: dict[Link, Sequence[_Link]] = {}
        self._times: dict[int, tuple[int, int]] = {}  # of each size: on a link, and to its end
        self.in_flight = 0

    def route(self, source: int, target: int) -> list[Link]:
        """Returns the links between two ranks."""
        return self._fabric.route(source, target)

    def send(self, source: int, target: int, size: int, arrive: Arrive, payload: Any) -> None:
        """Sends a message now; `arrive(payload)` is called on arrival."""
        self.in_flight += 1
        links = self._routes.get((source, target))
        if links is None:
            ends = self.route(source, target)
            links = self._routes[source, target] = [self._get_link(link) for link in ends]
        times = self._times.get(size)
        if times is None:
            occupied = size / self._rate
            times = self._times[size] = int(occupied), int(self._latency + occupied)
        self._take(Travel(size, times, links, 0, arrive, payload, self._clock.now))

    def _get_link(self, ends: Link) -> _Link:
        return self._links.setdefault(ends, _Link(ends, [0, 0, 0], deque()))

    def _take(self, travel: Travel) -> None:
        link = travel.links[travel.next]
        if link.busy:
            link.waiting.append(travel)
        else:
            link.busy = True
            self._serve(link, travel)

    def _serve(self, link: _Link, travel: Travel) -> None:
        now = self._clock.now
        busy_ns, travel_ns = travel.times
        self._clock.at(now + travel_ns, self._there, travel)
        self._clock.at(now + busy_ns, self._free, link)
        used = link.used
        used[0] += travel.size
        used[1] += busy_ns
        used[2] += now - travel.since

    def _there(self, travel: Travel) -> None:
        travel.next += 1
        if travel.next < len(travel.links):
            travel.since = self._clock.now
            self._take(travel)
        else:
            self.in_flight -= 1
            travel.arrive(travel.what)

    def _free(self, link: _Link) -> None:
        if link.waiting:
            self._serve(link, link.waiting.popleft())
        else:
            link.busy = False

    @property
    def usage(self) -> dict[Link, list[int]]:
        """The links that were used: bytes, busy time, time that messages waited for it."""
        return {ends: link.used for ends, link in self._links.items() if link.used[0]}

    def add(self, usage: Mapping[Link, Sequence[int]]) -> None:
        for ends, values in usage.items():
            used = self._get_link(ends).used
            used[:] = [before + extra for before, extra in zip(used, values, strict=True)]


class LostOrderError(Exception):
    """The order of events matters: a link was asked for before it was asked for by what it has
    served already, or at once, or a message frees the place of another one.
    """


class OrderedLinks:
    """The links of a one-dimensional machine for messages whose sequence on each link is known when
    they are sent: arrivals follow at once, for many messages or one.

    Args:
        fabric: One dimension.
    """

    def __init__(self, fabric: AnalyticalNetwork) -> None:
        self._fabric = fabric
        self._rate, self._latency = fabric.bytes_per_ns(0), fabric.latencies[0]
        ranks = fabric.sizes[0]
        count = ranks * ranks if fabric.topologies[0] == "FullyConnected" else 2 * ranks
        # Of each link: when it is free, when it was asked for last, and for a message of which rank;
        # bytes, busy time, time that messages waited for it; a place for marks.
        self._state = np.zeros((7, count), np.int64)
        self._state[1:3] = -1
        self._times: dict[int, tuple[Ints, Ints, Ints]] = {}

    def send(self, source: Ints, target: Ints, size: Ints, sent_ns: Ints) -> Ints:
        """Returns when messages arrive.

        Raises:
            LostOrderError: The sequence on a link is not that of the times.
        """
        if id(size) not in self._times:
            if len(self._times) > _MAX_SIZES:
                self._times.clear()
            occupied = size / self._rate
            travels_ns = convert_to_ns(self._latency + occupied)
            self._times[id(size)] = size, convert_to_ns(occupied), travels_ns
        _, busy_ns, travel_ns = self._times[id(size)]
        count = self._fabric.sizes[0]
        if self._fabric.topologies[0] == "FullyConnected":
            return self._serve(source * count + target, source, size, busy_ns, sent_ns) + travel_ns
        if self._fabric.topologies[0] == "Switch":
            there_ns = self._serve(source, source, size, busy_ns, sent_ns) + travel_ns
            return self._serve(target + count, source, size, busy_ns, there_ns) + travel_ns
        forward = (target - source) % count
        step = np.where(2 * forward <= count, 1, -1)
        hops, time_ns = np.minimum(forward, count - forward), sent_ns.copy()
        for number in range(int(hops.max(initial=0))):
            rows = np.flatnonzero(hops > number)
            link = (source[rows] + number * step[rows]) % count + np.where(step[rows] > 0, 0, count)
            started = self._serve(link, source[rows], size[rows], busy_ns[rows], time_ns[rows])
            time_ns[rows] = started + travel_ns[rows]
        return time_ns

    def _serve(self, link: Ints, source: Ints, size: Ints, busy_ns: Ints, asked_ns: Ints) -> Ints:
        free, asked, asker, carried, busy, waited, mark = self._state
        mark[link] = np.arange(len(link))
        if (mark[link] != np.arange(len(link))).any():  # several messages for one link
            order = np.lexsort((asked_ns, link))
            started = np.empty_like(asked_ns)
            for row in order.tolist():
                one = slice(row, row + 1)
                started[one] = self._serve(
                    link[one], source[one], size[one], busy_ns[one], asked_ns[one]
                )
            return started
        before = asked[link]
        if ((asked_ns < before) | ((asked_ns == before) & (asker[link] != source))).any():
            raise LostOrderError
        started = np.maximum(asked_ns, free[link])
        free[link], asked[link], asker[link] = started + busy_ns, asked_ns, source
        carried[link] += size
        busy[link] += busy_ns
        waited[link] += started - asked_ns
        return started

    @property
    def usage(self) -> dict[Link, list[int]]:
        """The links that were used: bytes, busy time, time that messages waited for it."""
        count = self._fabric.sizes[0]
        ends: dict[str, Callable[[int, int], Link]] = {
            "FullyConnected": lambda kind, place: (kind, place),
            "Switch": lambda kind, place: (count, place) if kind else (place, count),
            "Ring": lambda kind, place: (place, (place + (-1 if kind else 1)) % count),
        }
        link = ends[self._fabric.topologies[0]]
        return {
            link(*divmod(number, count)): self._state[3:6, number].tolist()
            for number in np.flatnonzero(self._state[1] >= 0).tolist()
        }


@dataclass(eq=False, slots=True)
class _Link:
    """A link with its usage, and the messages that wait for it."""

    ends: Link
    used: list[int]
    waiting: deque[Travel]
    busy: bool = False


@dataclass(eq=False, slots=True)
class Travel:
    """A message in flight, which has requested the link `next` at `since`."""

    size: int
    times: tuple[int, int]
    links: Sequence[_Link]
    next: int
    arrive: Arrive
    what: Any
    since: int
