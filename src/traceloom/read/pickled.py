"""Plain data out of a pickle, without running anything: lists, dicts, tuples, text, numbers.

Python's own unpickler calls what a pickle names. This reader knows no instruction that names or calls anything, so that
a file of a stranger can at worst be refused. What it takes grows with the size of the file alone.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from traceloom.errors import InputError
from traceloom.files import read_small
from traceloom.plain_text import clean

MOST_BYTES = 1 << 30
_KEYS = {str, int, bytes, float, bool, type(None)}
_TURN = 1 << 14  # instructions between two looks at what was made
_LEAST_PER_OBJECT = 8  # bytes of file; whoever needs fewer makes objects out of nothing
_SLACK = 10_000
_MOST_WAITING = 1 << 20  # values on the stack; writers put away a thousand at a time
_MOST_DIGITS = 16  # bytes of an integer
_LONG_GETS = re.compile(rb"(?:j.{4})+", re.DOTALL)
_SHORT_GETS = re.compile(rb"(?:h.)+", re.DOTALL)
# Instructions that name, make or call objects of classes.
_CODE = {
    ord("c"): "GLOBAL", 0x93: "STACK_GLOBAL", ord("R"): "REDUCE", ord("b"): "BUILD", ord("i"): "INST",
    ord("o"): "OBJ", 0x81: "NEWOBJ", 0x92: "NEWOBJ_EX", 0x82: "EXT1", 0x83: "EXT2", 0x84: "EXT4", ord("P"): "PERSID",
    ord("Q"): "BINPERSID",
}  # fmt: skip


def load(path: str | Path) -> tuple[Any, int]:
    """The data of a pickle file, and how many texts in it were invalid (halves of surrogate pairs) and replaced.

    Raises:
        InputError: `unreadable`; `pickle-too-large`; `pickle-with-code`: it asks for a class or a function;
            `pickle-damaged`: it is cut, no pickle, or holds what plain data does not need.
    """
    file_path = Path(path)
    try:
        size = file_path.stat().st_size
        if size > MOST_BYTES:
            raise InputError(
                f"the pickle has {size / 1e9:.1f} GB; up to {MOST_BYTES / 1e9:.1f} GB are read",
                slug="pickle-too-large",
                where=str(path),
                hint="record a shorter history (max_entries of torch.cuda.memory._record_memory_history)",
            )
        data = read_small(file_path, MOST_BYTES)
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(f"the file cannot be read: {reason.lower()}", slug="unreadable", where=str(path)) from error
    return loads(data, str(path))


def loads(data: bytes, where: str = "") -> tuple[Any, int]:
    """The data of a pickle; see `load`."""
    reader = _Reader(data, where)
    try:
        return reader.run(), reader.replaced
    except (IndexError, KeyError, TypeError, ValueError, struct.error, OverflowError) as error:
        raise reader.damaged("it is cut, or its instructions do not fit together") from error


class _Reader:
    """A stack machine for the instructions that make plain data."""

    def __init__(self, data: bytes, where: str) -> None:
        self.data, self.where = data, where
        self.at = 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.made = 0
        self.replaced = 0  # texts that were none

    def run(self) -> Any:
        data, handlers = self.data, _HANDLERS
        most = len(data) // _LEAST_PER_OBJECT + _SLACK
        if data[:1] != b"\x80":
            raise self.damaged("it does not begin as one")
        while True:
            for _ in range(_TURN):
                code = data[self.at]
                self.at += 1
                if code == 0x2E:
                    return self.stack.pop()
                handler = handlers.get(code)
                if handler is None:
                    self.refuse(code)
                handler(self)
            if self.made > most or len(self.memo) > most or len(self.stack) > _MOST_WAITING:
                raise self.damaged("it makes more objects than its size allows")

    def damaged(self, why: str) -> InputError:
        return InputError(
            f"the pickle cannot be read: {why} (byte {self.at})",
            slug="pickle-damaged",
            where=self.where,
            hint="write the snapshot again",
        )

    def refuse(self, code: int) -> NoReturn:
        if code not in _CODE:
            raise self.damaged(f"instruction {code} belongs to no plain data")
        name = self._named(code)
        raise InputError(
            f"the pickle asks for code{f' ({name})' if name else ''}, which no snapshot needs; nothing of it was run",
            slug="pickle-with-code",
            where=self.where,
            hint="do not open this file with anything else, unless you trust who made it",
        )

    def _named(self, code: int) -> str:
        """What is asked for, as far as it can be told harmlessly."""
        if code == ord("c"):
            parts = self.data[self.at : self.at + 200].split(b"\n")[:2]
            text = ".".join(part.decode("utf-8", "replace") for part in parts)
        elif code == 0x93 and len(self.stack) > 1:
            text = f"{self.stack[-2]}.{self.stack[-1]}"
        else:
            text = _CODE[code]
        return "".join(letter if letter.isprintable() else "?" for letter in text[:80])

    def take(self, size: int) -> bytes:
        at, self.at = self.at, self.at + size
        if self.at > len(self.data):
            raise IndexError
        return self.data[at : self.at]

    def number(self, layout: str, size: int) -> Any:
        return struct.unpack(layout, self.take(size))[0]

    def marked(self) -> list[Any]:
        """Everything above the last mark, taken off the stack."""
        low = self.marks.pop()
        items = self.stack[low:]
        del self.stack[low:]
        return items

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def make(self, value: Any) -> None:
        self.made += 1
        self.stack.append(value)


def _get(self: _Reader, runs: re.Pattern[bytes], layout: str) -> None:
    """One or many objects from the memo; stacks are long lists of these."""
    match = runs.match(self.data, self.at - 1)
    if match is None:
        raise IndexError
    self.at = match.end()
    memo = self.memo
    self.stack.extend([memo[number] for (number,) in struct.iter_unpack(layout, match[0])])


def _put(self: _Reader, number: int) -> None:
    self.memo[number] = self.stack[-1]


def _setitems(self: _Reader) -> None:
    items = self.marked()
    target = self.stack[-1]
    if type(target) is not dict or len(items) % 2:
        raise TypeError
    target.update(_dict_of(items))


def _setitem(self: _Reader) -> None:
    value, key = self.stack.pop(), self.stack.pop()
    if type(self.stack[-1]) is not dict or type(key) not in _KEYS:
        raise TypeError
    self.stack[-1][key] = value


def _append(self: _Reader, items: list[Any]) -> None:
    if type(self.stack[-1]) is not list:
        raise TypeError
    self.stack[-1].extend(items)


def _tuple(self: _Reader, size: int) -> None:
    items = tuple(self.stack[-size:])
    if len(items) != size:
        raise IndexError
    del self.stack[-size:]
    self.make(items)


def _long(self: _Reader, size: int) -> None:
    if not 0 <= size <= _MOST_DIGITS:
        raise ValueError
    self.push(int.from_bytes(self.take(size), "little", signed=True))


def _text(self: _Reader, size: int) -> None:
    text = self.take(size).decode("utf-8", "surrogatepass")
    plain = clean(text)
    self.replaced += plain != text
    self.make(plain)


def _dict_of(items: list[Any]) -> dict[Any, Any]:
    # A tuple that holds tuples again and again takes for ever to look up.
    if not {*map(type, items[::2])} <= _KEYS:
        raise TypeError
    return dict(zip(items[::2], items[1::2], strict=True))


def _version(self: _Reader) -> None:
    if not 2 <= self.take(1)[0] <= 5:
        raise ValueError


def _frame(self: _Reader) -> None:
    """Frames only help reading ahead; a length beyond the file is a cut file."""
    if self.number("<Q", 8) > len(self.data) - self.at:
        raise IndexError


_HANDLERS: dict[int, Callable[[_Reader], None]] = {
    0x80: _version,
    0x95: _frame,
    ord("("): lambda self: self.marks.append(len(self.stack)),
    ord("0"): lambda self: self.stack.pop(),
    ord("1"): lambda self: self.marked().clear(),
    ord("N"): lambda self: self.push(None),
    0x88: lambda self: self.push(True),
    0x89: lambda self: self.push(False),
    ord("J"): lambda self: self.push(self.number("<i", 4)),
    ord("K"): lambda self: self.push(self.take(1)[0]),
    ord("M"): lambda self: self.push(self.number("<H", 2)),
    0x8A: lambda self: _long(self, self.take(1)[0]),
    0x8B: lambda self: _long(self, self.number("<i", 4)),
    ord("G"): lambda self: self.push(self.number(">d", 8)),
    0x8C: lambda self: _text(self, self.take(1)[0]),
    ord("X"): lambda self: _text(self, self.number("<I", 4)),
    0x8D: lambda self: _text(self, self.number("<Q", 8)),
    ord("C"): lambda self: self.make(self.take(self.take(1)[0])),
    ord("B"): lambda self: self.make(self.take(self.number("<I", 4))),
    ord("]"): lambda self: self.make([]),
    ord(")"): lambda self: self.push(()),
    ord("}"): lambda self: self.make({}),
    ord("l"): lambda self: self.make(self.marked()),
    ord("t"): lambda self: self.make(tuple(self.marked())),
    ord("d"): lambda self: self.make(_dict_of(self.marked())),
    ord("a"): lambda self: _append(self, [self.stack.pop()]),
    ord("e"): lambda self: _append(self, self.marked()),
    ord("s"): _setitem,
    ord("u"): _setitems,
    0x85: lambda self: _tuple(self, 1),
    0x86: lambda self: _tuple(self, 2),
    0x87: lambda self: _tuple(self, 3),
    ord("h"): lambda self: _get(self, _SHORT_GETS, "<xB"),
    ord("j"): lambda self: _get(self, _LONG_GETS, "<xI"),
    ord("q"): lambda self: _put(self, self.take(1)[0]),
    ord("r"): lambda self: _put(self, self.number("<I", 4)),
    0x94: lambda self: _put(self, len(self.memo)),
}
