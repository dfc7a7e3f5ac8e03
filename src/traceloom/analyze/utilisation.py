"""Utilisation of steps: FLOPs, roofline, MFU and HFU."""

from collections.abc import Sequence

import numpy as np
import polars as pl

from traceloom.analyze.ancestry import build_forest
from traceloom.analyze.autograd import ENGINE_NODE_PATTERN, find_recomputed_work
from traceloom.analyze.kernel_kinds import classify_kinds
from traceloom.analyze.kernel_rules import select_gpu_work_with_steps
from traceloom.analyze.names import build_vocabulary
from traceloom.analyze.placed_calls import PlacedCalls
from traceloom.analyze.steps import NO_STEP, split_at_steps, step_times
from traceloom.trace.array_types import Bools
from traceloom.trace.arrays import gather_rows, to_nullable_series
from traceloom.trace.batch import TRACE_COLUMN, concatenate_by_trace, split_by_trace
from traceloom.trace.frames import build_schema
from traceloom.trace.trace import Trace

MATRIX_KINDS = ("gemm", "attention", "convolution")
MAX_UNMODELLED_SHARE = 0.05
"""Share of the GPU work launched in a step that unmodelled matrix work may take before MFU and HFU
are withheld.
"""

_HIDDEN_REASON = (
    f"more than {MAX_UNMODELLED_SHARE:.0%} of the GPU work is matrix work without a model".replace(
        "%", " %"
    )
)

_IMPOSSIBLE_REASON = "its FLOPs take longer at the peak of the device than it took: a peak, a shape or a time is wrong"

STEPS = build_schema(
    "step duration_ns complete gpu_ns modelled_ns modelled_fraction flops bytes hardware_flops",
    "model_flops roofline_ns rest_ns roofline_fraction placed_fraction mfu hfu reason",
)


def compute_utilisation(
    traces: Sequence[Trace], placed: Sequence[PlacedCalls]
) -> list[tuple[pl.DataFrame, pl.DataFrame]]:
    """Returns for each trace (steps, whole): one row per step, and one row for the whole trace,
    from its first to its last GPU work.

    FLOPs belong to the step that launched them; times are those of the GPU work that runs in the
    step. Columns as `STEPS`; see `Roofline` for their meaning.
    """
    work = _collect_work(traces, placed)
    repeated, in_steps = [], []
    bounds, facts = [], []
    for trace, trace_calls, trace_work in zip(
        traces, placed, split_by_trace(work, traces), strict=True
    ):
        repeats, reason = _find_repeated_calls(trace, trace_calls)
        repeated.append(repeats)
        facts.append((trace_calls.known, len(trace_calls.devices), reason))
        # The work cut at the bounds of steps, with the step in which each piece runs; null outside
        # all steps.
        long = trace_work.filter(pl.col("ns") > 0)
        step_spans, step = split_at_steps(
            trace, long["start_ns"].to_numpy(), long["end_ns"].to_numpy(), by_device=True
        )
        in_steps.append(
            long[step_spans.source].with_columns(
                pl.Series("start_ns", step_spans.start_ns),
                pl.Series("end_ns", step_spans.end_ns),
                to_nullable_series(step, pl.Int32, int(NO_STEP)).alias("step"),
                pl.Series("ns", step_spans.end_ns - step_spans.start_ns),
            )
        )
        window_ns = trace.end_ns - trace.start_ns
        if trace_work.height:
            window_ns = int(trace_work["end_ns"].max()) - int(trace_work["start_ns"].min())  # type: ignore[arg-type]
        times = step_times(trace)
        steps = times.steps.select("step", times.durations.alias("duration_ns"), "complete")
        window = pl.DataFrame(
            {"step": [None], "duration_ns": [window_ns], "complete": [True]}, schema=steps.schema
        )
        bounds.append(pl.concat([steps, window]))
    calls = concatenate_by_trace(placed_calls.calls for placed_calls in placed).with_columns(
        again=pl.Series(np.concatenate(repeated))
    )
    # The whole trace is the row without a step: all rows count in it, not only those outside all
    # steps.
    everywhere = pl.lit(None, pl.Int32).alias("step")
    run_work = work.with_columns(everywhere)
    calls, launched, running = (
        pl.concat([step_frame.drop_nulls("step"), whole_frame])
        for step_frame, whole_frame in (
            (calls, calls.with_columns(everywhere)),
            (work, run_work),
            (concatenate_by_trace(in_steps), run_work),
        )
    )
    columns = {"known": pl.Boolean(), "device_count": pl.Int64(), "why": pl.String()}
    trace_facts = pl.DataFrame(facts, schema=columns, orient="row")
    fractions = _compute_fractions(
        concatenate_by_trace(bounds), _compute_sums(calls, launched, running), trace_facts
    )
    return [(rows[:-1], rows[-1:]) for rows in split_by_trace(fractions, traces, STEPS)]


