"""Fabrics: how the members of one group of a dimension are joined, and the way of a message between two of them."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from traceloom.array_types import Bools, Floats, Ints
from traceloom.simulate.machine.parts import SHAPED, Dimension


class Fabric(Protocol):
    """Links between nodes: members 0 to size - 1, then switches.

    Attributes:
        source: Node where each link begins, shape (links,).
        target: Where it ends.
        bandwidth: 10^9 B/s, which are B/ns.
        latency: ns.
        exists: Which link numbers are links.
    """

    source: Ints
    target: Ints
    bandwidth: Floats
    latency: Floats
    exists: Bools

    def ways(self, source: Ints, target: Ints) -> tuple[Ints, Ints]:
        """The links of messages between members that differ.

        Returns:
            How many links each message takes, shape (messages,); the links, message by message.
        """


def fabric_of(dimension: Dimension) -> Fabric:
    """The fabric of one group of a dimension."""
    if dimension.topology in SHAPED or dimension.topology == "ring":
        return Grid(dimension)
    if dimension.topology == "fully-connected":
        return FullyConnected(dimension)
    if dimension.topology == "links":
        return _Wired(dimension)
    return Switched(dimension)


class Grid:
    """A ring, torus or mesh: a ring or line along each axis; a message goes along one axis after the other."""

    def __init__(self, dimension: Dimension) -> None:
        size = dimension.size
        self.shape = dimension.shape or (size,)
        self.closed = dimension.topology != "mesh"
        members = np.arange(size)
        # Link (axis * size + member) * 2 leads from that member upwards along the axis, the one after it downwards.
        links = (len(self.shape), size, 2)
        self.source = np.broadcast_to(members[:, None], links).reshape(-1).astype(np.int64)
        target = np.zeros(links, dtype=np.int64)
        exists = np.zeros(links, dtype=np.bool_)
        stride = 1
        for axis, length in enumerate(self.shape):
            at = members // stride % length
            for way, step in enumerate((1, -1)):
                target[axis, :, way] = members + ((at + step) % length - at) * stride
                inside = (at + step >= 0) & (at + step < length)
                # Both ways round a ring of two are one link.
                exists[axis, :, way] = inside if length == 2 or not self.closed else length > 1
                if length == 2 and self.closed:
                    exists[axis, :, way] = way == 0
            stride *= length
        self.target, self.exists = target.reshape(-1), exists.reshape(-1)
        self.bandwidth = np.full(self.source.size, dimension.bandwidth)
        self.latency = np.full(self.source.size, dimension.latency)

    def ways(self, source: Ints, target: Ints) -> tuple[Ints, Ints]:
        """Along one axis after the other; round a ring the shorter way, at a tie upwards."""
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
            at = position[message] + ((first[message] + ahead) % length - first[message]) * stride
            links.append((axis * size + at) * 2 + ~upwards[message])
            messages.append(message)
            position += (last - first) * stride
            stride *= length
        message = np.concatenate(messages)
        order = np.argsort(message, kind="stable")
        return np.bincount(message, minlength=source.size), np.concatenate(links)[order]


class FullyConnected:
    """A link from each member to each other."""

    def __init__(self, dimension: Dimension) -> None:
        size = dimension.size
        self.size = size
        self.source, self.target = np.divmod(np.arange(size * size), size)
        self.exists = self.source != self.target
        self.bandwidth = np.full(size * size, dimension.bandwidth)
        self.latency = np.full(size * size, dimension.latency)

    def ways(self, source: Ints, target: Ints) -> tuple[Ints, Ints]:
        """One link."""
        return np.ones(source.size, dtype=np.int64), source * self.size + target


class Switched:
    """A switch, or a fat tree: leaf switches below a spine, with one link each way between a leaf and the spine."""

    def __init__(self, dimension: Dimension) -> None:
        size = dimension.size
        self.size = size
        self.radix = dimension.radix or size
        leaves = -(-size // self.radix) if size > self.radix else 0
        members = np.arange(size)
        leaf = size + members // self.radix
        trunks = np.arange(size, size + leaves)
        spine = np.full(leaves, size + leaves)
        # Members to leaves, leaves to members, leaves to the spine, the spine to leaves.
        self.source = np.concatenate([members, leaf, trunks, spine])
        self.target = np.concatenate([leaf, members, spine, trunks])
        self.exists = np.full(self.source.size, size > 1)
        self.bandwidth = np.full(self.source.size, dimension.bandwidth)
        self.bandwidth[2 * size :] *= self.radix / dimension.oversubscription
        self.latency = np.full(self.source.size, dimension.latency)

    def ways(self, source: Ints, target: Ints) -> tuple[Ints, Ints]:
        """Up to the leaf, to the spine where the target is below another one, and down."""
        first, last = source // self.radix, target // self.radix
        leaves = (self.source.size - 2 * self.size) // 2
        links = np.stack([source, 2 * self.size + first, 2 * self.size + leaves + last, self.size + target], axis=1)
        used = np.ones(links.shape, dtype=np.bool_)
        used[:, 1:3] = (first != last)[:, None]
        return used.sum(axis=1), links[used]


class _Wired:
    """A list of links; a message takes the fewest, at a tie those over the lowest numbers."""

    def __init__(self, dimension: Dimension) -> None:
        wires = dimension.links
        ends = np.array([(wire.first, wire.second, wire.second, wire.first) for wire in wires]).reshape(-1, 2)
        self.source, self.target = ends[:, 0].copy(), ends[:, 1].copy()
        self.exists = np.ones(self.source.size, dtype=np.bool_)
        own = [(wire.bandwidth or dimension.bandwidth, wire.latency) for wire in wires]
        self.bandwidth = np.repeat([bandwidth for bandwidth, _ in own], 2).astype(np.float64)
        latency = [dimension.latency if value is None else value for _, value in own]
        self.latency = np.repeat(latency, 2).astype(np.float64)
        self._next: dict[int, Ints] = {}  # target -> the link that each node takes towards it

    def ways(self, source: Ints, target: Ints) -> tuple[Ints, Ints]:
        """The fewest links, at a tie over the lowest numbers."""
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
        order = np.argsort(np.concatenate(messages), kind="stable")
        return np.bincount(np.concatenate(messages), minlength=source.size), np.concatenate(steps)[order]

    def towards(self, node: int) -> Ints:
        """The link that each node takes towards one node."""
        distance = np.full(int(max(self.source.max(), self.target.max())) + 1, self.source.size, dtype=np.int64)
        distance[node] = 0
        # Distances settle one link further in each pass.
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
        link[self.source[candidates]] = candidates  # the last one, to the lowest number, stays
        return link
