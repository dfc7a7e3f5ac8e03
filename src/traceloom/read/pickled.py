"""Plain data out of a pickle, without running anything: lists, dicts, text, numbers.

A pickle may name and call anything, and a few bytes of one may ask for gigabytes. So the file is looked through before
Python's unpickler gets it: only instructions that make plain data pass, with sizes within the file and memo numbers
below its size. What is made then grows with the size of the file alone. Tuples hold small integers and nothing else
(PyTorch's hold two): one that holds tuples again and again takes for ever to look up where it is a key.
"""

from __future__ import annotations

import io
import pickle
import re
from pathlib import Path
from typing import Any, NoReturn

from traceloom.errors import InputError, unreadable
from traceloom.files import read_small
from traceloom.garbage import not_collected

MOST_BYTES = 1 << 30
_LEAST_PER_OBJECT = 8  # bytes of file; whoever needs fewer makes objects out of nothing
_SLACK = 10_000
_MOST_DIGITS = 16  # bytes of an integer
_INTEGER = rb"(?:K.|M..|J.{4})"
_LONG_INTEGERS = b"|".join(re.escape(bytes([size])) + rb".{%d}" % size for size in range(_MOST_DIGITS + 1))
# Instructions of a known length that make little: marks, appending, setting, constants, numbers, the memo up to 255,
# frames, versions; and tuples. Runs are limited since `re` remembers where it could go back to. Making the expression
# takes longer than loading this module, and most traces have no pickle beside them.
_PLAIN = (
    rb"(?:[(aesuN)0\x88\x89]|[hq].|j.{4}|[G\x95].{8}|\x80[\x02-\x05]|\x8a(?:%b)"
    rb"|%b(?:\x85\x94?|%b(?:[\x85\x86]\x94?|%b{1,1000}(?:[\x85-\x87]\x94?)?)?)?){0,1000}"
) % (_LONG_INTEGERS, _INTEGER, _INTEGER, _INTEGER)
_SIZE_BYTES = {0x8C: 1, ord("X"): 4, 0x8D: 8, ord("C"): 1, ord("B"): 4}  # of the length of a text, or of bytes
_TEXTS = (0x8C, ord("X"), 0x8D)
_LONE_SURROGATE = re.compile(rb"\xed[\xa0-\xbf][\x80-\xbf]")
# Instructions that name, make or call objects of classes.
_CODE = {
    ord("c"): "GLOBAL", 0x93: "STACK_GLOBAL", ord("R"): "REDUCE", ord("b"): "BUILD", ord("i"): "INST",
    ord("o"): "OBJ", 0x81: "NEWOBJ", 0x92: "NEWOBJ_EX", 0x82: "EXT1", 0x83: "EXT2", 0x84: "EXT4", ord("P"): "PERSID",
    ord("Q"): "BINPERSID",
}  # fmt: skip


class _Unpickler(pickle.Unpickler):
    """Knows no class and no function, whatever passed before."""

    def find_class(self, module: str, name: str, /) -> NoReturn:
        raise pickle.UnpicklingError(f"{module}.{name}")


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
        raise unreadable(path, error) from error
    return loads(data, str(path))


def loads(data: bytes, where: str = "") -> tuple[Any, int]:
    """The data of a pickle; see `load`."""
    data, replaced = _checked(data, where)
    try:
        with not_collected():
            return _Unpickler(io.BytesIO(data)).load(), replaced
    except Exception as error:  # instructions that do not fit together fail in many ways
        raise _damaged("its instructions do not fit together", where) from error


def _checked(data: bytes, where: str) -> tuple[bytes, int]:
    """The pickle with valid texts, and how many of them were replaced.

    Raises:
        InputError: `pickle-with-code`, `pickle-damaged`.
    """
    if data[:1] != b"\x80":
        raise _damaged("it does not begin as one", where)
    most, made, at = len(data) // _LEAST_PER_OBJECT + _SLACK, 0, 0
    replaced: dict[int, bytes] = {}
    names, plain = [b"", b""], re.compile(_PLAIN, re.DOTALL)
    while True:
        begin = at
        at = plain.match(data, at).end()  # type: ignore[union-attr]  # it matches nothing, too
        if at == len(data):
            raise _damaged("it is cut", where, at)
        code = data[at]
        if code == ord("."):
            break
        if code in (ord("}"), ord("]")):
            at += 1
        elif code in _SIZE_BYTES:
            low = at + 1 + _SIZE_BYTES[code]
            at = low + int.from_bytes(data[at + 1 : low], "little")
            if at > len(data):
                raise _damaged("it is cut", where, len(data))
            if code in _TEXTS:
                names = [names[1], data[low : min(at, low + 80)]]
                valid, count = _LONE_SURROGATE.subn(b"\xef\xbf\xbd", data[low:at])  # U+FFFD, as long
                if count:
                    replaced[low] = valid
        elif code == ord("r") and int.from_bytes(data[at + 1 : at + 5], "little") < len(data):
            at += 5
            continue
        elif code in _CODE:
            # Say what is asked for, as far as it can be said harmlessly.
            name = _CODE[code].encode()
            if code == ord("c"):
                name = b".".join(data[at + 1 : at + 200].split(b"\n")[:2])
            elif code == 0x93:
                name = b".".join(names)
            shown = "".join(letter if letter.isprintable() else "?" for letter in name.decode("utf-8", "replace")[:80])
            raise InputError(
                f"the pickle asks for code{f' ({shown})' if shown else ''}, which no snapshot needs; "
                "nothing of it was run",
                slug="pickle-with-code",
                where=where,
                hint="do not open this file with anything else, unless you trust who made it",
            )
        elif at == begin:
            raise _damaged(f"instruction {code} belongs to no plain data", where, at)
        else:
            continue
        made += 1
        if made > most:
            raise _damaged("it makes more objects than its size allows", where, at)
        at += data[at : at + 1] == b"\x94"  # what was made gets the next number of the memo
    if replaced:
        whole = bytearray(data)
        for low, valid in replaced.items():
            whole[low : low + len(valid)] = valid
        data = bytes(whole)
    return data, len(replaced)


def _damaged(why: str, where: str, at: int | None = None) -> InputError:
    return InputError(
        f"the pickle cannot be read: {why}{'' if at is None else f' (byte {at})'}",
        slug="pickle-damaged",
        where=where,
        hint="write the snapshot again",
    )
