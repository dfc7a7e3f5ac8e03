"""The parts of a machine: `machine.toml` as objects (docs/reference/machine.md)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Annotated, Literal, NamedTuple

import numpy as np
from msgspec import Meta

from traceloom.analyze.bandwidth import compute_bus_factor
from traceloom.analyze.placed_calls import Peak
from traceloom.errors import UsageError
from traceloom.trace.array_types import Floats, Ints
from traceloom.workload.collective_algorithms import KINDS_BY_ALGORITHM, compute_log2

Topology = Literal["ring", "fully-connected", "switch", "torus", "mesh", "fat-tree", "links"]
Collective = Literal[
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "barrier",
    "send",
]
Algorithm = Literal["ring", "direct", "halving-doubling", "double-tree", "tree", "two-level"]
Span = Literal["inside", "between"]
MAX_RANKS = 1 << 20
MAX_LINKS = 1 << 25
Bandwidth = Annotated[float, Meta(gt=0)]  # 10^9 bytes per second in each direction
Nanoseconds = Annotated[float, Meta(ge=0)]
Factor = Annotated[float, Meta(gt=0)]
Count = Annotated[int, Meta(ge=1)]
Member = Annotated[int, Meta(ge=0)]
Node = Annotated[int, Meta(ge=0, lt=MAX_RANKS)]

SHAPED = ("torus", "mesh")
_DEFAULT_ALGORITHMS: dict[str, Algorithm] = {
    "all_to_all": "direct",
    "gather": "direct",
    "scatter": "direct",
    "send": "direct",
    "broadcast": "tree",
    "reduce": "tree",
    "barrier": "tree",
}
_SMALL_ALL_REDUCE = 1 << 16  # bytes; below, the number of hops matters more than the bytes


def make_machine_error(message: str, hint: str = "") -> UsageError:
    return UsageError(message, slug="bad-machine", hint=hint)


class Wire(NamedTuple):
    """One link in a list of links, the same in both directions.

    Attributes:
        first: A member of the dimension's group; numbers from `size` on are switches between the
            members.
        second: Another member or switch.
        bandwidth: Of the link, 10^9 B/s; None for the dimension's.
        latency: Of the link, ns; None for the dimension's.
    """

    first: Node
    second: Node
    bandwidth: Bandwidth | None = None
    latency: Nanoseconds | None = None


@dataclass(frozen=True)
class Dimension:
    """One dimension of the network, which connects the members of each of its groups.

    Attributes:
        topology: The topology of each group.
        size: Members of a group.
        bandwidth: Of one link in each direction, 10^9 B/s.
        latency: Of one link, ns.
        name: Display name.
        shape: Of a torus or mesh: members along each axis, the first changes fastest.
        radix: Of a fat tree: members below one leaf switch.
        oversubscription: Of a fat tree: bandwidth of the members below a leaf / bandwidth of the
            leaf to the spine.
        links: Of the topology `links`.
        shared: Whether a member is a whole block of the previous dimensions, with one link for all
            its ranks (a host with one network card); else each rank of the block has its own.
    """

    topology: Topology
    size: Count
    bandwidth: Bandwidth
    latency: Nanoseconds = 0.0
    name: str = ""
    shape: tuple[Count, ...] = ()
    radix: Count | None = None
    oversubscription: Annotated[float, Meta(ge=1)] = 1.0
    links: tuple[Wire, ...] = ()
    shared: bool = False

    def __post_init__(self) -> None:
        numbers = [self.bandwidth, self.latency, self.oversubscription]
        numbers += [value for wire in self.links for value in wire[2:] if value is not None]
        if not all(map(math.isfinite, numbers)):
            raise make_machine_error("bandwidth and latency are finite numbers")
        for key, owners in (("shape", SHAPED), ("radix", ("fat-tree",)), ("links", ("links",))):
            if getattr(self, key) and self.topology not in owners:
                raise make_machine_error(
                    f"`{key}` belongs to {' and '.join(owners)}, not to the topology {self.topology}"
                )
            if not getattr(self, key) and self.topology in owners:
                raise make_machine_error(f"the topology {self.topology} needs `{key}`")
        if self.oversubscription != 1 and self.topology != "fat-tree":
            raise make_machine_error(
                f"`oversubscription` belongs to a fat-tree, not to the topology {self.topology}"
            )
        if self.topology in SHAPED and math.prod(self.shape) != self.size:
            product = " x ".join(map(str, self.shape))
            raise make_machine_error(
                f"the shape {product} has {math.prod(self.shape)} members, the size is {self.size}"
            )
        self._check_wires()

    @property
    def link_count(self) -> int:
        """The max number of links of one group."""
        per_member = {"fully-connected": self.size, "links": 0, "fat-tree": 4}.get(self.topology, 2)
        return self.size * per_member * max(len(self.shape), 1) + 2 * len(self.links)

    def _check_wires(self) -> None:
        """Rejects a list of links that leaves a member unconnected, or that contains a link
        twice.
        """
        pairs = set()
        root: dict[int, int] = {}

        def root_of(node: int) -> int:
            while root.get(node, node) != node:
                node = root[node]
            return node

        for wire in self.links:
            first, second = wire[:2]
            if first == second:
                raise make_machine_error(f"the link [{first}, {second}] joins {first} with itself")
            if frozenset(wire[:2]) in pairs:
                raise make_machine_error(
                    f"the link [{first}, {second}] stands twice",
                    "give one link with the bandwidth of both",
                )
            pairs.add(frozenset(wire[:2]))
            roots = sorted((root_of(first), root_of(second)))
            root.update(dict.fromkeys((first, second, *roots), roots[0]))
        for member in range(self.size if self.links else 0):
            if root_of(member) != root_of(0):
                raise make_machine_error(f"no links lead from member 0 to member {member}")


@dataclass(frozen=True)
class Nic:
    """The limit of what a rank can send and receive, whatever its links.

    Attributes:
        bandwidth: Of one rank in each direction, 10^9 B/s.
        of: `outer`: traffic that leaves the innermost dimension; `all`: all traffic.
    """

    bandwidth: Bandwidth
    of: Literal["outer", "all"] = "outer"

    def __post_init__(self) -> None:
        if not math.isfinite(self.bandwidth):
            raise make_machine_error("bandwidth is a finite number")


@dataclass(frozen=True)
class AlgorithmRule:
    """The algorithm of a collective.

    Attributes:
        collective: The kind.
        use: The algorithm.
        below: Only for sizes below this number of bytes; None for all.
    """

    collective: Collective
    use: Algorithm
    below: Count | None = None

    def __post_init__(self) -> None:
        kind = "all_reduce" if self.collective == "barrier" else self.collective
        if kind not in KINDS_BY_ALGORITHM[self.use]:
            able = [name for name, kinds in KINDS_BY_ALGORITHM.items() if kind in kinds]
            raise make_machine_error(
                f"there is no {self.use} algorithm for {self.collective}",
                f"{', '.join(able)} can do it" if able else "a send is one message",
            )


@dataclass(frozen=True)
class SpeedFactor:
    """Ranks that are faster or slower than the others.

    Attributes:
        ranks: The ranks.
        device: Speed of their devices: 0.5 takes twice as long.
        network: Speed of their links.
    """

    ranks: tuple[Member, ...]
    device: Factor = 1.0
    network: Factor = 1.0

    def __post_init__(self) -> None:
        if not math.isfinite(self.device) or not math.isfinite(self.network):
            raise make_machine_error("speed factors are finite numbers")
        if not self.ranks:
            raise make_machine_error("`ranks` names no rank")


@dataclass(frozen=True)
class MeasuredTransfer:
    """The fitted time of a measured collective: `alpha_ns + bytes on the bus / bandwidth`.

    Attributes:
        collective: The kind.
        span: `inside`: all ranks in one host; `between`: in several.
        ranks: Size of the group.
        from_bytes: Smallest size measured, as in the column `size_bytes` of the collectives.
        to_bytes: Largest size measured.
        alpha_ns: Time independent of size, ns.
        bandwidth: Bus bandwidth, 10^9 B/s; None if size has no effect.
        residual_p10: 10th percentile of (measured - fitted) / fitted.
        residual_p50: Median of it.
        residual_p90: 90th percentile of it.
        count: Number of measurements.
    """

    collective: Collective
    span: Span
    ranks: Count
    from_bytes: Member
    to_bytes: Member
    alpha_ns: Nanoseconds
    bandwidth: Bandwidth | None = None
    residual_p10: float = 0.0
    residual_p50: float = 0.0
    residual_p90: float = 0.0
    count: Member = 0

    def __post_init__(self) -> None:
        residuals = self.residual_p10, self.residual_p50, self.residual_p90
        if not all(map(math.isfinite, (self.alpha_ns, self.bandwidth or 1.0, *residuals))):
            raise make_machine_error("numbers of a transfer are finite")
        if self.from_bytes > self.to_bytes:
            raise make_machine_error(
                f"`from_bytes` {self.from_bytes:,} is above `to_bytes` {self.to_bytes:,}"
            )

    @property
    def group(self) -> tuple[str, str, int]:
        """The key of the collectives it applies to: kind, span, ranks."""
        return self.collective, self.span, self.ranks

    def outside(self, size_bytes: int) -> int:
        """Returns by how many bytes a size is outside the measured range; 0 inside."""
        return max(self.from_bytes - size_bytes, size_bytes - self.to_bytes, 0)

    def time_ns(self, size_bytes: float, ranks: int | None = None) -> float:
        """Returns the time of such a collective of any size.

        A group of another size has the same bus bandwidth; the latency changes in proportion to the
        ring steps.
        """
        ranks = self.ranks if ranks is None else ranks
        steps = (ranks - 1) / (self.ranks - 1) if self.ranks > 1 else 1.0
        on_bus = size_bytes * compute_bus_factor(self.collective, ranks)
        return self.alpha_ns * steps + (on_bus / self.bandwidth if self.bandwidth else 0.0)


class MeasuredTime(NamedTuple):
    """A time derived from measured collectives.

    Attributes:
        time_ns: From the last arrival to the end; None if nothing comparable was measured.
        flags: Properties outside the measurements: `kind`, `span` (no time then), `group` (its
            size), `size`.
    """

    time_ns: float | None
    flags: tuple[str, ...]


@dataclass(frozen=True)
class Machine:
    """A machine: devices and the network that connects them.

    Ranks have places 0, 1, ... Dimension 0 connects neighboring places: place = c0 + size0 * (c1 +
    size1 * (c2 + ...)).

    Attributes:
        dimensions: Of the network, the innermost first; empty for a single rank.
        name: Display name.
        source: Origin of the figures.
        nic: Limit of each rank; None if only its links limit it.
        order: The rank at each place; empty if place and rank are the same.
        per_host: Ranks per host; None: those of dimension 0 if there are several dimensions, else
            all.
        algorithms: The first match is used.
        device: The device of every rank; None if unknown.
        slow: Ranks that differ.
        transfers: Measured collectives.
        price_per_hour: Per rank; None if unknown.
    """

    dimensions: tuple[Dimension, ...]
    name: str = ""
    source: str = ""
    nic: Nic | None = None
    order: tuple[int, ...] = ()
    per_host: int | None = None
    algorithms: tuple[AlgorithmRule, ...] = ()
    device: Peak | None = None
    slow: tuple[SpeedFactor, ...] = ()
    transfers: tuple[MeasuredTransfer, ...] = field(default=(), repr=False)
    price_per_hour: float | None = None

    def __post_init__(self) -> None:
        if not self.dimensions and (self.device is None or self.nic is not None):
            raise make_machine_error(
                "a machine needs at least one `[[network]]`", "one rank alone needs a `[device]`"
            )
        if self.ranks > MAX_RANKS:
            raise make_machine_error(
                f"the machine has {self.ranks:,} ranks, more than {MAX_RANKS:,}"
            )
        if sum(self.ranks // part.size * part.link_count for part in self.dimensions) > MAX_LINKS:
            raise make_machine_error(
                f"the network has more than {MAX_LINKS:,} links", "a switch has fewest"
            )
        if self.dimensions and self.dimensions[0].shared:
            raise make_machine_error(
                "the innermost dimension cannot be `shared`: nothing is inside its members"
            )
        if self.price_per_hour is not None and not 0 <= self.price_per_hour < math.inf:
            raise make_machine_error(
                f"expected the price to be a number of at least 0, got {self.price_per_hour}"
            )
        if self.order and sorted(self.order) != list(range(self.ranks)):
            raise make_machine_error(
                f"the order of the ranks has not each of 0 to {self.ranks - 1} once",
                "give one rank for each place, or no order",
            )
        if self.per_host is not None and (self.per_host < 1 or self.ranks % self.per_host):
            raise make_machine_error(
                f"{self.ranks} ranks are no number of hosts of {self.per_host}"
            )
        for factor in self.slow:
            if max(factor.ranks) >= self.ranks:
                raise make_machine_error(
                    f"`slow` names rank {max(factor.ranks)}, the machine has ranks 0 to {self.ranks - 1}"
                )
        measured = sorted(
            self.transfers, key=lambda transfer: (*transfer.group, transfer.from_bytes)
        )
        for first, second in pairwise(measured):
            if first.group == second.group and second.from_bytes <= first.to_bytes:
                raise make_machine_error(
                    f"two transfers of {first.collective} {first.span} {first.ranks} ranks overlap at "
                    f"{second.from_bytes:,} bytes"
                )

    @cached_property
    def ranks(self) -> int:
        return math.prod(dimension.size for dimension in self.dimensions)

    def check(self, ranks: int) -> None:
        """Rejects a workload with another number of ranks.

        Raises:
            UsageError: slug `machine-size`.
        """
        if self.ranks != ranks:
            raise self._other_size(ranks, "change a size, as with --set network.0.size=N")

    def _other_size(self, ranks: int, hint: str) -> UsageError:
        sizes = " x ".join(str(dimension.size) for dimension in self.dimensions) or "no network"
        return UsageError(
            f"the machine has {self.ranks} ranks ({sizes}), the workload has {ranks}",
            slug="machine-size",
            hint=hint,
        )

    @property
    def ranks_per_host(self) -> int:
        return self.per_host or (
            self.dimensions[0].size if len(self.dimensions) > 1 else self.ranks
        )

    @cached_property
    def places(self) -> Ints:
        """Returns the place of each rank, shape (ranks,)."""
        return (
            np.argsort(self.order).astype(np.int64)
            if self.order
            else np.arange(self.ranks, dtype=np.int64)
        )

    def span(self, members: Sequence[int] | Ints) -> Span:
        """Returns whether the ranks are inside one host or between several."""
        hosts = self.places[np.asarray(members, dtype=np.int64)] // self.ranks_per_host
        return "inside" if hosts.size == 0 or hosts.min() == hosts.max() else "between"

    def device_speeds(self) -> Floats:
        """Returns the speed factor of each rank's device, shape (ranks,); factors of several
        entries multiply.
        """
        return self._speeds("device")

    def network_speeds(self) -> Floats:
        """Returns the speed factor of each rank's links, likewise."""
        return self._speeds("network")

    def _speeds(self, part: Literal["device", "network"]) -> Floats:
        speeds = np.ones(self.ranks)
        for factor in self.slow:
            speeds[list(factor.ranks)] *= getattr(factor, part)
        return speeds

    def algorithm(self, collective: str, size_bytes: int, ranks: int) -> Algorithm:
        """Returns the algorithm of a collective: the first entry that matches, else the default.

        Args:
            collective: Its kind.
            size_bytes: Its size, as in the column `size_bytes`.
            ranks: Size of its group.

        Raises:
            UsageError: slug `no-such-schedule`: the algorithm needs a power of two.
        """
        default = (
            "double-tree"
            if collective == "all_reduce" and size_bytes < _SMALL_ALL_REDUCE
            else _DEFAULT_ALGORITHMS.get(collective, "ring")
        )
        rules = (rule for rule in self.algorithms if rule.collective == collective)
        use = next(
            (rule.use for rule in rules if rule.below is None or size_bytes < rule.below), default
        )
        if use == "halving-doubling":
            compute_log2(ranks, use)
        return use

    def transfer(
        self, collective: str, members: Sequence[int] | Ints, size_bytes: int
    ) -> MeasuredTransfer | None:
        """Returns the measurement for a collective, or None if there is none.

        If its size was not measured, returns the entry with the nearest size, whose range does not
        contain it.
        """
        group = (collective, self.span(members), len(members))
        return min(
            (transfer for transfer in self.transfers if transfer.group == group),
            key=lambda transfer: transfer.outside(size_bytes),
            default=None,
        )

    def transfer_of(self, collective: str, span: Span, ranks: int, size_bytes: int) -> MeasuredTime:
        """Returns the time of a collective by measurements, and which of its properties were not
        measured.

        If its group size was not measured, the nearest one is used; another span never is.
        """
        same_collective = [
            transfer for transfer in self.transfers if transfer.collective == collective
        ]
        in_span = [transfer for transfer in same_collective if transfer.span == span]
        if not in_span:
            return MeasuredTime(
                None, ("span",) if same_collective else ("kind",) if self.transfers else ()
            )
        nearest_ranks = min(
            {transfer.ranks for transfer in in_span},
            key=lambda count: (abs(math.log(count / ranks)), count),
        )
        group = [transfer for transfer in in_span if transfer.ranks == nearest_ranks]
        nearest = min(group, key=lambda transfer: transfer.outside(size_bytes))
        flags = ("group",) * (nearest_ranks != ranks) + ("size",) * (
            nearest.outside(size_bytes) > 0
        )
        return MeasuredTime(nearest.time_ns(size_bytes, ranks), flags)

    def for_ranks(self, ranks: int) -> Machine:
        """Returns the same machine with another number of ranks: more or fewer members of the
        outermost dimension, or a part of one host.

        Raises:
            UsageError: slug `machine-size`: no number of members fits.
        """
        if ranks == self.ranks:
            return self
        if not self.dimensions:
            raise self._other_size(ranks, "measure or describe its network")
        sizes = []
        remaining = ranks
        for dimension in self.dimensions[:-1]:
            if remaining % dimension.size and remaining > dimension.size:
                raise self._other_size(ranks, f"a multiple of {dimension.size} fits")
            sizes.append(min(remaining, dimension.size))
            remaining //= sizes[-1]
        sizes.append(remaining)
        for dimension, size in zip(self.dimensions, sizes, strict=True):
            if dimension.size != size and dimension.topology in (*SHAPED, "links"):
                raise self._other_size(
                    ranks, f"the size of the {dimension.topology} is its own: write another machine"
                )
        if self.order or self.slow:
            raise self._other_size(
                ranks, "it names single ranks (`order`, `slow`): write another machine"
            )
        dimensions = (
            replace(dimension, size=size)
            for dimension, size in zip(self.dimensions, sizes, strict=True)
        )
        per_host = self.per_host and min(self.per_host, ranks)
        return replace(self, dimensions=tuple(dimensions), per_host=per_host)
