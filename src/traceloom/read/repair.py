"""Malformed stretches of `traceEvents`: every whole event is kept, what can be mended is, the rest is counted."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct, field

from traceloom.read.damage import Damage
from traceloom.read.fields import decode_loosely

# Between two events; the lookahead keeps most nested lists of objects out. What is cut wrongly is joined again. At the
# end of a cut text the key may be cut too.
BETWEEN = re.compile(
    rb'\}\s*,\s*(?=\{\s*(?:"(?:ph|name|cat|args|pid|tid|ts|dur|id|s|bp)"\s*:|(?:"(?:[a-z]{0,4}"?)?)?\s*\Z))'
)
MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_BYTE = re.compile(r"\(byte (\d+)\)$")
_JOINED = 16  # pieces tried together where a boundary may lie inside an event

_ESCAPED = re.compile(rb"\\.", re.DOTALL)
_EVENT = re.compile(rb'\{\s*"ph"\s*:')
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


def byte_of(error: Exception) -> int | None:
    """The byte at which the decoder gave up, where it says so."""
    match = _BYTE.search(str(error))
    return int(match.group(1)) if match else None


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


def recover(text: bytes, base: int, damage: Damage, *, cut: bool) -> Recovered:
    """Keep every whole entry of a malformed stretch.

    Args:
        text: Entries separated by commas.
        base: Where it begins in the whole text, for the notices.
        damage: Told what was repaired and what was lost.
        cut: The text ends here although the list does not: the last entry may be cut, and is not repaired.
    """
    spans = spans_between(BETWEEN, text)
    out = Recovered()
    at, window = 0, len(spans)
    while at < len(spans):
        upto = min(at + window, len(spans))
        stretch = text[spans[at][0] : spans[upto - 1][1]]
        try:
            entries, odd = decode_loosely(b"[" + stretch + b"]")
        except MALFORMED as error:
            if upto - at > 1:
                window = good_before(error, spans, at, upto)
                continue
            at = _one(text, spans, at, base, damage, out, cut=cut)
            window = 1
            continue
        if odd:
            damage.note("odd-values", f"byte {base + spans[at][0]} of the text", odd)
        out.add(entries, spans[at:upto])
        at, window = upto, window * 4
    return out


def spans_between(boundary: re.Pattern[bytes], text: bytes) -> list[tuple[int, int]]:
    """Where each piece between two boundaries begins and ends; a boundary begins with the bracket of the piece."""
    spans, start = [], 0
    for match in boundary.finditer(text):
        spans.append((start, match.start() + 1))
        start = match.end()
    spans.append((start, len(text)))
    return spans


def good_before(error: Exception, spans: list[tuple[int, int]], at: int, upto: int) -> int:
    """How many pieces to try next: those before the fault, or half where its place is unknown."""
    byte = byte_of(error)
    if byte is None:
        return max(1, (upto - at) // 2)
    place = spans[at][0] + byte - 1
    good = sum(1 for start, end in spans[at:upto] if end < place)
    return max(1, min(good, (upto - at) - 1))


def _one(  # noqa: PLR0917
    text: bytes, spans: list[tuple[int, int]], at: int, base: int, damage: Damage, out: Recovered, *, cut: bool
) -> int:
    """Deal with one malformed piece; give the next to look at."""
    start, end = spans[at]
    for upto in range(at + 1, min(at + _JOINED, len(spans))):
        whole = text[start : spans[upto][1]]
        try:
            entries, _ = decode_loosely(b"[" + whole + b"]")
        except MALFORMED:
            continue
        out.add(entries, [(start, spans[upto][1])])
        return upto + 1
    if cut and at == len(spans) - 1:
        damage.note("cut-file", f"byte {base + start} of the text")
        return at + 1
    # A malformed event may have swallowed the bounds of those behind it; each is dealt with alone.
    starts = [start, *(match.start() for match in _EVENT.finditer(text, start + 1, end))]
    for begin, finish in zip(starts, [*starts[1:], end], strict=True):
        _alone(text, begin, finish, base, damage, out)
    return at + 1


def _alone(text: bytes, begin: int, finish: int, base: int, damage: Damage, out: Recovered) -> None:  # noqa: PLR0917
    """Decode or mend what should be one event, or count it as lost."""
    piece = text[begin:finish].rstrip(b" \t\r\n,")
    try:
        entries, _ = decode_loosely(b"[" + piece + b"]")
    except MALFORMED:
        entries = mend(piece)
        slug = "repaired-events" if entries else "lost-events"
        damage.note(slug, f"byte {base + begin} of the text", max(1, len(entries)))
    if entries:
        out.add(entries, [(begin, begin + len(piece))])


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
            entries = json.loads(f"[{repaired}]", strict=False, parse_constant=lambda _: None)
        except (ValueError, RecursionError):
            continue
        whole = [entry for entry in entries if isinstance(entry, dict) and key in entry]
        if whole:
            return whole
    return []


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
    return _BACKSLASH.sub(lambda found: found[0] if found["good"] else r"\\", text)


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
