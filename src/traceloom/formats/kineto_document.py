"""Scans a Kineto file: metadata at any place, `traceEvents` in slices, with local recovery from
damage.
"""

import json
import re
from collections.abc import Callable, Generator, Iterator
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from traceloom.errors import InputError
from traceloom.formats.detect import describe_format, refuse_by_keys, refuse_list, refuse_start
from traceloom.formats.kineto_fields import EXACT, FAST, decode_loosely, needs_text
from traceloom.formats.resync import (
    BETWEEN,
    EVENTS,
    PARSE_ERRORS,
    DamageLog,
    EventRecovery,
    JsonScanner,
    find_complete_end,
    parse_error_offset,
)
from traceloom.formats.text_stream import BraceIndex, TextBuffer, TextObserver, locate_entries
from traceloom.system.text import replace_json_surrogates

SLICE = 1 << 19
_BOUNDARY_WINDOW = 1 << 16  # bytes in which a boundary is searched
_MAX_VALUE_BYTES = 1 << 26  # bytes of one metadata entry, or of one event
_BOUNDARY = re.compile(rb'\}(?=\s*,\s*\{\s*"(?:ph|name|cat|args|pid|tid|ts|dur|id|s|bp)"\s*:)')
_KEY = re.compile(rb'\s*,?\s*"((?:[^"\\]|\\.)*)"\s*:\s*')
_SALVAGE = re.compile(rb'"((?:[^"\\\n]|\\.){1,64})"\s*:\s*(?=[\[{"\d-])')
_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
_EVENT_FIRST = re.compile(rb'\s*\{\s*"ph"\s*:')
_FIRST_OF_LIST = re.compile(rb'\[?(?=\s*\{\s*"ph"\s*:)')
_SCANNER = json.JSONDecoder(strict=False)


class Slice(Struct):
    """A run of decoded entries.

    Attributes:
        entries: Structs with the fields of `traceloom.formats.kineto_fields`.
        exact: The times are text (see `traceloom.formats.kineto_fields`), else doubles that are
            exact.
        offsets: Byte of the text at which each entry begins; int64, shape (entries,).
        lengths: Bytes of each; int64, shape (entries,).
        text: The text they came from; offsets count from `base`.
        base: Byte of the text at which `text` begins.
    """

    entries: list[Any]
    exact: bool
    offsets: NDArray[np.int64]
    lengths: NDArray[np.int64]
    text: bytes
    base: int


class TextRange(Struct, frozen=True):
    """The range of a file that one process decodes; processes that decode other parts find the same
    boundaries.

    Attributes:
        begin: Byte of the text after which it begins, at the next boundary of two entries; 0 is the
            file's beginning.
        until: The `begin` of the part that follows; None where the part extends to the end.
    """

    begin: int = 0
    until: int | None = None


FULL_RANGE = TextRange()


