"""Walks a host trace: what stands around the nodes, and the nodes in slices, damage kept in bounds.

Of malformed stretches every whole node is kept, what can be mended is, the rest is counted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NoReturn

import polars as pl

from traceloom.errors import InputError
from traceloom.plain_text import clean_json
from traceloom.read.damage import Damage
from traceloom.read.detect import kind_of, refuse_start
from traceloom.read.host_nodes import LISTS, NUMBERS, decode, loose_frame
from traceloom.read.repair import mended
from traceloom.read.resync import MALFORMED, Form, Recovery, Span, Walk
from traceloom.read.text_window import TextWindow

SLICE = 1 << 20
_MOST_NODE = 1 << 26  # bytes of one node
_MOST_HEAD = 1 << 20  # bytes before the nodes
_NODES = re.compile(rb'"nodes"\s*:\s*\[')
_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[|^\s*\[\s*\{[^{}]{0,300}"ph"\s*:')
_ENTRY = re.compile(rb'"((?:[^"\\\n]|\\.){1,64})"\s*:\s*("(?:[^"\\]|\\.)*"|-?\d[\d.eE+-]*|true|false|null)')
_ENVELOPE = frozenset({"schema", "pid", "time", "start_ts", "finish_ts"})  # no node has such a key
_TRIED_ENDS = 64  # brackets looked at for the one that closes the list


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
    keys=frozenset(["id", "name", "ctrl_deps", "attrs", "op_schema", *NUMBERS.values(), *LISTS]),
    is_entry=lambda value: "id" in value and "name" in value and ("ctrl_deps" in value or "parent" in value),
)
_STRING = re.compile(r'("(?:[^"\\]|\\.)*")')
# The observer of older versions writes doubles as C++ prints them.
_ENDLESS = re.compile(r"(?<=[:\[,])(\s*)([+-]?(?:nan|inf(?:inity)?))(?=\s*[,}\]])", re.IGNORECASE)


class _NodeRecovery(Recovery):
    """Nodes as frames.

    Attributes:
        nested: The layout to expect.
        frames: What was kept.
    """

    nested: bool

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.frames: list[pl.DataFrame] = []

    def take(self, begin: int, end: int, spans: list[Span]) -> None:  # noqa: ARG002  (as of Recovery)
        frame, odd, lost = decode(self.text[begin:end], nested=self.nested)
        for slug, count in (("odd-values", odd), ("lost-events", lost)):
            if count:
                self._note(slug, begin, count)
        self.frames.append(frame)

    def mend(self, begin: int, end: int) -> int:
        # Bare inf and nan become strings, as newer observers write them; what stands in strings is left alone.
        parts = _STRING.split(self.text[begin:end].decode("utf-8", "replace"))
        piece = "".join(part if part.startswith('"') else _ENDLESS.sub(r'\1"\2"', part) for part in parts).encode()
        frame, _, lost = loose_frame(mended(piece, key="id"))
        if lost:
            self._note("lost-events", begin, lost)
        if frame.height:
            self.frames.append(frame)
        return frame.height


class HostText(TextWindow):
    """One pass over the text of a host trace.

    Attributes:
        envelope: Top-level entries other than `nodes`, complete after the pass.
    """

    def __init__(self, pieces: Iterator[bytes], damage: Damage, path: str) -> None:
        super().__init__(pieces)
        self.envelope: dict[str, Any] = {}
        self._damage = damage
        self._path = path
        self._nested = True

    def frames(self) -> Iterator[pl.DataFrame]:
        """All nodes, a slice at a time.

        Raises:
            InputError: The file is something else.
        """
        self.open()
        target_size = SLICE
        while self._fill(target_size):
            cut = self._last_boundary(BETWEEN, 4096)
            if cut is None:
                if target_size > _MOST_NODE:
                    raise InputError(
                        f"one node is larger than {_MOST_NODE >> 20} MB", slug="oversized-entry", where=self._path
                    )
                target_size = len(self._text) * 2
                continue
            frames, used, closed = self._decoded(self._text[:cut], last=False)
            yield from frames
            target_size = SLICE if used else len(self._text) * 2
            self._skip(used)
            if closed:
                while self._fill(len(self._text) + SLICE):
                    if len(self._text) > _MOST_HEAD:
                        self._skip(len(self._text) - _MOST_HEAD)
                tail = self._text
                break
            self._skip_blank()
        else:  # the last stretch: nodes, the end of the list, and what stands behind it
            self._skip_blank()
            end = self._end_of_list()
            if end is None:
                body = self._text.rstrip(b" \t\r\n,\0")
                frames, used, _ = self._decoded(body, last=True)
                yield from frames
                if used >= len(body):
                    if "cut-file" not in self._damage.cases:
                        self._damage.note("cut-file", f"byte {self.size} of the text", 0)
                    return
                tail = self._text[used:]
            else:
                frames, _, _ = self._decoded(self._text[:end].rstrip(b" \t\r\n,"), last=True, bounded=True)
                yield from frames
                tail = self._text[end + 1 :]
        self._keep(tail.strip().rstrip(b"\0").removesuffix(b"}"))

    def open(self) -> None:
        """Read what stands before the nodes.

        Raises:
            InputError: The file is something else.
        """
        self._fill(1 << 14)
        unknown = None
        try:
            refuse_start(self._text, self._path, "host trace")
        except InputError as error:
            if not self._text.strip() or kind_of(self._text):
                raise
            unknown = error
        while (match := _NODES.search(self._text)) is None:
            if _EVENTS.search(self._text):
                self._swapped()
            if not self._fill(min(2 * len(self._text), _MOST_HEAD)) or len(self._text) >= _MOST_HEAD:
                break
        if match is None:  # the key of the nodes is damaged
            at = Walk(self._text, NODES).next_entry(0)
            if at is None:
                if unknown is not None:
                    raise unknown
                keys = [entry.group(1).decode("utf-8", "replace") for entry in _ENTRY.finditer(self._text[:4096])]
                shown = ", ".join(f"`{key}`" for key in keys[:4])
                raise InputError(
                    f"this is no host trace but JSON without `nodes`{f' (its keys: {shown})' if shown else ''}",
                    slug="not-a-host-trace",
                    where=self._path,
                )
            self._damage.note("damaged-metadata", f"byte {at} of the text")
            head, behind = at, at
        else:
            head, behind = match.span()
        if unknown is not None:
            self._damage.note("damaged-metadata", "byte 0 of the text")
        if _EVENTS.search(self._text[:head]):
            self._swapped()
        self._keep(self._text[:head].lstrip()[1:])
        self._skip(behind)
        self._skip_blank()
        self._nested = b'"ctrl_deps"' in self._text[:SLICE] or b'"attrs"' in self._text[:SLICE]

    # -- text ---------------------------------------------------------------------------------------------------

    def _fill(self, count: int) -> bool:
        """As in `TextWindow`; False also where the text has ended: what is at hand is all there is."""
        return super()._fill(count) and not self._ended

    # -- nodes --------------------------------------------------------------------------------------------------

    def _decoded(self, text: bytes, *, last: bool, bounded: bool = False) -> tuple[list[pl.DataFrame], int, bool]:
        """Decode a stretch: (frames, bytes used up, whether the list ended in it)."""
        if not text.strip():
            return [], len(text), last
        try:
            frame, odd, lost = decode(text, nested=self._nested)
        except MALFORMED:
            recovery = _NodeRecovery(text, self._base, self._damage, NODES, last=last, bounded=bounded)
            recovery.nested = self._nested
            used, closed = recovery.run()
            return recovery.frames, used, closed
        for slug, count in (("odd-values", odd), ("lost-events", lost)):
            if count:
                self._damage.note(slug, f"byte {self._base} of the text", count)
        return [frame], len(text), last

    def _end_of_list(self) -> int | None:
        """Where the bracket stands that closes the nodes; None where the file is cut before it."""
        at, fallback = len(self._text), None
        for _ in range(_TRIED_ENDS):
            at = self._text.rfind(b"]", 0, at)
            if at < 0:
                break
            tail = _parsed(b'{"":0' + self._text[at + 1 :].rstrip(b" \t\r\n\0"))
            if tail is None:
                continue
            if tail.keys() & _ENVELOPE:
                return at
            try:
                decode(self._text[:at].strip(b" \t\r\n,"), nested=self._nested)
            except MALFORMED:
                # A cut behind the last list of a node looks like the end of the nodes.
                fallback = at if fallback is None and "finish_ts" in self.envelope else fallback
            else:
                return at
        return fallback

    # -- around them --------------------------------------------------------------------------------------------

    def _keep(self, text: bytes) -> None:
        """Store the entries other than nodes; where they are malformed, those that can be read."""
        text = text.strip(b" \t\r\n,")
        if not text:
            return
        entries = _parsed(b"{" + text + b"}")
        if entries is None:
            self._damage.note("damaged-metadata", f"byte {self._base} of the text")
            entries = {}
            for match in _ENTRY.finditer(text):
                value = _parsed(b'{"value":' + match.group(2) + b"}")
                if value is not None:
                    entries[match.group(1).decode("utf-8", "replace")] = value["value"]
        cleaned, odd = clean_json(entries)
        if odd:
            self._damage.note("replaced-text", f"byte {self._base} of the text", odd)
        self.envelope |= cleaned

    def _swapped(self) -> NoReturn:
        raise InputError(
            "this is a Kineto trace (device trace), where a host trace is expected; perhaps the two are swapped",
            slug="swapped-traces",
            where=self._path,
        )


def _parsed(text: bytes) -> dict[str, Any] | None:
    try:
        document = json.loads(text.decode("utf-8", "replace"), strict=False)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None
