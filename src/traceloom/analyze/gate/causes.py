"""What changed most between two sides, by name: what is behind a verdict when only summaries are at hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl

from traceloom.analyze.compare import Comparison
from traceloom.analyze.gate.summary import RunSummary
from traceloom.model.frames import schema

CAUSES = schema("what name base_ns new_ns difference_ns")
_MOST = 20
_PARTS = {"idle": "idle time of the GPUs", "exposed_communication": "exposed communication"}


def causes(base: Sequence[RunSummary], new: Sequence[RunSummary]) -> pl.DataFrame:
    """Means per recorded step, ranked by the size of the difference.

    Returns:
        `what` (part, kernel, operator), `name`, `base_ns`, `new_ns`, `difference_ns`; the 20 largest differences.
    """
    gpu = any("kernel" in run.tables for run in (*base, *new))
    rows = []
    for table, what in (("kernel", "kernel"),) if gpu else (("op", "operator"),):
        old, now = _means(base, table), _means(new, table)
        rows += [(what, name, old.get(name, 0.0), now.get(name, 0.0)) for name in old.keys() | now.keys()]
    for metric, words in _PARTS.items() if gpu else ():
        if all(metric in run.scalars for run in (*base, *new)):
            old_part, new_part = (float(np.mean([np.mean(run.scalars[metric]) for run in s])) for s in (base, new))
            rows.append(("part", words, old_part, new_part))
    return _ranked([(what, name, round(old), round(now)) for what, name, old, now in rows])


def causes_of(comparison: Comparison) -> pl.DataFrame:
    """The same from two runs that were compared: kernels with their operators, and idle time, add up to the step."""
    if comparison.account == "device":
        rows = []
        kernels = comparison.kernels.select("base_kernel", "new_kernel", "operator", "base_ns", "new_ns")
        for base, new, operator, old, now in kernels.rows():
            name = new if base is None else base if new in (None, base) else f"{base} → {new}"
            rows.append(("kernel", f"{name} in {operator}", old, now))
        idle = comparison.breakdown.filter(pl.col("part").str.starts_with("idle"))
        rows += [("idle", *row) for row in idle.select("meaning", "base_ns", "new_ns").rows()]
    else:
        host_times = comparison.operators.select("operator", "base_host_ns", "new_host_ns")
        summed = host_times.group_by("operator", maintain_order=True).agg(pl.all().sum())
        rows = [("operator", name, old, now) for name, old, now in summed.rows()]
    return _ranked(rows)


def _ranked(rows: Sequence[tuple[str, str, int, int]]) -> pl.DataFrame:
    changed = [(what, name, old, now, now - old) for what, name, old, now in rows if now != old]
    changed.sort(key=lambda row: (-abs(row[4]), row[1]))
    return pl.DataFrame(changed[:_MOST], schema=CAUSES, orient="row")


def _means(runs: Sequence[RunSummary], table: str) -> dict[str, float]:
    """Mean per step and run of every name of a table."""
    sums: dict[str, float] = {}
    for run in runs:
        for name, values in run.tables.get(table, {}).items():
            sums[name] = sums.get(name, 0.0) + float(np.mean(values)) / len(runs)
    return sums
