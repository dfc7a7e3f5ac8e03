"""Malformed stretches of a host trace's nodes: every whole node is kept, what can be mended is, the rest is counted."""

from __future__ import annotations

import re
from typing import Any

import polars as pl

from traceloom.read.damage import Damage
from traceloom.read.host_nodes import decode, loose_frame
from traceloom.read.repair import mended
from traceloom.read.resync import Form, Recovery, Span

# Between two nodes. An attribute begins with its name too, but a type or a value follows there.
_STARTS = (
    rb'"(?:id|ctrl_deps|data_deps|inputs|rf_id|parent|outputs|attrs|schema)"\s*:'
    rb'|"name"\s*:\s*"(?:[^"\\]|\\.)*"\s*,\s*"(?!type"|value"|doc_string")[a-z_]+"'
    rb'|"name"\s*:\s*"[^{}]{0,400}?"\s*,\s*"(?:id|rf_id|parent|ctrl_deps)"\s*:\s*-?\d'  # with quotes not escaped
)
BETWEEN = re.compile(rb"\}\s*,\s*(?=\{\s*(?:" + _STARTS + rb"))")
# At the end of a cut text the key may be cut.
_BETWEEN_OR_CUT = re.compile(rb"\}\s*,\s*(?=\{\s*(?:" + _STARTS + rb'|(?:"[a-z_]{0,9}"?)?\s*\Z))')
NODES = Form(
    between=_BETWEEN_OR_CUT,
    start=re.compile(rb'\{\s*"id"\s*:\s*\d+\s*,\s*"name"\s*:'),
    mark=re.compile(rb'"id"\s*:'),
    keys=frozenset(
        [
            "id",
            "name",
            "ctrl_deps",
            "inputs",
            "outputs",
            "attrs",
            "rf_id",
            "parent",
            "fw_parent",
            "seq_id",
            "scope",
            "tid",
            "fw_tid",
            "op_schema",
            "input_shapes",
            "input_types",
            "output_shapes",
            "output_types",
        ]
    ),
    is_entry=lambda value: "id" in value and "name" in value and ("ctrl_deps" in value or "parent" in value),
)
_STRING = re.compile(r'("(?:[^"\\]|\\.)*")')
# The observer of older versions writes doubles as C++ prints them.
_ENDLESS = re.compile(r"(?<=[:\[,])(\s*)([+-]?(?:nan|inf(?:inity)?))(?=\s*[,}\]])", re.IGNORECASE)


def recover(
    text: bytes, base: int, damage: Damage, *, nested: bool, last: bool, bounded: bool
) -> tuple[list[pl.DataFrame], int, bool]:
    """Keep every whole node of a malformed stretch.

    Args:
        text: Nodes separated by commas, and perhaps what follows the list.
        base: Where it begins in the whole text, for the notices.
        damage: Told what was repaired and what was lost.
        nested: The layout to expect.
        last: No more text follows.
        bounded: The list ends where the text does.

    Returns:
        (what was kept, bytes used up, whether the list ended there).
    """
    recovery = _OfNodes(text, base, damage, NODES, last=last, bounded=bounded)
    recovery.nested = nested
    used, closed = recovery.run()
    return recovery.frames, used, closed


class _OfNodes(Recovery):
    """Nodes as frames."""

    nested: bool

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.frames: list[pl.DataFrame] = []

    def take(self, begin: int, end: int, spans: list[Span]) -> None:  # noqa: ARG002  (as of Recovery)
        frame, odd, lost = decode(self.text[begin:end], nested=self.nested)
        tell(self.damage, f"byte {self.base + begin} of the text", odd, lost)
        self.frames.append(frame)

    def mend(self, begin: int, end: int) -> int:
        # Bare inf and nan become strings, as newer observers write them; what stands in strings is left alone.
        parts = _STRING.split(self.text[begin:end].decode("utf-8", "replace"))
        piece = "".join(part if part.startswith('"') else _ENDLESS.sub(r'\1"\2"', part) for part in parts).encode()
        frame, _, lost = loose_frame(mended(piece, key="id"))
        tell(self.damage, f"byte {self.base + begin} of the text", 0, lost)
        if frame.height:
            self.frames.append(frame)
        return frame.height


def tell(damage: Damage, where: str, odd: int, lost: int) -> None:
    """Count nodes with odd values, and entries that are none."""
    if odd:
        damage.note("odd-values", where, odd)
    if lost:
        damage.note("lost-events", where, lost)
