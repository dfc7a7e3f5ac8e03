"""Chakra messages in JSON files, read and written without holding the file.

Written: one object with `metadata` and `nodes`, or JSON lines (the metadata, then a node per line). Read: those, the
concatenated objects that the `jsonizer` of the Chakra tools writes, and the JSON of its feeder (`workload_graph`).
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from traceloom.chakra.json_messages import from_feeder, from_object, to_object
from traceloom.chakra.schema import GlobalMetadata, Node
from traceloom.errors import InputError
from traceloom.model.notice import Notice
from traceloom.packed import UnpackedFile, open_file

_MOST_TEXT = 1 << 28  # characters of one value
_BLANK = " \t\r\n"
_WORDS = ("true", "false", "null", "NaN", "Infinity", "-Infinity")
_ESCAPE = len("\\uD834\\uDD1E")
_FEEDER = "workload_graph"


class JsonReader:
    """Reads one JSON file of Chakra messages, once; as `traceloom.chakra.stream.EtReader`.

    Attributes:
        metadata: The file's metadata; empty where it has none.
        notices: What is wrong with the file, complete after the last node.

    Raises:
        InputError: `unreadable`, `empty-file`, `not-chakra`; `chakra-json`: no JSON, or an object that is no message;
            `chakra-cut`.
    """

    def __init__(self, path: str | Path, *, strict: bool = False) -> None:
        self.path = Path(path)
        self.notices: list[Notice] = []
        self._strict = strict
        self._handle = open_file(self.path)
        try:
            self._text = _Text(self._handle, str(self.path))
            self._next, self.metadata = self._open()
        except BaseException:
            self._handle.close()
            raise

    def __enter__(self) -> JsonReader:  # noqa: PYI034  (typing.Self is younger than Python 3.10)
        return self

    def __exit__(self, *_: object) -> None:
        self._handle.close()

    def __iter__(self) -> Iterator[Node]:
        """The nodes, in the order of the file."""
        number = 0
        try:
            for number, node in enumerate(self._next, 1):  # noqa: B007  (the notice says the number)
                yield node
        except _CutError as error:
            message = f"{error}; {number:,} nodes before that are whole"
            if self._strict:
                raise self._refused(str(error), "chakra-cut") from error
            self.notices.append(Notice("chakra-cut", "error", message, where=str(self.path)))

    def _refused(self, message: str, slug: str) -> InputError:
        return InputError(message, slug=slug, where=str(self.path))

    def _no_chakra(self, members: dict[str, Any]) -> InputError:
        return InputError(
            f"this is JSON with `{next(iter(members))}`, but no Chakra trace",
            slug="not-chakra",
            where=str(self.path),
            hint="traces of a profiler become a graph with `traceloom link`",
        )

    def _open(self) -> tuple[Iterator[Node], GlobalMetadata]:
        """The nodes and the metadata; what kind of JSON it is, its first object says."""
        text, where = self._text, f"{self.path}, metadata"
        first = text.peek()
        if not first:
            raise self._refused("the file is empty", "empty-file")
        if first not in "[{":
            raise self._refused("this is neither JSON nor a Chakra trace", "not-chakra")
        text.take()
        if first == "[":
            return self._nodes(text.items("]")), GlobalMetadata()
        members: dict[str, Any] = {}
        try:
            while (key := text.key()) is not None:
                if key in {"nodes", _FEEDER} and text.peek() == "[":
                    text.take()
                    return self._listed(key, members)
                members[key] = text.value()
        except _CutError as error:
            raise self._refused(str(error), "chakra-cut") from error
        # Objects one after the other; the first is the metadata, unless it is a node.
        if members.keys() & {"id", "name", "type", "dataDeps", "data_deps"}:
            message = "the file begins with a node, not with metadata"
            self.notices.append(Notice("chakra-no-metadata", "warning", message, where=str(self.path)))
            return self._nodes(chain([members], text.values())), GlobalMetadata()
        if "metadata" in members:
            return iter(()), from_object(members["metadata"], GlobalMetadata, where)
        if members and not members.keys() <= {"version", "attr", "unknown_fields", "unknownFields"}:
            raise self._no_chakra(members)
        return self._nodes(text.values()), from_object(members, GlobalMetadata, where)

    def _listed(self, key: str, members: dict[str, Any]) -> tuple[Iterator[Node], GlobalMetadata]:
        """One object that holds the nodes in a list; what stands behind the list is read when it is reached."""
        values = self._text.items("]")
        if key == _FEEDER:
            metadata = GlobalMetadata()
            metadata.attr.add(name="schema", string_val="feeder JSON")
            for name, value in members.items():
                metadata.attr.add(name=name, string_val=value if isinstance(value, str) else json.dumps(value))
            return (from_feeder(value, f"{self.path}, node {n}") for n, value in enumerate(values)), metadata
        held = members.pop("metadata", None)
        if "schema" in members:  # the host trace of PyTorch
            raise self._no_chakra(members)
        if members:
            raise self._refused(f"`{next(iter(members))}` beside the nodes is not known", "chakra-json")
        if held is None:
            self.notices.append(
                Notice("chakra-no-metadata", "warning", "no metadata stands before the nodes", where=str(self.path))
            )
        metadata = from_object(held or {}, GlobalMetadata, f"{self.path}, metadata")
        return self._nodes(values, inside=True), metadata

    def _nodes(self, values: Iterable[Any], *, inside: bool = False) -> Iterator[Node]:
        """The nodes of values; with `inside` nothing may follow in the object that holds their list."""
        for number, value in enumerate(values):
            yield from_object(value, Node, f"{self.path}, node {number}")
        if inside and (key := self._text.key()) is not None:
            raise self._refused(f"`{key}` behind the nodes is not known; metadata stands before them", "chakra-json")


class _CutError(Exception):
    """The text ends inside a value."""


class _Text:
    """JSON text, value by value; holds the value at hand and a piece of what follows."""

    def __init__(self, handle: BinaryIO, where: str) -> None:
        self._pieces = UnpackedFile(handle)
        self._source = iter(self._pieces)
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")(errors="strict")
        self._scan = json.JSONDecoder().raw_decode
        self._where = where
        self._text = ""
        self._at = 0
        self._done = False

    def peek(self) -> str:
        """The next character that is no blank; empty at the end."""
        while True:
            rest = len(self._text)
            while self._at < rest and self._text[self._at] in _BLANK:
                self._at += 1
            if self._at < rest:
                return self._text[self._at]
            if not self.more():
                return ""

    def take(self) -> str:
        """The character that `peek` saw."""
        self._at += 1
        return self._text[self._at - 1]

    def value(self) -> Any:
        """The next value, whole.

        Raises:
            InputError: `chakra-json`.
            _CutError: The text ends inside it.
        """
        if not self.peek():
            raise self.cut()
        while True:
            try:
                decoded, end = self._scan(self._text, self._at)
            except RecursionError as error:
                raise self.wrong("a value is nested too deeply") from error
            except ValueError as error:
                offset = error.pos - self._at if isinstance(error, json.JSONDecodeError) else 0
                if self.more():
                    continue
                # At the end of the text: cut, or no JSON (`offset` into the value).
                rest = self._text[self._at + offset :].rstrip()
                in_text = isinstance(error, json.JSONDecodeError) and (
                    error.msg.startswith("Unterminated string")
                    or (error.msg.startswith("Invalid") and len(rest) < _ESCAPE)
                )
                # An empty rest begins each of the words.
                unfinished = in_text or any(word.startswith(rest) for word in _WORDS)
                raise (self.cut() if unfinished else self.wrong(f"the text is no JSON: {error}")) from error
            # A number at the end of the piece may go on in the next one.
            if end == len(self._text) and self._text[end - 1] not in '}]"' and self.more():
                continue
            self._at = end
            return decoded

    def key(self) -> str | None:
        """The next key of an object; None at its end."""
        mark = self.peek()
        if mark == ",":
            self.take()
            mark = self.peek()
        if mark == "}":
            self.take()
            return None
        name = self.value()
        if not isinstance(name, str):
            raise self.wrong("a key is no text")
        if not self.peek():
            raise self.cut()
        if self.take() != ":":
            raise self.wrong(f"no value follows the key `{name}`")
        self.peek()
        return name

    def items(self, end: str) -> Iterator[Any]:
        """The values of a list that was begun, up to its end."""
        while True:
            mark = self.peek()
            if not mark:
                raise self.cut()
            if mark == ",":
                self.take()
            elif mark == end:
                self.take()
                return
            else:
                yield self.value()

    def values(self) -> Iterator[Any]:
        """The values up to the end of the text."""
        while self.peek():
            yield self.value()

    def more(self) -> bool:
        """Another piece of text behind what is held; False at the end."""
        if self._done:
            return False
        if len(self._text) - self._at > _MOST_TEXT:
            raise self.wrong(f"a value is longer than {_MOST_TEXT:,} characters")
        piece = next(self._source, None)
        self._done = piece is None
        try:
            fresh = self._decoder.decode(piece or b"", final=self._done)
        except UnicodeDecodeError as error:
            raise self.wrong("the text is not UTF-8") from error
        self._text, self._at = self._text[self._at :] + fresh, 0
        return bool(fresh) or not self._done

    def cut(self) -> _CutError:
        return _CutError(self._pieces.fault or "the JSON text ends inside a value")

    def wrong(self, message: str) -> InputError:
        return InputError(message, slug="chakra-json", where=self._where)


def write_json(handle: BinaryIO, metadata: GlobalMetadata, nodes: Iterable[Node]) -> None:
    """One JSON object: `metadata`, and `nodes`, one per line."""
    encode = msgspec.json.Encoder().encode
    handle.write(b'{"metadata": ' + encode(to_object(metadata)) + b',\n"nodes": [')
    separator = b"\n"
    for node in nodes:
        handle.write(separator + encode(to_object(node)))
        separator = b",\n"
    handle.write(b"\n]}\n")


def write_lines(handle: BinaryIO, metadata: GlobalMetadata, nodes: Iterable[Node]) -> None:
    """JSON lines: the metadata, then one node per line."""
    encode = msgspec.json.Encoder().encode
    handle.write(encode(to_object(metadata)) + b"\n")
    handle.writelines(encode(to_object(node)) + b"\n" for node in nodes)
