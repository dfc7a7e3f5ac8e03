"""Waits for the DataLoader: how long the main loop waits for its data, who makes it, and whether
the GPU waits too.
"""

from dataclasses import dataclass

import numpy as np
import polars as pl

from traceloom.analyze.ancestry import build_forest, build_host_pieces
from traceloom.analyze.host_events import BLOCKING_CALL, OP, classify_activity
from traceloom.analyze.intervals import EMPTY_SPANS, compute_coverage, invert_spans, merge_intervals
from traceloom.analyze.kernel_rules import select_gpu_work
from traceloom.analyze.names import build_vocabulary
from traceloom.analyze.steps import NO_STEP, split_at_steps, step_times
from traceloom.trace import vocabulary as vocab
from traceloom.trace.array_types import Bools, Ints
from traceloom.trace.arrays import gather_rows, to_nullable_series
from traceloom.trace.batch import cache_per_trace
from traceloom.trace.frames import Result, build_schema, cast_to_schema
from traceloom.trace.trace import Trace

PARTS = ("fetch", "collate", "pin_memory", "workers", "operators", "other")
MAKERS = ("main_thread", "workers")
WAITS = build_schema(
    "event name start_ns duration_ns step thread maker gpu_idle_ns",
    {"thread": pl.Int64, "maker": pl.Enum(MAKERS)},
)
STEPS = build_schema("step wait_ns fraction gpu_idle_ns bottleneck")
TIME_PARTS = build_schema("step part ns", {"part": pl.Enum(PARTS)})

# Calls of the training loop: PyTorch's own span around them, or the frame of the iterator where
# stacks are recorded.
LOADER_SPAN = r"^enumerate\(DataLoader\)#|^enumerate\(.*DataLoader.*\)#"
LOADER_FRAME = r"(^|/)torch/utils/data/dataloader\.py\(\d+\): __next__$"
_WORKER_LOADER = r"_MultiProcessing[A-Za-z]*Iter|(^|/)torch/utils/data/dataloader\.py\(\d+\): (_try_get_data|_get_data)$"
_MAIN_THREAD_LOADER = r"_SingleProcess[A-Za-z]*Iter|(^|/)torch/utils/data/_utils/fetch\.py\("
_PART_PATTERNS = (
    ("fetch", r"(^|/)torch/utils/data/_utils/fetch\.py\("),
    ("collate", r"(^|/)torch/utils/data/_utils/collate\.py\("),
    ("pin_memory", r"(^|/)torch/utils/data/_utils/pin_memory\.py\("),
    (
        "workers",
        r"(^|/)torch/utils/data/dataloader\.py\(\d+\): (_try_get_data|_get_data)$|(^|/)multiprocessing/",
    ),
)
MIN_WAIT_FRACTION = 0.05  # of a step, for the loader to be called a bottleneck
MIN_IDLE_FRACTION = 0.5  # of the wait in which the GPU had nothing to do


@dataclass(frozen=True)
class DataLoading(Result):
    """Waits for the DataLoader: the time from asking for a batch to having it, whoever makes it.

    Attributes:
        waits: One row per call; `step` is that of its start (null outside all steps). `maker` makes
            the batch: the main thread itself, or worker processes it waits for; null where neither
            name nor frames show it. `gpu_idle_ns` is the part of the wait in which no device had
            any work; null without GPU work.
        steps: One row per step; a wait across a border counts to both sides. Null where no call is
            recorded at all. `bottleneck`: the wait is at least 5 % of the step, and the GPU had
            nothing to do in at least half of it (without GPU work only the first counts).
        spent: Activity of the waiting thread meanwhile, by step (null outside all steps): in the
            data set and its fetcher, collating, pinning, waiting for workers, in operators outside
            of these, or anything else; adds up to `total_ns`. Without Python stacks only operators
            and calls that wait can be distinguished.
        total_ns: Union of the waits; None where no call is recorded.
        evidence: `annotations`, `python-frames` or `none`: how the calls are known.
    """

    waits: pl.DataFrame
    steps: pl.DataFrame
    spent: pl.DataFrame
    total_ns: int | None
    evidence: str


