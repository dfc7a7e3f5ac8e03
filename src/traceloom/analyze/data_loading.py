"""How long the main loop waits for its data."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from traceloom.analyze.ancestry import Forest, forest
from traceloom.analyze.intervals import Bools, union
from traceloom.analyze.splitting import split_at_steps
from traceloom.analyze.vocabulary import vocabulary
from traceloom.model import Trace
from traceloom.model import category as cat
from traceloom.model.result import Result

WAITS = pl.Schema(
    {
        "event": pl.UInt32,
        "name": pl.String,
        "start_ns": pl.Int64,
        "duration_ns": pl.Int64,
        "step": pl.Int32,
        "thread": pl.Int64,
    }
)
STEPS = pl.Schema({"step": pl.Int32, "wait_ns": pl.Int64, "fraction": pl.Float64})

# What the training loop calls: PyTorch's own span around it, or the frame of the iterator where stacks are recorded.
SPAN = r"^enumerate\(DataLoader\)#|^enumerate\(.*DataLoader.*\)#"
FRAME = r"(^|/)torch/utils/data/dataloader\.py\(\d+\): __next__$"


@dataclass(frozen=True)
class DataLoading(Result):
    """Waits for the DataLoader: the time from asking for a batch to having it, whoever makes it.

    Attributes:
        waits: One row per call; `step` is that of its start (null outside all steps).
        steps: One row per step; a wait across a border counts to both sides. Null where no call is recorded at all.
        total_ns: Union of the waits; None where no call is recorded.
        evidence: `annotations`, `python-frames` or `none`: how the calls are known.
    """

    waits: pl.DataFrame
    steps: pl.DataFrame
    total_ns: int | None
    evidence: str


def data_loading(trace: Trace) -> DataLoading:
    """Find the waits of the training loop for its DataLoader, per step."""
    tree = forest(trace)
    evidence, called = _calls(trace, tree)
    rows = tree.row[np.flatnonzero(called)]
    waits = (
        trace.events[pl.Series(np.sort(rows), dtype=pl.UInt32)]
        .with_columns(duration_ns=pl.col("nested_end_ns") - pl.col("start_ns"))
        .select(list(WAITS))
        .cast(WAITS)
    )
    waiting = union(tree.start_ns[called], tree.end_ns[called])
    pieces, step = split_at_steps(trace, waiting.start, waiting.end)
    waited = (
        pl.DataFrame({"step": step, "wait_ns": pieces.end_ns - pieces.start_ns})
        .group_by("step")
        .agg(pl.col("wait_ns").sum())
    )
    steps = trace.steps.select(pl.col("step").cast(pl.Int64), length=pl.col("end_ns") - pl.col("start_ns"))
    steps = steps.join(waited, on="step", how="left", maintain_order="left")
    wait = pl.lit(None, dtype=pl.Int64) if evidence == "none" else pl.col("wait_ns").fill_null(0)
    share = pl.when(pl.col("length") > 0).then(wait / pl.col("length"))
    table = steps.select("step", wait.alias("wait_ns"), share.alias("fraction")).cast(STEPS)
    return DataLoading(waits, table, None if evidence == "none" else waiting.total, evidence)


def _calls(trace: Trace, tree: Forest) -> tuple[str, Bools]:
    """Which host events are calls of a DataLoader, the outermost where several enclose each other."""
    words, category_of = vocabulary(trace), trace.events["category"]
    for evidence, category, pattern in (
        ("annotations", (cat.ANNOTATION, cat.OP), SPAN),
        ("python-frames", (cat.PYTHON,), FRAME),
    ):
        called = (words.events(pattern) & category_of.is_in(category).to_numpy())[tree.row]
        if called.any():
            return evidence, tree.topmost(called)
    return "none", np.zeros(tree.row.size, dtype=np.bool_)
