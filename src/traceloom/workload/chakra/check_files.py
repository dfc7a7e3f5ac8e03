"""Validation rules within one file, and those of ASTRA-sim."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from traceloom.formats.chakra.et_pb2 import CollectiveCommType, NodeType
from traceloom.formats.chakra.nodes import EXPECTED, NUMBERS, NodeFrame, Workload
from traceloom.trace.array_types import Bools, Ints
from traceloom.workload.chakra.validation_rules import MAX_EXAMPLES, Findings, Severity


@dataclass(frozen=True, slots=True)
class Arcs:
    """Dependencies between nodes that exist: row `target` waits for row `source`."""

    source: Ints
    target: Ints

    def __add__(self, other: Arcs) -> Arcs:
        return Arcs(
            np.concatenate([self.source, other.source]), np.concatenate([self.target, other.target])
        )


@dataclass(frozen=True, slots=True)
class Resolved:
    """The dependencies of a file, resolved to rows.

    Attributes:
        data: Data dependencies between different nodes of the file.
        control: Control dependencies between different nodes of the file.
        own: Rows of nodes with a data dependency on themselves.
        own_control: Rows of nodes with a control dependency on themselves.
        dangling: (row, id) of data dependencies on ids that no node has.
        dangling_control: The same for control dependencies.
    """

    data: Arcs
    control: Arcs
    own: Ints
    own_control: Ints
    dangling: tuple[Ints, NDArray[np.uint64]]
    dangling_control: tuple[Ints, NDArray[np.uint64]]


def resolve(table: NodeFrame) -> Resolved:
    """Resolves the ids that the nodes of a file wait for; of nodes with equal ids, the first one
    counts.
    """
    ids = table.nodes["id"].to_numpy()
    id_order = np.argsort(ids, kind="stable")
    arcs, self_waits, dangling = [], [], []
    for dependencies in (table.data, table.control):
        row, awaited = dependencies.row, dependencies.id
        source = row
        lost = np.zeros(len(row), np.bool_)
        if len(row):
            source = id_order[
                np.minimum(np.searchsorted(ids, awaited, sorter=id_order), len(ids) - 1)
            ].astype(np.int64)
            lost = ids[source] != awaited
        dangling.append((row[lost], awaited[lost]))
        source, row = source[~lost], row[~lost]
        same = source == row
        arcs.append(Arcs(source[~same], row[~same]))
        self_waits.append(np.unique(row[same]))
    return Resolved(arcs[0], arcs[1], self_waits[0], self_waits[1], dangling[0], dangling[1])


@dataclass(frozen=True, slots=True)
class TopologicalOrder:
    """An order in which every node comes after its dependencies.

    Attributes:
        order: Rows of all nodes that can start; nodes that are ready at once are mostly sorted by
            key.
        stuck: Whether each node never starts.
    """

    order: Ints
    stuck: Bools


def sort_topologically(
    count: int, arcs: Arcs, key: Ints, blocked: Ints | None = None
) -> TopologicalOrder:
    """Order `count` nodes by their dependencies.

    Args:
        count: Number of nodes.
        arcs: The dependencies.
        key: If all dependencies point from lower to higher keys, the keys already are the order.
        blocked: Rows that never start since they wait for missing nodes.
    """
    if (blocked is None or not len(blocked)) and (key[arcs.source] < key[arcs.target]).all():
        return TopologicalOrder(np.argsort(key, kind="stable"), np.zeros(count, dtype=bool))
    follower = arcs.target[np.argsort(arcs.source, kind="stable")].tolist()
    first: Any = np.concatenate(
        [[0], np.cumsum(np.bincount(arcs.source, minlength=count))]
    ).tolist()
    waits_of = np.bincount(arcs.target, minlength=count)
    if blocked is not None:
        waits_of[blocked] += 1
    waits: Any = waits_of.tolist()
    ready = [row for row in np.argsort(-key, kind="stable").tolist() if not waits[row]]
    order: list[int] = []
    while ready:
        row = ready.pop()
        order.append(row)
        for waiting_row in follower[first[row] : first[row + 1]]:
            waits[waiting_row] -= 1
            if not waits[waiting_row]:
                ready.append(waiting_row)
    return TopologicalOrder(np.array(order, dtype=np.int64), np.array(waits, dtype=np.int64) > 0)


def find_cycles(arcs: Arcs, stuck: Bools) -> list[list[int]]:
    """Returns cycles among nodes that never start: every row waits for the next one, the last for
    the first.

    From every stuck node, one dependency is followed until a row repeats. This takes linear time
    and finds one cycle for every group of nodes that wait only for each other.
    """
    is_stuck_arc = stuck[arcs.source] & stuck[arcs.target]
    awaited = np.full(len(stuck), -1, dtype=np.int64)
    awaited[arcs.target[is_stuck_arc]] = arcs.source[is_stuck_arc]
    next_of = awaited.tolist()
    walk = np.zeros(
        len(stuck), dtype=np.int64
    ).tolist()  # the walk that first visited a row; 0 for none
    cycles: list[list[int]] = []
    for number, start_row in enumerate(np.flatnonzero(stuck).tolist(), start=1):
        row = start_row
        while row >= 0 and not walk[row]:
            walk[row] = number
            row = next_of[row]
        if row >= 0 and walk[row] == number:
            cycle = [row]
            while next_of[cycle[-1]] != row:
                cycle.append(next_of[cycle[-1]])
            cycles.append(cycle)
    return cycles


Place = tuple[str, int | None]
_WORK = (NodeType.COMP_NODE, NodeType.MEM_LOAD_NODE, NodeType.MEM_STORE_NODE)
_MAX_CYCLE_SHOWN = 6
_MAX_NAME_CHARS = 60


def check_file(
    table: NodeFrame, location: Place, findings: Findings
) -> tuple[Resolved, TopologicalOrder]:
    """Checks all rules about one file; returns its dependencies and the resulting order."""
    for notice in table.notices:
        rule = "no-metadata" if notice.slug == "chakra-no-metadata" else "file-damage"
        findings.add(rule, location, [(None, notice.message)])
    if not len(table):
        findings.add("no-nodes", location, [(None, "there is no node in it")])
    kinds, values = table.nodes["type"].to_numpy(), table.nodes["id"].to_numpy()
    unknown_type_rows = np.flatnonzero((kinds < 1) | (kinds > max(NodeType.values())))
    if len(unknown_type_rows):
        types = (
            (table.nodes["id"][int(r)], f"{describe_node(table, int(r))} has the type {kinds[r]}")
            for r in unknown_type_rows
        )
        findings.add("node-type", location, types, get_ids(table, unknown_type_rows))
    if table.odd.height:
        _check_odd(table, location, findings)
    id_order = np.argsort(values, kind="stable")
    repeated_rows = id_order[1:][values[id_order][1:] == values[id_order][:-1]]
    if len(repeated_rows):
        repeated_rows = np.sort(repeated_rows)
        findings.add(
            "duplicate-id",
            location,
            describe_nodes(table, repeated_rows, "has the id of an earlier node"),
            get_ids(table, repeated_rows),
        )
    return _check_dependencies(table, location, findings)


_ANY_INTEGER = ("is_cpu_op", "comm_size")


def _check_odd(table: NodeFrame, location: Place, findings: Findings) -> None:
    """Reports attributes whose type or value readers do not expect."""
    expected = pl.col("attribute").cast(pl.String).replace_strict(EXPECTED)
    wrong = table.odd.filter(pl.col("kind") != expected)
    for (name, kind), rows in sorted(
        wrong.group_by("attribute", "kind"), key=lambda group: str(group[0])
    ):
        row_indices = rows["row"].to_numpy()
        # A reader that looks at another member finds 0; ASTRA-sim takes any integer for two of them.
        values = table.nodes[str(name)][row_indices]
        is_zero = name in NUMBERS and values.cast(pl.Int64).eq_missing(0).all()
        is_taken = (
            findings.target == "astra-sim" and name in _ANY_INTEGER and not values.has_nulls()
        )
        severity: Severity | None = "warning" if is_zero or is_taken else None
        predicate = f"has {name} as {kind}, expected {EXPECTED[str(name)]}"
        findings.add(
            "attribute-type",
            location,
            describe_nodes(table, row_indices, predicate),
            get_ids(table, np.unique(row_indices)),
            severity=severity,
        )
    twice = table.odd.filter("again").sort("row")
    if twice.height:
        repeats = (
            (table.nodes["id"][row], f"{describe_node(table, row)} has {name} more than once")
            for row, name in twice.select("row", "attribute")
            .unique(maintain_order=True)
            .iter_rows()
        )
        findings.add(
            "repeated-attribute",
            location,
            repeats,
            get_ids(table, twice["row"].unique().sort().to_numpy()),
        )


def describe_node(table: NodeFrame, row: int) -> str:
    """Returns the id and name of a node for messages."""
    name = table.nodes["name"][row]
    short = name if len(name) <= _MAX_NAME_CHARS else name[: _MAX_NAME_CHARS - 1] + "…"
    return f"node {table.nodes['id'][row]}" + (f" `{short}`" if short else "")


def get_ids(table: NodeFrame, rows: Ints) -> NDArray[np.uint64]:
    ids: NDArray[np.uint64] = table.nodes["id"].to_numpy()[rows]
    return ids


def describe_nodes(table: NodeFrame, rows: Any, complaint: str) -> Iterator[tuple[int, str]]:
    """Yields (id, sentence) of every row, lazily."""
    yield from (
        (table.nodes["id"][int(row)], f"{describe_node(table, int(row))} {complaint}")
        for row in rows
    )


def _check_dependencies(
    table: NodeFrame, location: Place, findings: Findings
) -> tuple[Resolved, TopologicalOrder]:
    resolved = resolve(table)
    for rule, (row_indices, lost), verb in (
        ("dangling-dependency", resolved.dangling, "waits for node"),
        ("dangling-control-dependency", resolved.dangling_control, "is called by node"),
    ):
        if len(row_indices):
            examples = (
                (
                    table.nodes["id"][int(r)],
                    f"{describe_node(table, int(r))} {verb} {i}, which is not there",
                )
                for r, i in zip(row_indices, lost, strict=True)
            )
            findings.add(
                rule,
                location,
                examples,
                get_ids(table, np.unique(row_indices)),
                count=len(row_indices),
            )
    for rows, predicate in (
        (resolved.own, "waits for itself"),
        (resolved.own_control, "is its own caller"),
    ):
        if len(rows):
            findings.add(
                "self-dependency",
                location,
                describe_nodes(table, rows, predicate),
                get_ids(table, rows),
            )
    for dependencies in (table.data, table.control):
        order = np.lexsort((dependencies.id, dependencies.row))
        row, awaited = dependencies.row[order], dependencies.id[order]
        repeated_rows = np.unique(row[1:][(row[1:] == row[:-1]) & (awaited[1:] == awaited[:-1])])
        if len(repeated_rows):
            repeats = describe_nodes(table, repeated_rows, "lists a dependency more than once")
            findings.add("repeated-dependency", location, repeats, get_ids(table, repeated_rows))
    # The order by data and control dependencies; by data dependencies alone if both together form
    # cycles.
    key = np.empty(len(table), dtype=np.int64)  # the rank of each node by id
    key[np.argsort(table.nodes["id"].to_numpy(), kind="stable")] = np.arange(len(table))
    blocked = np.union1d(resolved.dangling[0], resolved.own)
    data_order = sort_topologically(len(table), resolved.data, key, blocked)
    arcs = resolved.data + resolved.control
    settled = sort_topologically(len(table), arcs, key, blocked)
    rule, cycles = "dependency-cycle", find_cycles(resolved.data, data_order.stuck)
    if not cycles:
        rule, cycles = "control-dependency-cycle", find_cycles(arcs, settled.stuck)
        settled = data_order if cycles else settled

    def sentence(ring: list[int]) -> str:
        visible = ring[:_MAX_CYCLE_SHOWN]
        suffix = f" … and {len(ring) - len(visible)} more" if len(visible) < len(ring) else ""
        chain = ", which waits for ".join(describe_node(table, row) for row in visible).replace(
            ", which", "", 1
        )
        return f"{chain}{suffix}, which waits for {describe_node(table, ring[0])}"

    if cycles:
        sentences = ((table.nodes["id"][ring[0]], sentence(ring)) for ring in cycles)
        members = np.unique(np.concatenate([np.array(ring) for ring in cycles]))
        findings.add(rule, location, sentences, get_ids(table, members), count=len(cycles))
    is_downstream = settled.stuck.copy()
    is_downstream[[row for ring in cycles for row in ring]] = False
    is_downstream[blocked] = False
    rows = np.flatnonzero(is_downstream)
    if len(rows):
        findings.add(
            "never-starts",
            location,
            describe_nodes(table, rows, "waits for a node that never ends"),
            get_ids(table, rows),
        )
    if len(arcs.source):
        is_isolated = np.ones(len(table), dtype=bool)
        for part in (table.data.row, table.control.row, arcs.source):
            is_isolated[part] = False
        is_isolated &= np.isin(table.nodes["type"].to_numpy(), _WORK) & (
            table.nodes["duration_us"].to_numpy() > 0
        )
        rows = np.flatnonzero(is_isolated)
        if len(rows):
            findings.add(
                "isolated-node",
                location,
                describe_nodes(table, rows, "has no place in the order"),
                get_ids(table, rows),
            )
    return resolved, settled


COLLECTIVE, SEND, RECEIVE = (
    NodeType.COMM_COLL_NODE,
    NodeType.COMM_SEND_NODE,
    NodeType.COMM_RECV_NODE,
)
_NEEDED = {
    COLLECTIVE: ("comm_type", "comm_size"),
    SEND: ("comm_size", "comm_dst", "comm_tag"),
    RECEIVE: ("comm_size", "comm_src", "comm_tag"),
}
HAS_OLD_GROUP = (pl.col("comm_group") > 0) & pl.col("pg_name").is_null()
ALL = ("", "0")
"""How groups of all ranks are written."""


def find_rows(table: NodeFrame, *kinds: int) -> Ints:
    return np.flatnonzero(np.isin(table.nodes["type"].to_numpy(), kinds))


def format_collective_type(number: int | None) -> str:
    """Returns the name of a collective's type, such as `ALL_REDUCE`; `type 12` if the schema has
    none.
    """
    if number is None:
        return "a collective without type"
    return (
        CollectiveCommType.Name(number)
        if number in CollectiveCommType.values()
        else f"type {number}"
    )


def find_wrong_nodes(workload: Workload, broken: pl.Expr) -> Iterator[tuple[int, Ints]]:
    """Yields the files with nodes for which an expression holds, and the rows of these nodes."""
    for (file,), rows in (
        workload.nodes.filter(broken).select("file", "row").group_by("file", maintain_order=True)
    ):
        yield int(str(file)), rows["row"].to_numpy()


def check_nodes(
    workload: Workload, findings: Findings, rule: str, broken: pl.Expr, predicate: str
) -> None:
    """Reports, for each file, the nodes that break a rule."""
    for file, rows in find_wrong_nodes(workload, broken):
        table = workload.tables[file]
        findings.add(
            rule,
            workload.location(file),
            describe_nodes(table, rows, predicate),
            get_ids(table, rows),
        )


def check_attributes(workload: Workload, findings: Findings) -> None:
    """Checks the rules for attributes of communication nodes."""
    missing_attributes = [
        workload.nodes.clear().select("file", "row", pl.lit("").alias("attribute"))
    ]
    for kind, needed in _NEEDED.items():
        for name in needed:
            broken = (pl.col("type") == kind) & pl.col(name).is_null()
            if name == "comm_size" and kind == COLLECTIVE:
                broken &= pl.col("comm_type").ne_missing(CollectiveCommType.BARRIER)
            missing_attributes.append(
                workload.nodes.filter(broken).select("file", "row", pl.lit(name).alias("attribute"))
            )
    lacks = pl.concat(missing_attributes).join(
        workload.odd.with_columns(pl.col("attribute").cast(pl.String)),
        on=["file", "row", "attribute"],
        how="anti",
        maintain_order="left",
    )
    for (file,), rows in lacks.group_by("file", maintain_order=True):
        table = workload.tables[int(str(file))]
        lacking_by_row = rows.group_by("row", maintain_order=True).agg("attribute").sort("row")
        examples = (
            (table.nodes["id"][row], f"{describe_node(table, row)} has no {' and no '.join(names)}")
            for row, names in lacking_by_row.iter_rows()
        )
        findings.add(
            "communication-attribute",
            workload.location(int(str(file))),
            examples,
            get_ids(table, lacking_by_row["row"].to_numpy()),
        )
    communication = pl.col("type").is_in([COLLECTIVE, SEND, RECEIVE])
    for rule, broken, predicate in (
        (
            "collective-type",
            (pl.col("type") == COLLECTIVE)
            & ~pl.col("comm_type").is_in(CollectiveCommType.values()),
            "has a comm_type that is none",
        ),
        (
            "communication-size",
            communication
            & (pl.col("comm_size") <= 0)
            & pl.col("comm_type").ne_missing(CollectiveCommType.BARRIER),
            "has a comm_size that is not above 0",
        ),
        ("communication-on-host", communication & pl.col("is_cpu_op"), "has is_cpu_op true"),
        (
            "old-group",
            (pl.col("type") == COLLECTIVE) & HAS_OLD_GROUP,
            "has comm_group and no pg_name",
        ),
    ):
        check_nodes(workload, findings, rule, broken, predicate)


def check_groups(workload: Workload, findings: Findings) -> None:
    """Checks the group file, and that it contains the nodes' groups."""
    groups = workload.groups
    if groups.faults:
        location = (groups.path, None)
        findings.add(
            "group-file",
            location,
            [(None, fault) for fault in groups.faults],
            count=len(groups.faults),
        )
    if groups.members is None:
        return
    used = workload.nodes.filter(
        pl.col("type").is_in([COLLECTIVE, SEND, RECEIVE]) & pl.col("pg_name").is_not_null()
    ).select("file", "row", "pg_name")
    for (file, name), nodes in sorted(
        used.group_by("file", "pg_name"), key=lambda part: (part[0][0], str(part[0][1]))
    ):
        members = groups.members.get(str(name))
        table, (path, rank), rows = (
            workload.tables[file],
            workload.location(file),
            nodes["row"].to_numpy(),
        )
        if members is None and name not in ALL:
            findings.add(
                "unknown-group",
                (path, rank),
                describe_nodes(table, rows, f"is in group `{name}`"),
                get_ids(table, rows),
            )
        elif members is not None and rank is not None and rank not in members:
            predicate = f"of rank {rank} is in group `{name}` of the ranks {format_ranks(members)}"
            findings.add(
                "not-a-member",
                (path, rank),
                describe_nodes(table, rows, predicate),
                get_ids(table, rows),
            )


