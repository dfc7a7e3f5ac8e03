"""Reads broken JSON: mends malformed entries where it can, finds the next whole entry where it cannot, and counts both.

Stretches that decode are taken at once. Where that fails, entries are read one by one.

Where no
entry can be read, the next position at which one can is searched. Text in between is repaired, or
counted as lost.

repaired where possible, and the rest is counted.
"""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct, field

from traceloom.formats.kineto_fields import decode_loosely
from traceloom.trace.notice import Notice, NoticeSeverity


class _DamageKind(Struct, frozen=True):
    """One kind of damage, and the sentence that describes it."""

    slug: str
    severity: NoticeSeverity
    words: str


_DAMAGE_KINDS = (
    _DamageKind(
        "cut-file", "error", "the file ends in the middle; every whole {one} before the cut is kept"
    ),
    _DamageKind(
        "cut-gzip", "error", "the compressed file ends early; everything before the cut is kept"
    ),
    _DamageKind(
        "corrupt-gzip",
        "error",
        "the compressed file is corrupt; what can be decompressed before the fault is kept",
    ),
    _DamageKind(
        "trailing-bytes",
        "warning",
        "the compressed file goes on with bytes that are no gzip; they are left out",
    ),
    _DamageKind("lost-events", "error", "malformed beyond repair and left out: {n} {event}"),
    _DamageKind(
        "repaired-events",
        "warning",
        "malformed (escapes, quotes, NaN, control characters) and repaired: {n} {event}",
    ),
    _DamageKind(
        "odd-values",
        "warning",
        "values of an unexpected type, left empty where they are no numbers: in {n} {event}",
    ),
    _DamageKind(
        "replaced-text",
        "warning",
        "text beside `{list}` that is none (halves of surrogate pairs), replaced by U+FFFD: in {n} {place}",
    ),
    _DamageKind(
        "stray-text", "warning", "text between the entries of `{list}`, left out: in {n} {place}"
    ),
    _DamageKind(
        "damaged-metadata", "warning", "malformed beside `{list}` and left out: {n} {place}"
    ),
    _DamageKind(
        "duplicate-key",
        "warning",
        "standing twice beside `{list}`, where the last one counts: {n} {entry}",
    ),
    _DamageKind("missing-time", "error", "without a usable start time and left out: {n} {event}"),
    _DamageKind(
        "missing-duration",
        "warning",
        "without a usable duration, for which 0 is taken: {n} {event}",
    ),
    _DamageKind(
        "unknown-phase",
        "info",
        "of a phase (`ph`) that is no part of a Kineto trace, and left out: {n} {entry}",
    ),
    _DamageKind(
        "text-after-end", "warning", "there is text after the end of the trace; it is left out"
    ),
)
_DAMAGE_KIND_BY_SLUG = {kind.slug: kind for kind in _DAMAGE_KINDS}
_PLURALS = {"event": "events", "node": "nodes", "entry": "entries", "place": "places"}


class _DamageCount(Struct):
    count: int = 0
    where: str = ""


class DamageLog(Struct):
    """Counts damage by slug, with the place of the first case of each.

    Attributes:
        cases: Count and first place by slug.
        entry: Name of an entry of the file's list, for messages.
        list_key: The key of that list.
    """

    cases: dict[str, _DamageCount] = field(default_factory=dict)
    entry: str = "event"
    list_key: str = "traceEvents"

    def note(self, slug: str, location: str = "", count: int = 1) -> None:
        """Counts a case; the first place is kept."""
        case = self.cases.setdefault(slug, _DamageCount())
        case.count += count
        case.where = case.where or location

    def add(self, other: DamageLog) -> None:
        """Adds the counts from a later part of the file."""
        for slug, case in other.cases.items():
            self.note(slug, case.where, case.count)

    def notices(self) -> list[Notice]:
        notices = []
        for slug, case in self.cases.items():
            kind = _DAMAGE_KIND_BY_SLUG[slug]
            count = max(1, case.count)
            nouns = {
                singular: singular if count == 1 else plural
                for singular, plural in _PLURALS.items()
            }
            nouns |= {"event": nouns[self.entry], "one": self.entry, "list": self.list_key}
            message = kind.words.format(n=f"{count:,}", **nouns)
            if case.where:
                message += f" (first at {case.where})" if count > 1 else f" (at {case.where})"
            notices.append(Notice(slug, kind.severity, message, count, where=case.where))
        return notices


PARSE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
Span = tuple[int, int]

