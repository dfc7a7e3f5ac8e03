"""The kernel's instructions for programs of ours (eBPF), as Documentation/bpf/standardization/instruction-set.rst has
them: eight bytes each, eleven registers. The kernel verifies every program before it runs it.
"""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple


class Register(enum.IntEnum):
    """R0: results; R1 to R5: arguments, lost by a call; R6 to R9: kept; R10: end of the 512 bytes of stack."""

    R0, R1, R2, R3, R4, R5, R6, R7, R8, R9, R10 = range(11)


R0, R1, R2, R3, R4, R5, R6, R7, R8, R9, R10 = Register


class Helper(enum.IntEnum):
    """Functions of the kernel that programs call."""

    MAP_LOOKUP = 1
    MAP_UPDATE = 2
    MAP_DELETE = 3
    TIME_NS = 5  # of the monotonic clock
    PROCESS_AND_THREAD = 14  # process << 32 | thread
    READ_USER = 112
    READ_USER_TEXT = 114
    RING_OUTPUT = 130
    RING_RESERVE = 131
    RING_SUBMIT = 132


class _Encoded(NamedTuple):
    code: int
    target: int = 0
    source: int = 0
    offset: int = 0
    number: int = 0
    to: str = ""  # label that it jumps to


_SIZES = {1: 0x10, 2: 0x08, 4: 0x00, 8: 0x18}
_LOAD, _STORE_NUMBER, _STORE, _ATOMIC = 0x61, 0x62, 0x63, 0xC3
_ARITHMETIC = {"+=": 0x07, "-=": 0x17, "*=": 0x27, "|=": 0x47, "&=": 0x57, "<<=": 0x67, ">>=": 0x77, "=": 0xB7}
_JUMPS = {"==": 0x15, "!=": 0x55, ">": 0x25, ">=": 0x35, "<": 0xA5, "<=": 0xB5, "signed<": 0xC5}
_BY_REGISTER = 0x08
_ALWAYS, _CALL, _EXIT, _WIDE = 0x05, 0x85, 0x95, 0x18
_A_MAP = 1  # source of a wide number that is a map's descriptor
_NUMBERS = range(-(2**31), 2**31)


class ProbeProgram:
    """A program that is being written, one instruction after the other."""

    def __init__(self) -> None:
        self._encoded: list[_Encoded] = []
        self._labels: dict[str, int] = {}

    def do(self, target: Register, operation: str, value: int | Register) -> None:
        """`target operation value` in 64 bits: =, +=, -=, *=, |=, &=, <<= or >>=."""
        code = _ARITHMETIC[operation]
        if isinstance(value, Register):
            self._encoded.append(_Encoded(code | _BY_REGISTER, target, value))
        elif value in _NUMBERS:
            self._encoded.append(_Encoded(code, target, number=value))
        else:
            raise ValueError(f"{value} needs more than 32 bits: put it into a register with `wide`")

    def wide(self, target: Register, value: int) -> None:
        """`target` = any number of 64 bits."""
        self._two_words(target, 0, value)

    def map(self, target: Register, descriptor: int) -> None:
        """`target` = the map with this descriptor."""
        self._two_words(target, _A_MAP, descriptor)

    def load(self, target: Register, base: Register, offset: int = 0, size: int = 8) -> None:
        """`target` = the bytes at `base + offset`."""
        self._encoded.append(_Encoded(_LOAD | _SIZES[size], target, base, offset))

    def store(self, base: Register, offset: int, value: int | Register, size: int = 8) -> None:
        """The bytes at `base + offset` = `value`."""
        if isinstance(value, Register):
            self._encoded.append(_Encoded(_STORE | _SIZES[size], base, value, offset))
        else:
            self._encoded.append(_Encoded(_STORE_NUMBER | _SIZES[size], base, 0, offset, value))

    def add_at(self, base: Register, offset: int, value: Register) -> None:
        """Add `value` to the eight bytes at `base + offset`, whoever else does so at this moment."""
        self._encoded.append(_Encoded(_ATOMIC | _SIZES[8], base, value, offset))

    def call(self, helper: Helper) -> None:
        """`R0` = `helper(R1, ..., R5)`."""
        self._encoded.append(_Encoded(_CALL, number=helper))

    def on_map(self, helper: Helper, descriptor: int, key: int, value: int = 0) -> None:
        """`R0` = a look-up, an update or a removal in a map; `key` and `value` are offsets on the stack."""
        self.map(R1, descriptor)
        self.address(R2, key)
        if helper is Helper.MAP_UPDATE:
            self.address(R3, value)
            self.do(R4, "=", 0)
        self.call(helper)

    def read_user(self, to: int, size: int, helper: Helper = Helper.READ_USER) -> None:
        """Read from the process's memory at `R3` to the stack; `R0` is negative where that cannot be read."""
        self.address(R1, to)
        self.do(R2, "=", size)
        self.call(helper)

    def address(self, target: Register, offset: int) -> None:
        """`target` = the address of an offset on the stack."""
        self.do(target, "=", R10)
        self.do(target, "+=", offset)

    def jump(self, to: str) -> None:
        """Go on at the label."""
        self._encoded.append(_Encoded(_ALWAYS, to=to))

    def jump_if(self, left: Register, comparison: str, right: int | Register, to: str) -> None:
        """Go on at the label where the comparison holds: ==, !=, >, >=, <, <= without signs, or signed<."""
        code = _JUMPS[comparison]
        if isinstance(right, Register):
            self._encoded.append(_Encoded(code | _BY_REGISTER, left, right, to=to))
        else:
            self._encoded.append(_Encoded(code, left, number=right, to=to))

    def label(self, name: str) -> None:
        """The next instruction has this name; jumps lead forward alone."""
        assert name not in self._labels, f"the label {name} stands twice"
        self._labels[name] = len(self._encoded)

    def exit(self) -> None:
        """End the program; its result is of no account."""
        self.do(R0, "=", 0)
        self._encoded.append(_Encoded(_EXIT))

    def encoded(self) -> bytes:
        """The instructions as the kernel takes them."""
        words = []
        for position, word in enumerate(self._encoded):
            offset = self._labels[word.to] - position - 1 if word.to else word.offset
            words.append(struct.pack("<BBhi", word.code, word.source << 4 | word.target, offset, word.number))
        return b"".join(words)

    def _two_words(self, target: Register, source: int, value: int) -> None:
        low, high = struct.unpack("<ii", struct.pack("<Q", value % 2**64))
        self._encoded += [_Encoded(_WIDE, target, source, 0, low), _Encoded(0, number=high)]
