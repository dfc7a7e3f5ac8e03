"""Flows that share links over time, one per message: each gets its max-min fair share. The truth for faster models.

Shares are max-min fair where no flow can get more without one getting less that has no more than it: all rates grow
together until a link is full; the flows on it keep that rate, the others grow on. Shares change when a flow starts or
ends.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from traceloom.errors import UsageError
from traceloom.trace.array_types import Floats, Ints
from traceloom.workload.collective_algorithms import Schedule
from traceloom.workload.simulate.network import LinkUse, MachineNetwork

_SAME_NS = 1e-3  # ends that differ by less come from rounding
_FLOW = np.dtype(
    [
        ("first", np.int64),  # entry of its first link
        ("count", np.int64),  # of links
        ("bytes", np.float64),
        ("left", np.float64),  # bytes at `since`
        ("since", np.float64),  # ns
        ("rate", np.float64),  # B/ns from then on
        ("end", np.float64),  # ns, where the rate stays
        ("alone", np.float64),  # B/ns if no other flow were there
        ("limit", np.int64),  # the link that limits it; -1: none
        ("latency", np.float64),  # ns
    ]
)


class Flows:
    """Flows over a network; may be added while others run.

    Times never go back: a flow starts at `now_ns` or later. What comes out depends on what was added and when it
    starts, and for equal times on the order of adding, on nothing else.

    Attributes:
        now_ns: Until when everything is known.
        use: What the links carried.
    """

    def __init__(self, network: MachineNetwork, now_ns: float = 0.0) -> None:
        self.now_ns = now_ns
        self.use = LinkUse(network)
        self._network = network
        self._waiting: list[tuple[float, int]] = []  # (start, flow) of flows that have not started
        self._active: Ints = np.empty(0, dtype=np.int64)
        self._on_link = np.zeros(network.bandwidth.size, dtype=np.int64)  # active flows
        self._busy_since = np.zeros(network.bandwidth.size)
        self._count = 0
        self._flow = np.zeros(64, dtype=_FLOW)  # grows by doubling
        self._entries = 0
        self._entry = np.zeros(256, dtype=np.int64)  # links of all flows; grows too

    def add(self, start_ns: Floats | float, source: Ints, target: Ints, size: Ints) -> Ints:
        """Add flows between ranks.

        Args:
            start_ns: When they start; one value, or one per flow.
            source: Ranks, shape (flows,).
            target: Ranks.
            size: Bytes.

        Returns:
            Their numbers: 0, 1, ... in the order of adding.

        Raises:
            UsageError: slug `wrong-usage`: a flow starts before `now_ns`.
        """
        source, target = np.atleast_1d(source), np.atleast_1d(target)
        start = np.broadcast_to(np.asarray(start_ns, dtype=np.float64), source.shape)
        if start.size and start.min() < self.now_ns:
            message = f"a flow starts at {start.min():,} ns, when {self.now_ns:,} ns are over"
            raise UsageError(message, slug="wrong-usage")
        routes = self._network.routes(source, target)
        flows = self._count + np.arange(source.size)
        self._count += source.size
        if self._count > self._flow.size:
            self._flow = np.concatenate([self._flow, np.zeros(self._count, dtype=_FLOW)])
        new = self._flow[flows[0] : self._count] if flows.size else self._flow[:0]
        new["first"] = self._entries + np.cumsum(routes.counts) - routes.counts
        new["count"] = routes.counts
        new["bytes"] = new["left"] = size
        new["since"] = start
        new["end"] = np.inf
        new["alone"] = routes.over(np.minimum, self._network.bandwidth[routes.links], np.inf)
        new["limit"] = -1
        new["latency"] = routes.over(np.add, self._network.latency[routes.links], 0.0)
        if self._entries + routes.links.size > self._entry.size:
            self._entry = np.concatenate(
                [self._entry, np.zeros(self._entries + routes.links.size, dtype=np.int64)]
            )
        self._entry[self._entries : self._entries + routes.links.size] = routes.links
        self._entries += routes.links.size
        for begin, flow in zip(start.tolist(), flows.tolist(), strict=True):
            heapq.heappush(self._waiting, (begin, flow))
        return flows

    @property
    def next_ns(self) -> float:
        """When the next flow starts or has sent its last byte; infinity where none is left."""
        ends = float(self._flow["end"][self._active].min()) if self._active.size else np.inf
        return min(ends, self._waiting[0][0] if self._waiting else np.inf)

    def advance(self, until_ns: float) -> tuple[Ints, Floats]:
        """Let time pass.

        Returns:
            The flows that sent their last byte until then, in the order in which they did; when that byte arrives, ns:
            the latency of its links later, which may be after `until_ns`.
        """
        ended = [np.empty(0, dtype=np.int64)]
        while (now := self.next_ns) <= until_ns and now < np.inf:
            self.now_ns = now
            ended.append(self._step(now))
        if until_ns < np.inf:
            self.now_ns = max(self.now_ns, until_ns)
        flows = np.concatenate(ended)
        return flows, self._flow["end"][flows] + self._flow["latency"][flows]

    def _step(self, now: float) -> Ints:
        """What happens at one moment: flows end, flows start, rates change. Returns those that end."""
        ends = self._flow["end"]
        done = self._active[ends[self._active] <= now + _SAME_NS]
        done = done[np.lexsort((done, ends[done]))]
        begun = []
        while self._waiting and self._waiting[0][0] <= now:
            begun.append(heapq.heappop(self._waiting)[1])
        started = np.sort(np.array(begun, dtype=np.int64))
        left_links, left_flow = self._links_of(done)
        taken_links, _ = self._links_of(started)
        self._account(done, now)
        np.add.at(self.use.bytes, left_links, self._flow["bytes"][done][left_flow])
        before = self._on_link[left_links] > 0, self._on_link[taken_links] > 0
        np.subtract.at(self._on_link, left_links, 1)
        np.add.at(self._on_link, taken_links, 1)
        idle = np.unique(left_links[before[0] & (self._on_link[left_links] == 0)])
        self.use.busy_ns[idle] += now - self._busy_since[idle]
        self._busy_since[taken_links[~before[1]]] = now
        self._active = np.union1d(np.setdiff1d(self._active, done, assume_unique=True), started)
        nowhere = started[self._flow["count"][started] == 0]
        self._flow["end"][nowhere] = now  # a rank to itself
        self._reshare(np.concatenate([left_links, taken_links]), started, now)
        return done

    def _links_of(self, flows: Ints) -> tuple[Ints, Ints]:
        """The links of flows one after the other, and the position in `flows` of the flow of each."""
        count = self._flow["count"][flows]
        flow = np.repeat(np.arange(flows.size), count)
        start = self._flow["first"][flows] - (np.cumsum(count) - count)
        return self._entry[start[flow] + np.arange(flow.size)], flow

    def _account(self, flows: Ints, now: float) -> None:
        """Bring what is left of flows, and what they waited, to this moment."""
        state = self._flow[flows]
        passed = now - state["since"]
        slowed = (state["limit"] >= 0) & (state["rate"] < state["alone"])
        lost = (passed * (1.0 - state["rate"] / state["alone"]))[slowed]
        np.add.at(self.use.waiting_ns, state["limit"][slowed], lost)
        self._flow["left"][flows] = np.maximum(state["left"] - state["rate"] * passed, 0.0)
        self._flow["since"][flows] = now

    def _reshare(self, changed: Ints, started: Ints, now: float) -> None:
        """New rates for all flows that a change of the flows on these links can reach."""
        changed = np.unique(changed)
        on_changed = self._on_link[changed]
        if not on_changed.any():
            return
        flows = started
        links, flow = self._links_of(flows)
        if (
            on_changed.max() > 1 or on_changed.sum() > links.size
        ):  # not only flows that start, each alone
            flows = self._active
            links, flow = self._links_of(flows)
            reached = np.zeros(self._on_link.size, dtype=np.bool_)
            reached[changed] = True
            among = np.zeros(flows.size, dtype=np.bool_)
            while True:
                among[flow[reached[links]]] = True
                wider = links[among[flow]]
                if reached[wider].all():
                    break
                reached[wider] = True
            entries = among[flow]
            links, flow = links[entries], (np.cumsum(among) - 1)[flow[entries]]
            flows = flows[among]
        rates, limits = fair_shares(links, flow, flows.size, self._network.bandwidth)
        different = (rates != self._flow["rate"][flows]) & (limits >= 0)
        flows = flows[different]
        self._account(flows, now)
        self._flow["rate"][flows] = rates[different]
        self._flow["limit"][flows] = limits[different]
        self._flow["end"][flows] = now + self._flow["left"][flows] / rates[different]


def fair_shares(links: Ints, flow: Ints, flows: int, bandwidth: Floats) -> tuple[Floats, Ints]:
    """Max-min fair rates.

    Args:
        links: All links of all flows.
        flow: The flow of each entry, 0 to flows - 1.
        flows: How many there are.
        bandwidth: Of every link, B/ns.

    Returns:
        The rate of each flow, B/ns; the link that limits it, -1 for a flow without links.
    """
    used, link = np.unique(links, return_inverse=True)
    free = bandwidth[used].copy()
    rates = np.zeros(flows)
    limits = np.full(flows, -1, dtype=np.int64)
    growing = np.ones(link.size, dtype=np.bool_)  # entries of flows whose rate still grows
    while growing.any():
        count = np.bincount(link[growing], minlength=used.size)
        share = np.full(used.size, np.inf)
        np.divide(free, count, out=share, where=count > 0)
        least = share.min()
        held = np.flatnonzero(growing & (share <= least * (1 + 1e-12))[link])
        full = np.zeros(flows, dtype=np.bool_)
        full[flow[held]] = True
        rates[full] = least
        limits[flow[held[::-1]]] = used[link[held[::-1]]]  # the first of several
        stopping = growing & full[flow]
        free = np.maximum(free - least * np.bincount(link[stopping], minlength=used.size), 0.0)
        growing &= ~stopping
    return rates, limits


def sent_one_by_one(
    parts: Sequence[tuple[Schedule, Sequence[int], Sequence[float]]], network: MachineNetwork
) -> list[Floats]:
    """When each rank of some collectives ends, every message a flow.

    A rank begins a round of a collective once all that it awaits is there, and all that it sent in it has left.

    Args:
        parts: Schedule, the rank at each place, when each place is ready, ns.
        network: Over which all of them run.

    Returns:
        Of each collective, when each place ends, ns.
    """
    flows = Flows(network)
    sends: dict[
        tuple[int, int], dict[int, list[tuple[int, int]]]
    ] = {}  # collective, place -> round -> target, bytes
    awaited: dict[tuple[int, int], dict[int, int]] = {}
    ends = [np.array(ready, dtype=np.float64) for _, _, ready in parts]
    moments: list[
        tuple[float, int, int, int]
    ] = []  # a place is ready (-1), or gets a message of a round
    for number, (schedule, _, ready) in enumerate(parts):
        for place in range(schedule.ranks):
            sends[number, place], awaited[number, place] = {}, {}
            heapq.heappush(moments, (ready[place], number, place, -1))
        for turn, part in enumerate(schedule.rounds):
            for source, target, size in zip(
                part.source.tolist(), part.target.tolist(), part.bytes.tolist(), strict=True
            ):
                sends[number, source].setdefault(turn, []).append((target, size))
                awaited[number, target][turn] = awaited[number, target].get(turn, 0) + 1
    rest = {key: sorted(rounds) for key, rounds in sends.items()}
    under_way = dict.fromkeys(sends, 0)
    whose: list[tuple[int, int, int, int]] = []  # collective, source, target and round of each flow
    while moments or flows.next_ns < np.inf:
        now = min(flows.next_ns, moments[0][0] if moments else np.inf)
        changed = set()
        for flow, arrival in zip(*(values.tolist() for values in flows.advance(now)), strict=True):
            number, source, target, turn = whose[flow]
            under_way[number, source] -= 1
            changed.add((number, source))
            heapq.heappush(moments, (arrival, number, target, turn))
        while moments and moments[0][0] <= now:
            _, number, place, turn = heapq.heappop(moments)
            changed.add((number, place))
            if turn >= 0:
                awaited[number, place][turn] -= 1
        for number, place in sorted(changed):
            schedule, members, ready = parts[number]
            ends[number][place] = max(ends[number][place], now)
            turns = rest[number, place]
            while turns and not under_way[number, place] and now >= ready[place]:
                if any(count for turn, count in awaited[number, place].items() if turn < turns[0]):
                    break
                turn = turns.pop(0)
                for target, size in sends[number, place][turn]:
                    flows.add(
                        now, np.array(members[place]), np.array(members[target]), np.array(size)
                    )
                    whose.append((number, place, target, turn))
                    under_way[number, place] += 1
    return ends
