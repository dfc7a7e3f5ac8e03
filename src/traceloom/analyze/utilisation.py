"""FLOPs, roofline, MFU and HFU of steps."""

from __future__ import annotations

import numpy as np
import polars as pl

from traceloom.analyze.ancestry import forest
from traceloom.analyze.classify import gpu_work
from traceloom.analyze.kernel_kinds import kinds
from traceloom.analyze.placed import PlacedCalls
from traceloom.analyze.recompute import ENGINE, recomputed
from traceloom.analyze.splitting import NO_STEP, split_at_steps
from traceloom.analyze.vocabulary import vocabulary
from traceloom.model import Trace
from traceloom.model.arrays import lookup, nullable
from traceloom.model.frames import as_declared, schema

MATRIX_KINDS = ("gemm", "attention", "convolution")
MOST_UNMODELLED = 0.05
"""Share of the GPU work launched in a step that unmodelled matrix work may take before MFU and HFU are not told."""

_HIDDEN = f"more than {MOST_UNMODELLED:.0%} of the GPU work is matrix work without a model".replace("%", " %")

STEPS = schema(
    "step duration_ns complete gpu_ns modelled_ns modelled_fraction flops bytes hardware_flops",
    "model_flops roofline_ns rest_ns roofline_fraction placed_fraction mfu hfu reason",
)


def utilisation(trace: Trace, placed: PlacedCalls) -> tuple[pl.DataFrame, pl.DataFrame]:
    """(steps, whole): one row per step, and one row for the whole trace, from its first to its last GPU work.

    FLOPs belong to the step that launched them; times are those of the GPU work that runs in the step. Columns as
    `STEPS`; see `Roofline` for what they mean.
    """
    words, again = vocabulary(trace), recomputed(trace)
    # which modelled calls repeat forward work inside the backward pass (activation checkpointing)
    repeated = np.zeros(placed.calls.height, dtype=np.bool_)
    if again.evidence != "none":
        tree, position = forest(trace), placed.modelled.above[placed.calls["position"].to_numpy()]
        near = tree.nearest_or_self(again.root | lookup(words.matching(ENGINE), words.code[tree.row]))
        repeated = np.append(again.root, np.False_)[near[position]]
    calls = placed.calls.with_columns(again=pl.Series(repeated, dtype=pl.Boolean))
    why = None  # nobody can tell which FLOPs repeat the forward pass
    unnumbered = trace.events["sequence"].null_count() == trace.events.height
    if words.matching(r"^CompiledFunctionBackward$").any():
        why = "the backward pass is compiled, which may repeat forward work without a trace"
    elif words.matching(ENGINE).any() and unnumbered and again.evidence == "none":
        why = "sequence numbers are not recorded, so repeated forward work cannot be determined"

    work = _all_work(trace, placed)
    # the work cut at the bounds of steps, with the step in which each piece runs; null outside all steps
    long = work.filter(pl.col("ns") > 0)
    pieces, step = split_at_steps(trace, long["start_ns"].to_numpy(), long["end_ns"].to_numpy())
    in_steps = (
        long[pieces.source]
        .with_columns(
            pl.Series("start_ns", pieces.start_ns),
            pl.Series("end_ns", pieces.end_ns),
            nullable(step, pl.Int32, int(NO_STEP)).alias("step"),
        )
        .with_columns(ns=pl.col("end_ns") - pl.col("start_ns"))
    )
    window_ns = trace.end_ns - trace.start_ns
    if work.height:
        start, end = work.select(pl.col("start_ns").min(), pl.col("end_ns").max()).row(0)
        window_ns = int(end) - int(start)
    bounds = trace.steps.select("step", duration_ns=pl.col("end_ns") - pl.col("start_ns"), complete="complete")
    window = pl.DataFrame({"step": [None], "duration_ns": [window_ns], "complete": [True]}, schema=bounds.schema)
    # the whole trace is the row without a step: all rows count in it, not those outside all steps alone
    everywhere = pl.lit(None, pl.Int32).alias("step")
    whole_work = work.with_columns(everywhere)
    calls, launched, running = (
        pl.concat([by_step.drop_nulls("step"), whole])
        for by_step, whole in ((calls, calls.with_columns(everywhere)), (work, whole_work), (in_steps, whole_work))
    )
    fractions = _fractions(pl.concat([bounds, window]), _sums(calls, launched, running), placed, why)
    return fractions[: bounds.height], fractions[bounds.height :]


def _all_work(trace: Trace, placement: PlacedCalls) -> pl.DataFrame:
    """All GPU work: device, step of its launch, start_ns, end_ns, ns, modelled, placed, roofline density, matrix."""
    work, owner = gpu_work(trace), placement.modelled.work_owner
    density = pl.when(pl.col("gpu_ns") > 0).then(pl.col("roofline_ns") / pl.col("gpu_ns"))
    return (
        work.select(
            "device",
            "start_ns",
            "end_ns",
            trace.events["step"].gather(work["event"]),
            ns=pl.col("end_ns") - pl.col("start_ns"),
            position=pl.Series(owner),
            modelled=pl.Series(owner >= 0),
            matrix=kinds(trace)["kind"].is_in(MATRIX_KINDS),
        )
        .join(placement.calls.select("position", density=density), on="position", how="left", maintain_order="left")
        .with_columns(placed=pl.col("density").is_not_null())
    )


