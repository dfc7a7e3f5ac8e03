"""Steps of an inference server (prefill and decode, batches, time between tokens), and the
operators of replayed graphs.

Definitions: docs/concepts/inference.md.
"""

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from traceloom.analyze.gpu_work import collect_launched_work, convert_to_ndarray
from traceloom.analyze.graph_launches import (
    GRAPH_CALLS,
    MAPPED_NODES_SCHEMA,
    graph_launches,
    map_nodes,
    select_rank_trace,
)
from traceloom.analyze.intervals import merge_intervals
from traceloom.analyze.names import build_vocabulary
from traceloom.analyze.steps import build_device_tiles
from traceloom.errors import UsageError
from traceloom.trace.arrays import gather_rows
from traceloom.trace.frames import Result, build_schema, cast_to_schema
from traceloom.trace.session import Session
from traceloom.trace.trace import Trace
from traceloom.trace.vocabulary import ANNOTATION, GPU_ANNOTATION

KINDS = ("prefill", "decode", "mixed", "verify", "draft", "idle", "other")
FIELD_NAMES = (
    "requests",
    "context_requests",
    "context_tokens",
    "context_kv_tokens",
    "generation_requests",
    "generation_tokens",
    "generation_kv_tokens",
)
ANNOTATIONS = build_schema(
    "event name framework kind start_ns end_ns on_gpu", *FIELD_NAMES, {"kind": pl.Enum(KINDS)}
)

# Names of vLLM (`execute_context_2(300)_generation_5(5)`, with and without the detailed sums, and
# the older `execute_new_1_cached_3`), SGLang (`step[DECODE bs=32]`, with and without sums) and ATOM
# (`prefill[bs=2 tok=8192]`). A number of more than 15 digits is not a count.
_VLLM = re.compile(
    r"^execute(?:_\d+)?_context_(\d{1,15})\(([^()]*)\)_generation_(\d{1,15})\(([^()]*)\)", re.ASCII
)
_VLLM_OLD = re.compile(r"^execute_new_(\d{1,15})_cached_(\d{1,15})$", re.ASCII)
_SGLANG = re.compile(r"^step\[(\w+)((?: \w+=\d{1,15})*)\]$", re.ASCII)
_ATOM = re.compile(r"^(prefill|decode|mixed)\[((?:\w+=\d{1,15}(?: |(?=\])))*)\]$", re.ASCII)
_TOKEN_COUNTS = re.compile(r"^(?:(\d{1,15})$|sq(\d{1,15})sk(\d{1,15})(?!\d))", re.ASCII)
_STEP_ANNOTATION = (  # ASCII ranges: \w and \d of all scripts cost three times as much
    r"^execute(_[0-9]+)?_(context|new)_[0-9]|^step\[[0-9A-Za-z_]+[ \]]"
    r"|^(prefill|decode|mixed)\[([0-9A-Za-z_]+=[0-9]+ ?)*\]$"
)
_SGLANG_KINDS = {
    **dict.fromkeys(("EXTEND", "PREFILL", "SPLIT_PREFILL"), "prefill"),
    "DECODE": "decode",
    "MIXED": "mixed",
    **dict.fromkeys(("TARGET_VERIFY", "VERIFY"), "verify"),
    **dict.fromkeys(("DRAFT_EXTEND", "DRAFT_EXTEND_V2", "DRAFT"), "draft"),
    "IDLE": "idle",
}
_SGLANG_FIELDS = {
    "c_sq": "context_tokens",
    "c_sk": "context_kv_tokens",
    "g_sq": "generation_tokens",
    "g_sk": "generation_kv_tokens",
}
AnnotationFields = dict[str, Any]

STEPS = build_schema(
    "rank number framework kind event name start_ns duration_ns",
    *FIELD_NAMES,
    "gpu_ns gpu_span_ns work_count graph_work_count lag_ns between_ns",
    {"number": pl.UInt32, "kind": pl.Enum(KINDS)},
)
MIX = build_schema(
    "rank kind step_count mean_duration_ns min_duration_ns max_duration_ns mean_gpu_ns min_gpu_ns max_gpu_ns",
    "total_gpu_ns gpu_fraction mean_requests context_tokens generation_tokens",
    "between_median_ns between_p95_ns between_max_ns",
    {"kind": pl.Enum(KINDS), "mean_duration_ns": pl.Int64, "mean_gpu_ns": pl.Int64},  # rounded down
)
RATES = build_schema(
    "rank what count window_ns per_second evidence",
    {"evidence": pl.Enum(["annotation", "declared"])},
)
NODES = build_schema("rank", MAPPED_NODES_SCHEMA)
OPERATORS = build_schema("rank op_name module kernel_count gpu_ns")


