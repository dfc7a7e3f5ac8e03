"""Python frames of a process, read from outside: the stacks of its threads, the location of each
thread's newest frame, and the code of a frame.

Supports CPython 3.11 to 3.13, which store frames alike; from 3.13 on the interpreter publishes the
offsets of its fields. All data is untrusted: reading is bounded, and inconsistent data is not
treated as a frame.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from traceloom.system.elf import Elf, Mapping, open_mapped, read_mappings

EVAL_FUNCTION = "_PyEval_EvalFrameDefault\0"
FRAME_BYTES = 64  # size of the part of a frame that has all needed fields
_MOST_THREADS, _MOST_INTERPRETERS = 4096, 64
_MOST_FRAMES = 512
_PAGE_BYTES = 4096
_MAX_LINE = (1 << 31) - 1
_MAX_TRIES = 8
_MAX_TEXT_BYTES = 4096
_MAX_TABLE_BYTES = 1 << 20
_TYPE_AT = 8
_COOKIE = b"xdebugpy"


class InterpreterLayout(NamedTuple):
    """Offsets of fields in the interpreter's structures.

    Attributes:
        newest: Of a thread's newest frame in its state, or of the structure that has it.
        newest_behind: In that structure; None if there is none.
    """

    interpreters: int
    interpreter_next: int
    threads: int
    thread_next: int
    thread_id: int
    newest: int
    newest_behind: int | None
    code: int
    previous: int
    instruction: int
    file: int
    name: int
    lines: int
    first_line: int
    instructions: int
    text_length: int
    text_state: int
    ascii_text: int
    text: int
    bytes_size: int
    bytes_content: int


# Layout of the structures in its headers on 64 bits, which is stable within a minor version.
_LAYOUTS = {
    (3, 11): InterpreterLayout(
        40, 0, 16, 8, 160, 56, 8, 32, 48, 56, 112, 120, 136, 72, 184, 16, 32, 48, 72, 16, 32
    ),
    (3, 12): InterpreterLayout(
        40, 0, 72, 8, 144, 56, 0, 0, 8, 56, 112, 120, 136, 68, 192, 16, 32, 40, 56, 16, 32
    ),
}
# 3.13: positions of the fields among the numbers after the cookie of `_Py_DebugOffsets`.
_OFFSETS = struct.Struct("<8s96Q")
_NUMBERS_3_13 = {
    "interpreters": 5,
    "interpreter_next": 8,
    "threads": 9,
    "thread_next": 21,
    "newest": 23,
    "thread_id": 25,
    "previous": 29,
    "code": 30,
    "instruction": 31,
    "file": 35,
    "name": 36,
    "lines": 38,
    "first_line": 39,
    "instructions": 43,
}


class Frame(NamedTuple):
    """A call: of Python, or native with the library as its file and line 0."""

    function: str
    file: str
    line: int


class PythonThread(NamedTuple):
    """A thread: the address of its state, and its id in its container."""

    state: int
    number: int


class PythonFrames:
    """The interpreter of a process.

    Raises:
        OSError: The process runs no supported Python, or access is denied.
    """

    def __init__(self, process: int, proc: Path = Path("/proc")) -> None:
        self._process, self._proc = process, proc
        self._inner: dict[int, int] = {}  # thread id -> its id in its container
        self._descriptions: dict[tuple[int, int], Frame | None] = {}
        self.file, elf, bias = self._interpreter()
        runtime, version, code_type = (
            elf.find_data(name) for name in ("_PyRuntime", "Py_Version", "PyCode_Type")
        )
        os.close(self._descriptor)
        if runtime is None or version is None or code_type is None:
            raise OSError(errno.ENOTSUP, "its Python is older than 3.11")
        self._runtime, self._code_type = runtime + bias, code_type + bias
        self._memory = os.open(proc / str(process) / "mem", os.O_RDONLY | os.O_CLOEXEC)
        try:
            number = self._number(version + bias, 4)
            self.layout = self._layout((number >> 24, number >> 16 & 0xFF))
        except OSError:
            os.close(self._memory)
            raise

    def threads(self) -> dict[int, PythonThread | None]:
        """Returns its threads by their kernel ids; None if a thread is not one of Python, or is
        unknown.

        Raises:
            OSError: The process has ended, or its threads changed faster than they were read.
        """
        before, states = None, self._states()
        for _ in range(_MAX_TRIES):
            before, states = states, self._states()
            if states == before:
                break
        else:
            raise OSError(errno.EAGAIN, "its threads come and go")
        result: dict[int, PythonThread | None] = {}
        inner_numbers: dict[int, int] = {}
        for task in (self._proc / str(self._process) / "task").iterdir():
            number = int(task.name)
            inner = self._inner.get(number)
            if inner is None:
                status = (task / "status").read_bytes()
                inner = int(status.partition(b"\nNSpid:")[2].partition(b"\n")[0].split()[-1])
            state = states.get(inner)
            result[number] = None if state is None else PythonThread(state, inner)
            inner_numbers[number] = inner
        self._inner = inner_numbers
        return result

    def _states(self) -> dict[int, int]:
        """Returns the address of a thread's state by its id in its container."""
        layout = self.layout
        result: dict[int, int] = {}
        interpreters = self._chain(
            self._number(self._runtime + layout.interpreters),
            layout.interpreter_next,
            _MOST_INTERPRETERS,
        )
        remaining = _MOST_THREADS
        for interpreter in interpreters:
            # The newest comes first. At first it has the id of the thread that created it, whose
            # own state comes later and takes precedence.
            for state in self._chain(
                self._number(interpreter + layout.threads), layout.thread_next, remaining
            ):
                result[self._number(state + layout.thread_id)] = state
                remaining -= 1
        return result

    def stacks(self) -> dict[int, tuple[Frame, ...]]:
        """Returns the frames of each thread of Python by its id in its container, the outermost
        first.

        The threads go on meanwhile: of a stack that changes just now, frames may be missing.

        Raises:
            OSError: The process has ended, or changed its threads just now.
        """
        return {number: self._walk(state) for number, state in self._states().items()}

    def _walk(self, state: int) -> tuple[Frame, ...]:
        layout = self.layout
        frame = self._number(state + layout.newest)
        if layout.newest_behind is not None:
            frame = self._number(frame + layout.newest_behind)
        stack: list[Frame] = []
        # Most frames lie side by side: what is read at once belongs together, and costs less.
        pages: dict[int, bytes] = {}
        for _ in range(_MOST_FRAMES):
            if not frame:
                break
            page = frame & -_PAGE_BYTES
            if page not in pages:
                pages[page] = self._read(page, _PAGE_BYTES)
            fields = pages[page][frame - page : frame - page + FRAME_BYTES]
            if len(fields) < FRAME_BYTES:
                fields = self._read(frame, FRAME_BYTES)
            code, instruction, frame = (
                int.from_bytes(fields[at : at + 8], "little")
                for at in (layout.code, layout.instruction, layout.previous)
            )
            described = self.describe(code, instruction)
            if described is not None:
                stack.append(described)
        return tuple(reversed(stack))

    def describe(self, code: int, instruction: int) -> Frame | None:
        """Returns the function, file and line of a frame; None if it is not a Python frame."""
        key = (code, instruction)
        if key not in self._descriptions:
            self._descriptions[key] = None
            with contextlib.suppress(OSError, struct.error, UnicodeDecodeError):
                self._descriptions[key] = self._described(code, instruction)
        return self._descriptions[key]

    def close(self) -> None:
        """Close the process's memory."""
        os.close(self._memory)

    def _described(self, code: int, instruction: int) -> Frame | None:
        layout = self.layout
        if self._number(code + _TYPE_AT) != self._code_type:
            return None
        name, file = (
            self._text(self._number(code + layout.name)),
            self._text(self._number(code + layout.file)),
        )
        if file == "<shim>" or name.startswith("<interpreter"):
            return None  # the interpreter's entry frame, where C calls Python
        table = self._number(code + layout.lines)
        size = self._number(table + layout.bytes_size)
        if size > _MAX_TABLE_BYTES:
            return None
        lines = self._read(table + layout.bytes_content, size)
        unit = (instruction - code - layout.instructions) // 2
        first_line = self._number(code + layout.first_line, 4)
        line = find_line(lines, first_line, unit) or first_line
        return Frame(name, file, max(1, min(line, _MAX_LINE)))

    def _interpreter(self) -> tuple[Mapping, Elf, int]:
        """Returns the file with the interpreter, and its load offset."""
        seen_inodes = set()
        for mapping in read_mappings(self._process, self._proc):
            if mapping.inode in seen_inodes or not mapping.path.rpartition("/")[2].startswith(
                ("python", "libpython")
            ):
                continue
            seen_inodes.add(mapping.inode)
            with contextlib.suppress(OSError):
                descriptor = open_mapped(self._process, mapping, self._proc)
                try:
                    elf = Elf(descriptor)
                    address = elf.address_of(mapping.offset)
                    if elf.find(EVAL_FUNCTION) is not None and address is not None:
                        self._descriptor = descriptor
                        return mapping, elf, mapping.start - address
                except OSError:
                    pass
                os.close(descriptor)
        raise OSError(errno.ENOENT, "it runs no Python")

    def _layout(self, version: tuple[int, int]) -> InterpreterLayout:
        if version in _LAYOUTS:
            return _LAYOUTS[version]
        if version != (3, 13):
            raise OSError(
                errno.ENOTSUP,
                f"its Python is {version[0]}.{version[1]}: frames of 3.11 to 3.13 are known",
            )
        cookie, *numbers = _OFFSETS.unpack(self._read(self._runtime, _OFFSETS.size))
        offsets = [0, *numbers]
        if cookie != _COOKIE or offsets[2]:
            raise OSError(errno.ENOTSUP, "its Python is one without a global lock")
        base = _LAYOUTS[3, 12]
        fields = {name: offsets[number] for name, number in _NUMBERS_3_13.items()}
        frame = (fields["code"], fields["previous"], fields["instruction"])
        if max(fields.values()) > 1 << 20 or max(frame) > FRAME_BYTES - 8:
            raise OSError(errno.ENOTSUP, "its Python does not say where its frames are")
        return base._replace(**fields, newest_behind=None)

    def _chain(self, first: int, following: int, limit: int) -> Iterator[int]:
        for _ in range(limit):
            if not first:
                return
            yield first
            first = self._number(first + following)

    def _text(self, address: int) -> str:
        layout = self.layout
        length, state = (
            self._number(address + layout.text_length),
            self._number(address + layout.text_state, 4),
        )
        kind, ascii_only = state >> 2 & 7, state >> 6 & 1
        if kind not in {1, 2, 4}:
            raise OSError(errno.EINVAL, "no text")
        size = min(length, _MAX_TEXT_BYTES) * kind
        content = self._read(address + (layout.ascii_text if ascii_only else layout.text), size)
        return content.decode(
            {1: "latin-1", 2: "utf-16-le", 4: "utf-32-le"}[kind], errors="replace"
        )

    def _number(self, address: int, size: int = 8) -> int:
        return int.from_bytes(self._read(address, size), "little")

    def _read(self, address: int, size: int) -> bytes:
        if not 0 < address < 1 << 62:
            raise OSError(errno.EFAULT, "no address")
        content = os.pread(self._memory, size, address)
        if len(content) < size:
            raise OSError(errno.ESRCH, "the process has ended")
        return content


def find_line(table: bytes, first_line: int, unit: int) -> int:
    """Returns the line of an instruction, an index of two-byte units from the first one (PEP 626);
    0: it has none.
    """
    at, line, units = 0, first_line, 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while at < len(table):
            byte = table[at]
            at += 1
            value |= (byte & 0x3F) << shift
            shift += 6
            if not byte & 0x40:
                break
        return value

    while at < len(table):
        kind, length = table[at] >> 3 & 15, (table[at] & 7) + 1
        at += 1
        if kind in {13, 14}:
            change = number()
            line += -(change >> 1) if change & 1 else change >> 1
            for _ in range(3 if kind == 14 else 0):
                number()
        elif kind in {10, 11, 12}:
            line += kind - 10
            at += 2
        elif kind < 10:
            at += 1
        units += length
        if unit < units:
            return line if kind != 15 else 0
    return first_line
