"""FLOPs, roofline, MFU and HFU of steps."""

from __future__ import annotations

import numpy as np
import polars as pl

from traceloom.analyze.ancestry import forest
from traceloom.analyze.intervals import Bools
from traceloom.analyze.kernel_kinds import kinds
from traceloom.analyze.modelled_calls import modelled_calls
from traceloom.analyze.placed import Placed
from traceloom.analyze.recompute import ENGINE, recomputed
from traceloom.analyze.vocabulary import vocabulary
from traceloom.model import Trace
from traceloom.model import category as cat
from traceloom.read.ondisk import lookup

MATRIX_KINDS = ("gemm", "attention", "convolution")
MOST_UNMODELLED = 0.05
"""Share of the GPU work of a step that matrix work without a model may take before MFU and HFU are not told."""

STEPS = pl.Schema(
    {
        "step": pl.Int32(),
        "duration_ns": pl.Int64(),
        "complete": pl.Boolean(),
        "gpu_ns": pl.Int64(),
        "modelled_ns": pl.Int64(),
        "modelled_fraction": pl.Float64(),
        "flops": pl.Int64(),
        "bytes": pl.Int64(),
        "hardware_flops": pl.Int64(),
        "model_flops": pl.Int64(),
        "roofline_ns": pl.Int64(),
        "rest_ns": pl.Int64(),
        "roofline_fraction": pl.Float64(),
        "placed_fraction": pl.Float64(),
        "mfu": pl.Float64(),
        "hfu": pl.Float64(),
        "reason": pl.String(),
    }
)


def utilisation(trace: Trace, found: Placed) -> tuple[pl.DataFrame, pl.DataFrame]:
    """(steps, whole): one row per step, and one row for the whole trace, from its first to its last GPU work.

    Work belongs to the step in which it was launched. Columns as `STEPS`; see `Roofline` for what they mean.
    """
    calls = found.calls.with_columns(again=pl.Series(repeated_calls(trace, found.calls), dtype=pl.Boolean))
    work = _all_work(trace, found)
    why = _recompute_unknown(trace)
    bounds = trace.steps.select("step", duration_ns=pl.col("end_ns") - pl.col("start_ns"), complete="complete")
    steps = _told(bounds, _sums(calls, work, ["step"]), found, why)
    window = pl.DataFrame(
        {"step": [None], "duration_ns": [_window_ns(trace, work)], "complete": [True]}, schema=bounds.schema
    )
    one = pl.lit(None, pl.Int32).alias("step")
    whole = _told(window, _sums(calls.with_columns(one), work.with_columns(one), ["step"]), found, why)
    return steps, whole


def repeated_calls(trace: Trace, calls: pl.DataFrame) -> Bools:
    """Which modelled calls repeat forward work inside the backward pass (activation checkpointing)."""
    again = recomputed(trace)
    if again.evidence == "none":
        return np.zeros(calls.height, dtype=np.bool_)
    tree, root, words = forest(trace), again.root, vocabulary(trace)
    engine = lookup(words.matching(ENGINE), words.code[tree.row])
    near = tree.nearest_or_self(root | engine)
    found: Bools = np.append(root, np.False_)[near[calls["position"].to_numpy()]]
    return found


def _recompute_unknown(trace: Trace) -> str | None:
    """Why nobody can tell which FLOPs repeat the forward pass; None where that is known."""
    words = vocabulary(trace)
    compiled = bool(words.matching(r"^CompiledFunctionBackward$").any())
    backward = bool(words.matching(ENGINE).any())
    numbered = trace.events["sequence"].null_count() < trace.events.height
    if compiled:
        return "the backward pass is compiled, which may repeat forward work without a trace"
    if backward and not numbered and recomputed(trace).evidence == "none":
        return "sequence numbers are not recorded, so repeated forward work cannot be told"
    return None


def _all_work(trace: Trace, found: Placed) -> pl.DataFrame:
    """All GPU work: event, device, step, start_ns, end_ns, ns, modelled, placed, matrix (work by its kind)."""
    length = pl.col("duration_ns").clip(lower_bound=0)
    work = (
        trace.events.lazy()
        .filter(pl.col("category").is_in(cat.GPU_WORK))
        .select("event", "device", "step", "start_ns", end_ns=pl.col("start_ns") + length, ns=length)
        .collect()
    )
    owner = modelled_calls(trace).work_owner
    on_roofline = found.calls.filter(pl.col("roofline_ns").is_not_null())["position"]
    placed = np.isin(owner, on_roofline.to_numpy()) & (owner >= 0)
    work = work.with_columns(pl.Series("modelled", owner >= 0), pl.Series("placed", placed))
    matrix = kinds(trace).select("event", matrix=pl.col("kind").cast(pl.String).is_in(MATRIX_KINDS))
    return work.join(matrix, on="event", how="left", maintain_order="left")


