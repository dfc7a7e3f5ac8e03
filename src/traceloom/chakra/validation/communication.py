"""Rules about communication in one file: attributes, peers, groups."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import polars as pl

from traceloom.array_types import Ints
from traceloom.chakra.node_table import NodeTable
from traceloom.chakra.schema import CollectiveCommType, NodeType
from traceloom.chakra.validation.nodes import each, ids, label
from traceloom.chakra.validation.problem import Findings
from traceloom.chakra.workload import Workload

COLLECTIVE, SEND, RECEIVE = NodeType.COMM_COLL_NODE, NodeType.COMM_SEND_NODE, NodeType.COMM_RECV_NODE
_NEEDED = {
    COLLECTIVE: ("comm_type", "comm_size"),
    SEND: ("comm_size", "comm_dst", "comm_tag"),
    RECEIVE: ("comm_size", "comm_src", "comm_tag"),
}
ALL = ("", "0")
"""How groups of all ranks are written."""


def rows_of(table: NodeTable, *kinds: int) -> Ints:
    """Rows of the nodes of some types."""
    return np.flatnonzero(np.isin(table.nodes["type"].to_numpy(), kinds))


def kind_name(number: int | None) -> str:
    """The name of a collective's type, as `ALL_REDUCE`; `type 12` for one that the schema does not have."""
    if number is None:
        return "a collective without type"
    return CollectiveCommType.Name(number) if number in CollectiveCommType.values() else f"type {number}"


def wrong_nodes(workload: Workload, broken: pl.Expr) -> Iterator[tuple[int, Ints]]:
    """The files that have nodes of which something holds, and the rows of these."""
    nodes = workload.nodes.filter(broken)
    for (file,), rows in nodes.select("file", "row").group_by("file", maintain_order=True):
        yield int(str(file)), rows["row"].to_numpy()


def check_nodes(workload: Workload, findings: Findings, rule: str, broken: pl.Expr, predicate: str) -> None:
    """Say of each file which of its nodes break a rule."""
    for file, rows in wrong_nodes(workload, broken):
        table = workload.tables[file]
        findings.add(rule, workload.location(file), each(table, rows, predicate), ids(table, rows))


def check_attributes(workload: Workload, findings: Findings) -> None:
    """The rules for attributes of communication nodes."""
    lacking = [workload.nodes.clear().select("file", "row", pl.lit("").alias("attribute"))]
    for kind, needed in _NEEDED.items():
        for name in needed:
            broken = (pl.col("type") == kind) & pl.col(name).is_null()
            if name == "comm_size" and kind == COLLECTIVE:
                broken &= pl.col("comm_type").ne_missing(CollectiveCommType.BARRIER)
            lacking.append(workload.nodes.filter(broken).select("file", "row", pl.lit(name).alias("attribute")))
    odd = workload.odd.with_columns(pl.col("attribute").cast(pl.String))
    lacks = pl.concat(lacking).join(odd, on=["file", "row", "attribute"], how="anti", maintain_order="left")
    for (file,), rows in lacks.group_by("file", maintain_order=True):
        table = workload.tables[int(str(file))]
        by_row = rows.group_by("row", maintain_order=True).agg("attribute").sort("row")
        examples = (
            (table.nodes["id"][row], f"{label(table, row)} has no {' and no '.join(names)}")
            for row, names in by_row.iter_rows()
        )
        at = workload.location(int(str(file)))
        findings.add("communication-attribute", at, examples, ids(table, by_row["row"].to_numpy()))
    communication = pl.col("type").is_in([COLLECTIVE, SEND, RECEIVE])
    for rule, broken, predicate in (
        (
            "collective-type",
            (pl.col("type") == COLLECTIVE) & ~pl.col("comm_type").is_in(CollectiveCommType.values()),
            "has a comm_type that is none",
        ),
        (
            "communication-size",
            communication & (pl.col("comm_size") <= 0) & pl.col("comm_type").ne_missing(CollectiveCommType.BARRIER),
            "has a comm_size that is not above 0",
        ),
        ("communication-on-host", communication & pl.col("is_cpu_op"), "has is_cpu_op true"),
    ):
        check_nodes(workload, findings, rule, broken, predicate)


def check_groups(workload: Workload, findings: Findings) -> None:
    """The group file, and whether the nodes' groups are in it."""
    groups = workload.groups
    if groups.faults:
        at = (groups.path, None)
        findings.add("group-file", at, [(None, fault) for fault in groups.faults], count=len(groups.faults))
    if groups.members is None:
        return
    used = workload.nodes.filter(
        pl.col("type").is_in([COLLECTIVE, SEND, RECEIVE]) & pl.col("pg_name").is_not_null()
    ).select("file", "row", "pg_name")
    for (file, name), nodes in sorted(used.group_by("file", "pg_name"), key=lambda part: (part[0][0], str(part[0][1]))):
        members = groups.members.get(str(name))
        table, (path, rank), rows = workload.tables[file], workload.location(file), nodes["row"].to_numpy()
        if members is None and name not in ALL:
            findings.add("unknown-group", (path, rank), each(table, rows, f"is in group `{name}`"), ids(table, rows))
        elif members is not None and rank is not None and rank not in members:
            predicate = f"of rank {rank} is in group `{name}` of the ranks {ranks_text(members)}"
            findings.add("not-a-member", (path, rank), each(table, rows, predicate), ids(table, rows))


def check_peers(workload: Workload, findings: Findings) -> None:
    """The peers of messages, where the file alone shows that they are impossible."""
    of_file = pl.Series("rank", workload.ranks, dtype=pl.Int64)
    rank = pl.col("file").replace_strict(range(len(of_file)), of_file)
    for kind, peer, own in ((SEND, "comm_dst", "comm_src"), (RECEIVE, "comm_src", "comm_dst")):
        of_kind = (pl.col("type") == kind) & rank.is_not_null()
        for broken, predicate in (
            (of_kind & (pl.col(peer) == rank), f"of rank {{0}} has {peer} {{0}}, itself"),
            (of_kind & (pl.col(peer) < 0), f"has a {peer} below 0"),
            (of_kind & (pl.col(own) != rank), f"of rank {{0}} has another {own}"),
        ):
            for file, rows in wrong_nodes(workload, broken):
                table, at = workload.tables[file], workload.location(file)
                findings.add("message-peer", at, each(table, rows, predicate.format(at[1])), ids(table, rows))


def named_ranks(workload: Workload) -> dict[int, str]:
    """Every rank that a group or a message names, and where."""
    named: dict[int, str] = {}
    for name, members in (workload.groups.members or {}).items():
        for rank in members:
            named.setdefault(rank, f"group `{name}` of {workload.groups.path}")
    for kind, peer in ((SEND, "comm_dst"), (RECEIVE, "comm_src")):
        peers = workload.nodes.filter((pl.col("type") == kind) & (pl.col(peer) >= 0))
        for rank, file in peers.group_by(peer, maintain_order=True).agg(pl.col("file").first()).iter_rows():
            named.setdefault(rank, f"a message of {workload.tables[file].path}")
    return named


def ranks_text(ranks: Iterable[int], most: int = 8) -> str:
    """`0, 1, 2 and 5 more`."""
    listed: Sequence[int] = sorted(ranks)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(map(str, listed[:most])) + more