def _sums(calls: pl.DataFrame, launched: pl.DataFrame, work: pl.DataFrame) -> pl.DataFrame:
    """Per step the FLOPs of the calls that it launched, and the times of the `work` that runs in it."""
    ideal = pl.col("compute_ns")
    done = calls.group_by("step").agg(
        pl.col("flops", "bytes").sum(),
        calls=pl.len(),
        hardware_flops=pl.col("flops").filter("matrix").sum(),
        model_flops=(pl.col("flops") - pl.col("recomputed")).filter(pl.col("matrix") & ~pl.col("again")).sum(),
        hardware_ns=ideal.filter("matrix").sum(),
        model_ns=(ideal * (1 - pl.col("recomputed") / pl.max_horizontal("flops", 1)))
        .filter(pl.col("matrix") & ~pl.col("again"))
        .sum(),
        matrix_unknown=(pl.col("compute_ns").is_null() & pl.col("matrix")).any(),
    )
    timed = work.group_by("step").agg(
        gpu_ns=pl.col("ns").sum(),
        modelled_ns=pl.col("ns").filter("modelled").sum(),
        placed_ns=pl.col("ns").filter("placed").sum(),
        roofline_ns=(pl.col("ns") * pl.col("density")).sum().round().cast(pl.Int64),
    )
    launched_sums = launched.group_by("step").agg(
        launched_ns=pl.col("ns").sum(),
        unmodelled_matrix_ns=pl.col("ns").filter(pl.col("matrix") & ~pl.col("modelled")).sum(),
    )
    # the time in which any of the work runs, per device, added over devices
    new = {
        name: (end - pl.max_horizontal(start, end.cum_max().shift(1))).clip(lower_bound=0).sum()
        for name, (start, end) in {
            "busy_ns": (pl.col("start_ns"), pl.col("end_ns")),
            "placed_busy_ns": (pl.col("start_ns").filter("placed"), pl.col("end_ns").filter("placed")),
        }.items()
    }
    busy = work.sort("start_ns").group_by("step", "device").agg(**new).group_by("step").agg(pl.col(list(new)).sum())
    for sums in (launched_sums, busy, done):
        timed = timed.join(sums, on="step", how="full", coalesce=True, nulls_equal=True)
    return timed


def _fractions(bounds: pl.DataFrame, sums: pl.DataFrame, placement: PlacedCalls, why: str | None) -> pl.DataFrame:
    """Fractions of the step, each null with a reason where it cannot be computed."""
    counts = [name for name in sums.columns if name.endswith(("_ns", "flops", "bytes"))]
    rows = bounds.join(sums, on="step", how="left", nulls_equal=True, maintain_order="left").with_columns(
        pl.col(counts).fill_null(0), pl.col("matrix_unknown").fill_null(value=False)
    )
    long = pl.col("duration_ns") > 0
    # a step that launched nothing did no FLOPs; for one whose work has no model they are unknown
    counted = pl.col("calls").is_not_null() | ((pl.col("launched_ns") == 0) & bool(placement.devices))
    placed = (pl.col("placed_ns") > 0) & long
    hidden = pl.col("unmodelled_matrix_ns") > MOST_UNMODELLED * pl.col("launched_ns")
    reason = (
        pl.when(not placement.known)
        .then(pl.lit("the peaks of the device are not known"))
        .when(hidden)
        .then(pl.lit(_HIDDEN))
        .when(~counted)
        .then(pl.lit("no operator in it has a model and recorded shapes"))
        .when("matrix_unknown")
        .then(pl.lit("the peak for this element type is not known"))
        .when(~long)
        .then(pl.lit("the step has no length"))
    )
    whole = pl.col("duration_ns") * max(len(placement.devices), 1)
    computable = reason.is_null()
    recompute = pl.lit(why, pl.String)
    rest = pl.col("busy_ns") - pl.col("placed_busy_ns")
    return rows.select(
        "step",
        "duration_ns",
        "complete",
        "gpu_ns",
        "modelled_ns",
        pl.when(pl.col("gpu_ns") > 0).then(pl.col("modelled_ns") / pl.col("gpu_ns")).alias("modelled_fraction"),
        pl.when(counted).then(pl.col("flops", "bytes", "hardware_flops")),
        pl.when(counted & recompute.is_null()).then("model_flops").alias("model_flops"),
        pl.when(placed).then("roofline_ns").alias("roofline_ns"),
        pl.when(placed).then(rest).alias("rest_ns"),
        pl.when(placed).then((pl.col("roofline_ns") + rest) / whole).alias("roofline_fraction"),
        pl.when(pl.col("gpu_ns") > 0).then(pl.col("placed_ns") / pl.col("gpu_ns")).alias("placed_fraction"),
        pl.when(computable & recompute.is_null()).then(pl.col("model_ns") / whole).alias("mfu"),
        pl.when(computable).then(pl.col("hardware_ns") / whole).alias("hfu"),
        pl.coalesce(reason, recompute).alias("reason"),
    ).pipe(as_declared, STEPS)
