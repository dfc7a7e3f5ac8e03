"""Rules of ASTRA-sim alone: what its reader, its workload layer and its groups take."""

from __future__ import annotations

import numpy as np
import polars as pl

from traceloom.chakra.schema import CollectiveCommType, NodeType
from traceloom.chakra.validation.communication import COLLECTIVE, kind_name
from traceloom.chakra.validation.nodes import each, ids, label
from traceloom.chakra.validation.problem import Findings, Severity
from traceloom.chakra.workload import Workload

SUPPORTED = (
    CollectiveCommType.ALL_REDUCE,
    CollectiveCommType.ALL_GATHER,
    CollectiveCommType.ALL_TO_ALL,
    CollectiveCommType.REDUCE_SCATTER,
    CollectiveCommType.BROADCAST,
)
_MOST_GROUP = 2**31 - 1


def check_astra_sim(workload: Workload, findings: Findings) -> None:
    """All rules that only ASTRA-sim has."""
    collective = pl.col("type") == COLLECTIVE
    for rank, table in zip(workload.ranks, workload.tables, strict=True):
        location = (table.path, rank)
        if rank is None:
            findings.add("file-name", location, [(None, "the file's name does not end in .RANK.et")])
        if table.packed:
            findings.add("file-compressed", location, [(None, "the file is compressed")])
        for rule, broken, text in (
            ("unsupported-node", pl.col("type") == NodeType.METADATA_NODE, "is a metadata node"),
            ("unsupported-node", pl.col("type") == NodeType.INVALID_NODE, "is an invalid node"),
            (
                "replayed-broadcast",
                collective & (pl.col("comm_type") == CollectiveCommType.BROADCAST) & (pl.col("duration_us") == 0),
                "is a broadcast without duration",
            ),
            (
                "memory-node",
                pl.col("type").is_in([NodeType.MEM_LOAD_NODE, NodeType.MEM_STORE_NODE]),
                "loads or stores memory",
            ),
        ):
            rows = np.flatnonzero(table.nodes.select(broken.fill_null(value=False)).to_series().to_numpy())
            if len(rows):
                findings.add(rule, location, each(table, rows, text), ids(table, rows))
        host = (pl.col("type") == NodeType.COMP_NODE) & pl.col("is_cpu_op")
        rows = np.flatnonzero(table.nodes.select(host.fill_null(value=False)).to_series().to_numpy())
        if len(rows):  # about the simulation as a whole, however many they are
            text = f"{len(rows):,} node{'s are' if len(rows) > 1 else ' is'} work of the CPU"
            findings.add("host-node", location, [(None, text)], ids(table, rows), count=1)
        if len(table.control.row):
            rows = np.unique(table.control.row)
            findings.add(
                "control-dependency", location, each(table, rows, "has control dependencies"), ids(table, rows)
            )
        unsupported = pl.col("comm_type").is_in(CollectiveCommType.values()) & ~pl.col("comm_type").is_in(SUPPORTED)
        part = table.nodes.with_row_index("row").filter(collective & unsupported)
        if part.height:
            rows = part["row"].to_numpy()
            examples = (
                (table.nodes["id"][row], f"{label(table, row)} is {kind_name(table.nodes['comm_type'][row])}")
                for row in rows.tolist()
            )
            findings.add("unsupported-collective", location, examples, ids(table, rows))
        named = table.nodes.with_row_index("row").filter(collective & pl.col("pg_name").is_not_null())
        odd = [name for name in named["pg_name"].unique(maintain_order=True) if name and not _is_number(name, least=0)]
        for name in odd:
            rows = named.filter(pl.col("pg_name") == name)["row"].to_numpy()
            findings.add("group-name", location, each(table, rows, f"is in group `{name}`"), ids(table, rows))
        if workload.groups.members is None:
            rows = named.filter(~pl.col("pg_name").is_in(["", "0"]))["row"].to_numpy()
            if len(rows):
                findings.add("no-group-file", location, each(table, rows, "is in a group"), ids(table, rows))
    if len(workload.ranks) == 1:
        severity: Severity | None = None if workload.place.whole else "warning"  # others may lie elsewhere
        alone = [(None, "there is no other rank")]
        findings.add("one-rank", (workload.tables[0].path, workload.ranks[0]), alone, severity=severity)
    names = workload.groups.members or {}
    wrong = [name for name in names if not _is_number(name, least=1)]
    if wrong:
        sentences = [(None, f"the group file names the group `{name}`") for name in wrong]
        findings.add("group-name", (workload.groups.path, None), sentences, count=len(wrong))


def _is_number(name: str, least: int) -> bool:
    return name.isascii() and name.isdigit() and least <= int(name[:11]) <= _MOST_GROUP
