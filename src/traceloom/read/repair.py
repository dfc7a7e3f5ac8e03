"""Malformed stretches of `traceEvents`: every whole event is kept, what can be mended is, the rest is counted."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
from msgspec import Struct, field

from traceloom.read.damage import Damage
from traceloom.read.fields import decode_loosely
from traceloom.read.resync import MALFORMED, Form, Recovery, Span

_KEYS = ("ph", "name", "cat", "args", "pid", "tid", "ts", "dur", "id", "s", "bp")
_KEY = b"|".join(key.encode() for key in _KEYS)
# Between two events; the lookahead keeps most nested lists of objects out. What is cut wrongly is joined again. At the
# end of a cut text the key may be cut too.
BETWEEN = re.compile(rb'\}\s*,\s*(?=\{\s*(?:"(?:' + _KEY + rb')"\s*:|(?:"(?:[a-z]{0,4}"?)?)?\s*\Z))')
EVENTS = Form(
    between=BETWEEN,
    start=re.compile(rb'\{\s*"ph"\s*:'),
    mark=re.compile(rb'"ph"\s*:'),
    keys=frozenset(_KEYS),
    is_entry=lambda value: "ph" in value and ("ts" in value or value["ph"] == "M"),
)

_ESCAPED = re.compile(rb"\\.", re.DOTALL)
# Good escapes are matched too, so that the second half of `\\` is not taken for the beginning of another.
_BACKSLASH = re.compile(r'\\(?P<good>["\\/bfnrt]|u[0-9a-fA-F]{4})?')
_NO_VALUE = re.compile(
    r"(?<=[:\[,])(\s*)(?:N/A|n/a|[+-]?nan|[+-]?inf(?:inity)?|[+-]?Inf|[+-]NaN|None|undefined)(?=\s*[,}\]])"
)
_MISSING = re.compile(r"(?<=:)\s*(?=[,}\]])")
_SPARE_COMMA = re.compile(r",\s*(?=[}\]])")
_CLOSES_KEY = re.compile(r'"\s*:')
_CLOSES_VALUE = re.compile(r'"\s*(?:[}\]]|,\s*"(?:[^"\\]|\\.)*"\s*:|$)')
_CLOSES_ITEM = re.compile(r'"\s*(?:\]|,\s*["{\[\-0-9tfnN])')


def whole_events(text: bytes) -> int | None:
    """The end of the last whole object of a list that is cut; None where there is none.

    Brackets are counted outside of strings, so it is exact for well-formed text.
    """
    plain = _ESCAPED.sub(b"__", text)
    signs = np.frombuffer(plain, dtype=np.uint8)
    outside = ~np.logical_xor.accumulate(signs == ord('"'))
    opens = outside & ((signs == ord("{")) | (signs == ord("[")))
    closes = outside & ((signs == ord("}")) | (signs == ord("]")))
    depth = np.cumsum(opens.astype(np.int32) - closes)
    ends = np.flatnonzero(closes & (depth == 0) & (signs == ord("}")))
    return int(ends[-1]) + 1 if ends.size else None


class Recovered(Struct):
    """What could be kept of a stretch of text.

    Attributes:
        entries: Decoded entries.
        offsets: Where each begins in the stretch.
        lengths: Their lengths in bytes.
    """

    entries: list[Any] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)

    def add(self, entries: list[Any], spans: list[tuple[int, int]]) -> None:
        """Take entries with their spans; entries of one span share it."""
        if len(spans) != len(entries):
            spans = [(spans[0][0], spans[-1][1])] * len(entries)
        self.entries += entries
        self.offsets += [start for start, _ in spans]
        self.lengths += [end - start for start, end in spans]


def recover(text: bytes, base: int, damage: Damage, *, last: bool, alone: bool) -> tuple[Recovered, int, bool]:
    """Keep every whole entry of a malformed stretch.

    Args:
        text: Entries separated by commas, and perhaps what follows the list.
        base: Where it begins in the whole text, for the notices.
        damage: Told what was repaired and what was lost.
        last: No more text follows.
        alone: Nothing stands around the list.

    Returns:
        (what was kept, bytes used up, whether the list ended there).
    """
    recovery = _OfEvents(text, base, damage, EVENTS, last=last, alone=alone)
    used, closed = recovery.run()
    return recovery.kept, used, closed


class _OfEvents(Recovery):
    """Entries as decoded structs."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.kept = Recovered()

    def take(self, begin: int, end: int, spans: list[Span]) -> None:
        entries, odd = decode_loosely(b"[" + self.text[begin:end] + b"]")
        if odd:
            self.damage.note("odd-values", f"byte {self.base + begin} of the text", odd)
        self.kept.add(entries, spans)

    def mend(self, begin: int, end: int) -> int:
        entries = mend(self.text[begin:end])
        if entries:
            self.kept.add(entries, [(begin, end)])
        return len(entries)


