"""Trees in tables: a scope that holds nothing but one other stands in one row with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from traceloom.report.documents.memory import MemoryNodeRow

INDENT = "\u2003"


def joined(tree: list[MemoryNodeRow]) -> list[MemoryNodeRow]:
    """The rows to be shown, parents before children: `name` indented, chains of one as one row.

    Args:
        tree: The first is the root.
    """
    inside: dict[int, int] = {}
    for row in tree:
        if row["parent"] is not None:
            inside[row["parent"]] = inside.get(row["parent"], 0) + 1
    above: dict[int | None, tuple[int, str]] = {None: (0, "")}
    out: list[MemoryNodeRow] = []
    for row in tree:
        depth, prefix = above[row["parent"]]
        label = f"{prefix}.{row['name']}" if prefix else row["name"]
        chain = inside.get(row["node"]) == 1 and not row["self_bytes"] and row["parent"] is not None
        above[row["node"]] = (depth, label) if chain else (depth + 1, "")
        if not chain:
            out.append({**row, "depth": depth, "name": INDENT * depth + label})
    return out
