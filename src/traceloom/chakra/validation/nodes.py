"""Rules about one file: the stream, its nodes one by one, and what they wait for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from traceloom.array_types import Ints
from traceloom.chakra.node_table import EXPECTED, NodeTable
from traceloom.chakra.schema import NodeType
from traceloom.chakra.validation.problem import Findings
from traceloom.chakra.validation.waiting import Resolved, Settled, circles, resolve, settle

Place = tuple[str, int | None]
_WORK = (NodeType.COMP_NODE, NodeType.MEM_LOAD_NODE, NodeType.MEM_STORE_NODE)
_LONGEST_CIRCLE = 6
_LONGEST_NAME = 60


def check_file(table: NodeTable, location: Place, findings: Findings) -> tuple[Resolved, Settled]:
    """All rules about one file; returns its dependencies and the order they leave."""
    for notice in table.notices:
        if notice.slug == "chakra-no-metadata":
            findings.add("no-metadata", location, [(None, notice.message)])
        else:
            findings.add("file-damage", location, [(None, notice.message)])
    if not len(table):
        findings.add("no-nodes", location, [(None, "there is no node in it")])
    kinds, values = table.nodes["type"].to_numpy(), table.nodes["id"].to_numpy()
    odd = np.flatnonzero((kinds < 1) | (kinds > max(NodeType.values())))
    if len(odd):
        types = ((table.nodes["id"][int(r)], f"{label(table, int(r))} has the type {kinds[r]}") for r in odd)
        findings.add("node-type", location, types, ids(table, odd))
    if table.odd.height:
        _check_odd(table, location, findings)
    by_id = np.argsort(values, kind="stable")
    again = by_id[1:][values[by_id][1:] == values[by_id][:-1]]
    if len(again):
        again = np.sort(again)
        findings.add("duplicate-id", location, each(table, again, "has the id of an earlier node"), ids(table, again))
    return _check_dependencies(table, location, findings)


def _check_odd(table: NodeTable, location: Place, findings: Findings) -> None:
    """Attributes that are not as readers expect them."""
    expected = pl.col("attribute").cast(pl.String).replace_strict(EXPECTED)
    wrong = table.odd.filter(pl.col("kind") != expected)
    for (name, kind), rows in sorted(wrong.group_by("attribute", "kind"), key=lambda group: str(group[0])):
        at = rows["row"].to_numpy()
        predicate = f"has {name} as {kind}, expected {EXPECTED[str(name)]}"
        findings.add("attribute-type", location, each(table, at, predicate), ids(table, np.unique(at)))
    twice = table.odd.filter("again").sort("row")
    if twice.height:
        repeats = (
            (table.nodes["id"][row], f"{label(table, row)} has {name} more than once")
            for row, name in twice.select("row", "attribute").unique(maintain_order=True).iter_rows()
        )
        findings.add("repeated-attribute", location, repeats, ids(table, twice["row"].unique().sort().to_numpy()))


def label(table: NodeTable, row: int) -> str:
    """A node in words: its id and its name."""
    name = table.nodes["name"][row]
    short = name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 1] + "…"
    return f"node {table.nodes['id'][row]}" + (f" `{short}`" if short else "")


def ids(table: NodeTable, rows: Ints) -> NDArray[np.uint64]:
    """Ids of rows."""
    chosen: NDArray[np.uint64] = table.nodes["id"].to_numpy()[rows]
    return chosen


def each(table: NodeTable, rows: Any, complaint: str) -> Iterator[tuple[int, str]]:
    """(id, sentence) of every row, made lazily."""
    for row in rows:
        yield table.nodes["id"][int(row)], f"{label(table, int(row))} {complaint}"


def _check_dependencies(table: NodeTable, location: Place, findings: Findings) -> tuple[Resolved, Settled]:
    resolved = resolve(table)
    for rule, (at, lost), verb in (
        ("dangling-dependency", resolved.dangling, "waits for node"),
        ("dangling-control-dependency", resolved.dangling_control, "is called by node"),
    ):
        if len(at):
            examples = (
                (table.nodes["id"][int(r)], f"{label(table, int(r))} {verb} {i}, which is not there")
                for r, i in zip(at, lost, strict=True)
            )
            findings.add(rule, location, examples, ids(table, np.unique(at)), count=len(at))
    for rows, predicate in ((resolved.own, "waits for itself"), (resolved.own_control, "is its own caller")):
        if len(rows):
            findings.add("self-dependency", location, each(table, rows, predicate), ids(table, rows))
    for dependencies in (table.data, table.control):
        order = np.lexsort((dependencies.id, dependencies.row))
        row, awaited = dependencies.row[order], dependencies.id[order]
        again = np.unique(row[1:][(row[1:] == row[:-1]) & (awaited[1:] == awaited[:-1])])
        if len(again):
            repeats = each(table, again, "lists a dependency more than once")
            findings.add("repeated-dependency", location, repeats, ids(table, again))
    # The order by data and control dependencies; by data dependencies alone where both together form circles.
    key = np.empty(len(table), dtype=np.int64)  # the place of each among all, by id
    key[np.argsort(table.nodes["id"].to_numpy(), kind="stable")] = np.arange(len(table))
    held = np.union1d(resolved.dangling[0], resolved.own)
    by_data = settle(len(table), resolved.data, key, held)
    arcs = resolved.data + resolved.control
    settled = settle(len(table), arcs, key, held)
    rule, rings = "dependency-cycle", circles(resolved.data, by_data.stuck)
    if not rings:
        rule, rings = "control-dependency-cycle", circles(arcs, settled.stuck)
        settled = by_data if rings else settled

    def sentence(ring: list[int]) -> str:
        shown = ring[:_LONGEST_CIRCLE]
        more = f" … and {len(ring) - len(shown)} more" if len(shown) < len(ring) else ""
        chain = ", which waits for ".join(label(table, row) for row in shown).replace(", which", "", 1)
        return f"{chain}{more}, which waits for {label(table, ring[0])}"

    if rings:
        sentences = ((table.nodes["id"][ring[0]], sentence(ring)) for ring in rings)
        members = np.unique(np.concatenate([np.array(ring) for ring in rings]))
        findings.add(rule, location, sentences, ids(table, members), count=len(rings))
    behind = settled.stuck.copy()
    behind[[row for ring in rings for row in ring]] = False
    behind[held] = False
    rows = np.flatnonzero(behind)
    if len(rows):
        findings.add("never-starts", location, each(table, rows, "waits for a node that never ends"), ids(table, rows))
    if len(arcs.source):
        alone = np.ones(len(table), dtype=bool)
        for part in (table.data.row, table.control.row, arcs.source):
            alone[part] = False
        alone &= np.isin(table.nodes["type"].to_numpy(), _WORK) & (table.nodes["duration_us"].to_numpy() > 0)
        rows = np.flatnonzero(alone)
        if len(rows):
            findings.add("isolated-node", location, each(table, rows, "has no place in the order"), ids(table, rows))
    return resolved, settled