def mend(piece: bytes) -> list[Any]:
    """Entries of one malformed piece, by ever bolder repairs; empty where none helps."""
    whole = mended(piece)
    # Lone surrogates (half of a pair, cut by a writer) cannot stand in UTF-8.
    return _loosely(json.dumps(whole).encode("utf-8", "replace")) if whole else []


def mended(piece: bytes, key: str = "ph") -> list[dict[str, Any]]:
    """The same as plain dicts, of those entries that have the key."""
    text = piece.decode("utf-8", "replace").strip().strip(",")
    for repairs in _REPAIRS:
        repaired = text
        for repair in repairs:
            repaired = repair(repaired)
        try:
            entries = json.loads(f"[{repaired}]", strict=False, parse_constant=lambda _: None, parse_float=_finite)
        except (ValueError, RecursionError):
            continue
        whole = [entry for entry in entries if isinstance(entry, dict) and key in entry]
        if whole:
            return whole
    return []


def _finite(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None


def _loosely(text: bytes) -> list[Any]:
    try:
        return decode_loosely(text)[0]
    except MALFORMED:
        lone = re.compile(rb"\\ud[89a-f][0-9a-f]{2}")
        try:
            return decode_loosely(lone.sub(b"\\\\ufffd", text))[0]
        except MALFORMED:
            return []


def _escapes(text: str) -> str:
    """A backslash that escapes nothing is meant as a backslash."""
    return _BACKSLASH.sub(lambda match: match[0] if match["good"] else r"\\", text)


def _values(text: str) -> str:
    """Words that are no JSON values, and values that are missing, become null; spare commas go; outside of strings."""
    parts = re.split(r'("(?:[^"\\]|\\.)*")', text)
    return "".join(part if part.startswith('"') else _bare(part) for part in parts)


def _bare(part: str) -> str:
    part = _NO_VALUE.sub(r"\1null", part)
    return _SPARE_COMMA.sub("", _MISSING.sub(" null", part))


def _strings(text: str) -> str:
    """Quotes inside strings get their backslash: a quote closes a string only where JSON can go on after it."""
    out: list[str] = []
    open_brackets: list[str] = []
    at, inside, is_key = 0, False, False
    while at < len(text):
        char = text[at]
        if inside:
            if char == "\\":
                out.append(text[at : at + 2])
                at += 2
                continue
            if char == '"':
                inside = not _closes(text, at, is_key, open_brackets)
                char = '\\"' if inside else '"'
        elif char == '"':
            inside, is_key = True, _is_key(out, open_brackets)
        elif char in "{[":
            open_brackets.append(char)
        elif char in "}]" and open_brackets:
            open_brackets.pop()
        out.append(char)
        at += 1
    return "".join(out)


def _is_key(out: list[str], open_brackets: list[str]) -> bool:
    if not open_brackets or open_brackets[-1] == "[":
        return False
    before = next((part for part in reversed(out) if part.strip()), "")
    return before in "{,"


def _closes(text: str, at: int, is_key: bool, open_brackets: list[str]) -> bool:
    if is_key:
        return _CLOSES_KEY.match(text, at) is not None
    pattern = _CLOSES_ITEM if open_brackets and open_brackets[-1] == "[" else _CLOSES_VALUE
    return pattern.match(text, at) is not None


_Repair = Callable[[str], str]
_REPAIRS: tuple[tuple[_Repair, ...], ...] = (
    (),
    (_values,),
    (_escapes, _values),
    (_strings, _values),
    (_escapes, _strings, _values),
)
