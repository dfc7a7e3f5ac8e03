"""Communications of a graph and their durations on a machine.

A measured transfer of the machine takes precedence over schedule and topology. If the network
differs from that of the measurement (`--set network.0.bandwidth=100`), the measured time is scaled
like the modelled one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl

from traceloom.analyze.bandwidth import add_sizes
from traceloom.errors import UsageError
from traceloom.graph import graph as graph_schema
from traceloom.graph.evaluate import MAX_DURATION_NS
from traceloom.graph.graph import Graph, get_column_array, get_point_times
from traceloom.system import units
from traceloom.trace.array_types import Bools, Floats, Ints
from traceloom.trace.frames import build_schema
from traceloom.trace.notice import Notice
from traceloom.workload.collective_algorithms import KINDS_BY_ALGORITHM, Schedule, build_schedule
from traceloom.workload.simulate.machine import Machine
from traceloom.workload.simulate.network import LinkUse, MachineNetwork, finish_times

ROOTED = ("broadcast", "scatter", "reduce", "gather")


@dataclass(frozen=True, slots=True)
class Operations:
    """The communications with meetings; M of them, in the order of their meetings.

    Attributes:
        table: meeting (node), instance, kind (`send` for messages), group, group_size, members
            (ranks, the root or sender first; null if unknown), size_bytes and bus_factor as in
            `analyze.collective`, parts (recorded ones), splits (of an uneven all_to_all: bytes from
            each member, row by row, to each).
        edge: Edges out of the meetings, each to the end of a part.
        operation_of_edge: Row of `table` of each edge.
        part: Nodes of all parts.
        operation_of_part: Row of `table` of each part.
    """

    table: pl.DataFrame
    edge: Ints
    operation_of_edge: Ints
    part: Ints
    operation_of_part: Ints

    def __len__(self) -> int:
        return self.table.height


def find_operations(graph: Graph) -> Operations:
    kind = get_column_array(graph, graph.nodes["kind"])
    meeting = np.flatnonzero(kind == graph_schema.NODE_KINDS.index(graph_schema.RENDEZVOUS))
    number = np.full(graph.nodes.height, -1, dtype=np.int64)
    number[meeting] = np.arange(meeting.size)
    source, target = (
        get_column_array(graph, graph.edges[end]).astype(np.int64) for end in ("source", "target")
    )
    edge = np.flatnonzero((number[source] >= 0) & graph.edges["to_end"].to_numpy())
    communicates = np.isin(
        kind, [graph_schema.NODE_KINDS.index(name) for name in graph_schema.COMMUNICATION]
    )
    entering_edges = np.flatnonzero((number[target] >= 0) & communicates[source])
    pairs = np.unique(
        np.concatenate([number[source[edge]], number[target[entering_edges]]]) * graph.nodes.height
        + np.concatenate([target[edge], source[entering_edges]])
    )
    part_operation, part = np.divmod(pairs, max(graph.nodes.height, 1))
    return Operations(
        _build_table(graph, meeting, part, part_operation),
        edge,
        number[source[edge]],
        part.astype(np.int64),
        part_operation,
    )


def _build_table(graph: Graph, meeting: Ints, part: Ints, part_operation: Ints) -> pl.DataFrame:
    """See `Operations.table`."""
    part_table = pl.DataFrame({"row": part_operation, "node": part.astype(np.uint32)}).join(
        graph.communication, on="node", how="left", maintain_order="left"
    )
    part_table = part_table.with_columns(graph.nodes["rank"].gather(part).alias("rank"))
    message = pl.col("kind").is_in(["send", "receive"])
    sender = pl.when(pl.col("kind") == "receive").then("peer").otherwise("rank")
    receiver = pl.when(pl.col("kind") == "receive").then("rank").otherwise("peer")
    split = (
        (pl.col("kind") == "all_to_all")
        & (pl.col("in_splits").list.sum() > 0)
        & pl.col("in_bytes").is_not_null()
    )
    table = (
        part_table.group_by("row")
        .agg(
            pl.col("instance", "kind", "group", "ranks").first(),
            pl.max("in_bytes", "out_bytes", "group_size"),
            pl.col("peer").drop_nulls().first(),
            sender.filter(message).drop_nulls().first().alias("sender"),
            receiver.filter(message).drop_nulls().first().alias("receiver"),
            pl.col("rank").sort().alias("recorded"),
            pl.len().cast(pl.Int64).alias("parts"),
            # Ranks with recorded splits, and their total input.
            split_ranks=pl.col("rank").filter(split),
            split_lists=pl.col("in_splits").filter(split),
            put_in=pl.col("in_bytes").filter(split),
        )
        .sort("row")
    )
    pair = pl.concat_list("sender", "receiver")
    is_message = pl.col("kind").is_in(["send", "receive"])
    world = pl.lit(graph.world_size, dtype=pl.Int32)
    members = (
        pl.when(is_message)
        .then(pl.when(pl.col("sender").is_not_null() & pl.col("receiver").is_not_null()).then(pair))
        .when(pl.col("ranks").is_not_null())
        .then("ranks")
        .when(pl.col("group_size").fill_null(pl.col("parts")) == pl.col("parts"))
        .then("recorded")
        .when(pl.col("group_size") == world)
        .then(pl.int_ranges(0, world, dtype=pl.Int32))
    )
    table = table.with_columns(members.alias("members")).with_columns(
        # Both ends of a message are members, whatever their group.
        pl.coalesce(pl.col("members").list.len().cast(pl.Int32), "group_size").alias("group_size"),
        pl.when(is_message).then(pl.lit("send")).otherwise("kind").alias("kind"),
    )
    root_first = pl.concat_list(
        pl.concat_list("peer"),
        pl.col("members").list.set_difference(pl.concat_list("peer")).list.sort(),
    )
    rooted = pl.col("kind").is_in(ROOTED) & pl.col("members").list.contains(pl.col("peer"))
    table = add_sizes(table).with_columns(
        pl.when(rooted.fill_null(value=False))
        .then(root_first)
        .otherwise("members")
        .alias("members"),
        meeting=pl.Series(meeting).gather(table["row"]),
        splits=_build_splits(table),
    )
    return table.select(
        "meeting",
        "instance",
        "kind",
        "group",
        "group_size",
        "members",
        "size_bytes",
        "bus_factor",
        "parts",
        "splits",
    )


def _build_splits(table: pl.DataFrame) -> pl.Series:
    """See `Operations.table`; unrecorded splits are the mean of the others."""
    matrices: list[list[int] | None] = [None] * table.height
    rows = (
        table.with_row_index("at")
        .filter(pl.col("split_ranks").list.len() > 0)
        .drop_nulls("members")
    )
    columns = ("at", "members", "split_ranks", "split_lists", "put_in")
    for row, members, split_ranks, split_lists, put_in in rows.select(columns).iter_rows():
        even = len({part for split in split_lists for part in split}) == 1
        if even or any(len(split) != len(members) for split in split_lists):
            continue
        matrix = np.full((len(members), len(members)), np.mean(put_in) / len(members))
        for rank, split, sent_bytes in zip(split_ranks, split_lists, put_in, strict=True):
            matrix[members.index(rank)] = np.array(split) * sent_bytes / sum(split)
        matrices[row] = np.rint(matrix).astype(np.int64).ravel().tolist()
    return pl.Series("splits", matrices, dtype=pl.List(pl.Int64))


def compute_recorded_transfers(graph: Graph, operations: Operations) -> Ints:
    """Returns the time of each communication from its meeting to the end of its median part; shape
    (communications,), ns.
    """
    times = get_point_times(graph)
    target = get_column_array(graph, graph.edges["target"]).astype(np.int64)[operations.edge]
    durations = (
        times[2 * target + 1]
        - times[
            2
            * operations.table["meeting"].to_numpy().astype(np.int64)[operations.operation_of_edge]
        ]
    )
    middle = (
        pl.DataFrame({"row": operations.operation_of_edge, "took": np.maximum(durations, 0)})
        .group_by("row")
        .agg(pl.col("took").quantile(0.5, "lower").cast(pl.Int64))
    )
    out = np.zeros(len(operations), dtype=np.int64)
    out[middle["row"].to_numpy()] = middle["took"].to_numpy()
    return out


_MIN_SHARE = 1e-12  # of a link's bandwidth, since rounding may make the remainder negative
FULL = 1 + 1e-9  # of a link; a larger demand does not fit


@dataclass(frozen=True, eq=False)
class Transfers:
    """The transfers of M communications, of C classes, over L links.

    Attributes:
        time_ns: Duration of each alone, shape (M,).
        replaced: Whether it is the machine's rather than the recorded one; shape (M,).
        class_of_operation: Class of each; -1 if it needs no link; shape (M,).
        share: Share of each link that a communication of a class uses while it runs alone: rows
            `class_of_operation`, `link`, `share` (of the link's bandwidth), `bytes`.
        links: One row per link: link, name, source, target.
        algorithm: Of each communication; None if a measured transfer was used or the recorded one
            kept.
        flags: A remark on each time, in words; "" for none.
        card_ns: Lower bound of the time of each communication's bytes over network cards; shape
            (M,).
        latency_ns: Last part of each time, in which its bytes are on their way and no link is taken;
            shape (M,).
    """

    time_ns: Ints
    replaced: Bools
    class_of_operation: Ints
    share: pl.DataFrame
    links: pl.DataFrame
    algorithm: list[str | None]
    flags: list[str]
    card_ns: Ints
    latency_ns: Ints

    def bundles(self) -> LinkBundles:
        """Returns the links, with those bundled that have equal demand from all classes."""
        classes = int(self.class_of_operation.max(initial=-1)) + 1
        if not self.share.height:  # only latencies
            return LinkBundles.none(classes)
        shares_by_link = (
            self.share.sort("link", "class_of_operation")
            .group_by("link", maintain_order=True)
            .agg("class_of_operation", "share")
        )
        bundle_rows = (
            shares_by_link.group_by("class_of_operation", "share", maintain_order=True)
            .agg("link")
            .with_row_index("bundle")
        )
        rows = (
            bundle_rows.select("bundle", "class_of_operation", "share")
            .explode("class_of_operation", "share")
            .sort("class_of_operation", "bundle")
        )
        return LinkBundles(
            np.searchsorted(rows["class_of_operation"].to_numpy(), np.arange(classes + 1)),
            rows["bundle"].to_numpy().astype(np.int64),
            rows["share"].to_numpy(),
            bundle_rows["link"].explode().to_numpy().astype(np.int64),
            np.repeat(np.arange(bundle_rows.height), bundle_rows["link"].list.len().to_numpy()),
        )


@dataclass(frozen=True, eq=False, slots=True)
class LinkBundles:
    """Links grouped by demand; C classes, B bundles.

    Attributes:
        first: Where the bundles of each class start in `bundle` and `share`, and the end; shape (C
            + 1,).
        bundle: The bundles that a class needs.
        share: Share of the bandwidth of each of their links that it uses alone.
        link: The links in bundles.
        of_link: Bundle of each link.
    """

    first: Ints
    bundle: Ints
    share: Floats
    link: Ints
    of_link: Ints

    @classmethod
    def none(cls, classes: int = 0) -> LinkBundles:
        """Returns no bundles, for classes that need no links."""
        nothing = np.zeros(0, dtype=np.int64)
        return cls(np.zeros(classes + 1, dtype=np.int64), nothing, np.zeros(0), nothing, nothing)

    @property
    def count(self) -> int:
        """The number of bundles."""
        return int(self.of_link.max(initial=-1)) + 1

    def of(self, number: int) -> tuple[Ints, Floats]:
        """Returns the bundles of a class, and its share of them."""
        part = slice(int(self.first[number]), int(self.first[number + 1]))
        return self.bundle[part], self.share[part]

    def uses(self, class_by_operation: Ints) -> tuple[Ints, Ints, Floats]:
        """Returns the usage by communications of these classes (-1: none): row, bundle and share,
        row by row.
        """
        linked_rows = np.flatnonzero(class_by_operation >= 0)
        count = np.diff(self.first)[class_by_operation[linked_rows]]
        row = np.repeat(linked_rows, count)
        entry = (
            self.first[class_by_operation[row]]
            + np.arange(row.size)
            - np.repeat(np.cumsum(count) - count, count)
        )
        return row, self.bundle[entry], self.share[entry]

    def exceeds_bandwidth(self, class_by_operation: Ints, start: Ints, end: Ints) -> bool:
        """Returns whether communications at these times exceed the bandwidth of a link; shapes
        (M,).
        """
        row, bundle, requested = self.uses(np.where(end > start, class_by_operation, -1))
        # Running demand on each bundle in order of time, ends before starts.
        times = np.concatenate([start[row], end[row]])
        change = np.concatenate([requested, -requested])
        order = np.lexsort((change, times, np.concatenate([bundle, bundle])))
        return bool((np.cumsum(change[order]) > FULL).any())


def compute_fair_speeds(share: Floats) -> tuple[Floats, Ints]:
    """Returns the speeds of transfers that share links, as fractions of their speed alone: max-min
    fair.

    All speeds rise together until a link is full; the transfers on it are then fixed, and the
    others continue. The relevant bandwidth is that of the link of which a transfer uses most.

    Args:
        share: Share of each link that each transfer uses alone, at most 1; shape (transfers,
            links).

    Returns:
        Speeds, shape (transfers,), and the link that limits each, -1 for none.
    """
    count = len(share)
    speed, held_by = np.ones(count), np.full(count, -1, dtype=np.int64)
    max_share = share.max(axis=1, initial=0.0)
    short = np.flatnonzero(share.sum(axis=0) > FULL)  # no other link can be a bottleneck
    share = share[:, short]
    open_ = share.any(axis=1)
    weight = np.divide(share, max_share[:, None], out=np.zeros_like(share), where=share > 0)
    while open_.any():
        rise = weight[open_].sum(axis=0)
        free_share = 1.0 - speed[~open_] @ share[~open_]
        level = np.divide(free_share, rise, out=np.full(rise.size, np.inf), where=rise > 0)
        min_level = max(float(level.min()), _MIN_SHARE)
        enough = open_ & (max_share <= min_level * FULL)
        if enough.any():
            open_ &= ~enough
            continue
        # Links with the same fill level become full together.
        tight = level <= min_level * FULL
        stopped = open_ & share[:, tight].any(axis=1)
        speed[stopped] = min_level / max_share[stopped]
        held_by[stopped] = short[np.argmax((share[stopped] > 0) & tight, axis=1)]
        open_ &= ~stopped
    return speed, held_by


SHARES = build_schema(
    "class_of_operation link share bytes",
    {"class_of_operation": pl.Int64, "link": pl.Int64, "share": pl.Float64},
)
_PIPELINED = ("tree", "double-tree")
_CHUNK = 1 << 19  # bytes that trees and chains forward at once
_MAX_CHUNKS = 64
_MAX_BYTES = 2.0**62  # of a link, since files may contain any size
_FLAGS = {
    "kind": "kind not measured, by schedule",
    "span": "not measured inside or between hosts, by schedule",
    "group": "size of the group not among those measured",
    "size": "size not among those measured",
}
_REDUCED = 3  # bytes that a device moves per reduced byte: two read, one written


@dataclass(frozen=True, eq=False, slots=True)
class ModelledTransfer:
    """One communication, alone on a network.

    Attributes:
        time_ns: From the meeting to the last end.
        links: The links that it uses.
        bytes: Bytes on each of them.
        card_ns: Lower bound of the time of its bytes over the network cards of ranks; 0 if there
            are none.
        latency_ns: Of the messages of a single round; 0 where rounds follow each other.
        algorithm: The algorithm.
    """

    time_ns: float
    links: Ints
    bytes: Ints
    card_ns: float
    latency_ns: float
    algorithm: str


@dataclass(eq=False)
class _Pricing:
    """Cached times of communications on one machine."""

    machine: Machine
    network: MachineNetwork = field(init=False)
    _known: dict[tuple[str, tuple[int, ...], int, tuple[int, ...]], ModelledTransfer] = field(
        default_factory=dict
    )

    def __post_init__(self) -> None:
        self.network = MachineNetwork(self.machine)

    def modelled(
        self, kind: str, members: Sequence[int], size_bytes: int, splits: Sequence[int] = ()
    ) -> ModelledTransfer | None:
        """Returns a communication by its schedule; None if no schedule supports its kind.

        Args:
            kind: As in `Operations.table`.
            members: The ranks; the root or the sender first.
            size_bytes: As in `analyze.collective`.
            splits: As in `Operations.table`; empty for even ones.
        """
        key = (kind, tuple(members), size_bytes, tuple(splits))
        if key not in self._known:
            if kind not in {"send", "barrier"} and all(
                kind not in kinds for kinds in KINDS_BY_ALGORITHM.values()
            ):
                return None
            self._known[key] = self.model(*key)
        return self._known[key]

    def model(
        self, kind: str, members: tuple[int, ...], size_bytes: int, splits: tuple[int, ...]
    ) -> ModelledTransfer:
        machine = self.machine
        positions = machine.places[list(members)]
        order = np.asarray(members)
        if kind in ROOTED:
            order = np.concatenate([order[:1], order[1:][np.argsort(positions[1:])]])
        position_order = np.argsort(positions)
        matrix = (
            np.array(splits).reshape(len(members), -1)[np.ix_(position_order, position_order)]
            if splits
            else None
        )
        if kind not in {*ROOTED, "send"}:
            order = order[position_order]
        hosts = np.unique(positions // machine.ranks_per_host, return_counts=True)[1]
        algorithm: str = (
            "direct" if kind == "send" else machine.algorithm(kind, size_bytes, len(members))
        )
        stated = any(
            r.collective == kind and (r.below is None or size_bytes < r.below)
            for r in machine.algorithms
        )
        # One ring over several hosts would use only one network card of each.
        if not stated and algorithm == "ring" and kind in KINDS_BY_ALGORITHM["two-level"]:
            is_two_level = hosts.size > 1 and hosts.min() == hosts.max() > 1
            algorithm = "two-level" if is_two_level else algorithm
        size = size_bytes // len(members) if kind == "all_gather" else size_bytes
        chunks = (
            min(max(size // _CHUNK, 1), _MAX_CHUNKS)
            if algorithm in _PIPELINED or kind in ROOTED
            else 1
        )
        plan = build_schedule(
            "broadcast" if kind == "send" else kind,
            algorithm,
            len(members),
            size,
            chunks=chunks,
            local=int(hosts[0]),
            splits=matrix,
        )
        use = LinkUse(self.network)
        memory = machine.device.memory if machine.device else None
        end_ns = finish_times(
            plan,
            self.network,
            order,
            np.zeros(len(members)),
            reduction_ns_per_byte=_REDUCED * 1e9 / memory if memory else 0.0,
            use=use,
        )
        links = np.flatnonzero(use.bytes > 0)
        carried = np.rint(np.minimum(use.bytes[links], _MAX_BYTES)).astype(np.int64)
        time_ns = float(end_ns.max(initial=0.0))
        taken_ns = float((carried / self.network.bandwidth[links]).max(initial=0.0))
        latency_ns = max(time_ns - taken_ns, 0.0) if len(plan.rounds) == 1 and carried.size else 0.0
        return ModelledTransfer(
            time_ns, links, carried, self.card_ns(plan, order), latency_ns, algorithm
        )

    def card_ns(self, plan: Schedule, order: Ints) -> float:
        """Returns the time of the busiest network card for its bytes, whatever the links."""
        card = self.machine.nic
        if card is None:
            return 0.0
        block = 1 if card.of == "all" else self.machine.dimensions[0].size
        home = self.machine.places[order] // block
        passed = np.zeros((2, plan.ranks))
        for part in plan.rounds:
            leaves_host = home[part.source] != home[part.target]
            np.add.at(passed[0], part.source[leaves_host], part.bytes[leaves_host])
            np.add.at(passed[1], part.target[leaves_host], part.bytes[leaves_host])
        speed = card.bandwidth * self.machine.network_speeds()[order]
        return float((passed / speed).max(initial=0.0))


def compute_transfers(
    machine: Machine, table: pl.DataFrame, recorded_ns: Ints, measured_on: Machine | None = None
) -> Transfers:
    """Returns the transfers of communications on a machine.

    Those with unknown members, size or schedule keep their recorded times.

    Args:
        machine: The machine.
        table: As in `Operations.table`.
        recorded_ns: Recorded times, shape (communications,).
        measured_on: The machine on which its transfers were measured, if its network was changed
            since.
    """
    pricing = _Pricing(machine)
    base = pricing if measured_on is None else _Pricing(measured_on)
    request_columns = ["kind", "members", "size_bytes", "splits"]
    requests = table.select(request_columns).with_columns(
        key=pl.struct(request_columns).rank("dense")
    )
    distinct = requests.unique("key", keep="first").sort("key")
    prices = [_compute_price(pricing, base, row) for row in distinct.iter_rows(named=True)]
    class_by_operation = requests["key"].to_numpy().astype(np.int64) - 1
    priceable = np.array([price.time_ns is not None for price in prices], dtype=np.bool_)
    times = np.array([price.time_ns or 0 for price in prices], dtype=np.int64)
    shares = []
    for number, price in enumerate(prices):
        if price.modelled is None or not price.time_ns:
            continue
        links, carried = price.modelled.links, price.modelled.bytes
        taken_ns = max(price.time_ns - price.latency_ns, 1)
        share = np.minimum(carried / (pricing.network.bandwidth[links] * taken_ns), 1.0)
        shares.append(
            pl.DataFrame({"link": links, "share": share, "bytes": carried}).with_columns(
                class_of_operation=number
            )
        )
    columns = list(SHARES)
    replaced = priceable[class_by_operation]
    return Transfers(
        np.where(replaced, times[class_by_operation], recorded_ns),
        replaced,
        class_by_operation,
        pl.concat([SHARES.to_frame(), *(frame.select(columns).cast(SHARES) for frame in shares)]),
        pricing.network.links.select("link", "name", "source", "target"),
        [prices[k].algorithm for k in class_by_operation.tolist()],
        [prices[k].flag for k in class_by_operation.tolist()],
        *(
            np.array([getattr(price, name) for price in prices], dtype=np.int64)[class_by_operation]
            for name in ("card_ns", "latency_ns")
        ),
    )


def list_transfer_notices(flags: Iterable[str]) -> tuple[Notice, ...]:
    single = [flag for text in flags for flag in text.split("; ") if flag]
    counts = (
        pl.Series("flag", single, dtype=pl.String)
        .value_counts()
        .sort("count", "flag", descending=[True, False])
    )
    return tuple(
        Notice(
            "transfer-flag",
            "warning",
            f"{units.format_quantity(count, 'communication')}: {flag}",
            count,
        )
        for flag, count in counts.iter_rows()
    )


@dataclass(frozen=True, eq=False, slots=True)
class _Price:
    """The time of one communication (None to keep the recorded one), its source, and a remark."""

    time_ns: int | None
    modelled: ModelledTransfer | None = None
    algorithm: str | None = None
    flag: str = ""
    card_ns: int = 0
    latency_ns: int = 0


def _compute_price(pricing: _Pricing, base: _Pricing, request: dict[str, Any]) -> _Price:
    """Returns the price of one communication; `request` is a row of the table."""
    kind, members, size_bytes, splits = (
        request[name] for name in ("kind", "members", "size_bytes", "splits")
    )
    if kind == "barrier":
        size_bytes = 0
    if kind is None or members is None or size_bytes is None:
        return _Price(None, flag="as recorded, kind, members or size not known")
    modelled = pricing.modelled(kind, members, size_bytes, splits or ())
    machine = pricing.machine
    measured = machine.transfer_of(kind, machine.span(members), len(members), size_bytes)
    flags = [_FLAGS[flag] for flag in measured.flags]
    card_ns = modelled.card_ns if modelled else 0.0
    if measured.time_ns is None:
        if modelled is None:
            return _Price(None, flag=f"as recorded, no schedule for {kind}")
        time_ns, algorithm = modelled.time_ns, modelled.algorithm
    else:
        time_ns, algorithm = measured.time_ns, None
        if base is not pricing and modelled is not None:
            base_model = base.modelled(kind, members, size_bytes, splits or ())
            if base_model is not None and base_model.time_ns > 0:
                time_ns *= modelled.time_ns / base_model.time_ns
                flags.append("measured before the network was changed")
        if time_ns < int(card_ns):
            time_ns = int(card_ns)
            flags.append("held to what network cards allow")
    if not max(time_ns, card_ns) < MAX_DURATION_NS:
        raise UsageError(
            f"one {kind} of {units.format_size(size_bytes)} over {len(members)} ranks takes more than 100 days",
            slug="times-too-long",
            hint="bandwidths are in 10^9 B/s, latencies in ns",
        )
    latency_ns = int(modelled.latency_ns) if modelled and measured.time_ns is None else 0
    return _Price(round(time_ns), modelled, algorithm, "; ".join(flags), int(card_ns), latency_ns)
