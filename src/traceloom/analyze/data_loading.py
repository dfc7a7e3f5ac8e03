"""How long does the main loop wait for its data, who makes it, and does the GPU wait too?"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from traceloom.analyze.ancestry import forest, host_pieces
from traceloom.analyze.host_events import BLOCKING_CALL, OP, activity
from traceloom.analyze.intervals import EMPTY, complement, coverage, union
from traceloom.analyze.kernel_rules import gpu_work
from traceloom.analyze.names import vocabulary
from traceloom.analyze.steps import NO_STEP, split_at_steps
from traceloom.trace import vocabulary as cat
from traceloom.trace.array_types import Bools, Ints
from traceloom.trace.arrays import gather_rows, to_nullable_series
from traceloom.trace.batch import per_trace
from traceloom.trace.frames import Result, cast_to_schema, schema
from traceloom.trace.trace import Trace

PARTS = ("fetch", "collate", "pin_memory", "workers", "operators", "other")
MAKERS = ("main_thread", "workers")
WAITS = schema(
    "event name start_ns duration_ns step thread maker gpu_idle_ns", {"thread": pl.Int64, "maker": pl.Enum(MAKERS)}
)
STEPS = schema("step wait_ns fraction gpu_idle_ns bottleneck")
SPENT = schema("step part ns", {"part": pl.Enum(PARTS)})

# What the training loop calls: PyTorch's own span around it, or the frame of the iterator where stacks are recorded.
SPAN = r"^enumerate\(DataLoader\)#|^enumerate\(.*DataLoader.*\)#"
FRAME = r"(^|/)torch/utils/data/dataloader\.py\(\d+\): __next__$"
_BY_WORKERS = r"_MultiProcessing[A-Za-z]*Iter|(^|/)torch/utils/data/dataloader\.py\(\d+\): (_try_get_data|_get_data)$"
_IN_THE_LOOP = r"_SingleProcess[A-Za-z]*Iter|(^|/)torch/utils/data/_utils/fetch\.py\("
_PLACES = (
    ("fetch", r"(^|/)torch/utils/data/_utils/fetch\.py\("),
    ("collate", r"(^|/)torch/utils/data/_utils/collate\.py\("),
    ("pin_memory", r"(^|/)torch/utils/data/_utils/pin_memory\.py\("),
    ("workers", r"(^|/)torch/utils/data/dataloader\.py\(\d+\): (_try_get_data|_get_data)$|(^|/)multiprocessing/"),
)
LEAST_FRACTION = 0.05  # of a step, for the loader to be called a bottleneck
LEAST_IDLE = 0.5  # of the wait in which the GPU had nothing to do


@dataclass(frozen=True)
class DataLoading(Result):
    """Waits for the DataLoader: the time from asking for a batch to having it, whoever makes it.

    Attributes:
        waits: One row per call; `step` is that of its start (null outside all steps). `maker` is who makes the batch:
            the main thread itself, or worker processes it waits for; null where neither name nor frames tell.
            `gpu_idle_ns` is the part of the wait in which no device had any work; null without GPU work.
        steps: One row per step; a wait across a border counts to both sides. Null where no call is recorded at all.
            `bottleneck`: the wait is at least 5 % of the step, and the GPU had nothing to do in at least half of it
            (without GPU work only the first counts).
        spent: What the waiting thread did meanwhile, by step (null outside all steps): in the data set and its
            fetcher, collating, pinning, waiting for workers, in operators outside of these, or anything else; adds up
            to `total_ns`. Without Python stacks only operators and calls that wait can be told apart.
        total_ns: Union of the waits; None where no call is recorded.
        evidence: `annotations`, `python-frames` or `none`: how the calls are known.
    """

    waits: pl.DataFrame
    steps: pl.DataFrame
    spent: pl.DataFrame
    total_ns: int | None
    evidence: str


@per_trace
def data_loading(trace: Trace) -> DataLoading:
    """Find the waits of the training loop for its DataLoader, per step."""
    tree, words = forest(trace), vocabulary(trace)
    evidence, called = _calls(trace)
    rows = np.flatnonzero(called)
    rows = rows[np.argsort(tree.row[rows], kind="stable")]
    work = gpu_work(trace)
    on_gpu = union(work["start_ns"].to_numpy(), work["end_ns"].to_numpy())
    idle = complement(on_gpu, trace.start_ns, trace.end_ns) if work.height else None
    waiting = union(tree.start_ns[rows], tree.end_ns[rows])
    # who makes the batch of each call: by its name or by the names inside it
    by_workers, in_the_loop = (
        pl.Series(tree.subtree_sums(gather_rows(matches, words.code[tree.row]).astype(np.int64))[rows] > 0)
        for matches in words.matching_each((_BY_WORKERS, _IN_THE_LOOP))
    )
    waits = (
        trace.events[pl.Series(tree.row[rows], dtype=pl.UInt32)]
        .with_columns(
            duration_ns=pl.col("nested_end_ns") - pl.col("start_ns"),
            maker=pl.when(by_workers).then(pl.lit("workers")).when(in_the_loop).then(pl.lit("main_thread")),
            gpu_idle_ns=None if idle is None else pl.Series(coverage(idle, tree.start_ns[rows], tree.end_ns[rows])),
        )
        .pipe(cast_to_schema, WAITS)
    )
    unknown = evidence == "none"
    pieces, step = split_at_steps(trace, waiting.start, waiting.end)
    idle_ns = coverage(EMPTY if idle is None else idle, pieces.start_ns, pieces.end_ns)
    waited = pl.DataFrame({"step": step, "wait_ns": pieces.end_ns - pieces.start_ns, "gpu_idle_ns": idle_ns})
    waited = waited.group_by("step").agg(pl.col("wait_ns", "gpu_idle_ns").sum())
    steps = trace.steps.select(pl.col("step").cast(pl.Int64), length=pl.col("end_ns") - pl.col("start_ns"))
    steps = steps.join(waited, on="step", how="left", maintain_order="left")
    null = pl.lit(None, dtype=pl.Int64)
    wait = null if unknown else pl.col("wait_ns").fill_null(0)
    idling = null if unknown or idle is None else pl.col("gpu_idle_ns").fill_null(0)
    share = pl.when(pl.col("length") > 0).then(wait / pl.col("length"))
    starving = (share >= LEAST_FRACTION) & (idling >= LEAST_IDLE * wait if idle is not None else pl.lit(True))
    steps = steps.select(
        "step",
        wait.alias("wait_ns"),
        share.alias("fraction"),
        idling.alias("gpu_idle_ns"),
        starving.alias("bottleneck"),
    ).pipe(cast_to_schema, STEPS)
    return DataLoading(waits, steps, _spent(trace, called), None if unknown else waiting.total, evidence)


def _spent(trace: Trace, called: Bools) -> pl.DataFrame:
    """Tile the waits by what the thread did: by the code around it, else by the activity."""
    if not called.any():
        return SPENT.to_frame()
    tree, words, pieces = forest(trace), vocabulary(trace), host_pieces(trace)
    by_code = np.full(tree.row.size, -1, like=tree.row)
    names, patterns = zip(*_PLACES, strict=True)
    for name, matches in zip(names, words.matching_each(patterns), strict=True):
        by_code[gather_rows(matches, words.code[tree.row])] = PARTS.index(name)
    by_code = np.append(by_code, -1)[tree.nearest_or_self(by_code >= 0)]
    activities = activity(trace)
    by_activity = np.full(tree.row.size, PARTS.index("other"))
    by_activity[activities == OP] = PARTS.index("operators")
    by_activity[activities == BLOCKING_CALL] = PARTS.index("workers")
    part = np.where(by_code >= 0, by_code, by_activity)
    rows = np.flatnonzero((tree.nearest_or_self(called) >= 0)[pieces.owner])
    frame = pl.DataFrame(
        {
            "step": to_nullable_series(pieces.step[rows], pl.Int32, int(NO_STEP)),
            "part": pl.Series(PARTS)[part[pieces.owner[rows]]],
            "ns": pieces.ns[rows],
        },
        schema=SPENT,
    )
    return frame.group_by("step", "part").agg(pl.col("ns").sum()).sort("step", "part")


def loader_calls(trace: Trace) -> Ints:
    """Rows of `trace.events` in which the training loop waits for its DataLoader, ascending."""
    tree = forest(trace)
    return np.sort(tree.row[_calls(trace)[1]])


@per_trace
def _calls(trace: Trace) -> tuple[str, Bools]:
    """Which host events are calls of a DataLoader, the outermost where several enclose each other."""
    tree = forest(trace)
    words, category_of = vocabulary(trace), trace.events["category"]
    for evidence, category, pattern in (
        ("annotations", (cat.ANNOTATION, cat.OP), SPAN),
        ("python-frames", (cat.PYTHON,), FRAME),
    ):
        called = (words.events(pattern) & category_of.is_in(category).to_numpy())[tree.row]
        if called.any():
            return evidence, tree.topmost(called)
    return "none", np.zeros(tree.row.size, dtype=np.bool_)
