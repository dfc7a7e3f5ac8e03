"""Process groups that a host trace lists."""

from __future__ import annotations

import json
from typing import Any

import polars as pl

from traceloom.model.host_trace import GROUP_LIST
from traceloom.model.notice import Notice
from traceloom.model.schema import SCHEMAS
from traceloom.read.metadata import whole

_SCANNER = json.JSONDecoder(strict=False)


def group_frame(ops: pl.DataFrame, path: str) -> tuple[pl.DataFrame, list[Notice]]:
    """The groups of all `## process_group:init ##` nodes, the later ones completing the earlier; and what is wrong.

    An empty list of ranks means all ranks of the job, whose number is then the size of the group.
    """
    rows: dict[str, dict[str, Any]] = {}
    cut = 0
    for inputs in ops.filter(pl.col("name") == GROUP_LIST)["inputs"].to_list():
        items, complete = _items(inputs)
        cut += not complete
        for item in items:
            _add(rows, item)
    notices = []
    if cut:
        text = f"the list of process groups is cut or malformed {cut} times; the groups before the cut are kept"
        notices.append(Notice("damaged-groups", "warning", text, cut, where=path))
    return pl.DataFrame(list(rows.values()), schema=SCHEMAS["groups"]), notices


def _items(inputs: str | None) -> tuple[list[Any], bool]:
    """The groups of one node, and whether the list could be read to its end."""
    try:
        values = json.loads(inputs or "")
        text = values[0]
    except (ValueError, LookupError, TypeError, RecursionError):
        return [], False
    if not isinstance(text, str):
        return [], False
    try:
        listed = json.loads(text)
    except (ValueError, RecursionError):
        return _before_cut(text), False
    return (listed, True) if isinstance(listed, list) else ([], False)


def _before_cut(text: str) -> list[Any]:
    """Whole objects of a list that was cut: old observers cut strings at 8192 characters."""
    items = []
    at = text.find("{")
    while at >= 0:
        try:
            item, at = _SCANNER.raw_decode(text, at)
        except (ValueError, RecursionError):
            break
        items.append(item)
        at = text.find("{", at)
    return items


def _add(rows: dict[str, dict[str, Any]], item: Any) -> None:
    if not isinstance(item, dict) or item.get("pg_name") is None:
        return
    size = whole(item.get("group_size"))
    size = size if size is not None and 0 < size < 2**31 else None
    ranks = item.get("ranks")
    if isinstance(ranks, dict):  # old observers map global to group ranks
        ranks = [whole(rank) for rank in ranks]
    members = None
    if isinstance(ranks, list) and all(isinstance(rank, int) and 0 <= rank < 2**31 for rank in ranks):
        members = sorted(ranks) if ranks else list(range(size)) if size is not None and size <= 1 << 20 else None
    name = str(item["pg_name"])
    previous = rows.get(name, {})
    rows[name] = {
        "group": name,
        "description": _text(item.get("pg_desc")) or previous.get("description"),
        "backend": _text(item.get("backend_config")) or previous.get("backend"),
        "size": size or previous.get("size"),
        "ranks": members or previous.get("ranks"),
    }


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None
