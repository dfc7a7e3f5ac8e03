"""Sharing the time of each device among the parts of its work: sums of durations, and exclusive time by a priority."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl
from msgspec import Struct

from traceloom.analyze.intervals import EMPTY, coverage, merge, summed_coverage, union
from traceloom.analyze.stacked import TRACE
from traceloom.analyze.steps import Tiles, tiles
from traceloom.array_types import Ints
from traceloom.model import Trace

SHARES = ("count", "sum_ns", "exclusive_ns")


class Shares(Struct, frozen=True):
    """The time of devices, shared among parts; all frames begin with `trace` (see `stacked`).

    Attributes:
        devices: device, window_ns (first start to last end), busy_ns, idle_ns, sum_ns, count.
        parts: device, the key, count, sum_ns, exclusive_ns, fraction (of the device's sum); one row per device and
            part, also where it is 0. Exclusive times and idle time of a device add up to its window.
        steps: device, step (null outside all steps), the key, count, sum_ns, exclusive_ns; rows of zeros left out.
    """

    devices: pl.DataFrame
    parts: pl.DataFrame
    steps: pl.DataFrame


def shares(traces: Sequence[Trace], work: pl.DataFrame, key: str, priority: Sequence[str]) -> Shares:
    """Share the time of each device.

    Args:
        traces: For their steps.
        work: GPU work of all of them (`stacked`) with trace, device, start_ns, end_ns and the Enum column `key`.
        key: The column that names the part.
        priority: All values of the key; a nanosecond in which several run belongs to the first of them.
    """
    cuts = [tiles(trace) for trace in traces]
    label = work.schema[key]
    assert isinstance(label, pl.Enum)
    names = label.categories.to_list()
    order = [names.index(name) for name in priority]
    # the last of tiles outside all steps, whose row is -1
    step_numbers = [[*trace.steps["step"].to_list(), None] for trace in traces]
    fields = dict.fromkeys(SHARES, pl.Int64())
    devices, parts = [], []
    of_device = {TRACE: pl.UInt32(), "device": pl.Int32()}
    steps = [pl.DataFrame(schema={**of_device, "step": pl.Int32(), key: label, **fields})]
    rows = work[[*of_device, "start_ns", "end_ns", key]].sort(TRACE, "device", maintain_order=True)
    for part in rows.partition_by(TRACE, "device", maintain_order=True):
        number, device = part[TRACE][0], part["device"][0]
        cut, numbers = cuts[number], step_numbers[number]
        start, end = part["start_ns"].to_numpy(), part["end_ns"].to_numpy()
        values = _measure(start, end, part[key].to_physical().to_numpy(), cut, order)
        count, total, alone = values.sum(axis=2).tolist()
        window, busy, whole = int(end.max() - start.min()), sum(alone), sum(total)
        devices.append((number, device, window, busy, window - busy, whole, part.height))
        for index, name in enumerate(names):
            fraction = total[index] / whole if whole else None
            parts.append((number, device, name, count[index], total[index], alone[index], fraction))
        by_step = np.zeros((len(numbers), len(names), len(SHARES)), dtype=np.int64)
        np.add.at(by_step, cut.row, values.transpose(2, 1, 0))
        step, part_number = np.nonzero(by_step.any(axis=2))
        steps.append(
            pl.DataFrame(
                {
                    TRACE: [number] * step.size,
                    "device": [device] * step.size,
                    "step": [numbers[row] for row in step.tolist()],
                    key: [names[number] for number in part_number.tolist()],
                    **dict(zip(SHARES, by_step[step, part_number].T, strict=True)),
                },
                schema=steps[0].schema,
            )
        )
    by_device = dict.fromkeys(("window_ns", "busy_ns", "idle_ns", "sum_ns", "count"), pl.Int64())
    part_schema = {**of_device, key: label, **fields, "fraction": pl.Float64()}
    return Shares(
        pl.DataFrame(devices, schema={**of_device, **by_device}, orient="row"),
        pl.DataFrame(parts, schema=part_schema, orient="row"),
        pl.concat(steps),
    )


def _measure(start: Ints, end: Ints, code: Ints, cut: Tiles, order: list[int]) -> Ints:
    """Count, sum and exclusive time of each part in each tile; shape (3, parts, tiles)."""
    low, high = cut.spans
    out = np.zeros((len(SHARES), len(order), low.size), dtype=np.int64)
    covered, before = EMPTY, np.zeros(low.size, dtype=np.int64)
    for part in order:
        in_part = code == part
        if not in_part.any():
            continue
        first, last = start[in_part], end[in_part]
        covered = merge(covered, union(first, last))
        now = coverage(covered, low, high)
        out[0, part] = np.bincount(np.searchsorted(low, first, side="right") - 1, minlength=low.size)
        out[1, part] = summed_coverage(first, last, low, high)
        out[2, part] = now - before
        before = now
    return out
