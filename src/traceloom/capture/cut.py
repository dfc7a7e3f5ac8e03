"""Cuts the window out of a trace as PyTorch writes it, and puts the steps into it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol


@dataclass(frozen=True)
class TracePart:
    """Which part of a trace is kept, and what is added to it.

    Args:
        start_ns: What began earlier goes, in Unix time; 0 keeps everything.
        end_ns: What began later goes.
        steps: Number and beginning of the steps in it.
        thread: The system's number of the thread that makes them.
        process: That of the process.
        has_device: Whether there may be work of a device, which has to be joined to its launches.
    """

    start_ns: int = 0
    end_ns: int = 0
    steps: tuple[tuple[int, int], ...] = ()
    thread: int = 0
    process: int = 0
    has_device: bool = True


class SupportsWrite(Protocol):
    """What takes bytes: a file, or one that compresses them."""

    def write(self, data: bytes, /) -> object:
        """Takes them."""


_BASE = re.compile(rb'"baseTimeNanoseconds": (\d+)')
_TIME = re.compile(rb'"ts": (\d+)(?:\.(\d{1,3}))?')
_DURATION = re.compile(rb'"dur": (\d+)(?:\.(\d{1,3}))?')
_CATEGORY = re.compile(rb'"cat": "([^"]*)"')
_CORRELATION = re.compile(rb'"correlation": (\d+)')
# An arrow from a launch to its work has the number of both; those of CUDA graphs are from 2^40 on.
_ARROW = re.compile(rb'"id": (\d{1,10})[,\s]')
_DEVICE_WORK = {b"kernel", b"gpu_memcpy", b"gpu_memset"}
_LAUNCHES = {b"cuda_runtime", b"cuda_driver", b"privateuse1_runtime", b"xpu_runtime"}
_OWN_FRAMES = b"traceloom/capture/"


def cut_trace(source: Path, target: SupportsWrite, part: TracePart) -> tuple[int, int | None]:
    """Copies the part of a trace in plain JSON, as PyTorch writes it, and adds the steps to it.

    Work of a device stays where its launch stays, and a Python function that runs all the time, cut
    to that part: it is what the program's own code calls the rest from. Read in a line-wise manner: PyTorch puts each
    event between lines of its own, and a whole trace may not fit into memory.

    Returns:
        How many operators it holds, and when the first one began (None without any).
    """
    with source.open("rb") as file:
        launched = _find_launches(file, part) if part.start_ns and part.has_device else set()
        file.seek(0)
        head, base, separator = True, 0, b""
        first: int | None = None
        operators = 0
        for is_event, text in _split_events(file):
            if not is_event:
                if head:
                    head = False
                    base = int(match[1]) if (match := _BASE.search(text)) else 0
                    target.write(text)
                    for step, began_ns in part.steps:
                        target.write(separator + _format_step(step, began_ns - base, part))
                        separator = b",\n"
                else:
                    target.write(b"\n" + text)
                continue
            at_ns = _read_time_ns(text, base)
            category = match[1] if (match := _CATEGORY.search(text)) else b""
            kept = text
            if part.start_ns and at_ns is not None and not _is_metadata(text):
                number = None
                if category == b"ac2g":
                    number = _ARROW.search(text)
                elif category in _DEVICE_WORK:
                    number = _CORRELATION.search(text)
                if number is not None:
                    if number[1] not in launched:
                        continue
                elif category == b"python_function" and at_ns < part.start_ns:
                    length_ns = _read_time_ns(text, 0, _DURATION) or 0
                    if at_ns + length_ns < part.end_ns:
                        continue
                    kept = _TIME.sub(b'"ts": ' + _format_time(part.start_ns - base), text, 1)
                    length = _format_time(part.end_ns - part.start_ns)
                    kept = _DURATION.sub(b'"dur": ' + length, kept, 1)
                elif not part.start_ns <= at_ns < part.end_ns:
                    continue
            if category == b"python_function" and _OWN_FRAMES in text:
                continue
            if category == b"cpu_op":
                operators += 1
                if at_ns is not None and (first is None or at_ns < first):
                    first = at_ns
            target.write(separator + kept)
            separator = b",\n"
    return operators, first


def _find_launches(file: IO[bytes], part: TracePart) -> set[bytes]:
    found: set[bytes] = set()
    base = 0
    for is_event, text in _split_events(file):
        if not is_event:
            base = base or (int(match[1]) if (match := _BASE.search(text)) else 0)
            continue
        category = _CATEGORY.search(text)
        at_ns = _read_time_ns(text, base)
        if (
            category is not None
            and category[1] in _LAUNCHES
            and at_ns is not None
            and part.start_ns <= at_ns < part.end_ns
            and (number := _CORRELATION.search(text))
        ):
            found.add(number[1])
    return found


def _split_events(file: IO[bytes]) -> Iterator[tuple[bool, bytes]]:
    """The head, each event without its comma, and the foot; True for an event."""
    lines: list[bytes] = []
    inside = False
    for line in file:
        if not inside and line == b"  {\n":
            if lines:
                yield False, b"".join(lines)
            lines, inside = [line], True
        elif inside and line.startswith(b"  }"):
            lines.append(b"  }")
            yield True, b"".join(lines)
            lines, inside = [], False
        else:
            lines.append(line)
    if lines:
        yield False, b"".join(lines)


def _read_time_ns(text: bytes, base: int, field: re.Pattern[bytes] = _TIME) -> int | None:
    match = field.search(text)
    if match is None:
        return None
    return base + int(match[1]) * 1000 + int((match[2] or b"0").ljust(3, b"0"))


def _format_time(time_ns: int) -> bytes:
    return b"%d.%03d" % divmod(time_ns, 1000)


def _is_metadata(text: bytes) -> bool:
    return b'"ph": "M"' in text[:40] or b'"cat": "Trace"' in text[:60]


def _format_step(step: int, at_ns: int, part: TracePart) -> bytes:
    name, time_us = f"traceloom.step#{step}", _format_time(at_ns).decode()
    fields = f'"name": "{name}", "pid": {part.process}, "tid": {part.thread}, "ts": {time_us}'
    head = '  {\n    "ph": "X", "cat": "user_annotation", '
    return f'{head}{fields}, "dur": 0.000,\n    "args": {{}}\n  }}'.encode()