class Document(TextBuffer):
    """Scans the text of a Kineto file in one pass, or a part of its events and what follows.

    Args:
        read_chunks: Yields the text, and passes all of it to the observer that it receives.
        damage: Records what was repaired or lost.
        path: The file.
        part: The requested part of the text.
        taken_over: Called at the end of the part with the byte; returns whether another process
            decodes what follows; if not, this pass continues.

    Attributes:
        metadata: Top-level entries other than `traceEvents`, complete after the pass.
        found_events: `traceEvents` was found.
        began: Byte at which the part begins; None where it has none.
        left_at: Byte from which another process continues; None where the pass went to the end.
    """

    def __init__(
        self,
        read_chunks: Callable[[TextObserver], Iterator[bytes]],
        damage: DamageLog,
        path: str,
        part: TextRange = FULL_RANGE,
        taken_over: Callable[[int], bool] = lambda _: True,
    ) -> None:
        self._braces = BraceIndex(part.begin)
        super().__init__(read_chunks(self._braces.scan))
        self.metadata: dict[str, Any] = {}
        self.found_events = False
        self.began: int | None = None if part.begin else 0
        self.left_at: int | None = None
        self._begin, self._until = part.begin, part.until
        self._taken_over = taken_over
        self._damage = damage
        self._path = path
        self._exact: bool | None = None
        self._alone = False  # the list is not inside an object

    def slices(self) -> Generator[Slice, None, None]:
        """Yields all entries of `traceEvents`, a slice at a time.

        Raises:
            InputError: It is another kind of file, or holds nothing of a trace.
        """
        self._fill(1)
        well_formed = self._begins_well()
        self._alone = self._text.lstrip()[:1] == b"["
        if self._begin:
            # Skip the text before the part without buffering all of it.
            while self._base + len(self._text) < self._begin:
                self._skip(len(self._text))
                if not self._fill(1):
                    return
            self._skip(self._begin - self._base)
            cut = self._boundary(self._begin)
            if cut is None:
                return
            self._skip(cut)
            self.began = self._base
            self.found_events = True
            yield from self._entries()
            if not self._alone:
                yield from self._top()
            return
        if well_formed:
            self._skip(len(self._text) - len(self._text.lstrip()) + 1)
        if well_formed and self._alone:
            self.found_events = True
            yield from self._entries()
        else:
            yield from self._top()
        if not self.found_events:
            refuse_by_keys(self.metadata, self._path, done=True)

    def _begins_well(self) -> bool:
        """Whether the text begins as traces do; otherwise the rest may still be a trace.

        Raises:
            InputError: It is another kind of file.
        """
        try:
            refuse_start(self._text, self._path)
            if self._text.lstrip()[:1] == b"[":
                self._fill(4096)
                refuse_list(self._text.lstrip()[1:], self._path)
                return True
        except InputError:
            self._fill(SLICE)
            if (
                not self._text.strip()
                or describe_format(self._text)
                or self._start_of_events() is None
            ):
                raise
        else:
            if not _EVENT_FIRST.match(self._text):
                return True
        if not self._begin:
            self._damage.note("damaged-metadata", "byte 0 of the text")
        return False

    # -- parts -------------------------------------------------------------------------------------

    def _boundary(self, byte: int) -> int | None:
        """Returns the end of the first entry that ends after a byte, relative to the buffered text;
        None if none is near.

        An apparent boundary may be inside a string or a list of an entry.
        """
        start = byte - self._base
        self._fill(start + _BOUNDARY_WINDOW)
        match = _BOUNDARY.search(self._text, start, start + _BOUNDARY_WINDOW)
        return None if match is None else match.end()

    def _handing_over(self) -> Iterator[Slice]:
        """Yields the entries up to where the next part begins, if they prove that it can begin
        there; otherwise nothing.
        """
        until, self._until = self._until, None
        cut = None if until is None or until < self._base else self._boundary(until)
        if cut is None:
            return
        text = self._text[:cut]
        try:
            entries = self._decoder(text).decode(b"".join((b"[", text, b"]")))
        except PARSE_ERRORS:
            return
        exact = bool(self._exact)
        if not exact and _has_inexact_times(entries):
            return
        yield self._slice(entries, text, exact)
        self._skip(cut)
        if self._taken_over(self._base):
            self.left_at = self._base

    # -- the top level -----------------------------------------------------------------------------

    def _top(self) -> Iterator[Slice]:
        while self.left_at is None:
            self._fill(SLICE)
            match = _KEY.match(self._text)
            if match is None:
                remaining = self._text.lstrip(b" \t\r\n,")
                if not remaining:
                    if self._base:
                        self._damage.note("cut-file", f"byte {self.size} of the text", 0)
                    return
                # An event may be in the place of a key, or follow a stray bracket.
                entries_text = remaining.lstrip(b" \t\r\n,[]}\0")
                resumes = entries_text[:1] == b"{" and JsonScanner(
                    entries_text, EVENTS
                ).is_followed_by_entry(0)
                if resumes:
                    self._damage.note("damaged-metadata", f"byte {self._base} of the text")
                    self._skip(len(self._text) - len(entries_text))
                    self.found_events = True
                    yield from self._entries()
                elif remaining.startswith(b"}") and (
                    self.found_events or self._start_of_events() is None
                ):
                    if remaining[1:].strip(b" \t\r\n\0"):
                        location = (
                            f"byte {self._base + len(self._text) - len(remaining) + 1} of the text"
                        )
                        self._damage.note("text-after-end", location)
                    return
                elif not self._salvage():
                    return
                continue
            key = match.group(1).decode("utf-8", "replace")
            if key == "traceEvents" and self._text[match.end() : match.end() + 1] == b"[":
                if self.found_events:
                    self._damage.note("duplicate-key", "$.traceEvents")
                self.found_events = True
                self._skip(match.end() + 1)
                yield from self._entries()
                continue
            if not self.found_events and (first := _FIRST_OF_LIST.match(self._text, match.end())):
                self._damage.note(
                    "damaged-metadata", f"byte {self._base} of the text"
                )  # its key or bracket is damaged
                self.found_events = True
                self._skip(first.end())
                yield from self._entries()
                continue
            if not self.found_events:
                refuse_by_keys({**self.metadata, key: None}, self._path, done=False)
            if not self._value(key, match.end()) and not self._salvage():
                return

    def _value(self, key: str, start: int) -> bool:
        """Reads one entry; False where it is malformed."""
        while True:
            scanned = self._text.decode(
                "latin-1"
            )  # one character per byte; JSON's own characters are ASCII
            try:
                _, end = _SCANNER.raw_decode(scanned, start)
            except (ValueError, RecursionError):
                end = -1
            # A number at the very end may continue in the next piece.
            if 0 <= end < len(self._text) or (end > 0 and self._ended):
                break
            if end < 0 and (self._ended or _EVENTS.search(self._text, start)):
                return False
            if len(self._text) > _MAX_VALUE_BYTES:
                raise InputError(
                    f"the entry `{key}` is larger than {_MAX_VALUE_BYTES >> 20} MB, which no trace has",
                    slug="oversized-entry",
                    where=self._path,
                )
            self._fill(len(self._text) * 2)
        if not self.found_events and _EVENTS.search(self._text, start, end):
            return False  # a bracket is missing, so that this entry has swallowed the events
        value = json.loads(self._text[start:end].decode("utf-8", "replace"), strict=False)
        store_entry(self.metadata, key, value, self._damage)
        self._skip(end)
        return True

    def _salvage(self) -> bool:
        """Skips malformed metadata up to `traceEvents`; keeps readable entries on the way."""
        while (end := self._start_of_events()) is None and not self._ended:
            if len(self._text) > _MAX_VALUE_BYTES:
                break
            self._fill(len(self._text) * 2)
        region = self._text if end is None else self._text[:end]
        if self.found_events and end is None and not region.rstrip().endswith((b"}", b"]")):
            self._damage.note("cut-file", f"byte {self.size} of the text", 0)
        self._damage.note("damaged-metadata", f"byte {self._base} of the text")
        walk = JsonScanner(region, EVENTS)
        position = 0
        while match := _SALVAGE.search(region, position):
            value = walk.value(match.end())
            if value is None:
                position = max(match.end(), walk.choose_retry_position(match.start()))
                continue
            position = value[1]
            text = region[match.end() : position].decode("utf-8", "replace")
            key = match.group(1).decode("utf-8", "replace")
            if key not in self.metadata:
                store_entry(self.metadata, key, json.loads(text, strict=False), self._damage)
        self._skip(len(region))
        return end is not None

    def _start_of_events(self) -> int | None:
        """Returns the position of the key of the events in the buffered text, or else of the first
        event.
        """
        match = _EVENTS.search(self._text)
        return match.start() if match else JsonScanner(self._text, EVENTS).find_next_entry(0)

    # -- the events --------------------------------------------------------------------------------

    def _entries(self) -> Iterator[Slice]:
        """Yields slices up to the end of the list; the position is then just after its bracket."""
        target_size = SLICE
        while True:
            self._skip_blank()  # while the buffer is small, since the remainder is copied
            filled = self._fill(target_size)
            self._skip_blank()
            if self._text.startswith(b"]"):
                self._skip(1)
                return
            if not self._text:
                if not self._ended:
                    continue
                self._damage.note("cut-file", f"byte {self.size} of the text", 0)
                return
            cut = (
                self._last_boundary(BETWEEN, 256) if filled else len(self._text.rstrip(b" \t\r\n,"))
            )
            if (
                cut is not None
                and self._until is not None
                and self._base + len(self._text) > self._until
            ):
                target_size = SLICE
                yield from self._handing_over()
                if self.left_at is not None:
                    return
                continue
            used = 0
            if cut is not None:
                decoded, used, closed = self._decode(self._text[:cut], last=not filled)
            if not used:  # one event is larger than the buffer
                if len(self._text) > _MAX_VALUE_BYTES:
                    raise InputError(
                        f"one event is larger than {_MAX_VALUE_BYTES >> 20} MB",
                        slug="oversized-entry",
                        where=f"{self._path}, byte {self._base} of the text",
                    )
                target_size = len(self._text) * 2
                continue
            target_size = SLICE
            if decoded.entries:
                yield decoded
            self._skip(used)
            if closed:
                return

    def _decode(self, text: bytes, *, last: bool) -> tuple[Slice, int, bool]:
        """Decodes a stretch: (slice, bytes consumed, whether the list ended in it)."""
        try:
            entries = self._decoder(text).decode(
                b"".join((b"[", text, b"]"))
            )  # one copy, where concatenation makes two
        except msgspec.ValidationError:
            try:
                entries, unexpected = decode_loosely(b"[" + text + b"]")
            except PARSE_ERRORS as error:
                return self._decode_damaged(text, error, last=last)
            exact = True
            if unexpected:
                self._damage.note("odd-values", f"byte {self._base} of the text", unexpected)
        except PARSE_ERRORS as error:
            return self._decode_damaged(text, error, last=last)
        else:
            if not self._exact and _has_inexact_times(entries):
                self._exact = True
                return self._decode(text, last=last)
            exact = bool(self._exact)
        if last:
            self._damage.note("cut-file", f"byte {self.size} of the text", 0)
        return self._slice(entries, text, exact), len(text), last

    def _decoder(self, text: bytes) -> msgspec.json.Decoder[list[Any]]:
        """Returns the decoder for this text; the first text decides how times are read."""
        if self._exact is None:
            self._exact = needs_text(text)
        return EXACT if self._exact else FAST

    def _decode_damaged(
        self, text: bytes, error: Exception, *, last: bool
    ) -> tuple[Slice, int, bool]:
        """Decodes a stretch in which the list ends, or which is malformed."""
        byte = parse_error_offset(error)
        if "trailing characters" in str(error) and byte is not None:
            bracket = text.rfind(b"]", 0, byte - 1)
            if bracket >= 0:
                if not text[:bracket].strip():
                    return self._slice([], b"", exact=True), bracket + 1, True
                decoded, used, _ = self._decode(text[:bracket], last=False)
                if used == bracket:  # a proven stretch is consumed whole
                    return decoded, bracket + 1, True
        cut = None if last else find_complete_end(text)
        if cut:
            # The text was cut inside an event by us; there may be no other fault.
            try:
                entries, unexpected = decode_loosely(b"[" + text[:cut] + b"]")
            except PARSE_ERRORS:
                pass
            else:
                if unexpected:
                    self._damage.note("odd-values", f"byte {self._base} of the text", unexpected)
                return self._slice(entries, text[:cut], exact=True), cut, False
        recovery = EventRecovery(
            text, self._base, self._damage, EVENTS, last=last, alone=self._alone
        )
        used, closed = recovery.run()
        offsets = np.asarray(recovery.offsets, dtype=np.int64) + self._base
        lengths = np.asarray(recovery.lengths, dtype=np.int64)
        return Slice(recovery.entries, True, offsets, lengths, text, self._base), used, closed

    def _slice(self, entries: list[Any], text: bytes, exact: bool) -> Slice:
        braces = self._braces.between(self._base, self._base + len(text))
        offsets, lengths = locate_entries(text, len(entries), braces)
        return Slice(entries, exact, offsets + self._base, lengths, text, self._base)


def store_entry(metadata: dict[str, Any], key: str, value: Any, damage: DamageLog) -> None:
    """Stores one top-level entry, which may exist already."""
    (key, value), replaced = replace_json_surrogates([key, value])
    if replaced:
        damage.note("replaced-text", f"$.{key}", replaced)
    previous = metadata.get(key)
    if isinstance(previous, dict) and isinstance(value, dict):
        # Some writers repeat distributedInfo after the events, often with more entries.
        value = {
            **previous,
            **{name: item for name, item in value.items() if item not in (None, [], "")},
        }
    elif previous is not None and previous != value:
        damage.note("duplicate-key", f"$.{key}")
    metadata[key] = value


def _has_inexact_times(entries: list[Any]) -> bool:
    """Whether there are doubles that may have lost nanoseconds: fractions beyond 2^43."""
    return any(
        abs(entry.ts) >= 2**43 and entry.ts % 1 for entry in entries[:: max(1, len(entries) // 64)]
    )
