"""Which kernels, copies and fills take the GPU's time?"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import polars as pl

from traceloom.analyze.classify import CATEGORIES, CategoryType, KindType, Rule, gpu_work
from traceloom.analyze.intervals import union
from traceloom.analyze.per_step import durations
from traceloom.model import Trace
from traceloom.model.arrays import engine
from traceloom.model.frames import as_declared, schema
from traceloom.model.result import Result

KERNEL_SCHEMA = schema(
    "name category rule kind count total_ns mean_ns min_ns max_ns fraction",
    {"category": CategoryType, "kind": KindType},
)
CATEGORY_SCHEMA = schema("category count total_ns union_ns", {"category": CategoryType})


@dataclass(frozen=True)
class Kernels(Result):
    """GPU work by name and by category, all devices of the trace together.

    Attributes:
        kernels: One row per name and kind, largest total first: name, category, rule (which rule decided, see
            docs/concepts/kernel-categories.md), kind, count, total_ns (sum of durations), mean_ns (rounded down),
            min_ns, max_ns, fraction (of the sum of all GPU work).
        categories: category, count, total_ns (sum), union_ns (time in which at least one such piece of work runs,
            per device, added over devices). A sum above its union is work that overlaps its own kind.
    """

    kernels: pl.DataFrame
    categories: pl.DataFrame


def kernels(trace: Trace, rules: Iterable[Rule] = ()) -> Kernels:
    """Add up GPU work by name and by category; `rules` come before the built-in table."""
    work = gpu_work(trace, rules).with_columns((pl.col("end_ns") - pl.col("start_ns")).alias("duration_ns"))
    by_name = (
        work.lazy()
        .group_by("name", "kind")
        .agg(pl.col("category", "rule").first(), *durations(pl.col("duration_ns")))
        .with_columns((pl.col("total_ns") / pl.col("total_ns").sum()).fill_nan(0.0).alias("fraction"))
        .sort("total_ns", "name", "kind", descending=[True, False, False])
        .collect(engine=engine(trace))
        .pipe(as_declared, KERNEL_SCHEMA)
    )
    unions = dict.fromkeys(CATEGORIES, 0)
    for part in work[["category", "device", "start_ns", "end_ns"]].partition_by("category", "device"):
        unions[part["category"][0]] += union(part["start_ns"].to_numpy(), part["end_ns"].to_numpy()).total
    sums = work.group_by("category").agg(pl.len().alias("count"), pl.col("duration_ns").sum().alias("total_ns"))
    by_category = (
        pl.DataFrame({"category": list(unions), "union_ns": list(unions.values())})
        .cast({"category": CategoryType})
        .join(sums, on="category", how="left", maintain_order="left")
        .with_columns(pl.col("count", "total_ns").fill_null(0))
        .pipe(as_declared, CATEGORY_SCHEMA)
    )
    return Kernels(by_name, by_category)
