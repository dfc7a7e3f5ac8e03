"""How an answer stands in the snapshot: what varies is masked, what is long is a digest with its
structure.

The structure of documents is kept apart from their contents (`Shapes`), once for all documents of
one kind, so that a key that comes or goes is one line.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import re
import socket
import time
import zipfile
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import polars as pl

import traceloom

TEXTS = "SURFACES_TEXTS"
"""The variable with the folder that keeps each content that a digest stands for."""
WHOLE_TEXT = (
    24  # lines of a text that are kept as they are; of longer ones only the first of each paragraph
)
WHOLE_JSON = 1_500  # characters of a document that is kept as it is
MEASURED_KEYS = frozenset({"pass_ns"})
"""Keys of documents whose values were measured."""

_TYPE_NAMES = {
    dict: "object",
    list: "list",
    str: "text",
    bool: "bool",
    int: "number",
    float: "number",
}
_PARAGRAPHS = 40  # of a longer text, as that of a program, only the digest is kept
_LONG = 200  # characters of a line that are shown
_NEAR_NS = 2 * 86_400 * 10**9  # so far from now it is the time of this run
_DIGITS = 9  # of a number with a fraction: the last ones depend on the processor
_FRACTION = re.compile(r"(?<![\d.\w])\d+\.\d{7,}(?:e-?\d+)?(?!\d)")
_UNIX = re.compile(r"(?<![\w.])1[5-9]\d{8}(?:\d{9})?(?:\.\d+)?(?![\d.])")
_DATE = re.compile(
    r"\b(20\d\d-\d\d-\d\d)(?:([T ])(\d\d:\d\d(?::\d\d(?:\.\d+)?)?)(?:Z| UTC|[+-]\d\d:\d\d)?)?"
)
_MASKS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"\blocal-\d+(?=@)"), "local-<port>"),
    (re.compile(r"\b[0-9a-f]{64}\b"), "<sha256>"),
    (re.compile(r"\bwhsec_[\w+/=]+"), "whsec_<secret>"),
    (re.compile(r"\btl[a-z]?_[\w-]{16,}"), "<token>"),
    (re.compile(r"(127\.0\.0\.1|localhost|\[::1\]):\d+"), r"\1:<port>"),
    (re.compile(r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b"), "<uuid>"),
    (re.compile(r"\b[\d.,]+ (ns|µs|ms|s|min|h) ago\b"), "<ago>"),
    (re.compile(r"(?:/[\w.-]+)*/traceloom-[a-z0-9_]{8}(?![\w-])"), "<folder>"),
    (re.compile(r"(page made in|it took) [\d.,]+ [nµm]?s\b"), r"\1 <time>"),
    (re.compile(r"(one re-timing pass takes) [\d.,]+ [nµm]?s"), r"\1 <time>"),
    # How well a file is compressed depends on the processor.
    (re.compile(r"(?m)^(.*Wrote .*[( ])[\d.,]+ [kMG]?B\)"), r"\1<size>)"),
)
Masks = Sequence[tuple[re.Pattern[str], str]]


class Masker:
    """Takes out of texts and documents what differs from run to run.

    Args:
        folder: Where the answers are made; paths below it begin with `$HERE`.
        more: What else is taken out of texts.
        keys: Of documents whose values differ from run to run, beside `MEASURED_KEYS`.
    """

    def __init__(self, folder: Path, more: Masks = (), keys: frozenset[str] = frozenset()) -> None:
        self._keys = MEASURED_KEYS | keys
        self._now_ns = time.time_ns()
        names = {
            str(folder): "$HERE",
            str(folder.resolve()): "$HERE",
            str(folder.parent): "$ABOVE",
            str(Path.home()): "$HOME",
        }
        self._fixed = sorted(
            ((k, v) for k, v in names.items() if len(k) > 3), key=lambda pair: -len(pair[0])
        )
        self._masks = [
            (re.compile(rf"(?<![\w.]){re.escape(traceloom.__version__)}(?![\w.])"), "<version>"),
            (re.compile(rf"(?<![\w-]){re.escape(socket.gethostname())}(?![\w-])"), "<host>"),
            *_MASKS,
            *more,
        ]

    def text(self, text: str) -> str:
        """A text."""
        for path, name in self._fixed:
            text = text.replace(path, name)
        for pattern, name in self._masks:
            text = pattern.sub(name, text)
        text = _UNIX.sub(lambda match: "<now>" if self._is_now(float(match[0])) else match[0], text)
        text = _DATE.sub(self._date, text)
        return _FRACTION.sub(lambda match: f"{_rounded(float(match[0])):.{_DIGITS}g}", text)

    def _date(self, match: re.Match[str]) -> str:
        try:
            day = datetime.fromisoformat(match[1]).replace(tzinfo=timezone.utc)
        except ValueError:
            return match[0]
        return ("<time>" if match[3] else "<day>") if self._is_now(day.timestamp()) else match[0]

    def _is_now(self, number: float) -> bool:
        scale = 1 if abs(number) > 10**17 else 10**9
        return abs(number) > 10**9 and abs(number * scale - self._now_ns) < _NEAR_NS

    def document(self, value: Any, key: str = "") -> Any:
        """A document of JSON."""
        if key in self._keys and isinstance(value, (int, float, str)) and value:
            return f"<{type(value).__name__}>"
        if key in {"uid", "UID"} and str(value) == str(os.getuid()):
            return "<uid>"
        if key == "files" and "files" in self._keys and isinstance(value, dict):  # name -> bytes
            return dict.fromkeys(value, "<int>")
        if isinstance(value, dict):
            if str(value.get("output", "")).endswith(".gz") and "bytes" in value:
                value = {**value, "bytes": "<int>"}  # two packings may differ by a byte
            return {
                self.text(str(name)): self.document(inner, str(name))
                for name, inner in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [self.document(inner) for inner in value]
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, bool) or value is None:
            return value
        if self._is_now(value):
            return "<now>"
        return _rounded(value) if isinstance(value, float) else value


def _rounded(number: float) -> float:
    # A little more first, so that what lies half-way is rounded alike.
    return float(f"{number * (1 + 3e-11):.{_DIGITS}g}")


def digest(content: str | bytes) -> str:
    """Ten characters that stand for a content, which is kept where `TEXTS` names a folder."""
    raw = content.encode() if isinstance(content, str) else content
    name = hashlib.sha256(raw).hexdigest()[:10]
    if TEXTS in os.environ:
        Path(os.environ[TEXTS], name).write_bytes(raw)
    return name


class Shapes:
    """Which keys documents of a kind have, and values of which types: all that was ever seen, kind
    by kind.

    Args:
        typed: Whether types count: what is measured is null in some runs.
    """

    def __init__(self, *, typed: bool = True) -> None:
        self.typed = typed
        self.kinds: dict[str, dict[str, set[str]]] = {}

    def add(self, kind: str, value: Any, path: str = "") -> None:
        """One more document of a kind."""
        name = _TYPE_NAMES.get(type(value), "null")
        self.kinds.setdefault(kind, {}).setdefault(path or ".", set()).add(name)
        for key, inner in value.items() if isinstance(value, dict) else ():
            self.add(
                kind,
                inner,
                f"{path}.{key}" if re.fullmatch(r"[a-zA-Z_]\w*", key) else f"{path}{{}}",
            )
        for inner in value if isinstance(value, list) else ():
            self.add(kind, inner, f"{path}[]")

    def lines(self) -> list[str]:
        """All of them."""
        lines = []
        for kind, paths in sorted(self.kinds.items()):
            lines.append(f"== shape of {kind}")
            shown = (
                (path, "|".join(sorted(types)) if self.typed else "")
                for path, types in sorted(paths.items())
            )
            lines += [f"{path}\t{types}".rstrip() for path, types in shown]
            lines.append("")
        return lines


class Describer:
    """Describes answers and files, and collects the shapes of documents.

    Args:
        masker: What takes out what varies.
        measured: Numbers were measured, so that only structures and words count.
    """

    def __init__(self, masker: Masker, *, measured: bool = False) -> None:
        self.masker, self.measured, self.shapes = masker, measured, Shapes(typed=not measured)

    def digest(self, content: str | bytes) -> str:
        """Of a content, where it is the same in every run."""
        return "measured" if self.measured else digest(content)

    def words(self, text: str) -> str:
        """A text, masked; without numbers where they were measured."""
        text = self.masker.text(text)
        return (
            re.sub(r"\d+(?:[.,\u202f]\d+)*(?: (?:[nµm]?s|[kMG]?B|%)(?!\w))?", "#", text)
            if self.measured
            else text
        )

    def text(self, text: str) -> Iterator[str]:
        """A text that somebody reads."""
        lines = [line.rstrip() for line in self.words(text).splitlines()]
        if len(lines) <= WHOLE_TEXT:
            yield from (_cut(line) for line in lines)
            return
        paragraphs = list(_paragraphs(lines))
        if len(paragraphs) > _PARAGRAPHS:
            yield f"{self.digest(chr(10).join(lines))} {_cut(lines[0], 90)}" + self._more(
                len(lines) - 1
            )
            return
        for paragraph in paragraphs:
            own = self.digest("\n".join(paragraph))
            yield f"{own} {_cut(paragraph[0].strip(), 90)}{self._more(len(paragraph) - 1)}"

    def _more(self, lines: int) -> str:
        return f"  (+{lines} lines)" if lines and not self.measured else ""

    def json(self, text: str, kind: str) -> Iterator[str]:
        """A document."""
        value = self.masker.document(json.loads(text))
        if self.measured:
            if isinstance(value, dict):  # what happened in the meantime is another thing each time
                value = {
                    k: [] if k in {"traceEvents", "nodes"} else inner for k, inner in value.items()
                }
            self.shapes.add(kind, value)
            yield f"document of {kind}"
            return
        whole = json.dumps(value, ensure_ascii=False)
        if len(whole) <= WHOLE_JSON:
            yield whole
            return
        self.shapes.add(kind, value)
        for key, inner in value.items() if isinstance(value, dict) else [("(all)", value)]:
            text = json.dumps(inner, ensure_ascii=False)
            size = f" {len(inner)}" if isinstance(inner, (list, dict)) else ""
            yield (
                f"  {key}: {text}"
                if len(text) <= 80
                else f"  {key}: {digest(text)} {_TYPE_NAMES[type(inner)]}{size}"
            )

    def printed(self, text: str, kind: str) -> Iterator[str]:
        """What a command printed, or a service answered."""
        if text.lstrip()[:1] in {"{", "["}:
            try:
                yield from list(self.json(text, kind))
            except ValueError:
                yield from self.text(text)
        elif text.lstrip()[:9].lower() == "<!doctype":
            yield from self.html(text)
        else:
            yield from self.text(text)

    def html(self, text: str) -> Iterator[str]:
        """A page: its headings, its ids, and a digest of all of it."""
        text = self.words(text)
        page = _Page()
        page.feed(text)
        yield f"page {self.digest(text)}"
        yield from (f"  {_cut(line, 110)}" for line in page.headings)
        line = "  ids:"
        for name in page.ids:
            if len(line) + len(name) > 115:
                yield line
                line = "   "
            line += f" {name}"
        yield line

    def file(self, path: Path, kind: str) -> Iterator[str]:
        """The content of a file."""
        content, name = path.read_bytes(), path.name.removesuffix(".gz")
        if content[:2] == b"\x1f\x8b":
            content = gzip.decompress(content)
        yield from self.content(content, name.rpartition(".")[2], kind)

    def content(self, content: bytes, ending: str, kind: str) -> Iterator[str]:
        """The same, of its bytes, by the ending of its name."""
        if zipfile.is_zipfile(io.BytesIO(content)):
            archive = zipfile.ZipFile(io.BytesIO(content))
            for name in sorted(archive.namelist()):
                yield f"  {name}"
                yield from self.content(
                    archive.read(name), name.rpartition(".")[2], f"{kind} {ending} {name}"
                )
        elif ending in {"csv", "parquet"}:
            if ending == "parquet":
                frame = pl.read_parquet(io.BytesIO(content))
                heads = " ".join(f"{column}:{of}" for column, of in frame.schema.items())
                text, height = (
                    json.dumps(self.masker.document(frame.to_dicts()), default=str),
                    frame.height,
                )
            else:
                text = self.masker.text(content.decode())
                heads, height = text.partition("\n")[0].strip(), text.count("\n") - 1
            yield f"  {heads}"
            yield f"  {self.digest(text)}" + ("" if self.measured else f" {height} rows")
        elif not _is_text(content):
            yield f"  {self.digest(content)}" + ("" if self.measured else f" {len(content)} bytes")
        elif ending == "html":
            yield from self.html(content.decode())
        elif content.lstrip()[:1] in (b"{", b"[") and ending == "json":
            yield from self.json(content.decode(), f"{kind} .{ending}")
        else:
            yield from self.text(content.decode())


def _cut(line: str, most: int = _LONG) -> str:
    return line if len(line) <= most else f"{line[:most]}… {digest(line)}"


def _paragraphs(lines: list[str]) -> Iterator[list[str]]:
    paragraph: list[str] = []
    for line in [*lines, ""]:
        if line:
            paragraph.append(line)
        elif paragraph:
            yield paragraph
            paragraph = []


def _is_text(content: bytes) -> bool:
    try:
        return "\0" not in content.decode()
    except UnicodeDecodeError:
        return False


class _Page(HTMLParser):
    """Headings and ids of a page."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.headings: list[str] = []
        self.ids: list[str] = []
        self._open = self._drawing = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "svg":
            self._drawing = tag
        self.ids += [value for name, value in attrs if name == "id" and value and not self._drawing]
        if tag in {"title", "h1", "h2", "h3", "th"} and not self._drawing:
            self._open = tag
            self.headings.append(f"{tag}: ")

    def handle_endtag(self, tag: str) -> None:
        self._open = "" if tag == self._open else self._open
        self._drawing = "" if tag == self._drawing else self._drawing

    def handle_data(self, data: str) -> None:
        if self._open:
            self.headings[-1] += " ".join(data.split())
