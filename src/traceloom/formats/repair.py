"""Repairs malformed stretches of `traceEvents`: every whole event is kept, damaged ones are
repaired where possible, and the rest is counted.
"""

import json
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from traceloom.formats.kineto_fields import decode_loosely
from traceloom.formats.resync import PARSE_ERRORS, EntryFormat, EntryRecovery, Span

_KEYS = ("ph", "name", "cat", "args", "pid", "tid", "ts", "dur", "id", "s", "bp")
_KEY = b"|".join(key.encode() for key in _KEYS)
# Between two events; the lookahead excludes most nested lists of objects. Wrong cuts are joined
# again. At the end of a cut text the key may be cut too.
BETWEEN = re.compile(
    rb'\}\s*,\s*(?=\{\s*(?:"(?:' + _KEY + rb')"\s*:|(?:"(?:[a-z]{0,4}"?)?)?\s*\Z))'
)
EVENTS = EntryFormat(
    between=BETWEEN,
    start=re.compile(rb'\{\s*"ph"\s*:'),
    mark=re.compile(rb'"ph"\s*:'),
    keys=frozenset(_KEYS),
    is_entry=lambda value: "ph" in value and ("ts" in value or value["ph"] == "M"),
)

_LONE_SURROGATE = re.compile(rb"\\ud[89a-f][0-9a-f]{2}")
_ESCAPED = re.compile(rb"\\.", re.DOTALL)
# Valid escapes are matched too, so that the second half of `\\` is not taken for the beginning of
# another.
_BACKSLASH = re.compile(r'\\(?P<good>["\\/bfnrt]|u[0-9a-fA-F]{4})?')
_NO_VALUE = re.compile(
    r"(?<=[:\[,])(\s*)(?:N/A|n/a|[+-]?nan|[+-]?inf(?:inity)?|[+-]?Inf|[+-]NaN|None|undefined)(?=\s*[,}\]])"
)
_MISSING = re.compile(r"(?<=:)\s*(?=[,}\]])")
_SPARE_COMMA = re.compile(r",\s*(?=[}\]])")
_CLOSES_KEY = re.compile(r'"\s*:')
_CLOSES_VALUE = re.compile(r'"\s*(?:[}\]]|,\s*"(?:[^"\\]|\\.)*"\s*:|$)')
_CLOSES_ITEM = re.compile(r'"\s*(?:\]|,\s*["{\[\-0-9tfnN])')


def find_complete_end(text: bytes) -> int | None:
    """Returns the end of the last whole object of a list that is cut; None where there is none.

    Brackets inside strings are not counted, so it is exact for well-formed text.
    """
    characters = np.frombuffer(_ESCAPED.sub(b"__", text), dtype=np.uint8)
    unquoted = ~np.logical_xor.accumulate(characters == ord('"'))
    opens = unquoted & ((characters == ord("{")) | (characters == ord("[")))
    closes = unquoted & ((characters == ord("}")) | (characters == ord("]")))
    depth = np.cumsum(opens.astype(np.int32) - closes)
    object_ends = np.flatnonzero(closes & (depth == 0) & (characters == ord("}")))
    return int(object_ends[-1]) + 1 if object_ends.size else None


class EventRecovery(EntryRecovery):
    """Keeps every whole event of a malformed stretch, as decoded structs.

    Attributes:
        entries: Decoded entries.
        offsets: Where each begins in the stretch.
        lengths: Their lengths in bytes.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.entries: list[Any] = []
        self.offsets: list[int] = []
        self.lengths: list[int] = []

    def keep(self, entries: list[Any], spans: list[Span]) -> None:
        """Keeps entries with their spans; entries of one span share it."""
        if len(spans) != len(entries):
            spans = [(spans[0][0], spans[-1][1])] * len(entries)
        self.entries += entries
        self.offsets += [start for start, _ in spans]
        self.lengths += [end - start for start, end in spans]

    def take(self, start: int, end: int, spans: list[Span]) -> None:
        entries, unexpected = decode_loosely(b"[" + self.text[start:end] + b"]")
        if unexpected:
            self._note("odd-values", start, unexpected)
        self.keep(entries, spans)

    def mend(self, start: int, end: int) -> int:
        """Decodes the entries of one malformed piece, by increasingly aggressive repairs; none
        where no repair helps.
        """
        repaired = repair_event(self.text[start:end])
        if not repaired:
            return 0
        # UTF-8 cannot encode lone surrogates (half of a pair, cut by a writer).
        text = json.dumps(repaired).encode("utf-8", "replace")
        try:
            entries, _ = decode_loosely(text)
        except PARSE_ERRORS:
            try:
                entries, _ = decode_loosely(_LONE_SURROGATE.sub(b"\\\\ufffd", text))
            except PARSE_ERRORS:
                return 0
        self.keep(entries, [(start, end)])
        return len(entries)


def repair_event(fragment: bytes, key: str = "ph") -> list[dict[str, Any]]:
    """Returns the entries of one malformed piece that have the key, as plain dicts, by increasingly
    aggressive repairs.
    """

    def finite(number: str) -> float | None:
        return value if math.isfinite(value := float(number)) else None

    text = fragment.decode("utf-8", "replace").strip().strip(",")
    for repairs in _REPAIRS:
        repaired = text
        for repair in repairs:
            repaired = repair(repaired)
        try:
            entries = json.loads(
                f"[{repaired}]", strict=False, parse_constant=lambda _: None, parse_float=finite
            )
        except (ValueError, RecursionError):
            continue
        valid_entries = [entry for entry in entries if isinstance(entry, dict) and key in entry]
        if valid_entries:
            return valid_entries
    return []


def _repair_escapes(text: str) -> str:
    return _BACKSLASH.sub(lambda match: match[0] if match["good"] else r"\\", text)


def _repair_values(text: str) -> str:
    """Replaces invalid words and missing values outside of strings by null, and removes surplus
    commas.
    """
    parts = re.split(r'("(?:[^"\\]|\\.)*")', text)
    for index, part in enumerate(parts):
        if not part.startswith('"'):
            parts[index] = _SPARE_COMMA.sub(
                "", _MISSING.sub(" null", _NO_VALUE.sub(r"\1null", part))
            )
    return "".join(parts)


def _repair_strings(text: str) -> str:
    """Escapes quotes inside strings: a quote closes a string only where JSON can
    continue after it.
    """
    out: list[str] = []
    open_brackets: list[str] = []
    position, in_string, is_key = 0, False, False
    while position < len(text):
        char = text[position]
        if in_string:
            if char == "\\":
                out.append(text[position : position + 2])
                position += 2
                continue
            if char == '"':
                in_list = open_brackets and open_brackets[-1] == "["
                closing = _CLOSES_KEY if is_key else _CLOSES_ITEM if in_list else _CLOSES_VALUE
                in_string = closing.match(text, position) is None
                char = '\\"' if in_string else '"'
        elif char == '"':
            in_string, is_key = True, False
            if open_brackets and open_brackets[-1] != "[":
                is_key = next((part for part in reversed(out) if part.strip()), "") in "{,"
        elif char in "{[":
            open_brackets.append(char)
        elif char in "}]" and open_brackets:
            open_brackets.pop()
        out.append(char)
        position += 1
    return "".join(out)


_Repair = Callable[[str], str]
_REPAIRS: tuple[tuple[_Repair, ...], ...] = (
    (),
    (_repair_values,),
    (_repair_escapes, _repair_values),
    (_repair_strings, _repair_values),
    (_repair_escapes, _repair_strings, _repair_values),
)