# Numbers stay text: they are not used, and parsing a number of a thousand digits takes long.
_JSON_DECODER = json.JSONDecoder(strict=False, parse_int=str, parse_float=str)
_OBJECT_START = re.compile(r'\{[ \t\r\n]*"')
_BLANKS_OR_COMMAS = re.compile(r"[\s,\0]*")
_CLOSERS_OR_BLANKS = re.compile(r"[\s,\]}\0]*")
_LIST_CONTINUES = re.compile(r"[\s,\]\0]*\{")
_OBJECT_KEY = re.compile(r'"((?:[^"\\]|\\.)*)"\s*:')
_ERROR_BYTE_OFFSET = re.compile(r"\(byte (\d+)\)$")
_LIST_END = re.compile(r'\}\s*(\])\s*(?:,\s*"[^"]{1,64}"\s*:|\}\s*$)')
_JSON_LITERALS = (
    "true",
    "false",
    "null",
    "NaN",
    "Infinity",
    "-Infinity",
)  # a cut text may end inside one
_INITIAL_WINDOW_CHARS = 1 << 13  # characters within which most entries end
_MAX_END_CANDIDATES = 256  # max brackets tried when looking for the one that closes the list
_DEEP_NESTING = re.compile(r"(?:[^\[{]*[\[{]){256}")  # skipped where a value is nested too deep
# Average number of fruitless rereads of the text; beyond it, no entries are searched inside of
# malformed ones.
_MAX_REREADS = 32
_MAX_ENTRY_BYTES = 1 << 23  # max bytes to wait for the end of a malformed entry
_MAX_REPAIR_BYTES = 1 << 20  # max bytes of an entry that is repaired


class EntryFormat(Struct, frozen=True):
    """The form of the entries of a list.

    Attributes:
        between: Matches between two entries, up to the bracket of the second.
        start: Matches the bracket and first key of an entry, as most writers write it.
        mark: Matches a key that every entry has once.
        keys: The keys of entries.
        is_entry: Whether an object at an ambiguous position is an entry.
    """

    between: re.Pattern[bytes]
    start: re.Pattern[bytes]
    mark: re.Pattern[bytes]
    keys: frozenset[str]
    is_entry: Callable[[dict[str, Any]], bool]


class JsonScanner:
    """Reads values of a text at places where they may begin.

    Args:
        text: The text.
        entry_format: The form of the entries to find.
    """

    def __init__(self, text: bytes, entry_format: EntryFormat) -> None:
        self.letters = text.decode(
            "latin-1"
        )  # one character per byte; JSON's own characters are ASCII
        self.open_at_end = ""
        self._entry_format = entry_format
        self._budget = _MAX_REREADS * len(text)
        self._failure_end = 0
        self._is_too_deep = False  # the value tried last is nested too deep

    def skip_blanks(self, position: int) -> int:
        """Returns the first position from there on that is neither white space nor a comma."""
        match = _BLANKS_OR_COMMAS.match(self.letters, position)
        return match.end() if match else position

    def value(self, position: int) -> tuple[Any, int] | None:
        """Returns the value at a position and its end; None if it is malformed.

        `open_at_end` is set to whether it may continue after the text: in a string ("text"),
        elsewhere ("value"), or not ("").
        """
        # The decoder's error messages take time in proportion to the text before and after the
        # fault.
        size = _INITIAL_WINDOW_CHARS
        while True:
            self.open_at_end = ""
            excerpt = self.letters[position : position + size]
            try:
                value, end = _JSON_DECODER.raw_decode(excerpt)
            except RecursionError:
                match = _DEEP_NESTING.match(self.letters, position)
                self._failure_end, self._is_too_deep = (
                    match.end() if match else len(self.letters),
                    True,
                )
                return None
            except ValueError as error:
                reason, failure_offset = str(error), int(getattr(error, "pos", 1))
                remainder = excerpt[failure_offset : failure_offset + 16].strip()
                if reason.startswith("Unterminated string"):
                    self.open_at_end, failure_offset = "text", len(excerpt)
                elif "escape" in reason:
                    self.open_at_end = "text" if len(remainder) < 6 else ""
                elif not remainder or any(
                    word != remainder and word.startswith(remainder) for word in _JSON_LITERALS
                ):
                    self.open_at_end = "value"
                self._failure_end = position + failure_offset
                if not self.open_at_end or position + size >= len(self.letters):
                    return None
            else:
                if end < len(excerpt) or position + size >= len(self.letters):
                    return value, position + end
            size *= 8

    def find_next_entry(self, position: int) -> int | None:
        """Returns where the next complete entry begins, from a position on."""
        while opening := _OBJECT_START.search(self.letters, position):
            position = opening.start()
            parsed = self.value(position)
            if parsed is not None and self._entry_format.is_entry(parsed[0]):
                return position
            # A malformed entry may have swallowed those after it, whole or in part.
            self._failure_end = self._failure_end if parsed is None else parsed[1]
            position = self.choose_retry_position(position)
        return None

    def choose_retry_position(self, position: int) -> int:
        """Returns the next position to try after nothing could be read at one."""
        self._budget -= self._failure_end - position
        jump = self._is_too_deep or self._budget < 0
        self._is_too_deep = False
        return max(position + 1, self._failure_end) if jump else position + 1

    def is_followed_by_entry(self, position: int) -> bool:
        """Whether an entry follows, with only closing brackets before it."""
        match = _CLOSERS_OR_BLANKS.match(self.letters, position)
        position = match.end() if match else position
        parsed = self.value(position) if _OBJECT_START.match(self.letters, position) else None
        return parsed is not None and self._entry_format.is_entry(parsed[0])

    def is_key(self, position: int, *, of_entry: bool) -> bool:
        """Whether a key of entries is here; else whether any other key is."""
        match = _OBJECT_KEY.match(self.letters, position)
        return match is not None and (match.group(1) in self._entry_format.keys) == of_entry

    def find_list_end(self, position: int, *, is_bare_list: bool) -> int | None:
        """Returns the bracket that closes the list, if no more entries of it follow.

        Args:
            position: Where the search begins.
            is_bare_list: The list is not inside an object.
        """
        text = self.letters.rstrip(" \t\r\n\0")
        if is_bare_list:
            return len(text) - 1 if text.endswith("]") and len(text) > position else None
        bracket = position - 1
        for _ in range(_MAX_END_CANDIDATES):
            bracket = text.find("]", bracket + 1)
            if bracket < 0:
                break
            try:
                json.loads('{"":0' + text[bracket + 1 :], strict=False)
            except (ValueError, RecursionError):
                continue
            return bracket
        match = _LIST_END.search(text, position)
        return match.start(1) if match else None


