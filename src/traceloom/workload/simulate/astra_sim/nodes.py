"""The nodes of a rank, prepared for the engine, and custom algorithms of collectives."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import polars as pl

from traceloom.errors import InputError, UsageError
from traceloom.formats.chakra.et_pb2 import CollectiveCommType, NodeType
from traceloom.formats.chakra.nodes import NodeFrame, read_table
from traceloom.trace.array_types import Ints
from traceloom.workload.chakra.check_files import is_number
from traceloom.workload.simulate.astra_sim.streams import Mailbox, RankQueues

CPU, GPU, COMMUNICATION, NOTHING = range(4)  # slots of a rank, each occupied by one node at a time
TIMED, COLLECTIVE, SEND, RECEIVE, SKIP = range(5)  # how a node ends
KINDS = {
    int(CollectiveCommType.ALL_REDUCE): "all_reduce",
    int(CollectiveCommType.ALL_GATHER): "all_gather",
    int(CollectiveCommType.REDUCE_SCATTER): "reduce_scatter",
    int(CollectiveCommType.ALL_TO_ALL): "all_to_all",
}
_BROADCAST = int(CollectiveCommType.BROADCAST)
_NS_PER_US = 1000


@dataclass(frozen=True, slots=True)
class Compute:
    """How durations of computation are determined.

    Attributes:
        recorded: Whether communication, too, takes its recorded duration (`replay-only`).
        roofline: FLOP/s and bytes per second that determine the durations of GPU nodes; None for
            recorded durations.
    """

    recorded: bool = False
    roofline: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Message:
    """The communication of a node.

    Attributes:
        kind: Kind of a collective: all_reduce, ...; else empty.
        size: Bytes.
        peer: The other rank of a send or receive, else -1.
        tag: Distinguishes messages between the same ranks.
        group: Name of a collective's group as written; None for all ranks.
        dimensions: Which dimensions take part in a collective of all ranks; None for all.
    """

    kind: str
    size: int
    peer: int
    tag: int
    group: str | None
    dimensions: tuple[bool, ...] | None


@dataclass(frozen=True, eq=False, slots=True)
class RankNodes:
    """One rank's nodes in the order of their ids.

    Attributes:
        rank: The rank.
        table: The file.
        row: Row of each node in the file's table.
        slot: Slot that each node occupies: `CPU`, ..., `NOTHING`.
        action: How each node ends: `TIMED`, ..., `SKIP`.
        duration_ns: Durations of `TIMED` nodes.
        waits: Number of dependencies of each node.
        first: Where each node's successors start in `follower`, plus a final end.
        follower: Successors of all nodes.
        messages: The communication of communicating nodes.
    """

    rank: int
    table: NodeFrame
    row: Ints
    slot: Sequence[int]
    action: Sequence[int]
    duration_ns: Sequence[int]
    waits: Sequence[int]
    first: Sequence[int]
    follower: Sequence[int]
    messages: dict[int, Message]

    def __len__(self) -> int:
        return len(self.row)

    def label(self, node: int) -> str:
        row = int(self.row[node])
        return f"node {self.table.nodes['id'][row]} `{self.table.nodes['name'][row]}`"


def build_rank_nodes(rank: int, table: NodeFrame, compute: Compute) -> RankNodes:
    """Prepares the nodes of a file.

    Raises:
        InputError: `not-for-astra-sim`: it contains nodes on which ASTRA-sim aborts.
    """
    nodes = table.nodes
    ids = nodes["id"].to_numpy()
    order = np.argsort(ids, kind="stable")
    _refuse(
        table,
        np.flatnonzero(np.diff(ids[order]) == 0),
        order,
        "has an id that another node has, too",
    )
    action, slot = _classify_actions(table, compute)
    duration = _compute_durations(table, compute)
    if compute.roofline:
        is_gpu = slot == GPU
        for name in ("num_ops", "tensor_size"):
            _refuse(
                table,
                np.flatnonzero(is_gpu & nodes[name].is_null().to_numpy()),
                None,
                f"has no {name}",
            )
        action = np.where(
            is_gpu & (nodes["tensor_size"].fill_null(0).to_numpy() == 0), SKIP, action
        )
    ranked = np.empty(len(order), np.int64)
    ranked[order] = np.arange(len(order))
    # Dependencies as distinct pairs of positions in the order of ids; a Polars query would take
    # longer.
    rows = np.concatenate([table.data.row, table.control.row])
    awaited = np.concatenate([table.data.id, table.control.id])
    position = np.minimum(np.searchsorted(ids[order], awaited), max(len(order) - 1, 0))
    missing = ids[order][position] != awaited if len(order) else np.ones(len(awaited), np.bool_)
    if missing.any():
        first_missing = int(np.flatnonzero(missing)[0])
        raise InputError(
            f"node {ids[rows[first_missing]]} waits for node {awaited[first_missing]}, which is not there",
            slug="not-for-astra-sim",
            where=table.path,
            hint="`traceloom validate --target astra-sim` lists everything",
        )
    pairs = np.unique(position * len(order) + ranked[rows])
    source, target = pairs // max(len(order), 1), pairs % max(len(order), 1)
    source_order = np.argsort(source, kind="stable")
    return RankNodes(
        rank,
        table,
        order,
        slot[order].tolist(),
        action[order].tolist(),
        duration[order].tolist(),
        np.bincount(target, minlength=len(order)).tolist(),
        np.searchsorted(source[source_order], np.arange(len(order) + 1)).tolist(),
        target[source_order].tolist(),
        _build_messages(rank, table, order, action),
    )


def _build_messages(rank: int, table: NodeFrame, order: Ints, action: Ints) -> dict[int, Message]:
    """Returns the communication of the nodes, by position in the order of ids."""
    positions = np.flatnonzero((action[order] >= COLLECTIVE) & (action[order] <= RECEIVE))
    names = (
        "comm_type",
        "comm_size",
        "comm_src",
        "comm_dst",
        "comm_tag",
        "pg_name",
        "involved_dim",
    )
    rows = zip(*(table.nodes[name][order[positions]].to_list() for name in names), strict=True)
    messages = {}
    for node, kind, row in zip(
        positions.tolist(), action[order[positions]].tolist(), rows, strict=True
    ):
        comm_type, size, source, target, tag, group, dimensions = row
        name = KINDS.get(comm_type, "") if kind == COLLECTIVE else ""
        own_rank, peer = (source, target) if kind == SEND else (target, source)
        if kind == COLLECTIVE:
            # For size 0, ASTRA-sim makes minimal chunks, except for all_gather.
            absent = size is None or size < 0 or (not size and name == "all_gather")
        else:
            absent = size is None or size < 1
            if peer in (None, rank):
                _refuse(table, order[[node]], None, "is a message to nobody else")
            if own_rank not in (None, rank):
                _refuse(table, order[[node]], None, f"is a message of rank {own_rank}")
            if tag is None:
                _refuse(table, order[[node]], None, "has no comm_tag")
        if absent:
            _refuse(table, order[[node]], None, "communicates no bytes")
        messages[node] = Message(
            name,
            size,
            -1 if kind == COLLECTIVE else peer,
            tag or 0,
            group,
            dimensions and tuple(dimensions),
        )
    return messages


def _classify_actions(table: NodeFrame, compute: Compute) -> tuple[Ints, Ints]:
    nodes = table.nodes
    kind = nodes["type"].to_numpy()
    filled = nodes.select(
        pl.col("is_cpu_op").fill_null(value=False), pl.col("comm_type").fill_null(-1)
    )
    on_cpu, comm_type = filled["is_cpu_op"].to_numpy(), filled["comm_type"].to_numpy()
    communicates = (kind >= NodeType.COMM_SEND_NODE) & (kind <= NodeType.COMM_COLL_NODE)
    memory = (kind == NodeType.MEM_LOAD_NODE) | (kind == NodeType.MEM_STORE_NODE)
    if not compute.recorded:
        _refuse(table, np.flatnonzero(communicates & on_cpu), None, "is communication of the CPU")
        _refuse(
            table, np.flatnonzero(memory), None, "is of remote memory, which has no configuration"
        )
    computes = kind == NodeType.COMP_NODE
    collective = kind == NodeType.COMM_COLL_NODE
    is_done = np.logical_or.reduce([comm_type == done_type for done_type in (*KINDS, _BROADCAST)])
    _refuse(table, np.flatnonzero(kind == NodeType.METADATA_NODE), None, "is metadata")
    if not compute.recorded:
        _refuse(
            table,
            np.flatnonzero(collective & ~is_done),
            None,
            "is a collective that ASTRA-sim does not do",
        )
        is_unknown = ~(computes | communicates | (kind == NodeType.INVALID_NODE) | memory)
        _refuse(
            table, np.flatnonzero(is_unknown), None, "is of a kind that ASTRA-sim does not know"
        )
    replayed = computes | (collective & (comm_type == _BROADCAST)) | compute.recorded
    action = np.select(
        [replayed, collective, kind == NodeType.COMM_SEND_NODE, kind == NodeType.COMM_RECV_NODE],
        [TIMED, COLLECTIVE, SEND, RECEIVE],
        SKIP,
    )
    slot = np.select(
        [on_cpu, computes, kind == NodeType.COMM_RECV_NODE], [CPU, GPU, NOTHING], COMMUNICATION
    )
    return action, slot


def _compute_durations(table: NodeFrame, compute: Compute) -> Ints:
    """Returns recorded microseconds in ns; a recorded duration of 0 becomes 1 ns."""
    nodes = table.nodes
    recorded: Ints = np.maximum(nodes["duration_us"].to_numpy().astype(np.int64) * _NS_PER_US, 1)
    if not compute.roofline:
        return recorded
    peak, bandwidth = compute.roofline
    operations, size = (
        nodes[name].fill_null(0).to_numpy().astype(np.float64)
        for name in ("num_ops", "tensor_size")
    )
    is_gpu = (nodes["type"] == NodeType.COMP_NODE).to_numpy() & ~nodes["is_cpu_op"].fill_null(
        value=False
    ).to_numpy()
    with np.errstate(divide="ignore", invalid="ignore"):
        attainable = np.minimum(operations / size * bandwidth, peak)
        modelled = np.where((size > 0) & (operations > 0), operations / attainable * 1e9, 0.0)
    duration: Ints = np.where(is_gpu, modelled.astype(np.int64), recorded)
    return duration


def _refuse(table: NodeFrame, wrong: Ints, order: Ints | None, reason: str) -> None:
    if len(wrong):
        row = int(wrong[0] if order is None else order[wrong[0]])
        raise InputError(
            f"node {table.nodes['id'][row]} `{table.nodes['name'][row]}` {reason}",
            slug="not-for-astra-sim",
            where=table.path,
            hint="`traceloom validate --target astra-sim` lists everything",
        )


def find_group_ranks(
    name: str | None, groups: dict[str, tuple[int, ...]] | None, ranks: int
) -> tuple[int, ...] | None:
    """Returns the ranks of a node's group in the order of the group file, None for all ranks.

    Raises:
        UsageError: `no-such-group`: it is no number, is not in the group file, or has ranks outside
            the workload.
    """
    if name in (None, "", "0"):
        return None
    if not is_number(str(name), min_value=0):
        raise UsageError(
            f"ASTRA-sim reads the names of groups as numbers, and stops at `{name}`",
            slug="no-such-group",
            hint="traceloom convert DIR NEW --target astra-sim numbers them",
        )
    members = (groups or {}).get(str(name))
    if members is None:
        raise UsageError(
            f"no group file says who is in group `{name}`",
            slug="no-such-group",
            hint="give it with --groups FILE",
        )
    if max(members, default=0) >= ranks:
        raise UsageError(
            f"group `{name}` has rank {max(members)}, but there are {ranks} ranks",
            slug="no-such-group",
        )
    return members


def find_position(group: tuple[int, ...], nodes: RankNodes, node: int) -> int:
    """Returns the position of a node's rank in the node's group.

    Raises:
        UsageError: `no-such-group`: the rank is not in the group.
    """
    if nodes.rank not in group:
        raise UsageError(
            f"rank {nodes.rank} is not in the group `{nodes.messages[node].group}` of its {nodes.label(node)}",
            slug="no-such-group",
            where=nodes.table.path,
        )
    return (
        nodes.rank
        if len(group) > nodes.rank and group[nodes.rank] == nodes.rank
        else group.index(nodes.rank)
    )


def read_algorithm(prefix: str, ranks: int) -> list[RankNodes]:
    """Reads the files `PREFIX.<position>.et` of an algorithm, with the nodes of each position of a
    group.

    The peers of its messages are positions.

    Args:
        prefix: Directory and prefix of the names.
        ranks: Required number of files.

    Raises:
        InputError: `bad-algorithm`: a file is missing, or contains nodes other than sends, receives
            and computation.
    """
    positions = []
    for position in range(ranks):
        path = Path(f"{prefix}.{position}.et")
        if not path.is_file():
            raise InputError(
                f"the algorithm has no file for position {position}",
                slug="bad-algorithm",
                where=str(path),
                hint=f"a group of {ranks} ranks needs {Path(prefix).name}.0.et to {Path(prefix).name}.{ranks - 1}.et",
            )
        nodes = build_rank_nodes(position, read_table(path), Compute())
        for node, action in enumerate(nodes.action):
            if action not in {TIMED, SEND, RECEIVE}:
                raise InputError(
                    f"{nodes.label(node)} is no send, no receive and no computation",
                    slug="bad-algorithm",
                    where=str(path),
                )
            peer = nodes.messages[node].peer if action != TIMED else 0
            if not 0 <= peer < ranks:
                raise InputError(
                    f"{nodes.label(node)} names position {peer} in a group of {ranks}",
                    slug="bad-algorithm",
                    where=str(path),
                )
        positions.append(nodes)
    return positions


class Carried:
    """One rank's part of a collective with a custom algorithm: all nodes without dependencies start
    at once.

    Args:
        nodes: Nodes of its position.
        group: The rank at each position.
        queues: Queues of the rank.
        mailbox: Transmits the messages.
        done: Called at the end.
    """

    def __init__(
        self,
        nodes: RankNodes,
        group: Sequence[int],
        *,
        queues: RankQueues,
        mailbox: Mailbox,
        done: Callable[[], None],
    ) -> None:
        self._nodes, self._group, self._rank = nodes, group, queues.rank
        self._queues, self._mailbox, self._done = queues, mailbox, done
        self._left = list(nodes.waits)
        self._under_way = 0
        self._issue([node for node, waits in enumerate(self._left) if not waits])

    def _issue(self, ready: list[int]) -> None:
        self._under_way += len(ready)
        for node in ready:
            action = self._nodes.action[node]
            ended = partial(self._end, node)
            if action == TIMED:
                self._queues.after(self._nodes.duration_ns[node], ended)
                continue
            message = self._nodes.messages[node]
            peer = self._group[message.peer]
            if peer == self._rank:
                raise UsageError(
                    f"rank {peer} would send itself a message: its own position is that among the ranks in ascending "
                    "order, its peers' that in the group's order",
                    slug="bad-collective",
                    hint="list the group's ranks in ascending order",
                )
            if action == SEND:
                key = (message.tag, self._rank, peer, message.size)
                self._mailbox.send(key, self._rank, peer, message.size, ended)
            else:
                self._mailbox.receive((message.tag, peer, self._rank, message.size), ended)

    def _end(self, node: int, _: object = None) -> None:
        self._under_way -= 1
        ready = []
        for k in range(self._nodes.first[node], self._nodes.first[node + 1]):
            after = self._nodes.follower[k]
            self._left[after] -= 1
            if not self._left[after]:
                ready.append(after)
        self._issue(ready)
        if not self._under_way:
            self._done()
