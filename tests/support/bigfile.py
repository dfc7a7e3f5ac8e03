"""Big trace files: the events of a file again and again, with times and ids shifted so that copies do not touch."""

from __future__ import annotations

import gzip
import re
from itertools import chain
from pathlib import Path

import numpy as np

from traceloom.testing.trace_builder import TraceBuilder

_NUMBERS = re.compile(rb'"(ts|correlation|External id|Python id|Python parent id|id)"\s*:\s*(\d+)')
_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')


def sample() -> str:
    """A small training-like file to repeat where no real one is at hand."""
    builder = TraceBuilder(rank=0, world_size=1)
    for number in range(1000):
        at = number * 50.0
        builder.op("aten::linear", at, 40, shapes=[[64, 64], [64, 64]]).op("aten::mm", at + 5, 30)
        builder.python("model.py(12): forward", at, 45)
        builder.launch("cudaLaunchKernel", at + 10, 5, correlation=number + 1)
        builder.kernel("sm90_gemm", at + 20, 25, correlation=number + 1)
    return builder.text()


def write_big(path: str | Path, size: int, source: str | Path | None = None) -> int:
    """Write a Kineto file of about `size` bytes; give the number of its entries.

    Args:
        path: The file to write, not compressed.
        size: Bytes; at least one copy is written.
        source: The file whose events are repeated, gzip or not; `sample()` where None.
    """
    text = sample().encode() if source is None else Path(source).read_bytes()
    text = gzip.decompress(text) if text[:2] == b"\x1f\x8b" else text
    begin = _EVENTS.search(text)
    assert begin is not None, "the source has no traceEvents"
    end = text.index(b"]", text.rindex(b'"ph"'))
    head, body, tail = text[: begin.end()], text[begin.end() : end].strip(), text[end:]
    # The text between the numbers to shift, the numbers, and which of them are times.
    matches = list(_NUMBERS.finditer(body))
    borders = [0, *(position for match in matches for position in match.span(2)), len(body)]
    between = [body[start:stop] for start, stop in zip(borders[::2], borders[1::2], strict=True)]
    numbers = np.array([int(match.group(2)) for match in matches], dtype=np.int64)
    is_time = np.array([match.group(1) == b"ts" for match in matches], dtype=np.bool_)
    window = int(np.ptp(numbers[is_time])) + 10_000_000
    ids = int(numbers[~is_time].max(initial=0)) + 1
    entries = len(re.findall(rb'"ph"\s*:', body))
    copies = max(1, round(size / len(body)))
    with Path(path).open("wb") as file:
        file.write(head)
        for copy in range(copies):
            shifted = numbers + np.where(is_time, copy * window, copy * ids)
            file.write(b",\n" if copy else b"\n")
            digits = [b"%d" % number for number in shifted.tolist()]
            file.write(b"".join(chain.from_iterable(zip(between, [*digits, b""], strict=True))))
        file.write(tail)
    return entries * copies
