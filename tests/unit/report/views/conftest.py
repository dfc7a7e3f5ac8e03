"""The Python twin of the page's decoder (`unpack.js`), and a small run to show."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from traceloom.report import run
from traceloom.testing import TraceBuilder
from traceloom.trace.session import Session


def _varints(body: bytes) -> list[int]:
    out, value, shift = [], 0, 0
    for byte in body:
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            out.append(value)
            value = shift = 0
    assert shift == 0
    return out


def _unzigzag(values: np.ndarray) -> np.ndarray:
    return (values >> 1) ^ -(values & 1)


def _unsparse(values: np.ndarray) -> list[int | None]:
    out: list[int | None] = []
    last = 0
    for value in values.tolist():
        if value == 0:
            out.append(None)
        else:
            last += (value - 1 >> 1) ^ -(value - 1 & 1)
            out.append(last)
    return out


def unpack(payload: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(header, events): start, duration, label, fact, correlation, launch and forward of each event, decoded."""
    raw = zlib.decompress(base64.b64decode(payload))
    length = int.from_bytes(raw[:4], "little")
    header = json.loads(raw[4 : 4 + length])
    columns, position = {}, 4 + length
    for name, size, count in header["columns"]:
        columns[name] = np.array(_varints(raw[position : position + size]), dtype=np.int64)
        assert columns[name].size == count
        position += size
    assert position == len(raw)
    start = columns["start"].copy()
    first = 0
    for lane in header["lanes"]:
        here = slice(first, first + lane["count"])
        start[here] = np.cumsum(start[here])
        first += lane["count"]
    assert first == start.size
    unit = header["unit_ns"]
    events = {
        "start": (start * unit).tolist(),
        "duration": (_unzigzag(columns["duration"]) * unit).tolist(),
        "clip": (_unzigzag(columns["clip"]) * unit).tolist(),
        "label": columns["label"].tolist(),
        "fact": columns["fact"].tolist(),
        "correlation": _unsparse(columns["correlation"]),
        "launch": [None if p is None else p - 1 for p in _unsparse(columns["launch"])],
        "forward": [None if p is None else p - 1 for p in _unsparse(columns["forward"])],
    }
    if "twin" in columns:  # of a what-if
        events["twin"] = [None if p is None else p - 1 for p in _unsparse(columns["twin"])]
        events["changed"] = columns["changed"].tolist()
    return header, events


@pytest.fixture(scope="session")
def unpacked() -> Callable[[str], tuple[dict[str, Any], dict[str, Any]]]:
    return unpack


def small_trace(name: str = "aten::mm", rank: int = 0, host: str = "host0") -> Any:
    """Two steps with an operator, a launch, a kernel named like the operator, and a copy on another stream."""
    builder = TraceBuilder(rank=rank, world_size=2, host=host)
    for number, at in ((1, 0.0), (2, 100.0)):
        builder.step(number, at, 100)
        builder.op(name, at + 10, 40, shapes=[[4, 8], [8, 2]])
        builder.launch("cudaLaunchKernel", at + 15, 5, correlation=10 + number)
        builder.kernel(name, at + 30, 50, correlation=10 + number)
        builder.launch("cudaMemcpyAsync", at + 25, 5, correlation=20 + number)
        builder.copy("HtoD", at + 40, 10, bytes=4096, stream=8, correlation=20 + number)
        builder.kernel(
            "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgs)", at + 82, 8, stream=9
        )
    return builder.build()


@pytest.fixture
def session() -> Session:
    return Session((small_trace(rank=0), small_trace(rank=1)), "small run")


@pytest.fixture
def made_document(session: Session) -> dict[str, Any]:
    return run.build(session)


@pytest.fixture
def named_trace() -> Callable[..., Any]:
    return small_trace
