"""Malformed stretches of a host trace's nodes: every whole node is kept, what can be mended is, the rest is counted."""

from __future__ import annotations

import re

import polars as pl

from traceloom.read.damage import Damage
from traceloom.read.host_nodes import decode, loose_frame
from traceloom.read.repair import MALFORMED, good_before, mended, spans_between

# Between two nodes. An attribute begins with its name too, but a type or a value follows there.
_STARTS = (
    rb'"(?:id|ctrl_deps|data_deps|inputs|rf_id|parent|outputs|attrs|schema)"\s*:'
    rb'|"name"\s*:\s*"(?:[^"\\]|\\.)*"\s*,\s*"(?!type"|value"|doc_string")[a-z_]+"'
    rb'|"name"\s*:\s*"[^{}]{0,400}?"\s*,\s*"(?:id|rf_id|parent|ctrl_deps)"\s*:\s*-?\d'  # with quotes not escaped
)
BETWEEN = re.compile(rb"\}\s*,\s*(?=\{\s*(?:" + _STARTS + rb"))")
# At the end of a cut text the key may be cut.
_BETWEEN_OR_CUT = re.compile(rb"\}\s*,\s*(?=\{\s*(?:" + _STARTS + rb'|(?:"[a-z_]{0,9}"?)?\s*\Z))')
_NODE = re.compile(rb'\{\s*"id"\s*:\s*\d+\s*,\s*"name"\s*:')
_JOINED = 8  # pieces tried together where a boundary may lie inside a node
_STRING = re.compile(r'("(?:[^"\\]|\\.)*")')
# The observer of older versions writes doubles as C++ prints them.
_ENDLESS = re.compile(r"(?<=[:\[,])(\s*)([+-]?(?:nan|inf(?:inity)?))(?=\s*[,}\]])", re.IGNORECASE)


def recover(text: bytes, base: int, damage: Damage, *, nested: bool, cut: bool) -> list[pl.DataFrame]:
    """Keep every whole node of a malformed stretch.

    Args:
        text: Nodes separated by commas.
        base: Where it begins in the whole text, for the notices.
        damage: Told what was repaired and what was lost.
        nested: The layout to expect.
        cut: The text ends here although the list does not: the last node may be cut, and is not repaired.
    """
    spans = spans_between(_BETWEEN_OR_CUT, text)
    frames: list[pl.DataFrame] = []
    at, window = 0, len(spans)
    while at < len(spans):
        upto = min(at + window, len(spans))
        stretch = text[spans[at][0] : spans[upto - 1][1]]
        try:
            frame, odd, lost = decode(stretch, nested=nested)
        except MALFORMED as error:
            if upto - at > 1:
                window = good_before(error, spans, at, upto)
                continue
            at = _one(text, spans, at, base, damage, frames, nested=nested, cut=cut)
            window = 1
            continue
        tell(damage, f"byte {base + spans[at][0]} of the text", odd, lost)
        frames.append(frame)
        at, window = upto, window * 4
    return frames


def tell(damage: Damage, where: str, odd: int, lost: int) -> None:
    """Count nodes with odd values, and entries that are none."""
    if odd:
        damage.note("odd-values", where, odd)
    if lost:
        damage.note("lost-events", where, lost)


def _one(  # noqa: PLR0917
    text: bytes,
    spans: list[tuple[int, int]],
    at: int,
    base: int,
    damage: Damage,
    frames: list[pl.DataFrame],
    *,
    nested: bool,
    cut: bool,
) -> int:
    """Deal with one malformed piece; give the next to look at."""
    start, end = spans[at]
    for upto in range(at + 1, min(at + _JOINED, len(spans))):
        try:
            frame, odd, lost = decode(text[start : spans[upto][1]], nested=nested)
        except MALFORMED:
            continue
        tell(damage, f"byte {base + start} of the text", odd, lost)
        frames.append(frame)
        return upto + 1
    if cut and at == len(spans) - 1:
        damage.note("cut-file", f"byte {base + start} of the text")
        return at + 1
    # A malformed node may have swallowed the bounds of those behind it; each is dealt with alone.
    starts = [start, *(match.start() for match in _NODE.finditer(text, start + 1, end))]
    for begin, finish in zip(starts, [*starts[1:], end], strict=True):
        _alone(text[begin:finish].rstrip(b" \t\r\n,"), base + begin, damage, frames, nested=nested)
    return at + 1


def _alone(piece: bytes, place: int, damage: Damage, frames: list[pl.DataFrame], *, nested: bool) -> None:
    """Decode or mend what should be one node, or count it as lost."""
    where = f"byte {place} of the text"
    try:
        frame, odd, lost = decode(piece, nested=nested)
    except MALFORMED:
        frame, odd, lost = loose_frame(mended(_with_words(piece), key="id"))
        damage.note("repaired-events" if frame.height else "lost-events", where, max(1, frame.height))
        odd = 0
    tell(damage, where, odd, lost)
    if frame.height:
        frames.append(frame)


def _with_words(piece: bytes) -> bytes:
    """Bare inf and nan become strings, as newer observers write them; what stands in strings is left alone."""
    parts = _STRING.split(piece.decode("utf-8", "replace"))
    return "".join(part if part.startswith('"') else _ENDLESS.sub(r'\1"\2"', part) for part in parts).encode()
