"""Sharing the time of each device among the parts of its work: sums of durations, and exclusive time by a priority."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from traceloom.analyze.intervals import Ints, coverage, merge, summed_coverage, union
from traceloom.analyze.steps import Tiles, tiles
from traceloom.model import Trace

SHARES = ("count", "sum_ns", "exclusive_ns")


@dataclass(frozen=True, slots=True)
class Shares:
    """The time of devices, shared among parts.

    Attributes:
        devices: device, window_ns (first start to last end), busy_ns, idle_ns, sum_ns, count.
        parts: device, the key, count, sum_ns, exclusive_ns, fraction (of the device's sum); one row per device and
            part, also where it is 0. Exclusive times and idle time of a device add up to its window.
        steps: device, step (null outside all steps), the key, count, sum_ns, exclusive_ns; rows of zeros left out.
    """

    devices: pl.DataFrame
    parts: pl.DataFrame
    steps: pl.DataFrame


def shares(trace: Trace, work: pl.DataFrame, key: str, priority: Sequence[str]) -> Shares:
    """Share the time of each device.

    Args:
        trace: For its steps.
        work: GPU work with device, start_ns, end_ns and the Enum column `key`.
        key: The column that names the part.
        priority: All values of the key; a nanosecond in which several run belongs to the first of them.
    """
    cut = tiles(trace)
    label = work.schema[key]
    assert isinstance(label, pl.Enum)
    number = {name: code for code, name in enumerate(label.categories.to_list())}
    order = [number[name] for name in priority]
    devices, parts, steps = [], [], []
    rows = work.select("device", "start_ns", "end_ns", key).sort("device", maintain_order=True)
    steps_of = _StepTable(trace, cut, key, label)
    for part in rows.partition_by("device", maintain_order=True):
        device = part["device"][0]
        start, end = part["start_ns"].to_numpy(), part["end_ns"].to_numpy()
        code = part[key].to_physical().to_numpy()
        count, total, alone = _measure(start, end, code, cut, order)
        window = int(end.max() - start.min())
        busy = int(alone.sum())
        devices.append((device, window, busy, window - busy, int(total.sum()), part.height))
        whole = max(int(total.sum()), 1)
        for index, name in enumerate(label.categories.to_list()):
            sums = [int(values[index].sum()) for values in (count, total, alone)]
            parts.append((device, name, *sums, sums[1] / whole if total.sum() else None))
        steps.append(steps_of.made(device, (count, total, alone)))
    fields = {"count": pl.Int64(), "sum_ns": pl.Int64(), "exclusive_ns": pl.Int64()}
    by_device = {name: pl.Int64() for name in ("window_ns", "busy_ns", "idle_ns", "sum_ns", "count")}
    step_schema = {"device": pl.Int32(), "step": pl.Int32(), key: label, **fields}
    return Shares(
        pl.DataFrame(devices, schema={"device": pl.Int32(), **by_device}, orient="row"),
        pl.DataFrame(
            parts, schema={"device": pl.Int32(), key: label, **fields, "fraction": pl.Float64()}, orient="row"
        ),
        pl.concat(steps) if steps else pl.DataFrame(schema=step_schema),
    )


def _measure(start: Ints, end: Ints, code: Ints, cut: Tiles, order: list[int]) -> tuple[Ints, Ints, Ints]:
    """Count, sum and exclusive time of each part in each tile; arrays of shape (parts, tiles)."""
    low, high = cut.spans
    count, total, alone = (np.zeros((len(order), low.size), dtype=np.int64) for _ in range(3))
    covered = before = None
    for part in order:
        in_part = code == part
        if not in_part.any():
            continue
        first, last = start[in_part], end[in_part]
        count[part] = np.bincount(np.searchsorted(low, first, side="right") - 1, minlength=low.size)
        total[part] = summed_coverage(first, last, low, high)
        spans = union(first, last)
        covered = spans if covered is None else merge(covered, spans)
        now = coverage(covered, low, high)
        alone[part] = now if before is None else now - before
        before = now
    return count, total, alone


@dataclass(frozen=True, slots=True)
class _StepTable:
    """Tiles added up to steps."""

    trace: Trace
    cut: Tiles
    key: str
    label: pl.Enum

    def made(self, device: int | None, values: tuple[Ints, Ints, Ints]) -> pl.DataFrame:
        """The rows of one device; `values` are SHARES, of shape (parts, tiles)."""
        names, tile_count = self.label.categories.to_list(), self.cut.row.size
        step = pl.Series(np.append(self.trace.steps["step"].cast(pl.Int64).to_numpy(), -1)[self.cut.row])
        step = step.set(pl.Series(self.cut.row < 0), None)
        part = np.repeat(np.arange(len(names), dtype=np.uint32), tile_count)
        frame = pl.DataFrame(
            {
                "device": pl.Series([device] * part.size, dtype=pl.Int32),
                "step": pl.concat([step] * len(names)).cast(pl.Int32),
                self.key: pl.Series(names, dtype=self.label).gather(part),
                **{field: array.ravel() for field, array in zip(SHARES, values, strict=True)},
            }
        )
        summed = frame.group_by("device", "step", self.key, maintain_order=True).agg(pl.col(SHARES).sum())
        return summed.filter(pl.any_horizontal(pl.col(SHARES) != 0)).sort("step", self.key, nulls_last=True)
