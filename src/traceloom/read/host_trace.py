"""Host traces (PyTorch's execution traces) of every schema: one file to one HostTrace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
from msgspec import Struct

from traceloom.errors import InputError
from traceloom.model.host_trace import GROUP_LIST, HostTrace
from traceloom.model.notice import Notice
from traceloom.model.schema import SCHEMAS
from traceloom.packed import Step
from traceloom.plain_text import clean_json
from traceloom.read.damage import Damage
from traceloom.read.host_nodes import joined
from traceloom.read.host_text import HostText
from traceloom.read.inputs import Input
from traceloom.read.metadata import add_group, find_rank, whole
from traceloom.read.runs import Peek
from traceloom.read.source import first_pieces, open_input, text_pieces
from traceloom.read.sources import source_of

_SCANNER = json.JSONDecoder(strict=False)


def read_host_trace(path: str | Path, *, capture: dict[str, Any] | None = None, step: Step | None = None) -> HostTrace:
    """Read one host trace; gzip or not, whole or damaged, schema 1.0.1 to 1.1.1 and older.

    Args:
        path: The file; `-` is standard input.
        capture: This rank's part of capture.json, where there is one.
        step: Called now and then with (bytes read from the file, bytes of text).

    Returns:
        The host trace; what was repaired or lost stands in its notices.

    Raises:
        InputError: `unreadable`, `swapped-traces` (it is a Kineto trace), `not-a-host-trace`, `empty-host-trace`.
    """
    damage = Damage(entry="node", list_key="nodes")
    with open_input(path) as stream:
        host_text = HostText(text_pieces(stream, damage, step), damage, str(path))
        ops = joined(list(host_text.frames()))
    envelope = host_text.envelope
    if not ops.height:
        lost = damage.cases.get("lost-events")
        reason = f"none of its {lost.count:,} nodes can be read" if lost else "it holds no node"
        raise InputError(f"the host trace is empty: {reason}", slug="empty-host-trace", where=str(path))
    if "schema" not in envelope and not (ops["name"] != "").any():
        text = "this is no host trace but JSON whose `nodes` have no names"
        raise InputError(text, slug="not-a-host-trace", where=str(path))
    rank, _, _ = find_rank({}, None, str(path), capture)
    groups, notices = groups_in(ops, str(path))
    repeated = ops.height - ops["id"].n_unique()
    if repeated:
        text = f"{repeated:,} nodes have the id of another node; the first of each is what others refer to"
        notices.append(Notice("duplicate-host-ids", "warning", text, repeated, where=str(path)))
    schema = envelope.get("schema")
    recorded = envelope.get("time")
    return HostTrace(
        path=str(path),
        ops=ops,
        schema=str(schema) if isinstance(schema, (str, int, float)) else None,
        process=whole(envelope.get("pid")),
        rank=rank,
        recorded_at=recorded if isinstance(recorded, str) else None,
        start_ms=whole(envelope.get("start_ts")),
        finish_ms=whole(envelope.get("finish_ts")),
        groups=groups,
        notices=(*damage.notices(), *notices),
    )


class HostPeek(Struct, frozen=True):
    """What the first part of a host trace says.

    Attributes:
        source: The file.
        rank: From capture.json or the file name.
        process: Process id.
    """

    source: Input
    rank: int | None
    process: int | None


def peek_either(source: Input) -> Peek | HostPeek:
    """Look into the first part of a file that may be a host trace or a device trace.

    Raises:
        InputError: It is neither a host trace nor a Kineto trace, or cannot be read.
    """
    if str(source.path) == "-":
        return source_of(source.path).peek(source)
    damage = Damage(entry="node", list_key="nodes")
    with open_input(source.path) as stream:
        text = HostText(first_pieces(stream, damage), damage, str(source.path))
        try:
            text.open()
        except InputError:  # what it is instead is said by the reader of device traces
            return source_of(source.path).peek(source)
    rank, _, _ = find_rank({}, None, str(source.path), source.entry)
    return HostPeek(source, rank, whole(text.envelope.get("pid")))


def groups_in(ops: pl.DataFrame, path: str) -> tuple[pl.DataFrame, list[Notice]]:
    """The groups of all `## process_group:init ##` nodes, the later ones completing the earlier; and what is wrong.

    An empty list of ranks means all ranks of the job, whose number is then the size of the group.
    """
    rows: dict[str, dict[str, Any]] = {}
    cut = 0
    for inputs in ops.filter(pl.col("name") == GROUP_LIST)["inputs"].to_list():
        items, complete = _group_items(inputs)
        cut += not complete
        for item in items:
            if not isinstance(item, dict) or item.get("pg_name") is None:
                continue
            size = whole(item.get("group_size"))
            size = size if size is not None and 0 < size < 2**31 else None
            ranks = item.get("ranks")
            if isinstance(ranks, dict):  # old observers map global to group ranks
                ranks = [whole(rank) for rank in ranks]
            members = None
            if isinstance(ranks, list) and all(isinstance(rank, int) and 0 <= rank < 2**31 for rank in ranks):
                members = (
                    sorted(ranks) if ranks else list(range(size)) if size is not None and size <= 1 << 20 else None
                )
            add_group(rows, str(item["pg_name"]), (item.get("pg_desc"), item.get("backend_config")), size, members)
    notices = []
    if cut:
        text = f"the list of process groups is cut or malformed {cut} times; the groups before the cut are kept"
        notices.append(Notice("damaged-groups", "warning", text, cut, where=path))
    return pl.DataFrame(list(rows.values()), schema=SCHEMAS["groups"]), notices


def _group_items(inputs: str | None) -> tuple[list[Any], bool]:
    """The groups of one node, and whether the list could be read to its end."""
    try:
        text = json.loads(inputs or "")[0]
    except (ValueError, LookupError, TypeError, RecursionError):
        return [], False
    if not isinstance(text, str):
        return [], False
    try:
        listed = json.loads(text)
    except (ValueError, RecursionError):
        # Whole objects of a list that was cut: old observers cut strings at 8192 characters.
        items = []
        at = text.find("{")
        while at >= 0:
            try:
                item, at = _SCANNER.raw_decode(text, at)
            except (ValueError, RecursionError):
                break
            items.append(item)
            at = text.find("{", at)
        return clean_json(items)[0], False
    return (clean_json(listed)[0], True) if isinstance(listed, list) else ([], False)