@cache_per_trace
def data_loading(trace: Trace) -> DataLoading:
    """Finds the waits of the training loop for its DataLoader, per step."""
    tree, vocabulary = build_forest(trace), build_vocabulary(trace)
    evidence, called = _mark_loader_calls(trace)
    rows = np.flatnonzero(called)
    rows = rows[np.argsort(tree.row[rows], kind="stable")]
    work = select_gpu_work(trace)
    on_gpu = merge_intervals(work["start_ns"].to_numpy(), work["end_ns"].to_numpy())
    idle = invert_spans(on_gpu, trace.start_ns, trace.end_ns) if work.height else None
    waiting = merge_intervals(tree.start_ns[rows], tree.end_ns[rows])
    # Who makes the batch of each call, by its name or by the names inside it.
    made_by_workers, in_the_loop = (
        pl.Series(
            tree.subtree_sums(gather_rows(matches, vocabulary.code[tree.row]).astype(np.int64))[
                rows
            ]
            > 0
        )
        for matches in vocabulary.matching_each((_WORKER_LOADER, _MAIN_THREAD_LOADER))
    )
    waits = (
        trace.events[pl.Series(tree.row[rows], dtype=pl.UInt32)]
        .with_columns(
            duration_ns=pl.col("nested_end_ns") - pl.col("start_ns"),
            maker=pl.when(made_by_workers)
            .then(pl.lit("workers"))
            .when(in_the_loop)
            .then(pl.lit("main_thread")),
            gpu_idle_ns=None
            if idle is None
            else pl.Series(compute_coverage(idle, tree.start_ns[rows], tree.end_ns[rows])),
        )
        .pipe(cast_to_schema, WAITS)
    )
    unknown = evidence == "none"
    step_spans, step = split_at_steps(trace, waiting.start, waiting.end)
    idle_ns = compute_coverage(
        EMPTY_SPANS if idle is None else idle, step_spans.start_ns, step_spans.end_ns
    )
    waited = pl.DataFrame(
        {"step": step, "wait_ns": step_spans.end_ns - step_spans.start_ns, "gpu_idle_ns": idle_ns}
    )
    waited = waited.group_by("step").agg(pl.col("wait_ns", "gpu_idle_ns").sum())
    times = step_times(trace)
    steps = times.steps.select(
        pl.col("step").cast(pl.Int64), length=pl.max_horizontal("duration_ns", times.durations)
    )
    steps = steps.join(waited, on="step", how="left", maintain_order="left")
    null = pl.lit(None, dtype=pl.Int64)
    wait = null if unknown else pl.col("wait_ns").fill_null(0)
    idling = null if unknown or idle is None else pl.col("gpu_idle_ns").fill_null(0)
    share = pl.when(pl.col("length") > 0).then(wait / pl.col("length"))
    starving = (share >= MIN_WAIT_FRACTION) & (
        idling >= MIN_IDLE_FRACTION * wait if idle is not None else pl.lit(True)
    )
    steps = steps.select(
        "step",
        wait.alias("wait_ns"),
        share.alias("fraction"),
        idling.alias("gpu_idle_ns"),
        starving.alias("bottleneck"),
    ).pipe(cast_to_schema, STEPS)
    return DataLoading(
        waits,
        steps,
        _measure_wait_parts(trace, called),
        None if unknown else waiting.total,
        evidence,
    )


def _measure_wait_parts(trace: Trace, called: Bools) -> pl.DataFrame:
    """Tiles the waits by the activity of the thread: by the code around it, else by its class."""
    if not called.any():
        return TIME_PARTS.to_frame()
    tree, vocabulary, host_pieces = (
        build_forest(trace),
        build_vocabulary(trace),
        build_host_pieces(trace),
    )
    code_part = np.full(tree.row.size, -1, like=tree.row)
    names, patterns = zip(*_PART_PATTERNS, strict=True)
    for name, matches in zip(names, vocabulary.matching_each(patterns), strict=True):
        code_part[gather_rows(matches, vocabulary.code[tree.row])] = PARTS.index(name)
    code_part = np.append(code_part, -1)[tree.nearest_or_self(code_part >= 0)]
    activities = classify_activity(trace)
    activity_part = np.full(tree.row.size, PARTS.index("other"))
    activity_part[activities == OP] = PARTS.index("operators")
    activity_part[activities == BLOCKING_CALL] = PARTS.index("workers")
    part = np.where(code_part >= 0, code_part, activity_part)
    rows = np.flatnonzero((tree.nearest_or_self(called) >= 0)[host_pieces.owner])
    frame = pl.DataFrame(
        {
            "step": to_nullable_series(host_pieces.step[rows], pl.Int32, int(NO_STEP)),
            "part": pl.Series(PARTS)[part[host_pieces.owner[rows]]],
            "ns": host_pieces.ns[rows],
        },
        schema=TIME_PARTS,
    )
    return frame.group_by("step", "part").agg(pl.col("ns").sum()).sort("step", "part")


def find_loader_calls(trace: Trace) -> Ints:
    """Returns rows of `trace.events` in which the training loop waits for its DataLoader,
    ascending.
    """
    return np.sort(build_forest(trace).row[_mark_loader_calls(trace)[1]])


@cache_per_trace
def _mark_loader_calls(trace: Trace) -> tuple[str, Bools]:
    """Returns which host events are calls of a DataLoader, the outermost of nested ones."""
    tree = build_forest(trace)
    vocabulary, category_of = build_vocabulary(trace), trace.events["category"]
    for evidence, category, pattern in (
        ("annotations", (vocab.ANNOTATION, vocab.OP), LOADER_SPAN),
        ("python-frames", (vocab.PYTHON,), LOADER_FRAME),
    ):
        called = (vocabulary.events(pattern) & category_of.is_in(category).to_numpy())[tree.row]
        if called.any():
            return evidence, tree.topmost(called)
    return "none", np.zeros(tree.row.size, dtype=np.bool_)
