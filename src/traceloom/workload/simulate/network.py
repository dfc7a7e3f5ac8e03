"""Links, routes and arrival times in a network (alpha-beta model).

A message takes α, the latencies of its links, plus β, its bytes at the bandwidth of the narrowest
of them. Messages of one round that share a link share its bandwidth; a link serves the rounds in
order.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import polars as pl

from traceloom.trace.array_types import Array, Bools, Floats, Ints
from traceloom.workload.collective_algorithms import Round, Schedule
from traceloom.workload.simulate.machine import SHAPED, Dimension, Machine


class Fabric(Protocol):
    """Links between nodes: members 0 to size - 1, then switches.

    Attributes:
        source: Source node of each link, shape (links,).
        target: Target node.
        bandwidth: 10^9 B/s, which are B/ns.
        latency: ns.
        exists: Which link numbers are in use.
    """

    source: Ints
    target: Ints
    bandwidth: Floats
    latency: Floats
    exists: Bools

    def ways(self, source: Ints, target: Ints) -> tuple[Ints, Ints]:
        """Returns the links of messages between distinct members.

        Returns:
            The number of links of each message, shape (messages,); the links, message by message.
        """


def build_fabric(dimension: Dimension) -> Fabric:
    if dimension.topology in SHAPED or dimension.topology == "ring":
        return Grid(dimension)
    if dimension.topology == "fully-connected":
        return FullyConnected(dimension)
    return ExplicitLinks(dimension) if dimension.topology == "links" else SwitchFabric(dimension)


class Grid:
    """A ring, torus or mesh: a ring or line along each axis; a message takes one axis after the
    other.
    """

    def __init__(self, dimension: Dimension) -> None:
        size = dimension.size
        self.shape = dimension.shape or (size,)
        self.closed = dimension.topology != "mesh"
        members = np.arange(size)
        # Link (axis * size + member) * 2 leads from that member up along the axis, the next link
        # down.
        links = (len(self.shape), size, 2)
        self.source = np.broadcast_to(members[:, None], links).reshape(-1).astype(np.int64)
        target = np.zeros(links, dtype=np.int64)
        exists = np.zeros(links, dtype=np.bool_)
        stride = 1
        for axis, length in enumerate(self.shape):
            coordinate = members // stride % length
            for way, step in enumerate((1, -1)):
                target[axis, :, way] = (
                    members + ((coordinate + step) % length - coordinate) * stride
                )
                in_range = (coordinate + step >= 0) & (coordinate + step < length)
                # In a ring of two, both directions are one link.
                exists[axis, :, way] = in_range if length == 2 or not self.closed else length > 1
                if length == 2 and self.closed:
                    exists[axis, :, way] = way == 0
            stride *= length
        self.target, self.exists = target.reshape(-1), exists.reshape(-1)
        self.bandwidth = np.full(self.source.size, dimension.bandwidth)
        self.latency = np.full(self.source.size, dimension.latency)

    def ways(self, source: Ints, target: Ints) -> tuple[Ints, Ints]:
        """One axis after the other; in a ring the shorter way, upwards if equal."""
        size = self.source.size // (2 * len(self.shape))
        position = source.copy()
        messages, links = [], []
        stride = 1
        for axis, length in enumerate(self.shape):
            first, last = position // stride % length, target // stride % length
            up = (last - first) % length
            upwards = 2 * up <= length if self.closed else last > first
            hops = np.where(upwards, up, length - up) if self.closed else np.abs(last - first)
            message = np.repeat(np.arange(source.size), hops)
            hop = np.arange(message.size) - np.repeat(np.cumsum(hops) - hops, hops)
            ahead = np.where(upwards, 1, -1)[message] * hop
            hop_position = (
                position[message] + ((first[message] + ahead) % length - first[message]) * stride
            )
            links.append((axis * size + hop_position) * 2 + ~upwards[message])
            messages.append(message)
            position += (last - first) * stride
            stride *= length
        message = np.concatenate(messages)
        order = np.argsort(message, kind="stable")
        return np.bincount(message, minlength=source.size), np.concatenate(links)[order]


class FullyConnected:
    """A link between each pair of members."""

    def __init__(self, dimension: Dimension) -> None:
        size = dimension.size
        self.size = size
        self.source, self.target = np.divmod(np.arange(size * size), size)
        self.exists = self.source != self.target
        self.bandwidth = np.full(size * size, dimension.bandwidth)
        self.latency = np.full(size * size, dimension.latency)

    def ways(self, source: Ints, target: Ints) -> tuple[Ints, Ints]:
        """A single link per message."""
        return np.ones(source.size, dtype=np.int64), source * self.size + target


class SwitchFabric:
    """A switch, or a fat tree: leaf switches below a spine, with one link each way between a leaf
    and the spine.
    """

    def __init__(self, dimension: Dimension) -> None:
        size = dimension.size
        self.size = size
        self.radix = dimension.radix or size
        leaf_count = -(-size // self.radix) if size > self.radix else 0
        members = np.arange(size)
        leaf = size + members // self.radix
        trunks = np.arange(size, size + leaf_count)
        spine = np.full(leaf_count, size + leaf_count)
        # Members to leaves, leaves to members, leaves to spine, spine to leaves.
        self.source = np.concatenate([members, leaf, trunks, spine])
        self.target = np.concatenate([leaf, members, spine, trunks])
        self.exists = np.full(self.source.size, size > 1)
        self.bandwidth = np.full(self.source.size, dimension.bandwidth)
        self.bandwidth[2 * size :] *= self.radix / dimension.oversubscription
        self.latency = np.full(self.source.size, dimension.latency)

    def ways(self, source: Ints, target: Ints) -> tuple[Ints, Ints]:
        """Up to the leaf, to the spine where the target is below another one, and down."""
        first, last = source // self.radix, target // self.radix
        leaf_count = (self.source.size - 2 * self.size) // 2
        links = np.stack(
            [source, 2 * self.size + first, 2 * self.size + leaf_count + last, self.size + target],
            axis=1,
        )
        used = np.ones(links.shape, dtype=np.bool_)
        used[:, 1:3] = (first != last)[:, None]
        return used.sum(axis=1), links[used]


class ExplicitLinks:
    """A list of links; a message takes a shortest path, among equals that over the lowest
    numbers.
    """

    def __init__(self, dimension: Dimension) -> None:
        wires = dimension.links
        endpoints = np.array(
            [(wire.first, wire.second, wire.second, wire.first) for wire in wires]
        ).reshape(-1, 2)
        self.source, self.target = endpoints[:, 0].copy(), endpoints[:, 1].copy()
        self.exists = np.ones(self.source.size, dtype=np.bool_)
        wire_rates = [(wire.bandwidth or dimension.bandwidth, wire.latency) for wire in wires]
        self.bandwidth = np.repeat([bandwidth for bandwidth, _ in wire_rates], 2).astype(np.float64)
        latency = [dimension.latency if value is None else value for _, value in wire_rates]
        self.latency = np.repeat(latency, 2).astype(np.float64)
        self._next: dict[int, Ints] = {}  # target -> the next link from each node towards it

    def ways(self, source: Ints, target: Ints) -> tuple[Ints, Ints]:
        """Shortest paths; among equals that over the lowest numbers."""
        steps = []
        messages = []
        position, message = source.copy(), np.arange(source.size)
        for node in np.unique(target).tolist():
            if node not in self._next:
                self._next[node] = self.towards(node)
        while message.size:
            link = np.empty(message.size, dtype=np.int64)
            for node in np.unique(target[message]).tolist():
                those = target[message] == node
                link[those] = self._next[node][position[those]]
            steps.append(link)
            messages.append(message)
            position = self.target[link]
            on = position != target[message]
            position, message = position[on], message[on]
        return np.bincount(np.concatenate(messages), minlength=source.size), np.concatenate(steps)[
            np.argsort(np.concatenate(messages), kind="stable")
        ]

    def towards(self, node: int) -> Ints:
        distance = np.full(
            int(max(self.source.max(), self.target.max())) + 1, self.source.size, dtype=np.int64
        )
        distance[node] = 0
        # Each pass settles the distances one link further.
        while True:
            nearer = distance.copy()
            np.minimum.at(nearer, self.source, distance[self.target] + 1)
            if (nearer == distance).all():
                break
            distance = nearer
        link = np.full(distance.size, -1, dtype=np.int64)
        nearer = distance[self.source] == distance[self.target] + 1
        candidates = np.flatnonzero(nearer)
        candidates = candidates[np.argsort(-self.target[candidates], kind="stable")]
        link[self.source[candidates]] = (
            candidates  # the last assignment, to the lowest number, remains
        )
        return link


_NO_LINKS = pl.DataFrame(schema={"link": pl.Int64, "source": pl.String, "target": pl.String})


@dataclass(frozen=True, eq=False, slots=True)
class Routes:
    """The links of messages.

    Attributes:
        counts: Number of links of each message, shape (messages,); 0 from a rank to itself.
        links: Their numbers, message by message.
    """

    counts: Ints
    links: Ints

    @property
    def message(self) -> Ints:
        """The message of each entry of `links`."""
        return np.repeat(np.arange(self.counts.size), self.counts)

    def over(self, reduce: np.ufunc, values: Array, empty: float) -> Floats:
        """Returns one value per message from a value per entry of `links`: their sum, max or min.

        Args:
            reduce: `np.add`, `np.maximum`, `np.minimum`.
            values: One per entry.
            empty: For messages without links.
        """
        result = np.full(self.counts.size, empty, dtype=np.float64)
        filled = self.counts > 0
        if filled.any():
            result[filled] = reduce.reduceat(values, (np.cumsum(self.counts) - self.counts)[filled])
        return result


class MachineNetwork:
    """All links of a machine, numbered from 0.

    A message takes the dimensions one after the other, the innermost first: in dimension 0 to the
    rank with the target's place there, from it in dimension 1, and so on (as over NVLink to the
    rank whose network card is on the target's rail). Traffic that leaves the innermost dimension
    also passes the network cards of its source and its target.

    Attributes:
        machine: The machine.
        bandwidth: Of each link, B/ns (10^9 B/s), shape (links,).
        latency: Of each link, ns.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._fabrics: list[
            tuple[Fabric, int, int]
        ] = []  # with the first link and the number of groups of each dimension
        speeds = machine.network_speeds()
        bandwidth, latency = [np.empty(0)], [np.empty(0)]
        first = 0
        inner_size = 1
        for dimension in machine.dimensions:
            fabric = build_fabric(dimension)
            groups = machine.ranks // (dimension.size * (inner_size if dimension.shared else 1))
            factors = np.ones((groups, fabric.source.size))
            if not dimension.shared:
                positions = self._places(inner_size, dimension.size, groups)
                for endpoints in (fabric.source, fabric.target):
                    member = endpoints < dimension.size
                    at_place = speeds[_find_ranks(machine, positions[:, endpoints[member]])]
                    factors[:, member] = np.minimum(factors[:, member], at_place)
            self._fabrics.append((fabric, first, groups))
            bandwidth.append((factors * fabric.bandwidth).reshape(-1))
            latency.append(np.tile(fabric.latency, groups))
            first += groups * fabric.source.size
            inner_size *= dimension.size
        self._cards = first  # first link of the network cards: outgoing, then incoming, per rank
        if machine.nic is not None:
            bandwidth.append(np.tile(machine.nic.bandwidth * speeds, 2))
            latency.append(np.zeros(2 * machine.ranks))
        self.bandwidth = np.concatenate(bandwidth)
        self.latency = np.concatenate(latency)

    @staticmethod
    def _places(inner_size: int, size: int, groups: int) -> Ints:
        """Returns the place of each member of each group of a dimension, shape (groups, size)."""
        outer, inner = np.divmod(np.arange(groups), inner_size)
        positions: Ints = inner[:, None] + inner_size * (np.arange(size) + size * outer[:, None])
        return positions

    def routes(self, source: Ints, target: Ints) -> Routes:
        """Returns the links of messages between ranks.

        Args:
            source: Sending ranks, shape (messages,).
            target: Receiving ranks.
        """
        positions = self.machine.places
        start, end = positions[source], positions[target]
        messages = np.arange(source.size)
        parts: list[tuple[Ints, Ints]] = []
        inner_size = 1
        for dimension, (fabric, first, _) in zip(
            self.machine.dimensions, self._fabrics, strict=True
        ):
            outer_size = inner_size * dimension.size
            moved = np.flatnonzero(
                start // inner_size % dimension.size != end // inner_size % dimension.size
            )
            if moved.size:
                group = start[moved] // outer_size
                if not dimension.shared:
                    group = group * inner_size + end[moved] % inner_size
                counts, links = fabric.ways(
                    start[moved] // inner_size % dimension.size,
                    end[moved] // inner_size % dimension.size,
                )
                base = first + group * fabric.source.size
                parts.append((np.repeat(moved, counts), links + np.repeat(base, counts)))
            inner_size = outer_size
        if self.machine.nic is not None:
            block = 1 if self.machine.nic.of == "all" else self.machine.dimensions[0].size
            outer = np.flatnonzero(start // block != end // block)
            parts.insert(0, (messages[outer], self._cards + source[outer]))
            parts.append((messages[outer], self._cards + self.machine.ranks + target[outer]))
        message = (
            np.concatenate([message for message, _ in parts])
            if parts
            else np.empty(0, dtype=np.int64)
        )
        links = (
            np.concatenate([links for _, links in parts]) if parts else np.empty(0, dtype=np.int64)
        )
        order = np.argsort(message, kind="stable")
        return Routes(np.bincount(message, minlength=source.size), links[order])

    @cached_property
    def links(self) -> pl.DataFrame:
        """Returns a frame of link, name, source, target, bandwidth (10^9 B/s), latency (ns); unused
        link numbers are left out.
        """
        frames = []
        inner_size = 1
        for number, dimension in enumerate(self.machine.dimensions):
            frames.append(self._links_of(number, dimension, inner_size))
            inner_size *= dimension.size
        if self.machine.nic is not None:
            rank = pl.Series(np.arange(self.machine.ranks))
            names = pl.select(
                rank=pl.format("rank {}", rank), card=pl.format("network card of rank {}", rank)
            )
            for way, (source, target) in enumerate((("rank", "card"), ("card", "rank"))):
                frames.append(
                    pl.DataFrame(
                        {
                            "link": self._cards
                            + way * self.machine.ranks
                            + np.arange(self.machine.ranks),
                            "source": names[source],
                            "target": names[target],
                        }
                    )
                )
        links = pl.concat([_NO_LINKS, *frames])
        return links.select(
            "link",
            name=pl.format("{} → {}", "source", "target"),
            source="source",
            target="target",
            bandwidth=pl.Series(self.bandwidth[links["link"].to_numpy()]),
            latency=pl.Series(self.latency[links["link"].to_numpy()]),
        )

    def _links_of(self, number: int, dimension: Dimension, inner_size: int) -> pl.DataFrame:
        """Returns link, source, target of one dimension."""
        fabric, first, groups = self._fabrics[number]
        name = dimension.name or f"dimension {number}"
        positions = self._places(1 if dimension.shared else inner_size, dimension.size, groups)
        if dimension.shared:  # each member is a block of ranks
            ranks = _find_ranks(
                self.machine, positions[..., None] * inner_size + np.arange(inner_size)
            )
            rank_bounds = pl.Series(ranks.min(axis=2).ravel()), pl.Series(ranks.max(axis=2).ravel())
            label_format = "rank {}" if inner_size == 1 else "ranks {} to {}"
            members = pl.select(
                pl.format(label_format, *rank_bounds[: label_format.count("{}")])
            ).to_series()
        else:
            members = pl.select(
                pl.format("rank {}", pl.Series(_find_ranks(self.machine, positions).ravel()))
            ).to_series()

        def node(endpoints: Ints) -> pl.Series:
            group = np.repeat(np.arange(groups), int(fabric.exists.sum()))
            end = np.tile(endpoints[fabric.exists], groups)
            member = end < dimension.size
            switch = pl.format(
                "{} switch {}.{}", pl.lit(name), pl.Series(group), pl.Series(end - dimension.size)
            )
            rank = members.gather(np.where(member, group * dimension.size + end, 0))
            return pl.select(pl.when(pl.Series(member)).then(rank).otherwise(switch)).to_series()

        numbers = np.flatnonzero(fabric.exists)
        link = first + np.add.outer(np.arange(groups) * fabric.source.size, numbers).ravel()
        return pl.DataFrame(
            {"link": link, "source": node(fabric.source), "target": node(fabric.target)}
        )


def _find_ranks(machine: Machine, positions: Ints) -> Ints:
    return np.asarray(machine.order, dtype=np.int64)[positions] if machine.order else positions


class LinkUse:
    """Link usage summed over messages; shape (links,) each.

    Attributes:
        bytes: Bytes that the link carried.
        busy_ns: Time in which it was busy.
        waiting_ns: Extra time of messages due to contention on this link, summed over messages.
    """

    def __init__(self, network: MachineNetwork) -> None:
        self._network = network
        self.bytes: Floats = np.zeros(network.bandwidth.size)
        self.busy_ns: Floats = np.zeros(network.bandwidth.size)
        self.waiting_ns: Floats = np.zeros(network.bandwidth.size)

    def frame(self) -> pl.DataFrame:
        """Returns link, name, source, target, bytes, busy_ns, waiting_ns of every used link."""
        links = self._network.links.select("link", "name", "source", "target")
        rows = links["link"].to_numpy()
        counts = {
            name: pl.Series(np.rint(values[rows]).astype(np.int64))
            for name, values in (
                ("bytes", self.bytes),
                ("busy_ns", self.busy_ns),
                ("waiting_ns", self.waiting_ns),
            )
        }
        return links.with_columns(**counts).filter(self.bytes[rows] > 0)


def finish_times(
    schedule: Schedule,
    network: MachineNetwork,
    members: Ints,
    ready_ns: Floats,
    *,
    reduction_ns_per_byte: Floats | float = 0.0,
    use: LinkUse | None = None,
) -> Floats:
    """Returns when each rank has received, reduced and sent all its messages, ns.

    Args:
        schedule: The messages.
        network: Network of the machine.
        members: The rank at each place of the group, shape (places,).
        ready_ns: Start of each place, shape (places,).
        reduction_ns_per_byte: Time of a place to reduce a received byte; one value, or one per
            place.
        use: Accumulates the bytes and busy time of links.
    """
    members = np.asarray(members, dtype=np.int64)
    now = np.array(ready_ns, dtype=np.float64)
    sent = now.copy()
    reduction = np.broadcast_to(np.asarray(reduction_ns_per_byte, dtype=np.float64), now.shape)
    free = np.full(network.bandwidth.size, -np.inf)
    rounds: dict[int, _RoundOnLinks] = {}  # equal rounds are one object
    for part in schedule.rounds:
        if id(part) not in rounds:
            rounds[id(part)] = _RoundOnLinks(part, network, members)
        on_links = rounds[id(part)]
        sent_at = on_links.serve(now[part.source], free, use)
        np.maximum.at(sent, part.source, sent_at)
        arrived = now.copy()
        np.maximum.at(arrived, part.target, sent_at + on_links.latency)
        if on_links.reduces:
            arrived += np.bincount(part.target, part.reduced, now.size) * reduction
        now = arrived
    return np.maximum(now, sent)


class _RoundOnLinks:
    def __init__(self, part: Round, network: MachineNetwork, members: Ints) -> None:
        self.bytes = part.bytes.astype(np.float64)
        self.reduces = bool(part.reduced.any())
        self.routes: Routes = network.routes(members[part.source], members[part.target])
        self.message = self.routes.message
        links = self.routes.links
        self.own_ns = self.bytes[self.message] / network.bandwidth[links]
        self.latency = self.routes.over(np.add, network.latency[links], 0.0)
        self.alone_ns = self.routes.over(np.maximum, self.own_ns, 0.0)
        self.shared = links.size > 0 and int(np.bincount(links).max()) > 1

    def serve(self, start: Floats, free: Floats, use: LinkUse | None) -> Floats:
        """Returns when the last byte of each message has left its narrowest link; updates `free`,
        the times at which links are free again.
        """
        links = self.routes.links
        begin_ns = np.maximum(start[self.message], free[links])
        end = self.shared_ends(begin_ns) if self.shared else begin_ns + self.own_ns
        np.maximum.at(free, links, end)
        sent = np.maximum(self.routes.over(np.maximum, end, -np.inf), start)
        if use is not None:
            np.add.at(use.bytes, links, self.bytes[self.message])
            np.add.at(use.busy_ns, links, self.own_ns)
            waiting = np.maximum(sent - start - self.alone_ns, 0.0)
            slowest = np.flatnonzero(end == sent[self.message])
            message, first = np.unique(self.message[slowest], return_index=True)
            np.add.at(use.waiting_ns, links[slowest[first]], waiting[message])
        return sent

    def shared_ends(self, begin_ns: Floats) -> Floats:
        """Returns when each message has left each link, if several share one.

        Messages that overlap in time on a link share it, so all of them end when the link has
        served the last of them.
        """
        links = self.routes.links
        earliest = np.full(links.max() + 1, np.inf)
        np.minimum.at(earliest, links, begin_ns)
        if (begin_ns == earliest[links]).all():  # all start at once: no need to sort
            return begin_ns + np.bincount(links, self.own_ns)[links]
        order = np.lexsort((begin_ns, links))
        link, begin_ns, work_ns = links[order], begin_ns[order], self.own_ns[order]
        first = np.ones(link.size, dtype=np.bool_)
        first[1:] = link[1:] != link[:-1]
        segment = np.cumsum(first) - 1
        work = np.cumsum(work_ns)
        # Served in sequence: the end of entry i is the max over all entries up to it of their start
        # plus the work since.
        end = _compute_running_max(begin_ns - (work - work_ns), segment) + work
        starts_period = first.copy()
        starts_period[1:] |= begin_ns[1:] >= end[:-1]
        period = np.cumsum(starts_period) - 1
        end_ns = np.empty(link.size)
        end_ns[order] = np.maximum.reduceat(end, np.flatnonzero(starts_period))[period]
        return end_ns


def _compute_running_max(values: Floats, segment: Ints) -> Floats:
    """Returns the running max in each segment; segments are contiguous."""
    result = values.copy()
    step = 1
    while step < result.size:
        same = segment[step:] == segment[:-step]
        if not same.any():
            break
        result[step:] = np.where(same, np.maximum(result[step:], result[:-step]), result[step:])
        step *= 2
    return result