@dataclass(frozen=True)
class Inference(Result):
    """Inference of a run, rank by rank.

    Attributes:
        steps: One row per step of the server: number (from 0), framework, kind, event (its
            annotation), name, start_ns and duration_ns (of the annotation); the facts of its batch
            (null where the annotation does not state it): requests, context_requests,
            context_tokens (computed), context_kv_tokens (attended to), and the same of generation;
            then of the GPU work launched in it gpu_ns (union), gpu_span_ns (first start to last
            end), work_count, graph_work_count (of graph launches), lag_ns (from the end of the
            annotation to that of the work, at least 0); between_ns (from the end of the work of the
            last step that generated to the end of this one's, for steps that generate; null for the
            first and others).
        mix: The same by kind: number of steps, mean, min and max of duration and GPU time, its sum
            and share of all steps' GPU time, mean number of requests, tokens, and median, 95th
            percentile and maximum of `between_ns`.
        rates: Tokens (or samples) per second: what, count, window_ns (first start to the last end
            of steps and of their work), per_second, evidence (annotation: counted from the names;
            declared: by the user).
        nodes: Kernels of graphs with the operators of the capture, see `graph_capture.MAPPED`.
            Empty without a capture.
        operators: The same added up by operator and module, longest first; null op_name is what is
            not mapped.
        mapped_fraction: Share of the time of graph replays that has an operator; None without a
            capture or graphs.
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
    """Reads the steps of an inference server, and maps its graph replays.

    Args:
        session: The run, or one trace.
        capture: The recording of the graphs' capture, or of the same model without graphs; of a
            session the trace of the same rank, else its first.
        tokens_per_step: Tokens that a step makes, if the user knows; a step is one of the server,
            else a marked step of the trace.
        samples_per_step: The same for samples (sequences, images).

    Raises:
        UsageError: `wrong-usage`: a declared number is not positive.
    """
    for declared in (tokens_per_step, samples_per_step):
        if declared is not None and declared <= 0:
            raise UsageError(
                f"expected a positive number per step, got {declared}", slug="wrong-usage"
            )
    traces = session.traces if isinstance(session, Session) else (session,)
    parts = []
    for trace in traces:
        steps = _build_steps(trace)
        captured = select_rank_trace(capture, trace)
        if (
            not steps.height
            and captured is None
            and tokens_per_step is None
            and samples_per_step is None
        ):
            parts.append([columns.to_frame() for columns in (STEPS, MIX, RATES, NODES, OPERATORS)])
            continue
        nodes = (
            pl.DataFrame(schema=MAPPED_NODES_SCHEMA)
            if captured is None
            else map_nodes(graph_launches(trace), captured)
        )
        operators = (
            nodes.group_by("op_name", "module")
            .agg(
                pl.col("replay_count").sum().alias("kernel_count"),
                pl.col("total_ns").sum().alias("gpu_ns"),
            )
            .sort("gpu_ns", "op_name", "module", descending=[True, False, False], nulls_last=True)
        )
        # Tokens and samples per second over the window of the steps.
        rows = []
        if steps.height:
            end = (pl.col("start_ns") + pl.col("duration_ns") + pl.col("lag_ns").fill_null(0)).max()
            low, high = steps.select(pl.col("start_ns").min(), end.alias("high")).row(0)
            count = steps.height
            for name, quantity in (
                ("generation_tokens", "generated tokens"),
                ("context_tokens", "context tokens"),
            ):
                tokens = steps[name].drop_nulls()
                if tokens.len() == count and int(tokens.sum()) and high > low:
                    rows.append((quantity, int(tokens.sum()), high - low, "annotation"))
        else:
            cut = build_device_tiles(trace)
            marked = np.append(trace.steps["complete"].to_numpy(), False)[cut.row]
            count = int(marked.sum())
            low, high = (
                (int(cut.spans.start[marked][0]), int(cut.spans.end[marked][-1]))
                if count
                else (0, 0)
            )
        for quantity, per_step in {"tokens": tokens_per_step, "samples": samples_per_step}.items():
            if per_step is not None and high > low:
                rows.append((quantity, per_step * count, high - low, "declared"))
        schema = {
            "what": pl.String(),
            "count": pl.Int64(),
            "window_ns": pl.Int64(),
            "evidence": pl.String(),
        }
        per_second = (pl.col("count") * 1e9 / pl.col("window_ns")).alias("per_second")
        rates = pl.DataFrame(rows, schema=schema, orient="row").with_columns(per_second)
        frames = (
            (steps, STEPS),
            (_summarize_mix(steps), MIX),
            (rates, RATES),
            (nodes, NODES),
            (operators, OPERATORS),
        )
        rank = pl.lit(trace.rank, dtype=pl.Int32).alias("rank")
        parts.append(
            [frame.with_columns(rank).pipe(cast_to_schema, columns) for frame, columns in frames]
        )
    steps, mix, rates, nodes, operators = (pl.concat(frames) for frames in zip(*parts, strict=True))
    total_ns = int(nodes["total_ns"].sum())
    done = int(nodes.filter(pl.col("op").is_not_null())["total_ns"].sum())
    return Inference(steps, mix, rates, nodes, operators, done / total_ns if total_ns else None)


def _build_steps(trace: Trace) -> pl.DataFrame:
    annotated = _find_annotations(trace)
    if not annotated.height:
        return STEPS.to_frame()
    submitted = collect_launched_work(trace)
    on_gpu = bool(annotated["on_gpu"].any())
    # Work belongs to the step that launched it; where only the GPU's annotations are known, to the
    # step in which it starts.
    assigned_ns = (
        submitted.start
        if on_gpu
        else np.where(submitted.known, submitted.call_start, np.iinfo(np.int64).min)
    )
    start, end = annotated["start_ns"].to_numpy(), annotated["end_ns"].to_numpy()
    step = np.searchsorted(start, assigned_ns, side="right") - 1
    in_step = np.flatnonzero((step >= 0) & (assigned_ns < np.append(end, 0)[step]))
    graph_calls, code = (
        build_vocabulary(trace).matching(GRAPH_CALLS),
        convert_to_ndarray(build_vocabulary(trace).code),
    )
    in_graph = (
        submitted.known[in_step] & graph_calls[code[np.maximum(submitted.launch[in_step], 0)]]
    )
    work = pl.DataFrame(
        {
            "step": step[in_step],
            "start": submitted.start[in_step],
            "end": submitted.end[in_step],
            "graph": in_graph,
        }
    )
    # Time in which at least one piece of work of each step runs, on any stream
    busy = [0] * annotated.height
    for part in work.partition_by("step"):
        busy[part["step"][0]] = merge_intervals(
            part["start"].to_numpy(), part["end"].to_numpy()
        ).total
    added = work.group_by("step").agg(
        pl.col("start").min(),
        pl.col("end").max(),
        pl.len().alias("work_count"),
        pl.col("graph").sum().alias("graph_work_count"),
    )
    rows = (
        annotated.with_row_index("number")
        .join(
            added.with_columns(pl.col("step").cast(pl.UInt32)),
            left_on="number",
            right_on="step",
            how="left",
        )
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
        pl.col("generation_requests").is_null()
        & pl.col("kind").is_in(["decode", "mixed", "verify"])
    )
    done = pl.when(generates).then("done")
    # Steps whose work overlaps on several streams may end in another order than they began.
    between = pl.when(generates).then(
        (pl.col("done") - done.cum_max().forward_fill().shift(1)).clip(lower_bound=0)
    )
    lag = pl.when(pl.col("end").is_not_null()).then(
        (pl.col("end") - pl.col("end_ns")).clip(lower_bound=0)
    )
    return rows.with_columns(between.alias("between_ns"), lag.alias("lag_ns"))


def _summarize_mix(steps: pl.DataFrame) -> pl.DataFrame:
    total_ns = max(int(steps["gpu_ns"].sum()), 1)
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
            (pl.col("gpu_ns").sum() / total_ns).alias("gpu_fraction"),
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


def _find_annotations(trace: Trace) -> pl.DataFrame:
    """Returns the annotations of server steps, by start: `ANNOTATIONS`; none within another of its
    thread.

    The facts of an annotation within another are added to the outer one: some servers write two for
    one step. Where the host recorded none, those of the GPU are used; one that occurs on several
    streams is one step.
    """
    vocabulary = build_vocabulary(trace)
    is_step = vocabulary.matching(_STEP_ANNOTATION)
    if not is_step.any():
        return pl.DataFrame(schema=ANNOTATIONS)
    columns = trace.events[["event", "name", "category", "lane", "start_ns", "duration_ns"]]
    events = (
        columns[np.flatnonzero(gather_rows(is_step, vocabulary.code))]
        .filter(pl.col("category").is_in([ANNOTATION, GPU_ANNOTATION]))
        .with_columns(end_ns=pl.col("start_ns") + pl.col("duration_ns").clip(lower_bound=0))
        .drop("duration_ns")
    )
    on_host = events.filter(pl.col("category") == ANNOTATION)
    candidates = (
        on_host if on_host.height else events.with_columns(pl.lit(0, dtype=pl.UInt32).alias("lane"))
    )
    facts_of = {
        name: facts
        for name in candidates["name"].unique()
        if (facts := _parse_annotation(name)) is not None
    }
    candidates = candidates.filter(pl.col("name").is_in(list(facts_of)))
    rows: list[AnnotationFields] = []
    lane = -1
    for row in candidates.sort(
        "lane", "start_ns", maintain_order=True
    ).to_dicts():  # as many as there are steps
        facts = facts_of[row["name"]]
        if not rows or row["lane"] != lane or row["start_ns"] >= rows[-1]["end_ns"]:
            lane = row["lane"]
            rows.append({**row, **facts, "on_gpu": not on_host.height})
            continue
        outer = rows[-1]
        # On the GPU a further annotation of the same step may last longer on another stream
        if not on_host.height:
            outer["end_ns"] = max(outer["end_ns"], row["end_ns"])
        if facts["framework"] == "sglang":
            outer["framework"] = (
                "sglang"  # its name identifies the server; the other form is used by several
            )
        outer |= {name: facts[name] for name in FIELD_NAMES if outer[name] is None}
    frame = (
        pl.DataFrame(rows, schema_overrides=dict(ANNOTATIONS))
        if rows
        else pl.DataFrame(schema=ANNOTATIONS)
    )
    return frame.pipe(cast_to_schema, ANNOTATIONS).sort("start_ns", maintain_order=True)


def _parse_annotation(name: str) -> AnnotationFields | None:
    """Returns framework, kind and facts in a name; None for other names."""
    facts: AnnotationFields = dict.fromkeys(FIELD_NAMES)
    sglang = _SGLANG.match(name)
    if batch := sglang or _ATOM.match(name):
        fields = {key: int(value) for key, value in (part.split("=") for part in batch[2].split())}
        kind = _SGLANG_KINDS.get(batch[1], "other") if sglang else batch[1]
        size, tokens = fields.get("bs"), fields.get("toks")
        if not sglang:
            tokens = fields.get("tok", tokens)
        facts |= {"framework": "sglang" if sglang else "atom", "kind": kind, "requests": size}
        # A prefill computes its tokens, a decode one token of each request.
        if kind == "prefill":
            facts |= {"context_requests": size, "context_tokens": tokens}
            facts |= {"generation_requests": 0, "generation_tokens": 0}
        elif kind == "decode":
            facts |= {"context_requests": 0, "context_tokens": 0, "generation_requests": size}
            facts["generation_tokens"] = size if tokens is None else tokens
        elif kind == "mixed" and sglang:
            facts |= {"context_requests": fields.get("c"), "generation_requests": fields.get("g")}
        return facts | {
            _SGLANG_FIELDS[key]: value
            for key, value in fields.items()
            if sglang and key in _SGLANG_FIELDS
        }
    if match := _VLLM.match(name):
        context, generation = int(match[1]), int(match[3])
        facts["context_tokens"], facts["context_kv_tokens"] = _parse_token_counts(match[2])
        facts["generation_tokens"], facts["generation_kv_tokens"] = _parse_token_counts(match[4])
    elif match := _VLLM_OLD.match(name):
        context, generation = int(match[1]), int(match[2])
    else:
        return None
    kind = (
        "mixed"
        if context and generation
        else "prefill"
        if context
        else "decode"
        if generation
        else "idle"
    )
    numbers = {
        "requests": context + generation,
        "context_requests": context,
        "generation_requests": generation,
    }
    return {**facts, **numbers, "framework": "vllm", "kind": kind}


def _parse_token_counts(text: str) -> tuple[int | None, int | None]:
    """Returns tokens that are computed, and tokens that these attend to."""
    match = _TOKEN_COUNTS.match(text)
    if match is None:
        return None, None
    return (int(match[1]), None) if match[1] else (int(match[2]), int(match[3]))


__all__ = ["ANNOTATIONS", "MIX", "NODES", "OPERATORS", "RATES", "STEPS", "Inference", "inference"]
