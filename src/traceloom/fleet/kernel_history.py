"""How long one kernel took in each job, over time."""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from traceloom.fleet.regressions import by_job, of_captures
from traceloom.model.result import Result

MOST_JOBS = 2_000


@dataclass(frozen=True)
class KernelHistory(Result):
    """A kernel in jobs.

    Attributes:
        rows: One row per job, by the time of its first capture, the last 2,000: start_ns, job, mean_ns (median over its
            captures of the mean duration of a piece of work), count, total_ns (of all its captures), capture (the
            first), code and torch (of that one).
        jobs: How many jobs ran it.
    """

    rows: pl.DataFrame
    jobs: int


def kernel_history(
    kernels: pl.LazyFrame, captures: pl.LazyFrame, kernel: str, shapes: str | None = None
) -> KernelHistory:
    """Look at one kernel.

    Args:
        kernels: Rows of this table.
        captures: The same; a capture of no job is a job of its own.
        kernel: Its name.
        shapes: Of its inputs, as the rows have them; None: all.
    """
    works = kernels.filter(pl.col("count") > 0, pl.col("kernel") == kernel)
    if shapes is not None:
        works = works.filter(pl.col("shapes") == shapes)
    about = captures.select("capture", "start_ns", "code", "torch", job=pl.coalesce("job", "capture"))
    of_kernel = of_captures(works, about).group_by("kernel", "job", "start_ns", "capture")
    jobs = by_job(of_kernel.agg(pl.col("count", "total_ns").sum()), ("kernel",))
    rows = jobs.tail(MOST_JOBS).join(
        about.select("capture", "code", "torch").collect(), on="capture", how="left", maintain_order="left"
    )
    kept = rows.select("start_ns", "job", "count", "total_ns", "capture", "code", "torch", mean_ns="mean")
    return KernelHistory(kept, jobs.height)
