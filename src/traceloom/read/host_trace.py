"""Host traces (PyTorch's execution traces) of every schema: one file to one HostTrace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl

from traceloom.errors import InputError
from traceloom.model.host_trace import HostTrace
from traceloom.model.notice import Notice
from traceloom.read.damage import Damage
from traceloom.read.host_groups import group_frame
from traceloom.read.host_nodes import joined
from traceloom.read.host_text import HostText
from traceloom.read.metadata import find_rank, whole
from traceloom.read.source import Step, open_input, text_pieces


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
    _check_nodes(ops, envelope, str(path), damage)
    rank, _, _ = find_rank({}, None, str(path), capture)
    groups, notices = group_frame(ops, str(path))
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


def _check_nodes(ops: pl.DataFrame, envelope: dict[str, Any], path: str, damage: Damage) -> None:
    if not ops.height:
        lost = damage.cases.get("lost-events")
        reason = f"none of its {lost.count:,} nodes can be read" if lost else "it holds no node"
        raise InputError(f"the host trace is empty: {reason}", slug="empty-host-trace", where=path)
    if "schema" not in envelope and not (ops["name"] != "").any():
        raise InputError(
            "this is no host trace but JSON whose `nodes` have no names", slug="not-a-host-trace", where=path
        )