def _find_repeated_calls(trace: Trace, placed: PlacedCalls) -> tuple[Bools, str | None]:
    """Returns which modelled calls repeat forward work inside the backward pass (activation
    checkpointing), shape (calls,); and the reason where that is unknown.
    """
    vocabulary, recomputed = build_vocabulary(trace), find_recomputed_work(trace)
    repeated = np.zeros(placed.calls.height, dtype=np.bool_)
    if recomputed.evidence != "none":
        tree, position = (
            build_forest(trace),
            placed.modelled.above[placed.calls["position"].to_numpy()],
        )
        nearest = tree.nearest_or_self(
            recomputed.root
            | gather_rows(vocabulary.matching(ENGINE_NODE_PATTERN), vocabulary.code[tree.row])
        )
        repeated = np.append(recomputed.root, np.False_)[nearest[position]]
    unnumbered = trace.events["sequence"].null_count() == trace.events.height
    if vocabulary.matching(r"^CompiledFunctionBackward$").any():
        return (
            repeated,
            "the backward pass is compiled, which may repeat forward work without a trace",
        )
    if (
        vocabulary.matching(ENGINE_NODE_PATTERN).any()
        and unnumbered
        and recomputed.evidence == "none"
    ):
        return (
            repeated,
            "sequence numbers are not recorded, so repeated forward work cannot be determined",
        )
    return repeated, None


def _collect_work(traces: Sequence[Trace], placed: Sequence[PlacedCalls]) -> pl.DataFrame:
    """Returns all GPU work: trace, device, step of its launch, start_ns, end_ns, ns, modelled,
    placed, roofline density, matrix.
    """
    owner = np.concatenate([placed_calls.modelled.work_owner for placed_calls in placed])
    density = pl.when(pl.col("gpu_ns") > 0).then(pl.col("roofline_ns") / pl.col("gpu_ns"))
    kind = concatenate_by_trace(map(classify_kinds, traces))["kind"]
    return (
        select_gpu_work_with_steps(traces)[
            [TRACE_COLUMN, "device", "start_ns", "end_ns", "step", "ns"]
        ]
        .with_columns(
            position=pl.Series(owner),
            modelled=pl.Series(owner >= 0),
            matrix=kind.is_in(MATRIX_KINDS),
        )
        .join(
            concatenate_by_trace(placed_calls.calls for placed_calls in placed).select(
                TRACE_COLUMN, "position", density=density
            ),
            on=[TRACE_COLUMN, "position"],
            how="left",
            maintain_order="left",
        )
        .with_columns(placed=pl.col("density").is_not_null())
    )


def _compute_sums(calls: pl.DataFrame, launched: pl.DataFrame, work: pl.DataFrame) -> pl.DataFrame:
    """Returns per trace and step the FLOPs of the calls that it launched, and the times of the
    `work` that runs in it.
    """
    keys = [TRACE_COLUMN, "step"]
    ideal = pl.col("compute_ns")
    done = calls.group_by(keys).agg(
        pl.col("flops", "bytes").sum(),
        calls=pl.len(),
        hardware_flops=pl.col("flops").filter("matrix").sum(),
        model_flops=(pl.col("flops") - pl.col("recomputed"))
        .filter(pl.col("matrix") & ~pl.col("again"))
        .sum(),
        hardware_ns=ideal.filter("matrix").sum(),
        model_ns=(ideal * (1 - pl.col("recomputed") / pl.max_horizontal("flops", 1)))
        .filter(pl.col("matrix") & ~pl.col("again"))
        .sum(),
        matrix_unknown=(pl.col("compute_ns").is_null() & pl.col("matrix")).any(),
    )
    time_sums = work.group_by(keys).agg(
        gpu_ns=pl.col("ns").sum(),
        modelled_ns=pl.col("ns").filter("modelled").sum(),
        placed_ns=pl.col("ns").filter("placed").sum(),
        roofline_ns=(pl.col("ns") * pl.col("density")).sum().round().cast(pl.Int64),
    )
    launched_sums = launched.group_by(keys).agg(
        launched_ns=pl.col("ns").sum(),
        unmodelled_matrix_ns=pl.col("ns").filter(pl.col("matrix") & ~pl.col("modelled")).sum(),
    )
    # The time in which any of the work runs, per device, summed over devices.
    new = {
        name: (end - pl.max_horizontal(start, end.cum_max().shift(1))).clip(lower_bound=0).sum()
        for name, (start, end) in {
            "busy_ns": (pl.col("start_ns"), pl.col("end_ns")),
            "placed_busy_ns": (
                pl.col("start_ns").filter("placed"),
                pl.col("end_ns").filter("placed"),
            ),
        }.items()
    }
    busy = (
        work.sort("start_ns")
        .group_by(*keys, "device")
        .agg(**new)
        .group_by(keys)
        .agg(pl.col(list(new)).sum())
    )
    for sums in (launched_sums, busy, done):
        time_sums = time_sums.join(sums, on=keys, how="full", coalesce=True, nulls_equal=True)
    return time_sums


