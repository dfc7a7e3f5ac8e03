"""One rank's program, node by node: what generators write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl

from traceloom.chakra.plain import PLAIN, Pairs, PlainNodes
from traceloom.chakra.schema import CollectiveCommType, NodeType

SCHEMA, VERSION = "traceloom-generated", 1


class RankProgram:
    """The nodes of one rank in the order in which they are added; ids count from 1.

    Args:
        rank: Which rank.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._nodes: list[dict[str, Any]] = []
        self._awaited: list[list[int]] = []

    def __len__(self) -> int:
        return len(self._nodes)

    def compute(
        self, name: str, after: Sequence[int] = (), *, us: int, operations: int | None = None, size: int | None = None
    ) -> int:
        """GPU work of `us` microseconds, with its floating-point operations and the bytes it moves in memory."""
        return self._add(name, NodeType.COMP_NODE, after, duration_us=us, num_ops=operations, tensor_size=size)

    def collective(
        self, kind: str, size: int, after: Sequence[int] = (), *, group: str | None = None, name: str = ""
    ) -> int:
        """A collective (`ALL_REDUCE`) of `size` bytes, with the meaning of comm_size; `group` None is all ranks."""
        kind_number = int(CollectiveCommType.Value(kind))
        return self._add(
            name or kind.lower(), NodeType.COMM_COLL_NODE, after, comm_type=kind_number, comm_size=size, pg_name=group
        )

    def send(self, to: int, size: int, after: Sequence[int] = (), *, tag: int, name: str = "") -> int:
        """A message to a rank."""
        label = name or f"send to {to}"
        ends = {"comm_src": self.rank, "comm_dst": to}
        return self._add(label, NodeType.COMM_SEND_NODE, after, comm_size=size, comm_tag=tag, **ends)

    def receive(self, source: int, size: int, after: Sequence[int] = (), *, tag: int, name: str = "") -> int:
        """A message from a rank."""
        label = name or f"receive from {source}"
        ends = {"comm_src": source, "comm_dst": self.rank}
        return self._add(label, NodeType.COMM_RECV_NODE, after, comm_size=size, comm_tag=tag, **ends)

    def _add(self, name: str, kind: int, after: Sequence[int], **more: Any) -> int:
        number = len(self._nodes) + 1
        self._nodes.append(
            {"id": number, "name": name, "type": int(kind), "duration_us": 0, "is_cpu_op": False, **more}
        )
        self._awaited.append(sorted(set(after)))
        return number

    def sent(self) -> tuple[int, int]:
        """How many messages the rank sends, and their bytes."""
        sizes = [node["comm_size"] for node in self._nodes if node["type"] == NodeType.COMM_SEND_NODE]
        return len(sizes), sum(sizes)

    def collective_bytes(self) -> dict[str, int]:
        """Sum of comm_size by kind of collective."""
        totals: dict[str, int] = {}
        for node in self._nodes:
            if node["type"] == NodeType.COMM_COLL_NODE:
                kind = CollectiveCommType.Name(node["comm_type"]).lower()
                totals[kind] = totals.get(kind, 0) + node["comm_size"]
        return totals

    def compute_us(self) -> int:
        """Computation of the rank, one after the other."""
        return sum(node["duration_us"] for node in self._nodes)

    def operations(self) -> int:
        """Floating-point operations of the rank."""
        return sum(node.get("num_ops") or 0 for node in self._nodes)

    def plain(self) -> PlainNodes:
        """The columns of the rank's file."""
        row = np.repeat(np.arange(len(self._nodes)), [len(awaited) for awaited in self._awaited])
        ids = np.array([number for awaited in self._awaited for number in awaited], dtype=np.int64)
        return PlainNodes(pl.DataFrame(self._nodes, schema=PLAIN), Pairs(row.astype(np.int64), ids))


@dataclass(frozen=True)
class Generated:
    """A workload with known answers.

    Attributes:
        kind: What was generated.
        options: With which options.
        programs: The ranks' programs, from rank 0.
        groups: Members of the groups that are not all ranks.
        totals: What is known of it: numbers by name, with units in the names.
    """

    kind: str
    options: Mapping[str, Any]
    programs: Sequence[RankProgram]
    groups: Mapping[str, Sequence[int]] = field(default_factory=dict)
    totals: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """What `traceloom generate --json` prints, and the files' metadata hold."""
        return {
            "format": SCHEMA,
            "version": VERSION,
            "kind": self.kind,
            "options": dict(self.options),
            "ranks": len(self.programs),
            "nodes": [len(program) for program in self.programs],
            "groups": {name: list(members) for name, members in self.groups.items()},
            "totals": dict(self.totals),
        }
