"""Steps of an inference server: prefill and decode, their batches, the time between tokens, what graphs replayed.

Definitions: docs/concepts/inference.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from traceloom.analyze.graph_capture import MAPPED, mapped_nodes, of_rank
from traceloom.analyze.graph_launches import GRAPH_CALLS, graph_launches
from traceloom.analyze.intervals import union
from traceloom.analyze.serving_steps import ANNOTATIONS, FACTS, KINDS, step_annotations, step_at
from traceloom.analyze.submissions import plain, submissions
from traceloom.analyze.vocabulary import vocabulary
from traceloom.errors import UsageError
from traceloom.model import Session, Trace
from traceloom.model.result import Result

STEPS = pl.Schema(
    {
        "rank": pl.Int32(),
        "number": pl.UInt32(),
        "framework": pl.String(),
        "kind": pl.Enum(KINDS),
        "event": pl.UInt32(),
        "name": pl.String(),
        "start_ns": pl.Int64(),
        "duration_ns": pl.Int64(),
        **dict.fromkeys(FACTS, pl.Int64()),
        **dict.fromkeys(
            ("gpu_ns", "gpu_span_ns", "work_count", "graph_work_count", "lag_ns", "between_ns"), pl.Int64()
        ),
    }
)
MIX = pl.Schema(
    {
        "rank": pl.Int32(),
        "kind": pl.Enum(KINDS),
        "step_count": pl.Int64(),
        **{f"{how}_{name}": pl.Int64() for name in ("duration_ns", "gpu_ns") for how in ("mean", "min", "max")},
        "total_gpu_ns": pl.Int64(),
        "gpu_fraction": pl.Float64(),
        "mean_requests": pl.Float64(),
        **dict.fromkeys(("context_tokens", "generation_tokens"), pl.Int64()),
        **{f"between_{how}_ns": pl.Int64() for how in ("median", "p95", "max")},
    }
)
RATES = pl.Schema(
    {
        "rank": pl.Int32(),
        "what": pl.String(),
        "count": pl.Int64(),
        "window_ns": pl.Int64(),
        "per_second": pl.Float64(),
        "evidence": pl.Enum(["annotation", "declared"]),
    }
)
NODES = pl.Schema({"rank": pl.Int32(), **MAPPED})
OPERATORS = pl.Schema(
    {
        "rank": pl.Int32(),
        **dict.fromkeys(("op_name", "module"), pl.String()),
        **dict.fromkeys(("kernel_count", "gpu_ns"), pl.Int64()),
    }
)


@dataclass(frozen=True)
class Inference(Result):
    """Inference, rank by rank.

    Attributes:
        steps: One row per step of the server: number (from 0), framework, kind, event (its annotation), name, start_ns
            and duration_ns (of the annotation); the facts of its batch (null where the annotation does not tell):
            requests, context_requests, context_tokens (computed), context_kv_tokens (attended to), and the same of
            generation; then of the GPU work launched in it gpu_ns (union), gpu_span_ns (first start to last end),
            work_count, graph_work_count (of graph launches), lag_ns (from the end of the annotation to that of the
            work, at least 0); between_ns (from the end of the work of the last step that generated to the end of this
            one's, for steps that generate; null for the first and others).
        mix: The same by kind: number of steps, mean, min and max of duration and GPU time, its sum and share of all
            steps' GPU time, mean number of requests, tokens, and median, 95th percentile and maximum of `between_ns`.
        rates: Tokens (or samples) per second: what, count, window_ns (first start to the last end of steps and of their
            work), per_second, evidence (annotation: counted from the names; declared: by the user).
        nodes: Kernels of graphs with the operators of the capture, see `graph_capture.MAPPED`. Empty without a capture.
        operators: The same added up by operator and module, the most time first; null op_name is what is not mapped.
        mapped_fraction: Share of the time of graph replays that has an operator; None without a capture or graphs.
    """

    steps: pl.DataFrame
    mix: pl.DataFrame
    rates: pl.DataFrame
    nodes: pl.DataFrame
    operators: pl.DataFrame
    mapped_fraction: float | None


def inference(
    session: Session | Trace,
    capture: Session | Trace | None = None,
    *,
    tokens_per_step: int | None = None,
    samples_per_step: int | None = None,
) -> Inference:
    """Read the steps of an inference server, and map its graph replays.

    Args:
        session: The run, or one trace.
        capture: The recording of the graphs' capture, or of the same model without graphs; of a session the trace of
            the same rank, else its first.
        tokens_per_step: Tokens that a step makes, where the user knows; a step is one of the server, else a
            marked step of the trace.
        samples_per_step: The same for samples (sequences, images).

    Raises:
        UsageError: `wrong-usage`: a declared number is not positive.
    """
    for declared in (tokens_per_step, samples_per_step):
        if declared is not None and declared <= 0:
            raise UsageError(f"expected a positive number per step, got {declared}", slug="wrong-usage")
    traces = session.traces if isinstance(session, Session) else (session,)
    parts = []
    for trace in traces:
        steps = _steps(trace)
        captured = of_rank(capture, trace)
        nodes = pl.DataFrame(schema=MAPPED) if captured is None else mapped_nodes(graph_launches(trace), captured)
        operators = (
            nodes.group_by("op_name", "module")
            .agg(pl.col("replay_count").sum().alias("kernel_count"), pl.col("total_ns").sum().alias("gpu_ns"))
            .sort("gpu_ns", "op_name", "module", descending=[True, False, False], nulls_last=True)
        )
        rates = _rates(trace, steps, {"tokens": tokens_per_step, "samples": samples_per_step})
        frames = ((steps, STEPS), (_mix(steps), MIX), (rates, RATES), (nodes, NODES), (operators, OPERATORS))
        rank = pl.lit(trace.rank, dtype=pl.Int32).alias("rank")
        parts.append([frame.with_columns(rank).select(list(schema)).cast(schema) for frame, schema in frames])
    steps, mix, rates, nodes, operators = (pl.concat(frames) for frames in zip(*parts, strict=True))
    whole = int(nodes["total_ns"].sum())
    done = int(nodes.filter(pl.col("op").is_not_null())["total_ns"].sum())
    return Inference(steps, mix, rates, nodes, operators, done / whole if whole else None)


def _steps(trace: Trace) -> pl.DataFrame:
    """The steps with their GPU work."""
    annotated = step_annotations(trace)
    made = submissions(trace)
    on_gpu = bool(annotated["on_gpu"].any())
    # work belongs to the step that launched it; where only the GPU's annotations are known, to that in which it starts
    assigned_ns = made.start if on_gpu else np.where(made.known, made.call_start, np.iinfo(np.int64).min)
    step = step_at(annotated, assigned_ns)
    in_step = np.flatnonzero(step >= 0)
    graph_calls, code = vocabulary(trace).matching(GRAPH_CALLS), plain(vocabulary(trace).code)
    in_graph = made.known[in_step] & graph_calls[code[np.maximum(made.launch[in_step], 0)]]
    work = pl.DataFrame(
        {"step": step[in_step], "start": made.start[in_step], "end": made.end[in_step], "graph": in_graph}
    )
    busy = [0] * annotated.height  # time in which at least one piece of work of each step runs, on any stream
    for (number,), part in work.group_by("step"):
        busy[int(number)] = union(part["start"].to_numpy(), part["end"].to_numpy()).total
    added = work.group_by("step").agg(
        pl.col("start").min(),
        pl.col("end").max(),
        pl.len().alias("work_count"),
        pl.col("graph").sum().alias("graph_work_count"),
    )
    rows = (
        annotated.with_row_index("number")
        .join(added.with_columns(pl.col("step").cast(pl.UInt32)), left_on="number", right_on="step", how="left")
        .sort("number")
        .with_columns(
            (pl.col("end_ns") - pl.col("start_ns")).alias("duration_ns"),
            pl.Series("gpu_ns", busy, dtype=pl.Int64),
            (pl.col("end") - pl.col("start")).alias("gpu_span_ns"),
            pl.col("work_count", "graph_work_count").fill_null(0),
            pl.coalesce("end", "end_ns").alias("done"),
        )
    )
    generates = (pl.col("generation_requests") > 0) | (
        pl.col("generation_requests").is_null() & pl.col("kind").is_in(["decode", "mixed", "verify"])
    )
    done = pl.when(generates).then("done")
    # steps whose work overlaps on several streams may end in another order than they began
    between = pl.when(generates).then((pl.col("done") - done.cum_max().forward_fill().shift(1)).clip(lower_bound=0))
    lag = pl.when(pl.col("end").is_not_null()).then((pl.col("end") - pl.col("end_ns")).clip(lower_bound=0))
    return rows.with_columns(between.alias("between_ns"), lag.alias("lag_ns"))


def _mix(steps: pl.DataFrame) -> pl.DataFrame:
    whole = max(int(steps["gpu_ns"].sum()), 1)
    between = pl.col("between_ns")
    return (
        steps.group_by("kind")
        .agg(
            pl.len().alias("step_count"),
            *(
                statistic
                for name in ("duration_ns", "gpu_ns")
                for statistic in (
                    pl.col(name).mean().round().alias(f"mean_{name}"),
                    pl.col(name).min().alias(f"min_{name}"),
                    pl.col(name).max().alias(f"max_{name}"),
                )
            ),
            pl.col("gpu_ns").sum().alias("total_gpu_ns"),
            (pl.col("gpu_ns").sum() / whole).alias("gpu_fraction"),
            pl.col("requests").mean().alias("mean_requests"),
            *(
                pl.when(pl.col(name).null_count() == 0).then(pl.col(name).sum()).alias(name)
                for name in ("context_tokens", "generation_tokens")
            ),
            between.median().floor().alias("between_median_ns"),
            between.quantile(0.95, "nearest").alias("between_p95_ns"),
            between.max().alias("between_max_ns"),
        )
        .sort("kind")
    )


def _rates(trace: Trace, steps: pl.DataFrame, declared: dict[str, int | None]) -> pl.DataFrame:
    """Tokens and samples per second over the window of the steps."""
    rows = []
    if steps.height:
        end = (pl.col("start_ns") + pl.col("duration_ns") + pl.col("lag_ns").fill_null(0)).max()
        low, high = steps.select(pl.col("start_ns").min(), end.alias("high")).row(0)
        count = steps.height
        for name, quantity in (("generation_tokens", "generated tokens"), ("context_tokens", "context tokens")):
            tokens = steps[name].drop_nulls()
            if tokens.len() == count and int(tokens.sum()):
                rows.append((quantity, int(tokens.sum()), high - low, "annotation"))
    else:
        marked = trace.steps.filter("complete")
        count = marked.height
        low, high = (int(marked["start_ns"][0]), int(marked["end_ns"][-1])) if count else (0, 0)
    for quantity, each in declared.items():
        if each is not None and high > low:
            rows.append((quantity, each * count, high - low, "declared"))
    schema = {"what": pl.String(), "count": pl.Int64(), "window_ns": pl.Int64(), "evidence": pl.String()}
    per_second = (pl.col("count") * 1e9 / pl.col("window_ns")).alias("per_second")
    return pl.DataFrame(rows, schema=schema, orient="row").with_columns(per_second)


__all__ = ["ANNOTATIONS", "MIX", "NODES", "OPERATORS", "RATES", "STEPS", "Inference", "inference"]
