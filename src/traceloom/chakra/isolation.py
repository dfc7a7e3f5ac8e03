"""One side of a workload alone, communication or compute, with what its nodes wait for kept through the removed ones.

A kept node that waited for a removed one waits for what that one waited for. Done naively this multiplies dependencies:
a removed node with many before it and many behind it would tie each to each. Such a node stays, without duration, and
what other dependencies imply is not said, so that the work is linear in nodes and dependencies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from traceloom.chakra.columns import Decoder
from traceloom.chakra.framing import Block
from traceloom.chakra.graph_layout import CARRIED_NODES, COMMUNICATION_TYPES, EDGES, EDGES_OUT, SCHEMA
from traceloom.chakra.schema import GlobalMetadata, Node, NodeType
from traceloom.errors import InputError
from traceloom.model.notice import Notice

Side = Literal["communication", "compute"]
_OF_A_GRAPH = frozenset({EDGES, EDGES_OUT, CARRIED_NODES})  # attributes that would speak of removed nodes
_MOST_PASSED = 64  # of a list that grows along a chain of removed nodes


@dataclass(frozen=True)
class Shape:
    """Ids, types and dependencies of all nodes of a file, without the nodes.

    Attributes:
        ids: Id of each node.
        types: Type of each node.
        control: Rows that each node waits for by control.
        data: Rows that each node waits for by data.
        dangling: How many dependencies named no node.
    """

    ids: list[int]
    types: list[int]
    control: list[list[int]]
    data: list[list[int]]
    dangling: int


def shape(blocks: Iterator[Block], where: str) -> Shape:
    """The shape of a file, read in one pass.

    Raises:
        InputError: `chakra-damaged`.
    """
    ids: list[int] = []
    types: list[int] = []
    dependencies: tuple[list[list[int]], list[list[int]]] = ([], [])
    for columns in Decoder(("is_cpu_op",), where).columns(blocks):
        ids.extend(columns.id.view(np.uint64).tolist())
        types.extend(columns.type.tolist())
        for lists, out in ((columns.control, dependencies[0]), (columns.data, dependencies[1])):
            per_node: list[list[int]] = [[] for _ in range(len(columns))]
            values = lists.values.view(np.uint64).tolist()
            ends = np.cumsum(lists.count).tolist()
            for row, end, count in zip(lists.row.tolist(), ends, lists.count.tolist(), strict=True):
                per_node[row] = values[end - count : end]
            out.extend(per_node)
    row_of = {number: row for row, number in reversed(list(enumerate(ids)))}
    dangling = 0
    for lists_of in dependencies:
        for row, needed in enumerate(lists_of):
            existing = [row_of[number] for number in needed if number in row_of]
            dangling += len(needed) - len(existing)
            lists_of[row] = [other for other in existing if other != row]
    return Shape(ids, types, *dependencies, dangling)


@dataclass(frozen=True)
class Isolated:
    """What stays of a file.

    Attributes:
        kept: Whether each node stays as it is.
        joints: Nodes that stay without duration, because many wait through them for many.
        control: Ids that each node that stays waits for by control.
        data: Ids that each node that stays waits for by data.
        notices: What was left out.
    """

    kept: list[bool]
    joints: frozenset[int]
    control: dict[int, list[int]]
    data: dict[int, list[int]]
    notices: tuple[Notice, ...]


def isolate(file: Shape, side: Side, where: str) -> Isolated:
    """The nodes and dependencies that stay when only one side is kept.

    Raises:
        InputError: `chakra-circle`: nodes wait for each other.
    """
    communicates = {int(kind) for kind in COMMUNICATION_TYPES}
    keeps_communication = side == "communication"
    kept = [(kind in communicates) == keeps_communication and kind != NodeType.METADATA_NODE for kind in file.types]
    stays = list(kept)
    notices: list[Notice] = []
    if file.dangling:
        message = f"{file.dangling:,} dependencies name nodes that the file does not have, and are left out"
        notices.append(Notice("chakra-dangling", "warning", message, file.dangling, where=where))
    by_control = file.control
    try:
        for _ in _in_order(file.control, where):
            pass
    except InputError:
        dropped = sum(map(len, file.control))
        message = f"the {dropped:,} control dependencies lead in a circle, and are left out"
        notices.append(Notice("chakra-control-circle", "warning", message, dropped, where=where))
        by_control = [[] for _ in file.ids]
    while True:
        (control, more), (data, others) = (_bridged(waits, stays, where) for waits in (by_control, file.data))
        if not more and not others:
            break
        # Both kinds of dependencies go through the same joints, so both are bridged anew; twice in nearly all cases.
        for joint in (*more, *others):
            stays[joint] = True
    joints = frozenset(
        row for row, (is_kept, is_there) in enumerate(zip(kept, stays, strict=True)) if is_there > is_kept
    )

    def named(waits: dict[int, list[int]]) -> dict[int, list[int]]:
        return {row: sorted({file.ids[other] for other in others}) for row, others in waits.items()}

    return Isolated(kept, joints, named(control), named(data), tuple(notices))


def _bridged(waits: Sequence[list[int]], stays: Sequence[bool], where: str) -> tuple[dict[int, list[int]], list[int]]:
    """What each node that stays waits for, directly or through removed nodes, and the removed ones that must stay."""
    followers = [0] * len(waits)
    for needed in waits:
        for other in needed:
            followers[other] += 1
    chains = _Chains()
    bridged: dict[int, list[int]] = {}
    passed: dict[int, list[int]] = {}  # of a removed node: what those behind it wait for
    joints: list[int] = []
    for row in _in_order(waits, where):
        needed = waits[row]
        direct = [other for other in needed if stays[other]]
        lists = [passed[other] for other in needed if not stays[other]]
        if len(lists) == 1 and not direct:
            through = lists[0]
        else:
            through = chains.latest([*direct, *(other for passed_on in lists for other in passed_on)])
        is_joint = len(through) > 1 and (followers[row] > 1 or len(through) > _MOST_PASSED)
        if stays[row]:
            bridged[row] = list(dict.fromkeys([*direct, *through]))
            chains.add(row, bridged[row])
        elif is_joint:
            joints.append(row)
            bridged[row], passed[row] = through, [row]
            chains.add(row, through)
        else:
            passed[row] = through
    return bridged, joints


class _Chains:
    """Nodes in chains, in which each waits for the one before: whoever waits for a node waits for its whole chain."""

    def __init__(self) -> None:
        self._place: dict[int, tuple[int, int]] = {}
        self._last: list[int] = []

    def add(self, row: int, needed: Sequence[int]) -> None:
        """A node and what it waits for: it prolongs the chain of one of them, or begins its own."""
        for other in needed:
            chain, position = self._place[other]
            if self._last[chain] == other:
                self._last[chain] = row
                self._place[row] = chain, position + 1
                return
        self._place[row] = len(self._last), 0
        self._last.append(row)

    def latest(self, rows: Sequence[int]) -> list[int]:
        """The last of these nodes in each chain: they imply the others."""
        if len(rows) < 2:
            return list(rows)
        best: dict[int, tuple[int, int]] = {}
        for row in rows:
            chain, position = self._place[row]
            if chain not in best or best[chain][0] < position:
                best[chain] = position, row
        return [row for _, row in best.values()]


def _in_order(waits: Sequence[list[int]], where: str) -> Iterator[int]:
    """All rows, each after those it waits for."""
    behind: list[list[int]] = [[] for _ in waits]
    missing = [len(needed) for needed in waits]
    for row, needed in enumerate(waits):
        for other in needed:
            behind[other].append(row)
    ready = [row for row, number in enumerate(missing) if not number]
    done = 0
    while ready:
        row = ready.pop()
        done += 1
        yield row
        for other in behind[row]:
            missing[other] -= 1
            if not missing[other]:
                ready.append(other)
    if done < len(missing):
        raise InputError(
            f"{len(missing) - done:,} nodes wait for each other in a circle, or for such nodes",
            slug="chakra-circle",
            where=where,
            hint=f"traceloom validate {where} says which",
        )


def remaining(nodes: Iterator[Node], result: Isolated, progress: Callable[[int], None] | None = None) -> Iterator[Node]:
    """The nodes that stay, with their new dependencies."""
    for row, node in enumerate(nodes):
        if progress and not row % 4096:
            progress(row)
        if not result.kept[row] and row not in result.joints:
            continue
        for name, waits in (("ctrl_deps", result.control), ("data_deps", result.data)):
            node.ClearField(name)
            getattr(node, name).extend(waits.get(row, ()))
        stay = [attribute for attribute in node.attr if attribute.name not in _OF_A_GRAPH]
        if len(stay) < len(node.attr):
            copies = Node(attr=stay)
            node.ClearField("attr")
            node.attr.extend(copies.attr)
        if not result.kept[row]:
            node.type = NodeType.COMP_NODE
            node.duration_micros = 0
        yield node


def metadata_of_side(metadata: GlobalMetadata, side: Side) -> GlobalMetadata:
    """The metadata, with the side as an attribute; files of a graph are no longer such."""
    out = GlobalMetadata()
    out.CopyFrom(metadata)
    del out.attr[:]
    out.attr.extend(a for a in metadata.attr if not (a.name == "schema" and a.string_val == SCHEMA))
    out.attr.add(name="only", string_val=side)
    return out
