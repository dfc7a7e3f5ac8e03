"""Reads pickles of plain data without running anything in them.

A pickle may name and call anything, and a few bytes of one may request gigabytes. So the file is
checked before Python's unpickler gets it: only instructions that build plain data pass, with sizes
within the file and memo numbers in their order. The result then grows only with the size of the
file. Tuples may hold small integers, or be pairs of texts (as PyTorch's are): deeply nested tuples
would take forever to hash as a key.
"""

import io
import pickle
import re
from pathlib import Path
from typing import Any, NoReturn

from traceloom.errors import InputError, unreadable
from traceloom.system.files import read_small
from traceloom.system.process import pause_gc

MAX_BYTES = 1 << 30
# Bytes of file; with fewer bytes per object, a pickle would create objects out of nothing.
_MIN_BYTES_PER_OBJECT = 8
_EXTRA_OBJECTS = 10_000
_MAX_INTEGER_BYTES = 16  # bytes of an integer
_INTEGER = rb"(?:K.|M..|J.{4})"
_LONG_INTEGERS = b"|".join(
    re.escape(bytes([size])) + rb".{%d}" % size for size in range(_MAX_INTEGER_BYTES + 1)
)
_GET = rb"(?:h.|j.{4})"  # an object of the memo
# Instructions of a known length that build little: marks, appending, setting, constants, numbers,
# objects of the memo that are no part of a pair, frames, versions; and tuples of integers. Runs are
# limited because `re` stores positions for backtracking. Compiling the expression takes longer than
# loading this module, and most traces have no pickle beside them.
_SAFE_OPCODES = (
    rb"(?:[(aesuN)0\x88\x89]|%b(?!%b?\x86|[X\x8c\x8d])|[G\x95].{8}|\x80[\x02-\x05]|\x8a(?:%b)"
    rb"|%b(?:\x85|%b(?:[\x85\x86]|%b{1,1000}[\x85-\x87]?)?)?){0,1000}"
) % (_GET, _GET, _LONG_INTEGERS, _INTEGER, _INTEGER, _INTEGER)
_SIZE_BYTES = {
    0x8C: 1,
    ord("X"): 4,
    0x8D: 8,
    ord("C"): 1,
    ord("B"): 4,
}  # bytes of the length field of texts and bytes
_TEXTS = (0x8C, ord("X"), 0x8D)
# Instructions that put the last object into the memo: bytes of its number.
_MEMO_BYTES = {0x94: 0, ord("q"): 1, ord("r"): 4}
_LONE_SURROGATE = re.compile(rb"\xed[\xa0-\xbf][\x80-\xbf]")
# Instructions that name, create or call objects of classes.
_CODE_OPCODES = {
    ord("c"): "GLOBAL",
    0x93: "STACK_GLOBAL",
    ord("R"): "REDUCE",
    ord("b"): "BUILD",
    ord("i"): "INST",
    ord("o"): "OBJ",
    0x81: "NEWOBJ",
    0x92: "NEWOBJ_EX",
    0x82: "EXT1",
    0x83: "EXT2",
    0x84: "EXT4",
    ord("P"): "PERSID",
    ord("Q"): "BINPERSID",
}


class _Unpickler(pickle.Unpickler):
    """Refuses every class and function, whatever the check let through."""

    def find_class(self, module: str, name: str, /) -> NoReturn:
        raise pickle.UnpicklingError(f"{module}.{name}")


def load(path: str | Path) -> tuple[Any, int]:
    """Returns the data of a pickle file, and how many invalid texts (halves of surrogate pairs)
    were replaced in it.

    Raises:
        InputError: `unreadable`; `pickle-too-large`; `pickle-with-code`: it requests a class or a
            function; `pickle-damaged`: it is cut, not a pickle, or holds instructions that plain
            data does not need.
    """
    file_path = Path(path)
    try:
        size = file_path.stat().st_size
        if size > MAX_BYTES:
            raise InputError(
                f"the pickle has {size / 1e9:.1f} GB; up to {MAX_BYTES / 1e9:.1f} GB are read",
                slug="pickle-too-large",
                where=str(path),
                hint="record a shorter history (max_entries of torch.cuda.memory._record_memory_history)",
            )
        data = read_small(file_path, MAX_BYTES)
    except OSError as error:
        raise unreadable(path, error) from error
    return load_bytes(data, str(path))