def _window_ns(trace: Trace, work: pl.DataFrame) -> int:
    if not work.height:
        return trace.end_ns - trace.start_ns
    start, end = work.select(pl.col("start_ns").min(), pl.col("end_ns").max()).row(0)
    return int(end) - int(start)


def _union_ns(work: pl.DataFrame, keys: list[str], name: str) -> pl.DataFrame:
    """Time in which any of the work runs, per device, added over devices."""
    by = [*keys, "device"]
    reached = pl.col("end_ns").cum_max().shift(1).over(by)
    new = pl.col("end_ns") - pl.max_horizontal("start_ns", reached)
    return (
        work.sort("start_ns")
        .with_columns(new=new.clip(lower_bound=0))
        .group_by(keys)
        .agg(pl.col("new").sum().alias(name))
    )


def _sums(calls: pl.DataFrame, work: pl.DataFrame, keys: list[str]) -> pl.DataFrame:
    ideal = pl.col("compute_ns")
    done = calls.group_by(keys).agg(
        pl.col("flops", "bytes").sum(),
        pl.col("roofline_ns").sum().round().cast(pl.Int64),
        hardware_flops=pl.col("flops").filter("matrix").sum(),
        model_flops=(pl.col("flops") - pl.col("recomputed")).filter(pl.col("matrix") & ~pl.col("again")).sum(),
        hardware_ns=ideal.filter("matrix").sum(),
        model_ns=(ideal * (1 - pl.col("recomputed") / pl.max_horizontal("flops", 1)))
        .filter(pl.col("matrix") & ~pl.col("again"))
        .sum(),
        matrix_unknown=(pl.col("compute_ns").is_null() & pl.col("matrix")).any(),
    )
    timed = work.group_by(keys).agg(
        gpu_ns=pl.col("ns").sum(),
        modelled_ns=pl.col("ns").filter("modelled").sum(),
        placed_ns=pl.col("ns").filter("placed").sum(),
        unmodelled_matrix_ns=pl.col("ns").filter(pl.col("matrix") & ~pl.col("modelled")).sum(),
    )
    unions = _union_ns(work, keys, "busy_ns").join(
        _union_ns(work.filter("placed"), keys, "placed_busy_ns"), on=keys, how="left", nulls_equal=True
    )
    return timed.join(unions, on=keys, how="left", nulls_equal=True).join(
        done, on=keys, how="full", coalesce=True, nulls_equal=True
    )


def _told(bounds: pl.DataFrame, sums: pl.DataFrame, found: Placed, why: str | None) -> pl.DataFrame:
    """Fractions of the step, each null with a reason where it cannot be told."""
    counts = [name for name in sums.columns if name.endswith(("_ns", "flops", "bytes"))]
    rows = bounds.join(sums, on="step", how="left", nulls_equal=True, maintain_order="left").with_columns(
        pl.col(counts).fill_null(0), pl.col("matrix_unknown").fill_null(value=False)
    )
    long = pl.col("duration_ns") > 0
    placed = (pl.col("placed_ns") > 0) & long
    hidden = pl.col("unmodelled_matrix_ns") > MOST_UNMODELLED * pl.col("gpu_ns")
    share = pl.concat_str(
        (100 * pl.col("unmodelled_matrix_ns") / pl.max_horizontal("gpu_ns", 1)).round(1),
        pl.lit(" % of the GPU work is matrix work without a model"),
    )
    reason = (
        pl.when(not found.known)
        .then(pl.lit("the peaks of the device are not known"))
        .when(hidden)
        .then(share)
        .when("matrix_unknown")
        .then(pl.lit("the peak for this element type is not known"))
        .when(~long)
        .then(pl.lit("the step has no length"))
    )
    whole = pl.col("duration_ns") * max(len(found.devices), 1)
    known = reason.is_null()
    recompute = pl.lit(why, pl.String)
    rest = pl.col("busy_ns") - pl.col("placed_busy_ns")
    return rows.select(
        "step",
        "duration_ns",
        "complete",
        "gpu_ns",
        "modelled_ns",
        pl.when(pl.col("gpu_ns") > 0).then(pl.col("modelled_ns") / pl.col("gpu_ns")).alias("modelled_fraction"),
        "flops",
        "bytes",
        "hardware_flops",
        pl.when(recompute.is_null()).then("model_flops").alias("model_flops"),
        pl.when(placed).then("roofline_ns").alias("roofline_ns"),
        pl.when(placed).then(rest).alias("rest_ns"),
        pl.when(placed).then((pl.col("roofline_ns") + rest) / whole).alias("roofline_fraction"),
        pl.when(pl.col("gpu_ns") > 0).then(pl.col("placed_ns") / pl.col("gpu_ns")).alias("placed_fraction"),
        pl.when(known & recompute.is_null()).then(pl.col("model_ns") / whole).alias("mfu"),
        pl.when(known).then(pl.col("hardware_ns") / whole).alias("hfu"),
        pl.coalesce(reason, recompute).alias("reason"),
    ).cast(STEPS)
