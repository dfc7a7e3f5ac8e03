"""Finds the next whole entry in broken text; damage counted and told.

Stretches that decode are taken at once. Where that fails, entry by entry; where no entry can be read, the next place is
looked for at which one can. What lies between is mended, or counted as lost.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import Struct, field

from traceloom.trace.notice import Notice, NoticeSeverity


class _Kind(Struct, frozen=True):
    """One kind of damage, and the sentence that tells it."""

    slug: str
    severity: NoticeSeverity
    words: str


_KINDS = (
    _Kind("cut-file", "error", "the file ends in the middle; every whole {one} before the cut is kept"),
    _Kind("cut-gzip", "error", "the compressed file ends early; everything before the cut is kept"),
    _Kind("corrupt-gzip", "error", "the compressed file is corrupt; what can be decompressed before the fault is kept"),
    _Kind("trailing-bytes", "warning", "the compressed file goes on with bytes that are no gzip; they are left out"),
    _Kind("lost-events", "error", "malformed beyond repair and left out: {n} {event}"),
    _Kind(
        "repaired-events", "warning", "malformed (escapes, quotes, NaN, control characters) and repaired: {n} {event}"
    ),
    _Kind(
        "odd-values", "warning", "values of an unexpected type, left empty where they are no numbers: in {n} {event}"
    ),
    _Kind(
        "replaced-text",
        "warning",
        "text beside `{list}` that is none (halves of surrogate pairs), replaced by U+FFFD: in {n} {place}",
    ),
    _Kind("stray-text", "warning", "text between the entries of `{list}`, left out: in {n} {place}"),
    _Kind("damaged-metadata", "warning", "malformed beside `{list}` and left out: {n} {place}"),
    _Kind("duplicate-key", "warning", "standing twice beside `{list}`, where the last one counts: {n} {entry}"),
    _Kind("missing-time", "error", "without a usable start time and left out: {n} {event}"),
    _Kind("missing-duration", "warning", "without a usable duration, for which 0 is taken: {n} {event}"),
    _Kind("unknown-phase", "info", "of a phase (`ph`) that is no part of a Kineto trace, and left out: {n} {entry}"),
    _Kind("text-after-end", "warning", "there is text after the end of the trace; it is left out"),
)
_BY_SLUG = {kind.slug: kind for kind in _KINDS}
_PLURAL = {"event": "events", "node": "nodes", "entry": "entries", "place": "places"}


class _Case(Struct):
    count: int = 0
    where: str = ""


class DamageLog(Struct):
    """Counts by slug, each with the place of its first case.

    Attributes:
        cases: What was counted.
        entry: What one entry of the file's list is called.
        list_key: The key of that list.
    """

    cases: dict[str, _Case] = field(default_factory=dict)
    entry: str = "event"
    list_key: str = "traceEvents"

    def note(self, slug: str, where: str = "", count: int = 1) -> None:
        """Count a case; the first place is kept."""
        case = self.cases.setdefault(slug, _Case())
        case.count += count
        case.where = case.where or where

    def add(self, later: DamageLog) -> None:
        """Count what was found in a later part of the file, too."""
        for slug, case in later.cases.items():
            self.note(slug, case.where, case.count)

    def notices(self) -> list[Notice]:
        """One notice per kind of damage."""
        out = []
        for slug, case in self.cases.items():
            kind = _BY_SLUG[slug]
            count = max(1, case.count)
            nouns = {singular: singular if count == 1 else plural for singular, plural in _PLURAL.items()}
            nouns |= {"event": nouns[self.entry], "one": self.entry, "list": self.list_key}
            message = kind.words.format(n=f"{count:,}", **nouns)
            if case.where:
                message += f" (first at {case.where})" if count > 1 else f" (at {case.where})"
            out.append(Notice(slug, kind.severity, message, count, where=case.where))
        return out


MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
Span = tuple[int, int]

# Numbers stay text: nobody looks at them, and a number of a thousand digits takes long.
_SCANNER = json.JSONDecoder(strict=False, parse_int=str, parse_float=str)
_OPENING = re.compile(r'\{[ \t\r\n]*"')
_BLANK = re.compile(r"[\s,\0]*")
_STRAY = re.compile(r"[\s,\]}\0]*")
_GOES_ON = re.compile(r"[\s,\]\0]*\{")
_KEY = re.compile(r'"((?:[^"\\]|\\.)*)"\s*:')
_BYTE = re.compile(r"\(byte (\d+)\)$")
_CLOSING = re.compile(r'\}\s*(\])\s*(?:,\s*"[^"]{1,64}"\s*:|\}\s*$)')
_WORDS = ("true", "false", "null", "NaN", "Infinity", "-Infinity")  # where a cut one begins
_NEAR = 1 << 13  # letters in which most entries end
_TRIED_ENDS = 256  # brackets looked at for the one that closes the list
_MANY_BRACKETS = re.compile(r"(?:[^\[{]*[\[{]){256}")  # passed over where a value is nested too deep
_WORK = 32  # how often text is read in vain, on average; beyond, no entries are looked for inside of malformed ones
_PATIENCE = 1 << 23  # bytes in which the end of a malformed entry is waited for
_MOST_MENDED = 1 << 20  # bytes of an entry that is worth mending


class EntryFormat(Struct, frozen=True):
    """What the entries of a list look like.

    Attributes:
        between: Matches between two entries, up to the bracket of the second.
        start: Matches the bracket and first key of an entry, as most writers write it.
        mark: Matches a key that every entry has once.
        keys: The keys of entries.
        is_entry: Whether an object that stands where it need not be one is an entry.
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
        form: Of the entries that are looked for.
    """

    def __init__(self, text: bytes, form: EntryFormat) -> None:
        self.letters = text.decode("latin-1")  # one letter per byte; the signs of JSON are ASCII
        self.reaches_end = ""
        self._form = form
        self._budget = _WORK * len(text)
        self._reached = 0
        self._deep = False  # what was tried last is nested too deep

    def behind_blanks(self, at: int) -> int:
        """The first place from there on that is neither white nor a comma."""
        match = _BLANK.match(self.letters, at)
        return match.end() if match else at

    def value(self, at: int) -> tuple[Any, int] | None:
        """The value at a place and where it ends; None if it is malformed.

        `reaches_end` says whether it may go on behind the text: in a string ("text"), elsewhere ("value"), or not ("").
        """
        size = _NEAR  # what a decoder says about a fault takes time in line with the text before and behind it
        while True:
            self.reaches_end = ""
            piece = self.letters[at : at + size]
            try:
                value, end = _SCANNER.raw_decode(piece)
            except RecursionError:
                match = _MANY_BRACKETS.match(self.letters, at)
                self._reached, self._deep = match.end() if match else len(self.letters), True
                return None
            except ValueError as error:
                reason, reached = str(error), int(getattr(error, "pos", 1))
                rest = piece[reached : reached + 16].strip()
                if reason.startswith("Unterminated string"):
                    self.reaches_end, reached = "text", len(piece)
                elif "escape" in reason:
                    self.reaches_end = "text" if len(rest) < 6 else ""
                elif not rest or any(word != rest and word.startswith(rest) for word in _WORDS):
                    self.reaches_end = "value"
                self._reached = at + reached
                if not self.reaches_end or at + size >= len(self.letters):
                    return None
            else:
                if end < len(piece) or at + size >= len(self.letters):
                    return value, at + end
            size *= 8

    def next_entry(self, at: int) -> int | None:
        """Where the next complete entry begins, from a position on."""
        while opening := _OPENING.search(self.letters, at):
            at = opening.start()
            parsed = self.value(at)
            if parsed is not None and self._form.is_entry(parsed[0]):
                return at
            # A malformed entry may have swallowed those behind it, whole or not.
            self._reached = self._reached if parsed is None else parsed[1]
            at = self.after_failure(at)
        return None

    def after_failure(self, at: int) -> int:
        """Where to try next, after nothing of use could be read at a place."""
        self._budget -= self._reached - at
        jump = self._deep or self._budget < 0
        self._deep = False
        return max(at + 1, self._reached) if jump else at + 1

    def resumes(self, at: int) -> bool:
        """Whether an entry follows, with nothing but closing brackets before it."""
        match = _STRAY.match(self.letters, at)
        at = match.end() if match else at
        parsed = self.value(at) if _OPENING.match(self.letters, at) else None
        return parsed is not None and self._form.is_entry(parsed[0])

    def foreign_key(self, at: int) -> bool:
        """Whether a key stands there that no entry has."""
        match = _KEY.match(self.letters, at)
        return match is not None and match.group(1) not in self._form.keys

    def own_key(self, at: int) -> bool:
        """Whether a key of entries stands there."""
        match = _KEY.match(self.letters, at)
        return match is not None and match.group(1) in self._form.keys

    def end_of_list(self, at: int, *, alone: bool) -> int | None:
        """Where the bracket stands that closes the list, where nothing more of it follows.

        Args:
            at: From where on.
            alone: Nothing stands around the list.
        """
        text = self.letters.rstrip(" \t\r\n\0")
        if alone:
            return len(text) - 1 if text.endswith("]") and len(text) > at else None
        bracket = at - 1
        for _ in range(_TRIED_ENDS):
            bracket = text.find("]", bracket + 1)
            if bracket < 0:
                break
            try:
                json.loads('{"":0' + text[bracket + 1 :], strict=False)
            except (ValueError, RecursionError):
                continue
            return bracket
        match = _CLOSING.search(text, at)
        return match.start(1) if match else None


class Recovery:
    """Keeps every whole entry of a malformed stretch.

    Args:
        text: Entries separated by commas, and perhaps what follows the list.
        base: Where it begins in the whole text, for the notices.
        damage: Told what was repaired and what was lost.
        form: What entries look like.
        last: No more text follows.
        alone: Nothing stands around the list.
        bounded: The list ends where the text does.
    """

    def __init__(
        self,
        text: bytes,
        base: int,
        damage: DamageLog,
        form: EntryFormat,
        *,
        last: bool,
        alone: bool = False,
        bounded: bool = False,
    ) -> None:
        self.text = text
        self.base = base
        self.damage = damage
        self._form = form
        self._last = last
        self._alone = alone
        self._bounded = bounded
        self._walk = JsonScanner(text, form)
        self._spans = spans_between(form.between, text)
        self._starts = [start for start, _ in self._spans]

    def take(self, begin: int, end: int, spans: list[Span]) -> None:
        """Decode whole entries and keep them.

        Raises:
            msgspec.DecodeError, UnicodeDecodeError, RecursionError: They are malformed.
        """
        raise NotImplementedError

    def mend(self, begin: int, end: int) -> int:
        """Repair what should be one entry and keep what comes of it: how many."""
        raise NotImplementedError

    def run(self) -> tuple[int, bool]:
        """Take all: (bytes used up, whether the list ended there). What may go on behind the text is not used up."""
        numbers = {start: number for number, start in enumerate(self._starts)}
        at, window = 0, len(self._spans)
        while (at := self._walk.behind_blanks(at)) < len(self.text):
            number = numbers.get(at)
            if number is not None:
                spans = self._spans[number : number + window]
                try:
                    self.take(spans[0][0], spans[-1][1], spans)
                except MALFORMED as error:
                    byte = byte_of(error)
                else:
                    at, window = spans[-1][1], window * 4
                    continue
                if len(spans) > 1:  # next those before the fault, or half where its position is unknown
                    good = len(spans) // 2
                    if byte is not None:
                        fault = spans[0][0] + byte - 1
                        good = min(sum(1 for _, end in spans if end < fault), len(spans) - 1)
                    window = max(1, good)
                    continue
            window = 1
            following, ended = self._single(at)
            if following is None or ended:
                return at if following is None else following, ended
            at = following
        if self._last and not self._bounded:
            self._note("cut-file", len(self.text), 0)
        return len(self.text), self._last

    def _single(self, at: int) -> tuple[int | None, bool]:
        """Handle what is at one position: (where to go on, whether the list ended); None asks for more text."""
        sign, walk = self.text[at : at + 1], self._walk
        cut = ""
        if sign == b"{":
            parsed = walk.value(at)
            if parsed is not None:
                value, end = parsed
                rest = walk.behind_blanks(end)
                following = walk.next_entry(rest) if walk.own_key(rest) else None
                if following is None or self._form.mark.search(self.text, rest, following):
                    self._whole(at, end)
                    return end, False
                # A whole object, which is the first part of an entry with a bracket too many.
                if self._form.is_entry(value):
                    self._whole(at, end)
                    self._note("stray-text", rest)
                else:
                    self._between(at, following)
                return following, False
            cut = walk.reaches_end
        elif sign == b"]" and not (walk.resumes(at + 1) or _GOES_ON.match(walk.letters, at + 1)):
            return at + 1, True
        elif (sign == b'"' and walk.foreign_key(at)) or (sign == b"}" and not self.text[at + 1 :].strip(b" \t\r\n\0")):
            self._note("damaged-metadata", at)  # the bracket of the list is gone
            return at, True
        following = walk.next_entry(at)
        if following is not None:
            self._between(at, following)
            return following, False
        # No entry follows what cannot be read.
        if not self._last:
            if cut or len(self.text) - at < _PATIENCE:
                return None, False
            self._between(at, len(self.text))
            return len(self.text), False
        if self._bounded:
            self._between(at, len(self.text))
            return len(self.text), True
        list_end = None if cut == "value" else walk.end_of_list(at, alone=self._alone)
        if list_end is not None:
            self._between(at, list_end)
            return list_end + 1, True
        if cut:
            self._note("cut-file", at)
        else:
            self._between(at, len(self.text))
            self._note("cut-file", len(self.text), 0)
        return len(self.text), True

    def _whole(self, begin: int, end: int) -> None:
        """One whole entry, though its values may be what the decoder refuses."""
        try:
            self.take(begin, end, [(begin, end)])
        except MALFORMED:
            self._mended(begin, end)

    def _between(self, begin: int, end: int) -> None:
        """What cannot be read: it may hold several malformed entries, and each is dealt with alone."""
        first, behind = bisect_right(self._starts, begin), bisect_left(self._starts, end)
        starts = {begin, *self._starts[first:behind]}
        starts |= {match.start() for match in self._form.start.finditer(self.text, begin + 1, end)}
        ordered = sorted(starts)
        for start, finish in zip(ordered, [*ordered[1:], end], strict=True):
            self._mended(start, finish)

    def _mended(self, begin: int, end: int) -> None:
        piece = self.text[begin:end].rstrip(b" \t\r\n,")
        if b'"' not in piece:
            if piece.strip(b" \t\r\n,\0"):
                self._note("stray-text", begin)
            return
        # No repair adds brackets.
        mended = self.mend(begin, begin + len(piece)) if piece.endswith(b"}") and len(piece) < _MOST_MENDED else 0
        if mended:
            self._note("repaired-events", begin, mended)
        else:
            self._note("lost-events", begin, max(1, len(self._form.mark.findall(piece))))

    def _note(self, slug: str, at: int, count: int = 1) -> None:
        self.damage.note(slug, f"byte {self.base + at} of the text", count)


def byte_of(error: Exception) -> int | None:
    """The byte at which the decoder gave up, where it says so."""
    match = _BYTE.search(str(error))
    return int(match.group(1)) if match else None


def spans_between(boundary: re.Pattern[bytes], text: bytes) -> list[Span]:
    """Where each piece between two boundaries begins and ends; a boundary begins with the bracket of the piece."""
    spans, start = [], 0
    for match in boundary.finditer(text):
        spans.append((start, match.start() + 1))
        start = match.end()
    spans.append((start, len(text)))
    return spans