class EntryRecovery:
    """Keeps every whole entry of a malformed stretch.

    Args:
        text: Entries separated by commas, and perhaps what follows the list.
        base_offset: Offset of `text` in the whole text, for the notices.
        damage: Records what was repaired and what was lost.
        entry_format: The form of the entries.
        last: No more text follows.
        alone: The list is not inside an object.
        bounded: The list ends where the text does.
    """

    def __init__(
        self,
        text: bytes,
        base_offset: int,
        damage: DamageLog,
        entry_format: EntryFormat,
        *,
        last: bool,
        alone: bool = False,
        bounded: bool = False,
    ) -> None:
        self.text = text
        self.base = base_offset
        self.damage = damage
        self._entry_format = entry_format
        self._is_final = last
        self._is_bare_list = alone
        self._ends_with_text = bounded
        self._scanner = JsonScanner(text, entry_format)
        self._spans = split_spans(entry_format.between, text)
        self._starts = [start for start, _ in self._spans]

    def take(self, start: int, end: int, spans: list[Span]) -> None:
        """Decodes whole entries and keeps them.

        Raises:
            msgspec.DecodeError, UnicodeDecodeError, RecursionError: They are malformed.
        """
        raise NotImplementedError

    def mend(self, start: int, end: int) -> int:
        """Repairs one malformed entry and keeps the result; returns the number of entries kept."""
        raise NotImplementedError

    def run(self) -> tuple[int, bool]:
        """Recovers all entries: (bytes consumed, whether the list ended there).

        An entry that may continue after the text is not consumed.
        """
        index_by_start = {start: span_index for span_index, start in enumerate(self._starts)}
        position, window = 0, len(self._spans)
        while (position := self._scanner.skip_blanks(position)) < len(self.text):
            span_index = index_by_start.get(position)
            if span_index is not None:
                spans = self._spans[span_index : span_index + window]
                try:
                    self.take(spans[0][0], spans[-1][1], spans)
                except PARSE_ERRORS as error:
                    error_offset = parse_error_offset(error)
                else:
                    position, window = spans[-1][1], window * 4
                    continue
                # Next those before the fault, or half where its position is unknown.
                if len(spans) > 1:
                    good_count = len(spans) // 2
                    if error_offset is not None:
                        fault = spans[0][0] + error_offset - 1
                        good_count = min(sum(1 for _, end in spans if end < fault), len(spans) - 1)
                    window = max(1, good_count)
                    continue
            window = 1
            next_position, ended = self._recover_at(position)
            if next_position is None or ended:
                return position if next_position is None else next_position, ended
            position = next_position
        if self._is_final and not self._ends_with_text:
            self._note("cut-file", len(self.text), 0)
        return len(self.text), self._is_final

    def _recover_at(self, position: int) -> tuple[int | None, bool]:
        """Recovers at one position: (where to continue, whether the list ended); None requests more
        text.
        """
        char, scanner = self.text[position : position + 1], self._scanner
        open_at_end = ""
        if char == b"{":
            parsed = scanner.value(position)
            if parsed is not None:
                value, end = parsed
                after_value = scanner.skip_blanks(end)
                next_position = (
                    scanner.find_next_entry(after_value)
                    if scanner.is_key(after_value, of_entry=True)
                    else None
                )
                if next_position is None or self._entry_format.mark.search(
                    self.text, next_position, next_position
                ):
                    self._keep_whole_entry(position, end)
                    return end, False
                # A whole object, the first part of an entry with a bracket too many.
                if self._entry_format.is_entry(value):
                    self._keep_whole_entry(position, end)
                    self._note("stray-text", next_position)
                else:
                    self._repair_region(position, next_position)
                return next_position, False
            open_at_end = scanner.open_at_end
        elif char == b"]" and not (
            scanner.is_followed_by_entry(position + 1)
            or _LIST_CONTINUES.match(scanner.letters, position + 1)
        ):
            return position + 1, True
        elif (char == b'"' and scanner.is_key(position, of_entry=False)) or (
            char == b"}" and not self.text[position + 1 :].strip(b" \t\r\n\0")
        ):
            self._note("damaged-metadata", position)  # the closing bracket of the list is missing
            return position, True
        next_position = scanner.find_next_entry(position)
        if next_position is not None:
            self._repair_region(position, next_position)
            return next_position, False
        # No entry follows the unreadable text.
        if not self._is_final:
            if open_at_end or len(self.text) - position < _MAX_ENTRY_BYTES:
                return None, False
            self._repair_region(position, len(self.text))
            return len(self.text), False
        if self._ends_with_text:
            self._repair_region(position, len(self.text))
            return len(self.text), True
        list_end = (
            None
            if open_at_end == "value"
            else scanner.find_list_end(position, is_bare_list=self._is_bare_list)
        )
        if list_end is not None:
            self._repair_region(position, list_end)
            return list_end + 1, True
        if open_at_end:
            self._note("cut-file", position)
        else:
            self._repair_region(position, len(self.text))
            self._note("cut-file", len(self.text), 0)
        return len(self.text), True

    def _keep_whole_entry(self, start: int, end: int) -> None:
        """Keeps one whole entry, even if the strict decoder refuses its values."""
        try:
            self.take(start, end, [(start, end)])
        except PARSE_ERRORS:
            self._repair_piece(start, end)

    def _repair_region(self, range_start: int, end: int) -> None:
        """Repairs an unreadable region, which may hold several malformed entries; each is repaired
        separately.
        """
        first, after_last = bisect_right(self._starts, range_start), bisect_left(self._starts, end)
        starts = {range_start, *self._starts[first:after_last]}
        starts |= {
            match.start()
            for match in self._entry_format.start.finditer(self.text, range_start + 1, end)
        }
        ordered = sorted(starts)
        for start, finish in zip(ordered, [*ordered[1:], end], strict=True):
            self._repair_piece(start, finish)

    def _repair_piece(self, start: int, end: int) -> None:
        fragment = self.text[start:end].rstrip(b" \t\r\n,")
        if b'"' not in fragment:
            if fragment.strip(b" \t\r\n,\0"):
                self._note("stray-text", start)
            return
        # Repairs add no brackets.
        repaired_count = (
            self.mend(start, start + len(fragment))
            if fragment.endswith(b"}") and len(fragment) < _MAX_REPAIR_BYTES
            else 0
        )
        if repaired_count:
            self._note("repaired-events", start, repaired_count)
        else:
            self._note("lost-events", start, max(1, len(self._entry_format.mark.findall(fragment))))

    def _note(self, slug: str, position: int, count: int = 1) -> None:
        self.damage.note(slug, f"byte {self.base + position} of the text", count)


def parse_error_offset(error: Exception) -> int | None:
    """Returns the byte at which the decoder stopped, if the error states it."""
    match = _ERROR_BYTE_OFFSET.search(str(error))
    return int(match.group(1)) if match else None


def split_spans(boundary: re.Pattern[bytes], text: bytes) -> list[Span]:
    """Returns where each piece between two boundaries begins and ends; a boundary begins with the
    bracket of the piece.
    """
    spans, start = [], 0
    for match in boundary.finditer(text):
        spans.append((start, match.start() + 1))
        start = match.end()
    spans.append((start, len(text)))
    return spans


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
