"""Rules about communication in one file: attributes, peers, groups."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import polars as pl

from traceloom.array_types import Ints
from traceloom.chakra.node_table import NodeTable
from traceloom.chakra.schema import CollectiveCommType, NodeType
from traceloom.chakra.validation.nodes import Place, each, ids, label
from traceloom.chakra.validation.problem import Findings
from traceloom.chakra.workload import Workload

COLLECTIVE, SEND, RECEIVE = NodeType.COMM_COLL_NODE, NodeType.COMM_SEND_NODE, NodeType.COMM_RECV_NODE
_NEEDED = {
    COLLECTIVE: ("comm_type", "comm_size"),
    SEND: ("comm_size", "comm_dst", "comm_tag"),
    RECEIVE: ("comm_size", "comm_src", "comm_tag"),
}
_ALL = ("", "0")  # how groups of all ranks are written


def rows_of(table: NodeTable, *kinds: int) -> Ints:
    """Rows of the nodes of some types."""
    return np.flatnonzero(np.isin(table.nodes["type"].to_numpy(), kinds))


def kind_name(number: int | None) -> str:
    """The name of a collective's type, as `ALL_REDUCE`; `type 12` for one that the schema does not have."""
    if number is None:
        return "a collective without type"
    return CollectiveCommType.Name(number) if number in CollectiveCommType.values() else f"type {number}"


def check_attributes(table: NodeTable, location: Place, findings: Findings) -> None:
    """The rules for attributes of communication nodes."""
    lacks: dict[int, list[str]] = {}
    for kind, needed in _NEEDED.items():
        rows = rows_of(table, kind)
        part = table.nodes[rows]
        barrier = (part["comm_type"] == CollectiveCommType.BARRIER).fill_null(value=False)
        for name in needed:
            missing = part[name].is_null()
            if name == "comm_size" and kind == COLLECTIVE:
                missing &= ~barrier
            has = table.odd.filter(pl.col("attribute") == name)["row"].unique().to_numpy()
            for row in np.setdiff1d(rows[missing.to_numpy()], has).tolist():
                lacks.setdefault(row, []).append(name)
    if lacks:
        rows = np.array(sorted(lacks), dtype=np.int64)
        examples = (
            (table.nodes["id"][r], f"{label(table, r)} has no {' and no '.join(lacks[r])}") for r in rows.tolist()
        )
        findings.add("communication-attribute", location, examples, ids(table, rows))
    communication = pl.col("type").is_in([COLLECTIVE, SEND, RECEIVE])
    for rule, broken, predicate in (
        (
            "collective-type",
            (pl.col("type") == COLLECTIVE) & ~pl.col("comm_type").is_in(CollectiveCommType.values()),
            "has a comm_type that is none",
        ),
        (
            "communication-size",
            communication & (pl.col("comm_size") <= 0) & (pl.col("comm_type") != CollectiveCommType.BARRIER),
            "has a comm_size that is not above 0",
        ),
        ("communication-on-host", communication & pl.col("is_cpu_op"), "has is_cpu_op true"),
    ):
        rows = np.flatnonzero(table.nodes.select(broken.fill_null(value=False)).to_series().to_numpy())
        if len(rows):
            findings.add(rule, location, each(table, rows, predicate), ids(table, rows))


def check_groups(workload: Workload, findings: Findings) -> None:
    """The group file, and whether the nodes' groups are in it."""
    groups = workload.groups
    if groups.faults:
        at = (groups.path, None)
        findings.add("group-file", at, [(None, fault) for fault in groups.faults], count=len(groups.faults))
    if groups.members is None:
        return
    for rank, table in zip(workload.ranks, workload.tables, strict=True):
        used = table.nodes.with_row_index("row").filter(
            pl.col("type").is_in([COLLECTIVE, SEND, RECEIVE]) & pl.col("pg_name").is_not_null()
        )
        for (name,), nodes in sorted(used.group_by("pg_name"), key=lambda part: str(part[0])):
            members = groups.members.get(str(name))
            rows = nodes["row"].to_numpy()
            if members is None and name not in _ALL:
                findings.add(
                    "unknown-group", (table.path, rank), each(table, rows, f"is in group `{name}`"), ids(table, rows)
                )
            elif members is not None and rank is not None and rank not in members:
                predicate = f"of rank {rank} is in group `{name}` of the ranks {ranks_text(members)}"
                findings.add("not-a-member", (table.path, rank), each(table, rows, predicate), ids(table, rows))


def check_peers(workload: Workload, findings: Findings) -> None:
    """The peers of messages, where the file alone shows that they are impossible."""
    for rank, table in zip(workload.ranks, workload.tables, strict=True):
        if rank is None:
            continue
        for kind, peer, own in ((SEND, "comm_dst", "comm_src"), (RECEIVE, "comm_src", "comm_dst")):
            of_kind = pl.col("type") == kind
            for broken, predicate in (
                (of_kind & (pl.col(peer) == rank), f"of rank {rank} has {peer} {rank}, itself"),
                (of_kind & (pl.col(peer) < 0), f"has a {peer} below 0"),
                (of_kind & pl.col(own).is_not_null() & (pl.col(own) != rank), f"of rank {rank} has another {own}"),
            ):
                rows = np.flatnonzero(table.nodes.select(broken.fill_null(value=False)).to_series().to_numpy())
                if len(rows):
                    findings.add("message-peer", (table.path, rank), each(table, rows, predicate), ids(table, rows))


def named_ranks(workload: Workload) -> dict[int, str]:
    """Every rank that a group or a message names, and where."""
    named: dict[int, str] = {}
    for name, members in (workload.groups.members or {}).items():
        for rank in members:
            named.setdefault(rank, f"group `{name}` of {workload.groups.path}")
    for table in workload.tables:
        for kind, peer in ((SEND, "comm_dst"), (RECEIVE, "comm_src")):
            peers = table.nodes.filter((pl.col("type") == kind) & (pl.col(peer) >= 0))[peer].unique().to_list()
            for rank in peers:
                named.setdefault(rank, f"a message of {table.path}")
    return named


def ranks_text(ranks: Iterable[int], most: int = 8) -> str:
    """`0, 1, 2 and 5 more`."""
    listed: Sequence[int] = sorted(ranks)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(map(str, listed[:most])) + more
