"""The trace of a made capture: a Kineto file whose GPU work is that of the capture's rows, to the nanosecond."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from traceloom.testing import TraceBuilder

STEPS = 4
WAITS: Mapping[str, str] = {
    "recommender": "torch/utils/data/dataloader.py(733): __next__",
    "assistant": "assistant/train.py(97): clip_and_log",
    "vision": "vision/augment.py(41): rotate_on_host",
    "speech": "speech/train.py(120): save_checkpoint",
}
"""Model -> what its program does at the end of a step, while the device has nothing to do."""

_LAUNCH_US = 15.0  # from one operator to the next: the host is ahead of the device nearly all the time


class MadeRecording(NamedTuple):
    """A trace file.

    Attributes:
        text: Its content.
        window_ns: From its first to its last event.
        step_ns: Median of its steps.
        device_window_ns: From the first to the last GPU work.
    """

    text: str
    window_ns: int
    step_ns: int
    device_window_ns: int


def recording(
    rows: Iterable[Mapping[str, Any]], *, model: str, busy: float, host: str, process: int, start_ns: int
) -> MadeRecording:
    """Write down steps that run the GPU work of a capture: the pieces of a row in turn, so that all steps are alike.

    Args:
        rows: Rows of `kernels` of one capture.
        model: What the program trains, one of `WAITS`.
        busy: Share of a step in which the device computes.
        host: Where it ran.
        process: Its number there.
        start_ns: When, Unix time.
    """
    made = TraceBuilder(host=host, process=process, base_ns=start_ns)
    work: list[list[tuple[Mapping[str, Any], int]]] = [[] for _ in range(STEPS)]
    for at, row in enumerate(rows):
        for number in range(row["count"]):
            # whole nanoseconds that add up: the first pieces are longer by one
            ns = row["total_ns"] // row["count"] + (number < row["total_ns"] % row["count"])
            work[(at + number) % STEPS].append((row, ns))
    correlation, start_us, device_us, lengths = 0, 0.0, 0.0, []
    first_us = None
    for step, pieces in enumerate(work):
        step_us = round(sum(ns for _, ns in pieces) / busy / 1000 + 100, 3)
        made.step(step, start_us, step_us)
        made.python(f"{model}/train.py(41): step", start_us + 1, step_us - 2, python_id=2 * step + 1)
        host_us = start_us + 5
        for row, ns in pieces:
            shapes = json.loads(row["shapes"])
            correlation += 1
            types = ["c10::BFloat16" if shape else "Scalar" for shape in shapes]
            scalars: dict[str, Any] = {"Concrete Inputs": ["" if shape else "False" for shape in shapes]}
            made.op(row["op"], host_us, 12, shapes=shapes, types=types, **scalars)
            made.launch("cudaLaunchKernel", host_us + 3, 6, correlation=correlation, flow=False)
            begin_us = round(max(device_us, host_us + 10), 3)
            made.kernel(row["kernel"], begin_us, ns / 1000, correlation=correlation)
            first_us = begin_us if first_us is None else first_us
            device_us = begin_us + ns / 1000
            host_us += _LAUNCH_US
        waits_us = max(device_us - host_us, 0) + 5
        correlation += 1
        made.op("aten::item", host_us, waits_us)
        made.launch("cudaStreamSynchronize", host_us + 1, waits_us - 2, correlation=correlation, flow=False)
        rest_us = host_us + waits_us + 5
        made.python(
            WAITS[model], rest_us, start_us + step_us - rest_us - 5, python_id=2 * step + 2, parent_id=2 * step + 1
        )
        start_us += step_us
        lengths.append(step_us)
    middle = sorted(lengths)[(STEPS - 1) // 2 : STEPS // 2 + 1]
    return MadeRecording(
        made.text(),
        round(start_us * 1000),
        round(sum(middle) / len(middle) * 1000),
        round((device_us - (first_us or 0.0)) * 1000),
    )
