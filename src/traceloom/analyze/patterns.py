"""Which sequences of kernels occur again and again? What could be fused, or put into a graph.

Definitions: docs/concepts/patterns.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import polars as pl

from traceloom.analyze.gpu_work import UNKNOWN, SubmittedWork, as_plain_array, submissions
from traceloom.analyze.kernel_kinds import kinds
from traceloom.analyze.names import vocabulary
from traceloom.analyze.repeats import chosen, maximal_repeats
from traceloom.analyze.steps import per_step, spread_schema, whole_steps
from traceloom.trace.array_types import Bools, Ints
from traceloom.trace.arrays import row_numbers, to_nullable_series
from traceloom.trace.frames import Result, cast_to_schema, schema
from traceloom.trace.trace import Trace

ELEMENTWISE = r"(?i)elementwise|^triton_poi_|pointwise"
LONGEST = 64

SEQUENCES = schema(
    "sequence kind count length launch_count kernel_ns gap_ns span_ns fraction elementwise example names",
    {"sequence": pl.UInt32, "kind": pl.Enum(["sequence", "elementwise"]), "names": pl.List(pl.String())},
)
OCCURRENCES = schema(
    "sequence device stream step first last start_ns span_ns",
    {"sequence": pl.UInt32, "first": pl.UInt32, "last": pl.UInt32},
)
STEPS = schema("sequence", spread_schema("call_count", "span_ns"), {"sequence": pl.UInt32})


@dataclass(frozen=True)
class Patterns(Result):
    """Frequent sequences of GPU work on one stream.

    Attributes:
        sequences: The largest gain first, `sequence` kind before `elementwise`: sequence (its number), kind (sequence:
            among all work; elementwise: among runs of elementwise kernels only, the candidates for fusion), count
            (occurrences that do not overlap), length (pieces of work), launch_count (calls that launch one of them, in
            all occurrences), kernel_ns (summed durations), gap_ns (time inside in which nothing of the stream runs),
            span_ns (first start to last end, summed), fraction (of the summed durations of all GPU work), elementwise
            (whether all are elementwise kernels), example (row of the first work of the first one), names (in order).
        occurrences: Where they are: sequence, device, stream, step, first and last (rows of work), start_ns, span_ns.
        steps: Per sequence calls and span per whole step, as mean, min and max.
        work_count: GPU work that was searched.
        work_ns: Its summed durations.
        fusible_count: Kernels fewer, if each occurrence of an `elementwise` sequence were one kernel; those that two
            sequences share count once.
    """

    sequences: pl.DataFrame
    occurrences: pl.DataFrame
    steps: pl.DataFrame
    work_count: int
    work_ns: int
    fusible_count: int = 0


def patterns(trace: Trace, *, shortest: int = 2, longest: int = LONGEST, least: int = 3, most: int = 25) -> Patterns:
    """Find the sequences of GPU work that occur often.

    Args:
        trace: The trace.
        shortest: Fewest pieces of work in a sequence.
        longest: Most pieces of work in a sequence.
        least: Fewest occurrences.
        most: How many sequences of each kind.
    """
    made = submissions(trace)
    words = vocabulary(trace)
    code = as_plain_array(words.code)[made.row].astype(np.int64)
    # kernels that go through their data element by element: by name, or by their kind
    named = words.matching(ELEMENTWISE)[code] if code.size else np.zeros(0, dtype=np.bool_)
    kind = kinds(trace)
    elementwise = kind.filter(pl.col("kind").is_in(["elementwise"]))["event"].to_numpy()
    simple = made.kernel & (named | np.isin(made.row, elementwise))
    bounds = (shortest, longest, least, most)
    every = _search(code, made, np.zeros(code.size, dtype=np.bool_), bounds)
    fused = _search(code, made, ~simple, bounds)
    repeats = [*every, *fused]
    whole = int((made.end - made.start).sum())
    if not repeats:
        return Patterns(SEQUENCES.to_frame(), OCCURRENCES.to_frame(), STEPS.to_frame(), made.row.size, whole)

    # where the occurrences of all sequences begin and end
    counts = [start.size for start, _ in repeats]
    low = np.concatenate([start for start, _ in repeats])
    high = low + np.repeat([size for _, size in repeats], counts)
    # What is added up of each occurrence [low, high): `Patterns.sequences`
    gap = np.zeros(made.row.size, dtype=np.int64)  # before each piece, in which its stream did nothing
    for begin, end in pairwise(made.bounds().tolist()):
        reach = np.maximum.accumulate(made.end[begin:end])
        gap[begin + 1 : end] = np.maximum(made.start[begin + 1 : end] - reach[:-1], 0)
    # a piece has a launch of its own, or is the first of its graph; unknown launches count as own
    own_launch = (made.first | ~made.known).astype(np.int64)
    launched, busy, idle = (np.append(0, np.cumsum(values)) for values in (own_launch, made.end - made.start, gap))
    span = np.maximum.reduceat(np.append(made.end, 0), np.column_stack([low, high]).ravel())[::2] - made.start[low]
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
            "kind": ["sequence"] * len(every) + ["elementwise"] * len(fused),
            "count": counts,
            "length": [size for _, size in repeats],
            **{name: np.add.reduceat(values, first) for name, values in sums.items()},
            "elementwise": [bool(simple[start[0] : start[0] + size].all()) for start, size in repeats],
            "example": [int(made.row[start[0]]) for start, _ in repeats],
            "names": [words.names[code[start[0] : start[0] + size]].to_list() for start, size in repeats],
        }
    ).with_columns((pl.col("kernel_ns") / max(whole, 1)).alias("fraction"))
    # a kernel is fused with the next one where any occurrence holds both
    joins = np.zeros(code.size + 1, dtype=np.int64)
    of_fused = slice(sum(counts[: len(every)]), None)
    np.add.at(joins, low[of_fused], 1)
    np.add.at(joins, high[of_fused] - 1, -1)
    fusible = int(np.count_nonzero(np.cumsum(joins)))
    occurrences = pl.DataFrame(
        {
            "sequence": np.repeat(np.arange(len(repeats)), counts),
            "device": to_nullable_series(made.device[low], absent=UNKNOWN),
            "stream": to_nullable_series(made.stream[low], absent=UNKNOWN),
            "step": trace.steps["step"][row_numbers(made.step[low])],
            "first": made.row[low],
            "last": made.row[high - 1],
            "start_ns": made.start[low],
            "span_ns": sums["span_ns"],
        }
    ).pipe(cast_to_schema, OCCURRENCES)
    in_steps = occurrences.with_columns(pl.lit(1, pl.Int64).alias("call_count"))
    spread = per_step(in_steps, ["sequence"], ["call_count", "span_ns"], whole_steps(trace))
    steps = spread.pipe(cast_to_schema, STEPS).sort("sequence")
    sequences = sequences.pipe(cast_to_schema, SEQUENCES)
    return Patterns(sequences, occurrences, steps, made.row.size, whole, fusible)


def _search(
    code: Ints, made: SubmittedWork, border: Bools, bounds: tuple[int, int, int, int]
) -> list[tuple[Ints, int]]:
    """The chosen repeats between borders, as starts and lengths, longest first; streams are searched together."""
    shortest, longest, least, most = bounds
    if not code.size:
        return []
    opens = np.flatnonzero(np.diff(made.lane, prepend=-1))
    # one border before every stream, and one in the place of every piece that is left out
    text = np.insert(np.where(border, -1, code), opens, -1)
    position = np.insert(np.arange(code.size), opens, 0)
    weight = np.insert(np.where(border, 0, made.end - made.start), opens, 0)
    taken = chosen(text, maximal_repeats(text, shortest, longest), weight, least, most, shortest=shortest)
    return [(position[start], length) for start, length in taken]
