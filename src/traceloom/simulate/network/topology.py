"""The links of a machine, and the way of every message over them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import polars as pl

from traceloom.array_types import Array, Floats, Ints
from traceloom.simulate.machine.parts import Dimension, Machine
from traceloom.simulate.network.fabrics import Fabric, fabric_of

_NO_LINKS = pl.DataFrame(schema={"link": pl.Int64, "source": pl.String, "target": pl.String})


@dataclass(frozen=True, eq=False, slots=True)
class Routes:
    """The links of messages.

    Attributes:
        counts: How many links each message takes, shape (messages,); 0 from a rank to itself.
        links: Their numbers, message by message.
    """

    counts: Ints
    links: Ints

    @property
    def message(self) -> Ints:
        """The message of each entry of `links`."""
        return np.repeat(np.arange(self.counts.size), self.counts)

    def over(self, reduce: np.ufunc, values: Array, empty: float) -> Floats:
        """One value per message from a value per entry of `links`: their sum, largest or smallest.

        Args:
            reduce: `np.add`, `np.maximum`, `np.minimum`.
            values: One per entry.
            empty: For messages without links.
        """
        result = np.full(self.counts.size, empty, dtype=np.float64)
        filled = self.counts > 0
        if filled.any():
            starts = (np.cumsum(self.counts) - self.counts)[filled]
            result[filled] = reduce.reduceat(values, starts)
        return result


class MachineNetwork:
    """All links of a machine, numbered from 0.

    A message goes through the dimensions one after the other, the innermost first: in dimension 0 to the rank that has
    the target's place there, from it in dimension 1, and so on (as over NVLink to the rank whose network card is on the
    target's rail). What leaves the innermost dimension also takes the network card of its source and of its target.

    Attributes:
        machine: The machine.
        bandwidth: Of each link, B/ns (10^9 B/s), shape (links,).
        latency: ns.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._fabrics: list[tuple[Fabric, int, int]] = []  # with the first link and the groups of each dimension
        speeds = machine.network_speeds()
        bandwidth, latency = [np.empty(0)], [np.empty(0)]
        first = 0
        inside = 1
        for dimension in machine.dimensions:
            fabric = fabric_of(dimension)
            groups = machine.ranks // (dimension.size * (inside if dimension.shared else 1))
            factors = np.ones((groups, fabric.source.size))
            if not dimension.shared:
                places = self._places(inside, dimension.size, groups)
                for ends in (fabric.source, fabric.target):
                    member = ends < dimension.size
                    at_place = speeds[_rank_at(machine, places[:, ends[member]])]
                    factors[:, member] = np.minimum(factors[:, member], at_place)
            self._fabrics.append((fabric, first, groups))
            bandwidth.append((factors * fabric.bandwidth).reshape(-1))
            latency.append(np.tile(fabric.latency, groups))
            first += groups * fabric.source.size
            inside *= dimension.size
        self._cards = first  # of ranks outwards, then of ranks inwards
        if machine.nic is not None:
            bandwidth.append(np.tile(machine.nic.bandwidth * speeds, 2))
            latency.append(np.zeros(2 * machine.ranks))
        self.bandwidth = np.concatenate(bandwidth)
        self.latency = np.concatenate(latency)

    @staticmethod
    def _places(inside: int, size: int, groups: int) -> Ints:
        """The place of each member of each group of a dimension, shape (groups, size)."""
        outer, inner = np.divmod(np.arange(groups), inside)
        places: Ints = inner[:, None] + inside * (np.arange(size) + size * outer[:, None])
        return places

    def routes(self, source: Ints, target: Ints) -> Routes:
        """The links of messages from ranks to ranks.

        Args:
            source: Ranks, shape (messages,).
            target: Ranks.
        """
        places = self.machine.places
        start, end = places[source], places[target]
        messages = np.arange(source.size)
        parts: list[tuple[Ints, Ints]] = []
        inside = 1
        for dimension, (fabric, first, _) in zip(self.machine.dimensions, self._fabrics, strict=True):
            outside = inside * dimension.size
            moved = np.flatnonzero(start // inside % dimension.size != end // inside % dimension.size)
            if moved.size:
                group = start[moved] // outside
                if not dimension.shared:
                    group = group * inside + end[moved] % inside
                counts, links = fabric.ways(
                    start[moved] // inside % dimension.size, end[moved] // inside % dimension.size
                )
                base = first + group * fabric.source.size
                parts.append((np.repeat(moved, counts), links + np.repeat(base, counts)))
            inside = outside
        if self.machine.nic is not None:
            block = 1 if self.machine.nic.of == "all" else self.machine.dimensions[0].size
            outer = np.flatnonzero(start // block != end // block)
            parts.insert(0, (messages[outer], self._cards + source[outer]))
            parts.append((messages[outer], self._cards + self.machine.ranks + target[outer]))
        message = np.concatenate([message for message, _ in parts]) if parts else np.empty(0, dtype=np.int64)
        links = np.concatenate([links for _, links in parts]) if parts else np.empty(0, dtype=np.int64)
        order = np.argsort(message, kind="stable")
        return Routes(np.bincount(message, minlength=source.size), links[order])

    @cached_property
    def links(self) -> pl.DataFrame:
        """link, name, source, target, bandwidth (10^9 B/s), latency (ns); numbers without a link are left out."""
        frames = []
        inside = 1
        for number, dimension in enumerate(self.machine.dimensions):
            frames.append(self._links_of(number, dimension, inside))
            inside *= dimension.size
        if self.machine.nic is not None:
            rank = pl.Series(np.arange(self.machine.ranks))
            names = pl.select(rank=pl.format("rank {}", rank), card=pl.format("network card of rank {}", rank))
            for way, (source, target) in enumerate((("rank", "card"), ("card", "rank"))):
                frames.append(
                    pl.DataFrame(
                        {
                            "link": self._cards + way * self.machine.ranks + np.arange(self.machine.ranks),
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

    def _links_of(self, number: int, dimension: Dimension, inside: int) -> pl.DataFrame:
        """link, source, target of one dimension."""
        fabric, first, groups = self._fabrics[number]
        name = dimension.name or f"dimension {number}"
        blocks = 1 if dimension.shared else inside
        places = self._places(blocks, dimension.size, groups)
        if dimension.shared:  # a member is a block of ranks
            ranks = _rank_at(self.machine, places[..., None] * inside + np.arange(inside))
            ends = pl.Series(ranks.min(axis=2).ravel()), pl.Series(ranks.max(axis=2).ravel())
            words = "rank {}" if inside == 1 else "ranks {} to {}"
            members = pl.select(pl.format(words, *ends[: words.count("{}")])).to_series()
        else:
            members = pl.select(pl.format("rank {}", pl.Series(_rank_at(self.machine, places).ravel()))).to_series()

        def node(ends: Ints) -> pl.Series:
            group = np.repeat(np.arange(groups), int(fabric.exists.sum()))
            end = np.tile(ends[fabric.exists], groups)
            member = end < dimension.size
            switch = pl.format("{} switch {}.{}", pl.lit(name), pl.Series(group), pl.Series(end - dimension.size))
            rank = members.gather(np.where(member, group * dimension.size + end, 0))
            return pl.select(pl.when(pl.Series(member)).then(rank).otherwise(switch)).to_series()

        numbers = np.flatnonzero(fabric.exists)
        link = first + np.add.outer(np.arange(groups) * fabric.source.size, numbers).ravel()
        return pl.DataFrame({"link": link, "source": node(fabric.source), "target": node(fabric.target)})


def _rank_at(machine: Machine, places: Ints) -> Ints:
    """The ranks at places."""
    return np.asarray(machine.order, dtype=np.int64)[places] if machine.order else places
