"""Call stacks drawn shorter: frames that do nothing but call the next one stand as one box."""

from __future__ import annotations

from typing import Any

from traceloom.analyze.blocking_calls import is_users

Row = dict[str, Any]
_SAME = 0.98  # of a frame's time (host and GPU) that its only child of note has


def shortened(tree: list[Row]) -> list[Row]:
    """The rows of a tree (parents before children, `parent` a row number) with chains of single calls made one row.

    The row of a chain carries the name that says most: the last frame of the user's, else the last module, else the
    last frame; `(+n)` counts the others. Times and calls are those of its outermost frame.
    """
    children: dict[int | None, list[int]] = {}
    for number, row in enumerate(tree):
        children.setdefault(row["parent"], []).append(number)
    out: list[Row] = []
    stack: list[tuple[int, int | None]] = [(number, None) for number in reversed(children.get(None, []))]
    while stack:
        first, parent = stack.pop()
        chain = [first]
        while tree[chain[0]]["kind"] != "thread" and (following := _only(tree, children, chain[-1])) is not None:
            chain.append(following)
        at = len(out)
        out.append({**tree[first], "parent": parent, "name": _name([tree[number] for number in chain])})
        stack.extend((number, at) for number in reversed(children.get(chain[-1], [])))
    return out


def _only(tree: list[Row], children: dict[int | None, list[int]], number: int) -> int | None:
    """The child that has nearly all of the row's time and of its GPU work; None where there is none."""
    row = tree[number]
    for child in children.get(number, []):
        inner = tree[child]
        if inner["total_ns"] >= _SAME * row["total_ns"] and inner["device_ns"] >= _SAME * row["device_ns"]:
            return child
    return None


def _name(chain: list[Row]) -> str:
    users = [row for row in chain if row["file"] and is_users(f"{row['file']}({row['line']}): {row['name']}")]
    modules = [row for row in chain if row["kind"] == "module"]
    frame = (modules or users or chain)[-1]
    location = f" {frame['file']}:{frame['line']}" if frame["file"] else ""
    more = f" (+{len(chain) - 1})" if len(chain) > 1 else ""
    return f"{str(frame['name']).removeprefix('nn.Module: ')}{location}{more}"