def _compute_fractions(
    bounds: pl.DataFrame, sums: pl.DataFrame, trace_facts: pl.DataFrame
) -> pl.DataFrame:
    """Returns fractions of the step, each null with a reason where it cannot be computed.

    Args:
        bounds: All steps: trace, step, duration_ns, complete.
        sums: The result of `_compute_sums`.
        trace_facts: One row per trace: known (whether there are peaks), device_count, why (see
            `_find_repeated_calls`).
    """
    counts = [name for name in sums.columns if name.endswith(("_ns", "flops", "bytes"))]
    rows = (
        bounds.join(
            sums, on=[TRACE_COLUMN, "step"], how="left", nulls_equal=True, maintain_order="left"
        )
        .hstack(trace_facts[bounds[TRACE_COLUMN]])
        .with_columns(pl.col(counts).fill_null(0), pl.col("matrix_unknown").fill_null(value=False))
    )
    long = pl.col("duration_ns") > 0
    # A step that launched nothing did no FLOPs; for one whose work has no model they are unknown.
    counted = pl.col("calls").is_not_null() | (
        (pl.col("launched_ns") == 0) & (pl.col("device_count") > 0)
    )
    placed = (pl.col("placed_ns") > 0) & long
    hidden = pl.col("unmodelled_matrix_ns") > MAX_UNMODELLED_SHARE * pl.col("launched_ns")
    reason = (
        pl.when(~pl.col("known"))
        .then(pl.lit("the peaks of the device are not known"))
        .when(hidden)
        .then(pl.lit(_HIDDEN_REASON))
        .when(~counted)
        .then(pl.lit("no operator in it has a model and recorded shapes"))
        .when("matrix_unknown")
        .then(pl.lit("the peak for this element type is not known"))
        .when(~long)
        .then(pl.lit("the step has no length"))
    )
    device_ns = pl.col("duration_ns") * pl.col("device_count").clip(lower_bound=1)
    # No device does more than its peak: then the peak, the times or the shapes are wrong.
    exceeds = pl.when(pl.col("hardware_ns") > device_ns).then(pl.lit(_IMPOSSIBLE_REASON))
    withheld = pl.coalesce(reason, exceeds)
    computable = withheld.is_null()
    recompute = pl.col("why")
    unplaced_ns = pl.col("busy_ns") - pl.col("placed_busy_ns")
    return rows.select(
        TRACE_COLUMN,
        "step",
        "duration_ns",
        "complete",
        "gpu_ns",
        "modelled_ns",
        pl.when(pl.col("gpu_ns") > 0)
        .then(pl.col("modelled_ns") / pl.col("gpu_ns"))
        .alias("modelled_fraction"),
        pl.when(counted).then(pl.col("flops", "bytes", "hardware_flops")),
        pl.when(counted & recompute.is_null()).then("model_flops").alias("model_flops"),
        pl.when(placed).then("roofline_ns").alias("roofline_ns"),
        pl.when(placed).then(unplaced_ns).alias("rest_ns"),
        pl.when(placed)
        .then((pl.col("roofline_ns") + unplaced_ns) / device_ns)
        .alias("roofline_fraction"),
        pl.when(pl.col("gpu_ns") > 0)
        .then(pl.col("placed_ns") / pl.col("gpu_ns"))
        .alias("placed_fraction"),
        pl.when(computable & recompute.is_null()).then(pl.col("model_ns") / device_ns).alias("mfu"),
        pl.when(computable).then(pl.col("hardware_ns") / device_ns).alias("hfu"),
        pl.coalesce(withheld, recompute).alias("reason"),
    )
