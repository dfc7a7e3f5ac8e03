"""Rules of ASTRA-sim alone: what its reader, its workload layer and its groups take."""

from __future__ import annotations

import numpy as np
import polars as pl

from traceloom.chakra.schema import CollectiveCommType, NodeType
from traceloom.chakra.validation.communication import ALL, COLLECTIVE, check_nodes, kind_name, wrong_nodes
from traceloom.chakra.validation.nodes import each, ids, label
from traceloom.chakra.validation.problem import MOST_EXAMPLES, Findings, Severity
from traceloom.chakra.workload import Workload

SUPPORTED = (
    CollectiveCommType.ALL_REDUCE,
    CollectiveCommType.ALL_GATHER,
    CollectiveCommType.ALL_TO_ALL,
    CollectiveCommType.REDUCE_SCATTER,
    CollectiveCommType.BROADCAST,
)
_MOST_GROUP = 2**31 - 1
_MEMORY = (NodeType.MEM_LOAD_NODE, NodeType.MEM_STORE_NODE)


def check_astra_sim(workload: Workload, findings: Findings) -> None:
    """All rules that only ASTRA-sim has."""
    for rank, table in zip(workload.ranks, workload.tables, strict=True):
        if rank is None:
            findings.add("file-name", (table.path, rank), [(None, "the file's name does not end in .RANK.et")])
        if table.packed:
            findings.add("file-compressed", (table.path, rank), [(None, "the file is compressed")])
    collective = pl.col("type") == COLLECTIVE
    in_group = collective & ~pl.col("pg_name").is_in(ALL)
    unsupported = pl.col("comm_type").is_in(CollectiveCommType.values()) & ~pl.col("comm_type").is_in(SUPPORTED)
    rules = [
        ("unsupported-node", pl.col("type") == NodeType.METADATA_NODE, "is a metadata node"),
        ("unsupported-node", pl.col("type") == NodeType.INVALID_NODE, "is an invalid node"),
        (
            "replayed-broadcast",
            collective & (pl.col("comm_type") == CollectiveCommType.BROADCAST) & (pl.col("duration_us") == 0),
            "is a broadcast without duration",
        ),
        ("memory-node", pl.col("type").is_in(_MEMORY), "loads or stores memory"),
    ]
    if workload.groups.members is None:
        rules.append(("no-group-file", in_group, "is in a group"))
    for rule, broken, predicate in rules:
        check_nodes(workload, findings, rule, broken, predicate)
    named = workload.nodes.filter(in_group).select("file", "row", "pg_name")
    odd = [name for name in named["pg_name"].unique() if not is_number(name, least=0)]
    by_group = named.filter(pl.col("pg_name").is_in(odd)).group_by("file", "pg_name", maintain_order=True)
    for (number, name), nodes in by_group:
        file = int(str(number))
        table, rows = workload.tables[file], nodes["row"].to_numpy()
        in_odd = each(table, rows, f"is in group `{name}`")
        findings.add("group-name", workload.location(file), in_odd, ids(table, rows))
    for file, rows in wrong_nodes(workload, collective & unsupported):
        table = workload.tables[file]
        sentences = [
            (table.nodes["id"][row], f"{label(table, row)} is {kind_name(table.nodes['comm_type'][row])}")
            for row in rows[:MOST_EXAMPLES].tolist()
        ]
        findings.add("unsupported-collective", workload.location(file), sentences, ids(table, rows))
    host = (pl.col("type") == NodeType.COMP_NODE) & pl.col("is_cpu_op")
    for file, rows in wrong_nodes(workload, host):  # about the simulation as a whole, however many they are
        text = f"{len(rows):,} node{'s are' if len(rows) > 1 else ' is'} work of the CPU"
        table = workload.tables[file]
        findings.add("host-node", workload.location(file), [(None, text)], ids(table, rows), count=1)
    for file, table in enumerate(workload.tables):
        if len(table.control.row):
            rows = np.unique(table.control.row)
            examples = each(table, rows, "has control dependencies")
            findings.add("control-dependency", workload.location(file), examples, ids(table, rows))
    if len(workload.ranks) == 1:
        severity: Severity | None = None if workload.place.whole else "warning"  # others may lie elsewhere
        alone = [(None, "there is no other rank")]
        findings.add("one-rank", (workload.tables[0].path, workload.ranks[0]), alone, severity=severity)
    names = workload.groups.members or {}
    wrong = [name for name in names if not is_number(name, least=1)]
    if wrong:
        sentences = [(None, f"the group file names the group `{name}`") for name in wrong]
        findings.add("group-name", (workload.groups.path, None), sentences, count=len(wrong))


def is_number(name: str, least: int) -> bool:
    """Whether ASTRA-sim reads a group's name as a number from `least` on."""
    return name.isascii() and name.isdigit() and least <= int(name[:11]) <= _MOST_GROUP
