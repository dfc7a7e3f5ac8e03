"""Frequent sequences of kernels: candidates for fusion, or for a graph.

Definitions: docs/concepts/patterns.md.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import polars as pl

from traceloom.analyze.gpu_work import (
    MISSING_VALUE,
    LaunchedWork,
    collect_launched_work,
    convert_to_ndarray,
)
from traceloom.analyze.kernel_kinds import classify_kinds
from traceloom.analyze.names import build_vocabulary
from traceloom.analyze.repeats import find_maximal_repeats, select_repeats
from traceloom.analyze.steps import build_spread_schema, select_whole_steps, summarize_per_step
from traceloom.trace.array_types import Bools, Ints
from traceloom.trace.arrays import build_event_column, to_nullable_series
from traceloom.trace.frames import Result, build_schema, cast_to_schema
from traceloom.trace.trace import Trace

ELEMENTWISE = r"(?i)elementwise|^triton_poi_|pointwise"
MAX_LENGTH = 64

SEQUENCES = build_schema(
    "sequence kind count length launch_count kernel_ns gap_ns span_ns fraction elementwise example names",
    {
        "sequence": pl.UInt32,
        "kind": pl.Enum(["sequence", "elementwise"]),
        "names": pl.List(pl.String()),
    },
)
OCCURRENCES = build_schema(
    "sequence device stream step first last start_ns span_ns",
    {"sequence": pl.UInt32, "first": pl.UInt32, "last": pl.UInt32},
)
STEPS = build_schema(
    "sequence", build_spread_schema("call_count", "span_ns"), {"sequence": pl.UInt32}
)


@dataclass(frozen=True)
class Patterns(Result):
    """Frequent sequences of GPU work on one stream.

    Attributes:
        sequences: The largest gain first, `sequence` kind before `elementwise`: sequence (its
            number), kind (sequence: among all work; elementwise: among runs of elementwise kernels
            only, the candidates for fusion), count (occurrences that do not overlap), length
            (pieces of work), launch_count (calls that launch one of them, in all occurrences),
            kernel_ns (summed durations), gap_ns (time inside in which nothing of the stream runs),
            span_ns (first start to last end, summed), fraction (of the summed durations of all GPU
            work), elementwise (whether all are elementwise kernels), example (row of the first work
            of the first one), names (in order).
        occurrences: Positions of the occurrences: sequence, device, stream, step, first and last
            (rows of work), start_ns, span_ns.
        steps: Per sequence calls and span per whole step, as mean, min and max.
        work_count: GPU work that was searched.
        work_ns: Its summed durations.
        fusible_count: Kernels fewer, if each occurrence of an `elementwise` sequence were one
            kernel; those that two sequences share count once.
    """

    sequences: pl.DataFrame
    occurrences: pl.DataFrame
    steps: pl.DataFrame
    work_count: int
    work_ns: int
    fusible_count: int = 0


def patterns(
    trace: Trace, *, shortest: int = 2, longest: int = MAX_LENGTH, least: int = 3, most: int = 25
) -> Patterns:
    """Finds the sequences of GPU work that occur often.

    Args:
        trace: The trace.
        shortest: Minimum number of pieces of work in a sequence.
        longest: Maximum number of pieces of work in a sequence.
        least: Minimum number of occurrences.
        most: Maximum number of sequences of each kind.
    """
    submitted = collect_launched_work(trace)
    vocabulary = build_vocabulary(trace)
    code = convert_to_ndarray(vocabulary.code)[submitted.row].astype(np.int64)
    # Kernels that process their data element by element: by name, or by their kind.
    is_elementwise = (
        vocabulary.matching(ELEMENTWISE)[code] if code.size else np.zeros(0, dtype=np.bool_)
    )
    kind = classify_kinds(trace)
    elementwise = kind.filter(pl.col("kind").is_in(["elementwise"]))["event"].to_numpy()
    simple = submitted.kernel & (is_elementwise | np.isin(submitted.row, elementwise))
    bounds = (shortest, longest, least, most)
    sequences_found = _search(code, submitted, np.zeros(code.size, dtype=np.bool_), bounds)
    fused = _search(code, submitted, ~simple, bounds)
    repeats = [*sequences_found, *fused]
    total_ns = int((submitted.end - submitted.start).sum())
    if not repeats:
        return Patterns(
            SEQUENCES.to_frame(),
            OCCURRENCES.to_frame(),
            STEPS.to_frame(),
            submitted.row.size,
            total_ns,
        )

    # Where the occurrences of all sequences begin and end.
    counts = [start.size for start, _ in repeats]
    low = np.concatenate([start for start, _ in repeats])
    high = low + np.repeat([size for _, size in repeats], counts)
    # The sums of each occurrence [low, high): `Patterns.sequences`. Before each piece, in which its
    # stream did nothing
    gap = np.zeros(submitted.row.size, dtype=np.int64)
    for lane_start, end in pairwise(submitted.bounds().tolist()):
        reach = np.maximum.accumulate(submitted.end[lane_start:end])
        gap[lane_start + 1 : end] = np.maximum(
            submitted.start[lane_start + 1 : end] - reach[:-1], 0
        )
    # A piece has a launch of its own, or is the first of its graph; unknown launches count as own.
    own_launch = (submitted.first | ~submitted.known).astype(np.int64)
    launched, busy, idle = (
        np.append(0, np.cumsum(values))
        for values in (own_launch, submitted.end - submitted.start, gap)
    )
    span = (
        np.maximum.reduceat(np.append(submitted.end, 0), np.column_stack([low, high]).ravel())[::2]
        - submitted.start[low]
    )
    sums = {
        "launch_count": launched[high] - launched[low],
        "kernel_ns": busy[high] - busy[low],
        "gap_ns": idle[high] - idle[low + 1],  # the gap before the first is not inside
        "span_ns": span,
    }
    first = np.cumsum([0, *counts])[:-1]
    sequences = pl.DataFrame(
        {
            "sequence": np.arange(len(repeats)),
            "kind": ["sequence"] * len(sequences_found) + ["elementwise"] * len(fused),
            "count": counts,
            "length": [size for _, size in repeats],
            **{name: np.add.reduceat(values, first) for name, values in sums.items()},
            "elementwise": [
                bool(simple[start[0] : start[0] + size].all()) for start, size in repeats
            ],
            "example": [int(submitted.row[start[0]]) for start, _ in repeats],
            "names": [
                vocabulary.names[code[start[0] : start[0] + size]].to_list()
                for start, size in repeats
            ],
        }
    ).with_columns((pl.col("kernel_ns") / max(total_ns, 1)).alias("fraction"))
    # A kernel is fused with the next one where any occurrence holds both.
    joins = np.zeros(code.size + 1, dtype=np.int64)
    fused_slice = slice(sum(counts[: len(sequences_found)]), None)
    np.add.at(joins, low[fused_slice], 1)
    np.add.at(joins, high[fused_slice] - 1, -1)
    fusible = int(np.count_nonzero(np.cumsum(joins)))
    occurrences = pl.DataFrame(
        {
            "sequence": np.repeat(np.arange(len(repeats)), counts),
            "device": to_nullable_series(submitted.device[low], absent=MISSING_VALUE),
            "stream": to_nullable_series(submitted.stream[low], absent=MISSING_VALUE),
            "step": trace.steps["step"][build_event_column(submitted.step[low])],
            "first": submitted.row[low],
            "last": submitted.row[high - 1],
            "start_ns": submitted.start[low],
            "span_ns": sums["span_ns"],
        }
    ).pipe(cast_to_schema, OCCURRENCES)
    in_steps = occurrences.with_columns(pl.lit(1, pl.Int64).alias("call_count"))
    spread = summarize_per_step(
        in_steps, ["sequence"], ["call_count", "span_ns"], select_whole_steps(trace)
    )
    steps = spread.pipe(cast_to_schema, STEPS).sort("sequence")
    sequences = sequences.pipe(cast_to_schema, SEQUENCES)
    return Patterns(sequences, occurrences, steps, submitted.row.size, total_ns, fusible)


def _search(
    code: Ints, submitted: LaunchedWork, border: Bools, bounds: tuple[int, int, int, int]
) -> list[tuple[Ints, int]]:
    """Returns the selected repeats between borders, as starts and lengths, longest first; streams
    are searched together.
    """
    shortest, longest, min_count, limit = bounds
    if not code.size:
        return []
    opens = np.flatnonzero(np.diff(submitted.lane, prepend=-1))
    # One border before every stream, and one in place of every piece that is left out.
    text = np.insert(np.where(border, -1, code), opens, -1)
    position = np.insert(np.arange(code.size), opens, 0)
    weight = np.insert(np.where(border, 0, submitted.end - submitted.start), opens, 0)
    selected = select_repeats(
        text,
        find_maximal_repeats(text, shortest, longest),
        weight,
        min_count,
        limit,
        shortest=shortest,
    )
    return [(position[start], length) for start, length in selected]