def check_peers(workload: Workload, findings: Findings) -> None:
    """Checks the peers of messages, where the file alone shows that they are impossible."""
    rank_by_file = pl.Series("rank", workload.ranks, dtype=pl.Int64)
    rank = pl.col("file").replace_strict(range(len(rank_by_file)), rank_by_file)
    for kind, peer, own_column in (
        (SEND, "comm_dst", "comm_src"),
        (RECEIVE, "comm_src", "comm_dst"),
    ):
        is_kind = (pl.col("type") == kind) & rank.is_not_null()
        for broken, predicate in (
            (is_kind & (pl.col(peer) == rank), f"of rank {{0}} has {peer} {{0}}, itself"),
            (is_kind & (pl.col(peer) < 0), f"has a {peer} below 0"),
            (is_kind & (pl.col(own_column) != rank), f"of rank {{0}} has another {own_column}"),
        ):
            for file, rows in find_wrong_nodes(workload, broken):
                table, location = workload.tables[file], workload.location(file)
                findings.add(
                    "message-peer",
                    location,
                    describe_nodes(table, rows, predicate.format(location[1])),
                    get_ids(table, rows),
                )


def find_named_ranks(workload: Workload) -> dict[int, str]:
    """Returns every rank that a group or a message names, and where."""
    location_by_rank: dict[int, str] = {}
    for name, members in (workload.groups.members or {}).items():
        for rank in members:
            location_by_rank.setdefault(rank, f"group `{name}` of {workload.groups.path}")
    for kind, peer in ((SEND, "comm_dst"), (RECEIVE, "comm_src")):
        peers = workload.nodes.filter((pl.col("type") == kind) & (pl.col(peer) >= 0))
        for rank, file in (
            peers.group_by(peer, maintain_order=True).agg(pl.col("file").first()).iter_rows()
        ):
            location_by_rank.setdefault(rank, f"a message of {workload.tables[file].path}")
    return location_by_rank


