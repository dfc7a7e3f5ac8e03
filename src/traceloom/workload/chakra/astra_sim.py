"""Conversion of a graph to the files of ASTRA-sim, with notices of every change.

ASTRA-sim only honors dependencies from an end to a start, runs one CPU operation, one GPU operation
and one communication of a rank at a time, and starts ready nodes in the order of ids. Hence:
- host nodes are merged to units (see `astra_sim_order`); with `gpu_only`, dependencies replace
  them;
- dropped nodes pass on their dependencies: nothing dangles, and no order is lost;
- unsupported communication is mapped to supported kinds (see `map_communication`);
- unordered communication gets one order over all ranks, since ranks in different orders hang
  silently.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

from traceloom.errors import CheckError, TraceloomError
from traceloom.formats.chakra.et_pb2 import CollectiveCommType, NodeType
from traceloom.formats.chakra.files import GroupFile
from traceloom.formats.chakra.nodes import (
    SIMULATOR_SCHEMA,
    FileSet,
    Pairs,
    SimulatorNodes,
    Workload,
    build_metadata,
    write_simulator_nodes,
)
from traceloom.graph import graph as graph_schema
from traceloom.graph.graph import Graph, Stage
from traceloom.system import units as text
from traceloom.trace.array_types import Bools, Ints
from traceloom.trace.notice import Notice
from traceloom.workload.chakra.astra_sim_order import (
    Units,
    build_units,
    compute_job_order,
    find_awaited_units,
    find_last_before,
    is_for_simulators,
)
from traceloom.workload.chakra.check_files import ALL, Arcs, is_number, sort_topologically
from traceloom.workload.chakra.graph_read import list_groups

_KNOWN = {
    "all_reduce": CollectiveCommType.ALL_REDUCE,
    "all_gather": CollectiveCommType.ALL_GATHER,
    "reduce_scatter": CollectiveCommType.REDUCE_SCATTER,
    "all_to_all": CollectiveCommType.ALL_TO_ALL,
    "broadcast": CollectiveCommType.BROADCAST,
    # ASTRA-sim replays a broadcast at its recorded duration, so it stands in for unsupported
    # operations.
    "reduce": CollectiveCommType.BROADCAST,
    "gather": CollectiveCommType.BROADCAST,
    "scatter": CollectiveCommType.BROADCAST,
    # NCCL implements a barrier as an all_reduce.
    "barrier": CollectiveCommType.ALL_REDUCE,
}
REPLAYED = ("broadcast", "reduce", "gather", "scatter")
_REPLACED = ("reduce", "gather", "scatter", "barrier")
_BARRIER_BYTES_PER_RANK = 8
_MAX_TAG = 2**31 - 1

# Reasons why a rank replays a communication alone, at its recorded duration.
ALONE, UNKNOWN_KIND, UNKNOWN_SIZE, UNKNOWN_PEER = (
    "alone",
    "unknown-kind",
    "unknown-size",
    "unknown-peer",
)


@dataclass(frozen=True)
class WrittenCommunication:
    """The rows to write for communication nodes.

    Attributes:
        rows: `node`, `kind`, `instance`, `type` (of the node to write), `comm_type`, `comm_size`,
            `pg_name`, `comm_src`, `comm_dst`, `comm_tag`, `transfer_ns` (recorded duration once all
            ranks had arrived), `met_ns` (time of that arrival), `why` (null, or why the rank
            replays it alone), `uneven` (sizes of the ranks differ), `omitted` (peers that were not
            recorded).
        by_order: Number of collectives that were joined across ranks by their order, in a graph
            whose ranks were not joined.
        groups: Members by name, with ranks as numbered in the files.
    """

    rows: pl.DataFrame
    by_order: int
    groups: dict[str, list[int]]


def map_communication(
    graph: Graph, numbers: dict[int, int], *, as_written: bool = False
) -> WrittenCommunication:
    """Maps the communication of a graph to what ASTRA-sim supports.

    Args:
        graph: The joined graph.
        numbers: Rank in the graph -> number of its file.
        as_written: Leave what ASTRA-sim supports as other writers' files have it.
    """
    named = _find_named_groups(graph, numbers)
    rows, joined_count = _join_by_order(
        _add_times(graph, numbers).with_columns(turn=_find_turns(graph))
    )
    is_joined = pl.col("instance").is_not_null()
    rows = rows.with_columns(
        pl.when(is_joined).then(pl.len().over("instance")).otherwise(1).alias("parts"),
        pl.when(is_joined)
        .then(
            pl.col("number")
            .sort()
            .over("instance", mapping_strategy="join")
            .cast(pl.List(pl.String))
            .list.join(",")
        )
        .alias("members"),
        pl.when(is_joined)
        .then(pl.col("size").max().over("instance"))
        .otherwise("size")
        .alias("comm_size"),
        (is_joined & (pl.col("size").n_unique().over("instance") > 1)).alias("uneven"),
    )
    pair = pl.col("node_kind").is_in([graph_schema.SEND, graph_schema.RECEIVE])
    barrier = pl.col("kind") == "barrier"
    stays = (
        ~pair
        & as_written
        & (pl.col("size") > 0)
        & pl.col("kind").is_in([kind for kind in _KNOWN if kind not in _REPLACED])
        & pl.col("group").fill_null("").is_in([*ALL, *named])
    ).fill_null(value=False)
    rows = rows.with_columns(
        pl.when(stays).then("size").otherwise("comm_size").alias("comm_size"), stays.alias("stays")
    )
    lone_reason = (
        pl.when("stays")
        .then(None)
        .when(pair & pl.col("peer_number").is_null())
        .then(pl.lit(UNKNOWN_PEER))
        .when(pair & (pl.col("comm_size").fill_null(0) <= 0))
        .then(pl.lit(UNKNOWN_SIZE))
        .when(pair)
        .then(None)
        .when(~pl.col("kind").fill_null("").is_in(list(_KNOWN)))
        .then(pl.lit(UNKNOWN_KIND))
        .when(pl.col("parts") < 2)
        .then(pl.lit(ALONE))
        .when((pl.col("comm_size").fill_null(0) <= 0) & ~barrier & ~pl.col("kind").is_in(REPLAYED))
        .then(pl.lit(UNKNOWN_SIZE))
    )
    rows = rows.with_columns(lone_reason.alias("why")).with_columns(
        pl.when(barrier)
        .then(pl.col("parts") * _BARRIER_BYTES_PER_RANK)
        .otherwise("comm_size")
        .alias("comm_size")
    )
    is_mapped = pl.col("why").is_null()
    is_named = is_mapped & ~pair & pl.col("group").is_in(list(named))
    rows = rows.with_columns(
        pl.when("stays")
        .then(None)
        .when(is_mapped)
        .then("members")
        .otherwise(pl.col("number").cast(pl.String))
        .alias("members"),
        pl.when(is_mapped).then("parts").otherwise(1).alias("parts"),
        pl.when(is_named & (pl.col("stays") | (pl.col("parts") == pl.col("group_size"))))
        .then("group")
        .alias("own_name"),
    )
    # ASTRA-sim tells collectives of all ranks without a group apart by how many each rank had before.
    before = (
        rows.filter(is_mapped & ~pair & ~pl.col("kind").is_in(REPLAYED))
        .sort("met_ns", "node")
        .with_columns(pl.int_range(pl.len()).over("number").alias("before"))
        .filter(pl.col("own_name").is_null() & ~pl.col("stays") & (pl.col("parts") == len(numbers)))
    )
    differs = before.select((pl.col("before").n_unique().over("instance") > 1).any()).item()
    # Number the others by members (as text), in order of first use; the group of all ranks has
    # none.
    is_lone = pl.col("why").is_not_null() & (len(numbers) > 1)
    sets = (
        rows.filter(pl.col("own_name").is_null() & ~pl.col("stays"))
        .filter(~(pair & is_mapped) & ((pl.col("parts") < len(numbers)) | is_lone | differs))
        .sort("met_ns", "node")["members"]
        .unique(maintain_order=True)
    )
    free = 1 + max(map(int, named), default=0)
    groups = {members: str(number) for number, members in enumerate(sets.drop_nulls(), start=free)}
    members = {name: named[name] for name in rows["own_name"].drop_nulls().unique().sort()} | {
        name: [int(member) for member in member_text.split(",")]
        for member_text, name in groups.items()
    }
    if as_written:
        joined_count = rows.filter(~pl.col("stays"))["instance"].drop_nulls().n_unique()
    return WrittenCommunication(_build_attributes(rows, groups), joined_count, members)


def _find_named_groups(graph: Graph, numbers: dict[int, int]) -> dict[str, list[int]]:
    """Returns the members of the groups of other writers' files that ASTRA-sim can read as they
    are: their order matters, and two groups may have the same members.
    """
    if not graph.foreign.height or any(rank != number for rank, number in numbers.items()):
        return {}
    return {
        name: members
        for name, members in list_groups(graph).items()
        if is_number(name, min_value=1) and set(members) <= set(numbers)
    }


def _add_times(graph: Graph, numbers: dict[int, int]) -> pl.DataFrame:
    """Returns the communication with its bytes, file numbers of itself and its peer, and the time
    when all ranks had arrived.
    """
    nodes = graph.nodes.select(
        "node",
        pl.col("kind").cast(pl.String).alias("node_kind"),
        "bytes",
        pl.col("rank").cast(pl.Int64),
        "start_ns",
        (pl.col("start_ns") + pl.col("duration_ns")).alias("end_ns"),
    )
    meeting = nodes.filter(pl.col("node_kind") == graph_schema.RENDEZVOUS).select(
        meeting="node", met="start_ns"
    )
    met = (
        graph.edges.filter(pl.col("to_end"))
        .select(meeting="source", node="target")
        .join(meeting, on="meeting")
        .group_by("node")
        .agg(pl.col("met").max())
    )
    rows = (
        graph.communication.select(
            "node",
            "instance",
            "kind",
            "group",
            "group_size",
            "in_bytes",
            "out_bytes",
            "peer",
            "tag",
        )
        .join(nodes, on="node", how="left", maintain_order="left")
        .join(met, on="node", how="left", maintain_order="left")
    )
    renamed = pl.DataFrame(
        {"old": list(numbers), "new": list(numbers.values())},
        schema={"old": pl.Int64, "new": pl.Int64},
    )
    # Bytes as defined by ASTRA-sim: a rank's input; for all_gather its own part.
    kind, out, ranks = pl.col("kind"), pl.col("out_bytes"), pl.col("group_size").cast(pl.Int64)
    from_out = (
        pl.when(kind == "all_gather")
        .then(out // ranks)
        .when(kind == "reduce_scatter")
        .then(out * ranks)
        .otherwise(out)
    )
    put_in = pl.when(pl.col("node_kind") == graph_schema.RECEIVE).then(None).otherwise("in_bytes")
    size = pl.coalesce(
        pl.when(put_in > 0).then(put_in), pl.when(from_out > 0).then(from_out), "bytes"
    )
    met_in_time = pl.when(pl.col("met").is_not_null()).then(pl.min_horizontal("met", "end_ns"))
    begun = pl.max_horizontal("start_ns", met_in_time)
    return (
        rows.with_columns(pl.col("peer").cast(pl.Int64))
        .join(
            renamed.rename({"old": "rank", "new": "number"}),
            on="rank",
            how="left",
            maintain_order="left",
        )
        .join(
            renamed.rename({"old": "peer", "new": "peer_number"}),
            on="peer",
            how="left",
            maintain_order="left",
        )
        .with_columns(
            begun.alias("met_ns"),
            (pl.col("end_ns") - begun).alias("transfer_ns"),
            size.alias("size"),
        )
    )


def _find_turns(graph: Graph) -> pl.Series:
    """Returns the place of each communication in the order of all: by time; in files of other
    writers, which state none, by their dependencies and then their ids.
    """
    nodes = graph.communication["node"].to_numpy()
    key = np.argsort(np.argsort(graph.nodes["start_ns"].to_numpy(), kind="stable"))
    if graph.foreign.height:
        own_id = np.zeros(graph.nodes.height, np.uint64)
        own_id[graph.foreign["node"].to_numpy()] = graph.foreign["id"].to_numpy()
        source, target = (
            graph.edges[name].to_numpy().astype(np.int64) for name in ("source", "target")
        )
        ids = np.argsort(np.argsort(own_id, kind="stable"))
        key[sort_topologically(len(key), Arcs(source, target), ids).order] = np.arange(len(key))
    return pl.Series("turn", key[nodes])


def _join_by_order(rows: pl.DataFrame) -> tuple[pl.DataFrame, int]:
    """Joins the k-th collectives of a group across ranks, in graphs of several ranks where nothing
    is joined.

    Such graphs are read from files of other writers. Groups whose ranks differ in number or kinds
    of collectives are left unjoined.
    """
    collective = rows.filter(
        ~pl.col("node_kind").is_in([graph_schema.SEND, graph_schema.RECEIVE])
        & pl.col("kind").is_not_null()
    )
    if rows["instance"].count() or collective["rank"].n_unique() < 2:
        return rows, 0
    ordered = (
        collective.sort("turn")
        .with_columns(pl.col("group").fill_null("").replace(ALL[1], ALL[0]).alias("name"))
        .with_columns(pl.int_range(pl.len()).over("name", "rank").alias("turn"))
        .with_columns(
            pl.len().over("name", "turn").alias("came"),
            pl.col("rank").n_unique().over("name").alias("members"),
            pl.col("kind").n_unique().over("name", "turn").alias("kinds"),
        )
        .filter(((pl.col("came") == pl.col("members")) & (pl.col("kinds") == 1)).all().over("name"))
        .filter(pl.col("members") > 1)
        .with_columns(
            pl.struct("name", "turn").rank("dense").cast(pl.Int64).alias("order"),
            pl.col("start_ns").max().over("name", "turn").alias("last"),
        )
    )
    numbered = rows.join(
        ordered.select("node", "order", "last"), on="node", how="left", maintain_order="left"
    ).with_columns(
        pl.coalesce("instance", "order").alias("instance"),
        pl.coalesce("last", "met_ns").alias("met_ns"),
    )
    return numbered.drop("order", "last"), ordered["order"].n_unique()


def _build_attributes(rows: pl.DataFrame, groups: dict[str, str]) -> pl.DataFrame:
    send, receive = (
        pl.col("node_kind") == graph_schema.SEND,
        pl.col("node_kind") == graph_schema.RECEIVE,
    )
    is_mapped = pl.col("why").is_null()
    names = pl.DataFrame(
        {"members": list(groups), "pg_name": list(groups.values())},
        schema={"members": pl.String, "pg_name": pl.String},
    )
    pair = is_mapped & (send | receive)
    tag = pl.when(pl.col("tag").is_between(0, _MAX_TAG)).then("tag").otherwise(0)
    numbers = {name: int(number) for name, number in _KNOWN.items()}
    comm_type = pl.col("kind").replace_strict(numbers, default=None, return_dtype=pl.Int64)
    return rows.join(names, on="members", how="left", maintain_order="left").select(
        "node",
        "kind",
        "instance",
        "why",
        "met_ns",
        "transfer_ns",
        (is_mapped & pl.col("uneven") & ~pl.col("stays")).alias("uneven"),
        (
            is_mapped
            & ~pair
            & ~pl.col("stays")
            & (pl.col("group_size").fill_null(0) > pl.col("parts"))
        ).alias("omitted"),
        pl.when(is_mapped & send)
        .then(int(NodeType.COMM_SEND_NODE))
        .when(is_mapped & receive)
        .then(int(NodeType.COMM_RECV_NODE))
        .otherwise(int(NodeType.COMM_COLL_NODE))
        .alias("type"),
        pl.when(~pair)
        .then(pl.when(is_mapped).then(comm_type).otherwise(int(CollectiveCommType.BROADCAST)))
        .alias("comm_type"),
        pl.max_horizontal(pl.col("comm_size").fill_null(1), 1).alias("comm_size"),
        pl.when(~pair).then(pl.coalesce("own_name", "pg_name")).alias("pg_name"),
        pl.when(pair).then(pl.when(send).then("number").otherwise("peer_number")).alias("comm_src"),
        pl.when(pair).then(pl.when(send).then("peer_number").otherwise("number")).alias("comm_dst"),
        pl.when(pair).then(tag).alias("comm_tag"),
    )


_WHY = {
    ALONE: "that met no other recorded rank",
    UNKNOWN_KIND: "of a kind that is not known",
    UNKNOWN_SIZE: "without a known size",
    UNKNOWN_PEER: "whose other end is not known or was not recorded",
}


@dataclass(frozen=True)
class ConversionSummary:
    """Statistics of a conversion, for its notices.

    Attributes:
        graph: The converted graph.
        frame: All units.
        kept: Which units became nodes.
        leading: Which units belong to threads that lead to work.
        queued: Number of dependencies between work that overlapped on one stream.
        loose: Number of dependencies dropped from the order of communication since they would close
            a cycle.
        by_order: Number of collectives joined only by their order.
        delays: Nodes that stand for times without GPU work.
    """

    graph: Graph
    frame: pl.DataFrame
    kept: Bools
    leading: Bools
    queued: int
    loose: int
    by_order: int
    delays: pl.DataFrame


def list_notices(
    changes: ConversionSummary, ranks: list[int], empty: list[int], added: int, *, gpu_only: bool
) -> Iterator[Notice]:
    """Yields the notices of a conversion.

    Args:
        changes: Statistics of the conversion.
        ranks: The ranks in the graph.
        empty: Ranks whose file has no nodes.
        added: Number of added dependencies.
        gpu_only: Whether host work was dropped.
    """
    if count := changes.by_order:
        message = f"{text.format_quantity(count, 'collective')} joined over ranks by the order in the group: the files say no more"
        yield Notice("target-joined-by-order", "info", message, count)
    frame = changes.frame
    for reason, description in _WHY.items():
        count = frame.filter(pl.col("why") == reason).height
        if count:
            message = f"{text.format_quantity(count, 'communication')} {description}: replayed alone by the rank, at the recorded duration"
            yield Notice("target-lone-communication", "warning", message, count)
    mapped = frame.filter(pl.col("why").is_null() & pl.col("comm_type").is_not_null())
    replayed = mapped.filter(pl.col("kind_of").is_in(REPLAYED))
    if replayed.height:
        kinds = ", ".join(sorted(replayed["kind_of"].unique()))
        message = (
            f"{text.format_quantity(replayed.height, 'collective')} ({kinds}) written as broadcasts, which ASTRA-sim replays at "
            "their recorded duration, whatever the network"
        )
        yield Notice("target-replayed-communication", "warning", message, replayed.height)
    barriers = mapped.filter(pl.col("kind_of") == "barrier").height
    if barriers:
        yield Notice(
            "target-barriers",
            "info",
            f"{text.format_quantity(barriers, 'barrier')} written as all-reduces of 8 bytes per rank",
            barriers,
        )
    uneven = mapped.filter("uneven").height
    if uneven:
        message = f"{text.format_quantity(uneven, 'collective')} of other sizes on other ranks; ASTRA-sim gets the largest"
        yield Notice("target-uneven-sizes", "warning", message, uneven)
    omitted = mapped.filter("omitted").height
    if omitted:
        message = f"{text.format_quantity(omitted, 'collective')} with members that were not recorded: written without them"
        yield Notice("target-missing-members", "warning", message, omitted)
    copies = frame.filter(pl.col("kind").is_in(["copy", "fill"]))
    if copies.height:
        total = text.format_duration(int((copies["end_ns"] - copies["start_ns"]).sum()))
        message = f"{copies.height} copies and fills ({total}) are GPU computation of their recorded duration"
        yield Notice("target-copies", "info", message, copies.height)
    yield from _list_host_notices(changes, gpu_only=gpu_only)
    if changes.queued:
        message = f"{changes.queued} pieces of GPU work that overlapped on one stream run one after the other"
        yield Notice("target-overlap", "info", message, changes.queued)
    if added:
        message = f"{added} dependencies only give an order that ASTRA-sim needs; `simulation_deps` of a node lists them"
        yield Notice("target-added-order", "info", message, added)
    if changes.loose:
        message = (
            "the communication could not be put into one order on all ranks: ASTRA-sim may hang"
        )
        yield Notice("target-no-order", "warning", message, changes.loose)
    if ranks != list(range(len(ranks))):
        message = f"the recorded ranks {', '.join(map(str, ranks[:8]))} are numbered from 0"
        yield Notice("target-renumbered-ranks", "warning", message, len(ranks))
    if len(ranks) == 1:
        yield Notice(
            "target-one-rank",
            "warning",
            "there is one rank alone: ASTRA-sim simulates two or more",
            1,
        )
    if empty:
        reason = (
            "no GPU work was recorded, and that of the host was left out"
            if gpu_only
            else "no GPU work waits for what it does"
        )
        message = f"the file of rank {empty[0]} has no nodes, which ASTRA-sim refuses: {reason}"
        yield Notice("target-no-nodes", "warning", message, len(empty))
    delay = changes.graph.edges.filter(
        pl.col("kind").is_in(["launch", "synchronize", "stream", "wait", "cross-thread"])
    )
    lost_ns = int((delay["delay_ns"].clip(lower_bound=0) + delay["residual_ns"]).sum())
    if lost_ns:
        message = f"delays between nodes (of launches, wake-ups, streams) have no place: {text.format_duration(lost_ns)} in all"
        yield Notice("target-dropped-delays", "info", message, delay.height)


def _list_host_notices(changes: ConversionSummary, *, gpu_only: bool) -> Iterator[Notice]:
    on_host = changes.frame["on_host"].to_numpy()
    members, work = changes.frame["members"].to_numpy(), changes.frame["work_ns"].to_numpy()
    hosts, nodes = int(members[on_host].sum()), int((on_host & changes.kept).sum())
    if gpu_only:
        if hosts:
            message = (
                f"{hosts} host nodes are folded into dependencies; where the GPU had nothing to do, a node `host` "
                "stands for that time, which a faster GPU or network does not change"
            )
            yield Notice("target-folded-host", "info", message, hosts)
        return
    if is_for_simulators(changes.graph):
        return
    if changes.delays.height:
        total = text.format_duration(int(changes.delays["duration_us"].sum()) * 1000)
        message = (
            f"{changes.delays.height} nodes `unexplained` ({total}) stand for times without GPU work that neither the "
            "host nor anything else in the trace explains"
        )
        yield Notice("target-unexplained", "warning", message, changes.delays.height)
    if hosts:
        yield Notice(
            "target-merged-host",
            "info",
            f"{hosts} host nodes run together to {nodes}",
            hosts - nodes,
        )
    idle = on_host & ~changes.leading
    if idle.any():
        lanes = changes.frame.filter(pl.Series(idle))["lane"].n_unique()
        message = f"{lanes} threads that no GPU work waits for are left out ({text.format_duration(int(work[idle].sum()))})"
        yield Notice("target-left-out-threads", "info", message, lanes)
    # Time in which several threads of a rank worked concurrently, ns over all ranks.
    spans = changes.frame.filter(pl.Series(on_host & changes.kept)).select(
        "rank", "start_ns", (pl.col("start_ns") + pl.col("work_ns")).alias("to")
    )
    free = pl.col("to").cum_max().shift(1).over("rank").fill_null(-(2**62))
    both = (pl.min_horizontal("to", free) - pl.col("start_ns")).clip(lower_bound=0)
    overlap = int(spans.sort("rank", "start_ns").select(both.sum()).item())
    if overlap:
        message = (
            "ASTRA-sim runs one host operation of a rank at a time: "
            f"{text.format_duration(overlap)} that threads worked side by side runs one after the other"
        )
        yield Notice("target-one-thread", "warning", message)


_SERIAL_TYPES = (
    int(NodeType.COMM_COLL_NODE),
    int(NodeType.COMM_SEND_NODE),
)  # ASTRA-sim runs one of them at a time
_US = 1000
_MAX_ID = 2**63 - 1
_MIN_UNEXPLAINED_NS = 10_000  # shorter ones are only counted in the notice about delays


@dataclass(frozen=True)
class _Nodes:
    """The nodes of all files, and pairs (target, source) of row numbers."""

    frame: pl.DataFrame
    pairs: Ints
    added: Ints


def build_rank_files(
    graph: Graph, ranks: list[int], *, gpu_only: bool, ordered: bool = True
) -> tuple[list[SimulatorNodes], dict[str, list[int]], list[Notice]]:
    """Returns the nodes of every rank's file, the groups, and notices of all changes.

    Args:
        graph: The graph.
        ranks: Its ranks.
        gpu_only: Leave out host work.
        ordered: Put the communication into one order on all ranks.
    """
    units = build_units(graph)
    communication = map_communication(
        graph,
        {rank: number for number, rank in enumerate(ranks)},
        as_written=not ordered,
    )
    frame = units.frame.join(
        communication.rows, on="node", how="left", maintain_order="left", suffix="_of"
    )
    frame = frame.join(
        graph.foreign.drop("type"), on="node", how="left", maintain_order="left"
    ).with_columns(pl.when(pl.col("members") == 1).then("attributes"))
    # Round to whole microseconds so that the remainder carries over to the next node of a chain.
    total = pl.col("work_ns").cum_sum().over("lane")
    frame = frame.with_columns(
        pl.when(pl.col("transfer_ns").is_not_null() & ~pl.col("on_host"))
        .then((pl.col("transfer_ns") + _US // 2) // _US)
        .otherwise(total // _US - (total - pl.col("work_ns")) // _US)
        .alias("duration_us"),
        pl.col("type").fill_null(int(NodeType.COMP_NODE)),
    )
    leading = _find_needed_units(units, frame)
    works = ~frame["on_host"].to_numpy()
    exact = is_for_simulators(graph)
    retained = works | (((frame["duration_us"].to_numpy() > 0) & leading | exact) & (not gpu_only))
    waits = find_awaited_units(units, retained)
    nodes = _Nodes(
        frame, np.stack([waits.target, waits.source], axis=1), np.zeros((0, 2), np.int64)
    )
    job_start_ns = int(graph.nodes["start_ns"].min() or 0)  # type: ignore[arg-type]
    # Long unexplained times before GPU work, per node: they occur in traces without host events and
    # on devices that were busy with other work before the window.
    from_origin = pl.when(pl.col("kind") == "origin").then("delay_ns").otherwise(0)
    late = graph.edges.filter(~pl.col("to_end")).select(
        "target", (pl.col("residual_ns") + from_origin).alias("late")
    )
    late = late.filter(pl.col("late") >= _MIN_UNEXPLAINED_NS)
    unexplained = late.group_by(pl.col("target").alias("node")).agg(
        pl.col("late").max().alias("residual_ns")
    )
    if gpu_only or not exact:
        nodes, retained = _add_idle_delays(
            nodes, retained, job_start_ns, None if gpu_only else unexplained
        )
    delays = nodes.frame[frame.height :]
    if not gpu_only and not exact:
        nodes, retained = _add_start_delays(nodes, retained, job_start_ns)
    # Order the communication of all ranks consistently; nodes in a cycle have no place in the
    # order.
    position = compute_job_order(nodes.frame, nodes.pairs)
    in_turn = nodes.frame["type"].is_in(_SERIAL_TYPES) & ordered
    serial_nodes = (
        nodes.frame.with_columns(pl.Series("place", position)).with_row_index("row").filter(in_turn)
    )
    loose = serial_nodes.filter(pl.col("place") < 0).height
    rows = (
        serial_nodes.filter(pl.col("place") >= 0)
        .sort("rank", "place", "row")
        .select(
            pl.col("row").cast(pl.Int64),
            pl.col("row").shift(1).over("rank").cast(pl.Int64).alias("before"),
        )
        .drop_nulls()
        .to_numpy()
    )
    last = find_last_before(position, in_turn.to_numpy(), nodes.pairs)
    added = rows[last[rows[:, 0]] < position[rows[:, 1]]]  # else a path exists already
    nodes = _Nodes(
        nodes.frame, np.concatenate([nodes.pairs, added]), np.concatenate([nodes.added, added])
    )
    files = [_build_file(nodes, retained, rank) for rank in ranks]
    changes = ConversionSummary(
        graph,
        frame,
        retained[: frame.height],
        leading,
        int(waits.queued.sum()),
        loose,
        communication.by_order,
        delays,
    )
    empty = [rank for rank, file in zip(ranks, files, strict=True) if not file.nodes.height]
    return (
        files,
        communication.groups,
        list(list_notices(changes, ranks, empty, len(nodes.added), gpu_only=gpu_only)),
    )


def _find_needed_units(units: Units, frame: pl.DataFrame) -> Bools:
    """Returns the units of threads that GPU work or communication waits for, directly or via other
    threads; all units if there is no such work.
    """
    lane = frame["lane"].fill_null(2**31).cast(pl.Int64).to_numpy()
    works = ~frame["on_host"].to_numpy()
    if not works.any():
        return np.ones(frame.height, np.bool_)
    between = np.unique(np.stack([lane[units.source], lane[units.target]], axis=1), axis=0)
    reached = set(lane[works].tolist())
    before: dict[int, list[int]] = {}
    for source, target in between.tolist():
        before.setdefault(target, []).append(source)
    ahead = list(reached)
    while ahead:
        for source in before.get(ahead.pop(), []):
            if source not in reached:
                reached.add(source)
                ahead.append(source)
    return np.isin(lane, list(reached))


def _add_start_delays(nodes: _Nodes, retained: Bools, job_start_ns: int) -> tuple[_Nodes, Bools]:
    """Adds a node before everything else of each rank that started later than the first, since
    ASTRA-sim starts all ranks at 0.
    """
    retained_nodes = nodes.frame.with_row_index("row").filter(pl.Series(retained))
    starts = (
        retained_nodes.group_by("rank")
        .agg(pl.col("start_ns").min())
        .sort("rank")
        .select(
            pl.lit("start").alias("name"),
            "rank",
            pl.lit(job_start_ns, dtype=pl.Int64).alias("start_ns"),
            pl.col("start_ns").alias("end_ns"),
            pl.lit(value=True).alias("on_host"),
            ((pl.col("start_ns") - job_start_ns) // _US).alias("duration_us"),
            pl.lit(int(NodeType.COMP_NODE), dtype=nodes.frame.schema["type"]).alias("type"),
        )
        .filter(pl.col("duration_us") > 0)
    )
    first = nodes.frame.height
    roots = np.setdiff1d(retained_nodes["row"].to_numpy(), nodes.pairs[:, 0])
    start_rows = pl.DataFrame({"rank": starts["rank"], "start": np.arange(starts.height) + first})
    added = (
        pl.DataFrame({"row": roots, "rank": nodes.frame["rank"].gather(roots)})
        .join(start_rows, on="rank", maintain_order="left")
        .select(pl.col("row").cast(pl.Int64), "start")
        .to_numpy()
    )
    frame = pl.concat([nodes.frame, starts], how="diagonal_relaxed")
    return _Nodes(
        frame, np.concatenate([nodes.pairs, added]), np.concatenate([nodes.added, added])
    ), np.concatenate([retained, np.ones(starts.height, np.bool_)])


def _add_idle_delays(
    nodes: _Nodes, retained: Bools, job_start_ns: int, unexplained: pl.DataFrame | None
) -> tuple[_Nodes, Bools]:
    """Adds a node for each time in which a rank's GPU was idle, before the work that ended it.

    The node waits for the dependencies of that work, and for the last work that ended before it.

    Args:
        nodes: The nodes so far.
        retained: Which of them are kept.
        job_start_ns: Start of the job, ns; ranks that start later keep their offset.
        unexplained: `node`, `residual_ns`: with host work, only this part of an idle time, which
            neither the host nor anything else explains, becomes a node. None if host work is
            dropped: then all of it does.
    """
    work = (
        nodes.frame.with_row_index("row")
        .filter(pl.Series(retained) & ~pl.col("on_host"))
        .sort("rank", "start_ns", "row")
        .with_columns(pl.col("end_ns").cum_max().shift(1).over("rank").alias("free"))
        .with_columns(
            (pl.col("start_ns") - pl.col("free").fill_null(job_start_ns))
            .clip(lower_bound=0)
            .alias("gap")
        )
    )
    if unexplained is not None:
        work = work.join(unexplained, on="node", how="left", maintain_order="left").with_columns(
            pl.min_horizontal("gap", pl.col("residual_ns").fill_null(0)).alias("gap")
        )
    total = pl.col("gap").cum_sum().over("rank")
    work = work.with_columns((total // _US - (total - pl.col("gap")) // _US).alias("gap_us"))
    delayed = work.filter(pl.col("gap_us") > 0)
    delays = delayed.select(
        pl.lit("host" if unexplained is None else "unexplained").alias("name"),
        pl.col("rank"),
        (pl.col("start_ns") - pl.col("gap")).alias("start_ns"),
        pl.col("start_ns").alias("end_ns"),
        pl.lit(False).alias("on_host"),
        pl.col("gap_us").alias("duration_us"),
        pl.lit(int(NodeType.COMP_NODE), dtype=pl.Int64).alias("type"),
    )
    first = nodes.frame.height
    frame = pl.concat(
        [nodes.frame, delays.cast({"type": nodes.frame.schema["type"]})], how="diagonal_relaxed"
    )
    rows, new = delayed["row"].to_numpy().astype(np.int64), np.arange(delayed.height) + first
    delay_of = np.full(frame.height, -1, np.int64)
    delay_of[rows] = new
    target, source = nodes.pairs[:, 0], nodes.pairs[:, 1]
    moved = np.stack([np.where(delay_of[target] >= 0, delay_of[target], target), source], axis=1)
    # The row of the work that ended last, among all that started before on the same rank.
    record = (
        pl.when(pl.col("end_ns") > pl.col("free").fill_null(-(2**62)))
        .then("row")
        .forward_fill()
        .over("rank")
    )
    work = work.with_columns(record.alias("record")).with_columns(
        pl.col("record").shift(1).over("rank").alias("last")
    )
    last = work.filter(pl.col("gap_us") > 0)["last"]
    added = np.stack([new, last.fill_null(-1).to_numpy()], axis=1)
    added = added[added[:, 1] >= 0]
    if len(added):  # only new pairs
        width = 1 + max(int(added.max()), int(moved.max(initial=0)))
        added = added[
            ~np.isin(added[:, 0] * width + added[:, 1], moved[:, 0] * width + moved[:, 1])
        ]
    pairs = np.concatenate([moved, np.stack([rows, new], axis=1), added])
    return _Nodes(frame, pairs, added), np.concatenate([retained, np.ones(len(new), np.bool_)])


def _build_file(nodes: _Nodes, retained: Bools, rank: int) -> SimulatorNodes:
    """Returns the nodes of one rank: under the ids of another writer's file, else numbered from 1
    in the order of their starts.
    """
    rows = np.flatnonzero(
        retained & (nodes.frame["rank"] == rank).fill_null(value=False).to_numpy()
    )
    given = nodes.frame["id"][rows]
    key = nodes.frame["start_ns"][rows] if given.null_count() == len(rows) else given.fill_null(0)
    rows = rows[np.argsort(key.to_numpy(), kind="stable")]
    ids = np.arange(1, len(rows) + 1)
    if len(rows) and not given.null_count() and not given.is_duplicated().any():
        ids = np.minimum(given.sort().to_numpy(), np.uint64(_MAX_ID)).astype(np.int64)
        ids = ids if ids[-1] < _MAX_ID else np.arange(1, len(rows) + 1)
    row_in_file = np.full(nodes.frame.height, -1, np.int64)
    row_in_file[rows] = np.arange(len(rows))
    node_table = (
        nodes.frame[rows]
        .with_columns(
            pl.Series("id", ids),
            pl.col("name").fill_null(""),
            (pl.col("on_host") & (pl.col("type") == int(NodeType.COMP_NODE))).alias("is_cpu_op"),
            pl.lit(None, dtype=pl.Int64).alias("num_ops"),
            pl.when(pl.col("kind").is_in(["copy", "fill"])).then("bytes").alias("tensor_size"),
            pl.col("duration_us").clip(lower_bound=0),
        )
        .select(list(SIMULATOR_SCHEMA))
    )
    dependencies = []
    for pairs in (nodes.pairs, nodes.added):
        row, awaited_row = row_in_file[pairs[:, 0]], row_in_file[pairs[:, 1]]
        in_file = (row >= 0) & (awaited_row >= 0)
        row, awaited_row = row[in_file], awaited_row[in_file]
        order = np.lexsort((awaited_row, row))
        dependencies.append(Pairs(row[order], ids[awaited_row[order]]))
    return SimulatorNodes(node_table.cast(SIMULATOR_SCHEMA), *dependencies)


SCHEMA = "traceloom-astra-sim"


@dataclass(frozen=True)
class AstraSim:
    """The files for ASTRA-sim.

    Attributes:
        ranks: The rank in the graph of each file, by the file's number.
        files: The nodes of each file.
        groups: Members of the groups other than that of all ranks, by number.
        notices: What was changed or left out, with counts.
        stage: Chakra's stage of the source graph.
    """

    ranks: tuple[int, ...]
    files: tuple[SimulatorNodes, ...]
    groups: dict[str, list[int]]
    notices: tuple[Notice, ...]
    stage: Stage = "profiled"

    def write(self, directory: str | Path, *, force: bool = False) -> list[Path]:
        """Write all files, or none on failure.

        Raises:
            OutputError: `file-exists`, `cannot-write`.
        """
        notices = json.dumps([notice.to_dict() for notice in self.notices])
        parts = [
            (
                build_metadata(
                    SCHEMA, {"recorded_rank": rank, "stage": self.stage, "notices": notices}
                ),
                nodes,
            )
            for rank, nodes in zip(self.ranks, self.files, strict=True)
        ]
        return write_simulator_nodes(Path(directory), parts, self.groups, force=force)


def to_astra_sim(graph: Graph, *, gpu_only: bool = False) -> AstraSim:
    """Converts a graph to the files of ASTRA-sim.

    Args:
        graph: A calibrated graph.
        gpu_only: Leave out host work. Dependencies replace its order; where the GPU was idle, a GPU
            node of that length stands for the host's time.
    """
    ranks = sorted({int(rank) for rank in graph.nodes["rank"].drop_nulls().unique()})
    ordered = not is_for_simulators(graph)
    files, groups, notices = build_rank_files(graph, ranks, gpu_only=gpu_only, ordered=ordered)
    if not ordered and _hang(files, groups):
        files, groups, notices = build_rank_files(graph, ranks, gpu_only=gpu_only)
    return AstraSim(tuple(ranks), tuple(files), groups, tuple(notices), graph.stage)


def _hang(files: Sequence[SimulatorNodes], groups: dict[str, list[int]]) -> bool:
    """Returns whether the ranks wait for each other for ever in ASTRA-sim."""
    from traceloom.workload.simulate.astra_sim.run import simulate_on_plain_network

    tables = tuple(file.read_back(f"workload.{rank}.et") for rank, file in enumerate(files))
    workload = Workload(
        FileSet("", (), whole=True, groups=None),
        tuple(range(len(files))),
        tables,
        GroupFile(members={name: tuple(ranks) for name, ranks in groups.items()}),
    )
    try:
        simulate_on_plain_network(workload)
    except CheckError:
        return True
    except TraceloomError:
        return False  # of what the order does not change
    return False


__all__: Sequence[str] = ("SCHEMA", "AstraSim", "to_astra_sim")
