"""Pairs of host and device traces of the same nested operators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from traceloom.testing.host_trace_builder import HOST_SCHEMAS, HostTraceBuilder
from traceloom.testing.trace_builder import TraceBuilder


@dataclass(frozen=True, slots=True)
class NestedOp:
    """An op with the ops that it calls.

    Attributes:
        name: Its name.
        inside: The ops that it calls, on its own thread.
        thread: PyTorch's number of the thread; used for outermost ops only.
    """

    name: str
    inside: tuple[NestedOp, ...] = ()
    thread: int = 1


def build_trace_pair(
    iterations: Sequence[Sequence[NestedOp]],
    *,
    recorded: range = range(1),
    keys: str = "record function id",
    schema: str = HOST_SCHEMAS[-1],
    process: int = 4242,
) -> tuple[TraceBuilder, HostTraceBuilder]:
    """Returns a device trace of all iterations and a host trace of some of them, with the same ops.

    Thread ids differ in the device trace: 1 is the process id, n is 7000 + n.

    Args:
        iterations: Outermost ops of each, in the order in which they start.
        recorded: The iterations that the host trace contains.
        keys: The ids by which they are joined: `record function id`, `external id`, or `none`.
        schema: Schema of the host trace.
        process: Process id of both.
    """
    device = TraceBuilder(device_name=None, process=process, generation="2024")
    host = HostTraceBuilder(schema, process=process)
    clock = _Clock()
    for number, calls in enumerate(iterations):
        device.step(number, clock.now, _compute_length(calls) + 1, thread=process)
        for call in calls:
            _write(
                call,
                None,
                device,
                host if number in recorded else None,
                clock,
                keys,
                call.thread,
                process,
            )
        clock.now += 5
    return device, host


@dataclass(slots=True)
class _Clock:
    now: int = 0
    record: int = 100


def _compute_length(calls: Sequence[NestedOp]) -> int:
    return sum(2 + _compute_length(call.inside) for call in calls)


def _write(
    call: NestedOp,
    parent: int | None,
    device: TraceBuilder,
    host: HostTraceBuilder | None,
    clock: _Clock,
    keys: str,
    thread: int,
    process: int,
) -> None:
    clock.record += 1
    args: dict[str, Any] = {
        "external_id": clock.record if keys == "external id" else 900_000 + clock.record
    }
    if keys == "record function id":
        args["Record function id"] = clock.record if host is not None else 0
    tid = process if thread == 1 else 7000 + thread
    device.op(call.name, clock.now, 1 + _compute_length(call.inside), thread=tid, **args)
    op_id = None
    if host is not None:
        op_id = host.op(call.name, thread=thread, parent=parent, record_id=clock.record)
    clock.now += 1
    for inner in call.inside:
        _write(inner, op_id, device, host, clock, keys, thread, process)
    clock.now += 1