def load_bytes(data: bytes, location: str = "") -> tuple[Any, int]:
    """Returns the data of a pickle; see `load`."""
    data, replaced = _validate_pickle(data, location)
    try:
        with pause_gc():
            return _Unpickler(io.BytesIO(data)).load(), replaced
    except Exception as error:  # inconsistent instructions fail in many ways
        raise _make_damage_error("its instructions do not fit together", location) from error


def _validate_pickle(data: bytes, location: str) -> tuple[bytes, int]:
    """Returns the pickle with valid texts, and how many of them were replaced.

    Raises:
        InputError: `pickle-with-code`, `pickle-damaged`.
    """
    if data[:1] != b"\x80":
        raise _make_damage_error("it does not begin as one", location)
    max_objects, object_count, position = len(data) // _MIN_BYTES_PER_OBJECT + _EXTRA_OBJECTS, 0, 0
    replaced: dict[int, bytes] = {}
    names, safe_opcodes = [b"", b""], re.compile(_SAFE_OPCODES, re.DOTALL)
    memo_size, memoized_texts = 0, set[int]()
    adjacent_texts = 0  # how many of the objects that were just put onto the stack are texts
    while True:
        start = position
        position = safe_opcodes.match(data, position).end()  # type: ignore[union-attr]  # matches ""
        if position == len(data):
            raise _make_damage_error("it is cut", location, position)
        code, is_new = data[position], True
        if position > start:
            adjacent_texts = 0
        if code == ord("."):
            break
        # A dict, a list, or a pair of texts
        if code in (ord("}"), ord("]")) or (code == 0x86 and adjacent_texts >= 2):
            position += 1
            adjacent_texts = 0
        elif code in (ord("h"), ord("j")):
            width = 1 if code == ord("h") else 4
            number = int.from_bytes(data[position + 1 : position + 1 + width], "little")
            adjacent_texts = adjacent_texts + 1 if number in memoized_texts else 0
            position += 1 + width
            continue
        elif code in _SIZE_BYTES:
            low = position + 1 + _SIZE_BYTES[code]
            position = low + int.from_bytes(data[position + 1 : low], "little")
            if position > len(data):
                raise _make_damage_error("it is cut", location, len(data))
            adjacent_texts = adjacent_texts + 1 if code in _TEXTS else 0
            if code in _TEXTS:
                names = [names[1], data[low : min(position, low + 80)]]
                valid, count = _LONE_SURROGATE.subn(
                    b"\xef\xbf\xbd", data[low:position]
                )  # U+FFFD, which has the same length
                if count:
                    replaced[low] = valid
        elif code in _CODE_OPCODES:
            # Report the requested name as far as it can be printed safely.
            name = _CODE_OPCODES[code].encode()
            if code == ord("c"):
                name = b".".join(data[position + 1 : position + 200].split(b"\n")[:2])
            elif code == 0x93:
                name = b".".join(names)
            printable_name = "".join(
                letter if letter.isprintable() else "?"
                for letter in name.decode("utf-8", "replace")[:80]
            )
            raise InputError(
                f"the pickle asks for code{f' ({printable_name})' if printable_name else ''}, which plain data does not need; "
                "nothing of it was run",
                slug="pickle-with-code",
                where=location,
                hint="do not open this file with anything else, unless you trust who made it",
            )
        elif code in _MEMO_BYTES and position > start:
            is_new = False
        elif position == start:
            raise _make_damage_error(
                f"instruction {code} belongs to no plain data", location, position
            )
        else:
            continue
        object_count += is_new
        if object_count > max_objects:
            raise _make_damage_error(
                "it makes more objects than its size allows", location, position
            )
        # Picklers number the objects of the memo in their order.
        if position < len(data) and data[position] in _MEMO_BYTES:
            width = _MEMO_BYTES[data[position]]
            number = int.from_bytes(data[position + 1 : position + 1 + width], "little")
            if width and number != memo_size:
                raise _make_damage_error("its memo has gaps", location, position)
            if adjacent_texts:
                memoized_texts.add(memo_size)
            memo_size += 1
            position += 1 + width
    if replaced:
        patched = bytearray(data)
        for low, valid in replaced.items():
            patched[low : low + len(valid)] = valid
        data = bytes(patched)
    return data, len(replaced)


def _make_damage_error(reason: str, location: str, offset: int | None = None) -> InputError:
    return InputError(
        f"the pickle cannot be read: {reason}{'' if offset is None else f' (byte {offset})'}",
        slug="pickle-damaged",
        where=location,
        hint="write the file again",
    )
