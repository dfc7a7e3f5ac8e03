"""Export for pprof (https://github.com/google/pprof): the call tree of all threads, with host and GPU time.

The message is `perftools.profiles.Profile` of profile.proto, written field by field; numbers of fields stand beside
their names below. Every path is one sample, innermost frame first, labelled with its thread and rank.
"""

from __future__ import annotations

import gzip
from typing import BinaryIO

from traceloom import __version__
from traceloom.analyze.flame import Flame, flame
from traceloom.model import Session
from traceloom.report.exports.stacks import NO_LAUNCH, Frames, first_of

# profile.proto: numbers of the fields of Profile
_SAMPLE_TYPE, _SAMPLE, _LOCATION, _FUNCTION, _STRING_TABLE = 1, 2, 4, 5, 6
_TIME_NANOS, _DURATION_NANOS, _COMMENT, _DEFAULT_SAMPLE_TYPE = 9, 10, 13, 14
_VALUES = (("calls", "count"), ("host", "nanoseconds"), ("gpu", "nanoseconds"))
_AT_ONCE = 4096  # messages


class _Strings:
    """The string table; number 0 is the empty string, as the format asks."""

    def __init__(self) -> None:
        self.texts: dict[str, int] = {"": 0}

    def __call__(self, text: str) -> int:
        return self.texts.setdefault(text, len(self.texts))


def varint(value: int) -> bytes:
    """A number as protobuf writes it: seven bits a byte, the lowest first; negative ones as 64-bit complement."""
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value) if value else b""


def _message(field: int, content: bytes) -> bytes:
    return varint(field << 3 | 2) + varint(len(content)) + content


def write(session: Session, handle: BinaryIO) -> None:
    """Write all threads of all ranks as one gzipped profile; values are calls, host time and GPU time."""
    strings, frames = _Strings(), Frames()
    start = first_of(session)
    end = max((trace.end_ns for trace in session.traces if trace.events.height), default=0)
    with gzip.GzipFile(filename="", fileobj=handle, mode="wb", compresslevel=6, mtime=0) as packed:
        for name, unit in _VALUES:
            packed.write(_message(_SAMPLE_TYPE, _number(1, strings(name)) + _number(2, strings(unit))))
        for trace in session.traces:
            written = _samples(flame(trace), trace.rank, strings, frames)
            for first in range(0, len(written), _AT_ONCE):
                packed.write(b"".join(written[first : first + _AT_ONCE]))
        for number, (name, file, line) in enumerate(frames.keys, start=1):
            text = strings(name)
            function = _number(1, number) + _number(2, text) + _number(3, text) + _number(4, strings(file or ""))
            packed.write(_message(_FUNCTION, function))
            location = _number(1, number) + _message(4, _number(1, number) + _number(2, line or 0))
            packed.write(_message(_LOCATION, location))
        comment, default = strings(f"traceloom {__version__}: {session.name}"), strings("host")
        for string in strings.texts:
            packed.write(_message(_STRING_TABLE, string.encode("utf-8", "replace")))
        packed.write(_number(_TIME_NANOS, start) + _number(_DURATION_NANOS, end - start))
        packed.write(_message(_COMMENT, varint(comment)) + _number(_DEFAULT_SAMPLE_TYPE, default))


def _samples(flame_graph: Flame, rank: int | None, strings: _Strings, frames: Frames) -> list[bytes]:
    """One message per path that was called or takes time, and one for GPU work of no known launch."""
    key_thread, key_rank = strings("thread"), strings("rank")
    table = flame_graph.frames
    columns = table.select("parent", "calls", "self_ns", "self_device_ns").iter_rows()
    ranked = b"" if rank is None else _message(3, _number(1, key_rank) + _number(3, rank))
    stacks: list[bytes] = []
    labels: list[bytes] = []
    out: list[bytes] = []
    for number, name, (parent, *values) in zip(frames.numbers(table), table["name"], columns, strict=True):
        above = b"" if parent is None else stacks[parent]
        thread = _message(3, _number(1, key_thread) + _number(2, strings(name))) if parent is None else labels[parent]
        stacks.append(varint(number + 1) + above)
        labels.append(thread)
        if any(values):
            out.append(_sample(stacks[-1], values, thread + ranked))
    if flame_graph.unattributed_device_ns:
        out.append(_sample(varint(frames.number(NO_LAUNCH) + 1), [0, 0, flame_graph.unattributed_device_ns], ranked))
    return out


def _sample(stack: bytes, values: list[int], labels: bytes) -> bytes:
    return _message(_SAMPLE, _message(1, stack) + _message(2, b"".join(map(varint, values))) + labels)