def format_ranks(ranks: Iterable[int], limit: int = 8) -> str:
    """`0, 1, 2 and 5 more`."""
    sorted_ranks: Sequence[int] = sorted(ranks)
    suffix = f" and {len(sorted_ranks) - limit} more" if len(sorted_ranks) > limit else ""
    return ", ".join(map(str, sorted_ranks[:limit])) + suffix


SUPPORTED = (
    CollectiveCommType.ALL_REDUCE,
    CollectiveCommType.ALL_GATHER,
    CollectiveCommType.ALL_TO_ALL,
    CollectiveCommType.REDUCE_SCATTER,
    CollectiveCommType.BROADCAST,
)
_MAX_GROUP = 2**31 - 1
_MEMORY = (NodeType.MEM_LOAD_NODE, NodeType.MEM_STORE_NODE)


def check_astra_sim(workload: Workload, findings: Findings) -> None:
    """Checks the rules that apply to ASTRA-sim only."""
    for rank, table in zip(workload.ranks, workload.tables, strict=True):
        if rank is None:
            findings.add(
                "file-name",
                (table.path, rank),
                [(None, "the file's name does not end in .RANK.et")],
            )
        if table.packed:
            findings.add("file-compressed", (table.path, rank), [(None, "the file is compressed")])
    collective = pl.col("type") == COLLECTIVE
    in_group = collective & ~pl.col("pg_name").is_in(ALL)
    unsupported = pl.col("comm_type").is_in(CollectiveCommType.values()) & ~pl.col(
        "comm_type"
    ).is_in(SUPPORTED)
    rules = [
        ("unsupported-node", pl.col("type") == NodeType.METADATA_NODE, "is a metadata node"),
        ("unsupported-node", pl.col("type") == NodeType.INVALID_NODE, "is an invalid node"),
        (
            "replayed-broadcast",
            collective
            & (pl.col("comm_type") == CollectiveCommType.BROADCAST)
            & (pl.col("duration_us") == 0),
            "is a broadcast without duration",
        ),
        ("memory-node", pl.col("type").is_in(_MEMORY), "loads or stores memory"),
    ]
    if workload.groups.members is None:
        rules.append(("no-group-file", in_group, "is in a group"))
    lone = [name for name, members in (workload.groups.members or {}).items() if len(members) == 1]
    is_replayed = pl.col("comm_type") == CollectiveCommType.BROADCAST
    is_lone = in_group & pl.col("pg_name").is_in(lone) & ~is_replayed
    rules.append(("group-of-one", is_lone, "is in a group of one rank"))
    for rule, broken, predicate in rules:
        check_nodes(workload, findings, rule, broken, predicate)
    grouped_nodes = workload.nodes.filter(in_group).select("file", "row", "pg_name")
    invalid_names = [
        name for name in grouped_nodes["pg_name"].unique() if not is_number(name, min_value=0)
    ]
    for (number, name), nodes in grouped_nodes.filter(
        pl.col("pg_name").is_in(invalid_names)
    ).group_by("file", "pg_name", maintain_order=True):
        file = int(str(number))
        table, rows = workload.tables[file], nodes["row"].to_numpy()
        in_odd = describe_nodes(table, rows, f"is in group `{name}`")
        findings.add("group-name", workload.location(file), in_odd, get_ids(table, rows))
    for file, rows in find_wrong_nodes(workload, collective & unsupported):
        table = workload.tables[file]
        sentences = [
            (
                table.nodes["id"][row],
                f"{describe_node(table, row)} is {format_collective_type(table.nodes['comm_type'][row])}",
            )
            for row in rows[:MAX_EXAMPLES].tolist()
        ]
        findings.add(
            "unsupported-collective", workload.location(file), sentences, get_ids(table, rows)
        )
    for file, rows in find_wrong_nodes(
        workload, (pl.col("type") == NodeType.COMP_NODE) & pl.col("is_cpu_op")
    ):  # about the simulation as a whole, however many there are
        text = f"{len(rows):,} node{'s are' if len(rows) > 1 else ' is'} work of the CPU"
        table = workload.tables[file]
        findings.add(
            "host-node", workload.location(file), [(None, text)], get_ids(table, rows), count=1
        )
        awaited = np.concatenate([table.data.id, table.control.id])
        is_last = ~np.isin(table.nodes["id"].to_numpy(), awaited)
        if np.isin(table.nodes["type"].to_numpy()[is_last], (SEND, RECEIVE)).all():
            ends = np.flatnonzero(is_last)
            examples = describe_nodes(table, ends, "is a message, and nothing comes after it")
            findings.add(
                "host-node-last", workload.location(file), examples, get_ids(table, ends), count=1
            )
    for file, table in enumerate(workload.tables):
        if len(table.control.row):
            rows = np.unique(table.control.row)
            examples = describe_nodes(table, rows, "has control dependencies")
            findings.add(
                "control-dependency", workload.location(file), examples, get_ids(table, rows)
            )
    if len(workload.ranks) == 1:
        severity: Severity | None = (
            None if workload.place.whole else "warning"
        )  # other files may be elsewhere
        findings.add(
            "one-rank",
            (workload.tables[0].path, workload.ranks[0]),
            [(None, "there is no other rank")],
            severity=severity,
        )
    wrong = [name for name in workload.groups.members or {} if not is_number(name, min_value=1)]
    if wrong:
        sentences = [(None, f"the group file names the group `{name}`") for name in wrong]
        findings.add("group-name", (workload.groups.path, None), sentences, count=len(wrong))


def is_number(name: str, min_value: int) -> bool:
    """Returns whether ASTRA-sim reads a group's name as a number >= `min_value`."""
    return name.isascii() and name.isdigit() and min_value <= int(name[:11]) <= _MAX_GROUP
