"""Steps of inference servers, read from the names of their annotations.

The forms are those of vLLM (`execute_context_2(300)_generation_5(5)`, with and without the detailed sums, and the older
`execute_new_1_cached_3`), SGLang (`step[DECODE bs=32]`, with and without sums) and ATOM (`prefill[bs=2 tok=8192]`).
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import polars as pl

from traceloom.analyze.intervals import Ints
from traceloom.analyze.vocabulary import vocabulary
from traceloom.model import Trace
from traceloom.model.arrays import lookup
from traceloom.model.category import ANNOTATION, GPU_ANNOTATION

KINDS = ("prefill", "decode", "mixed", "verify", "draft", "idle", "other")
FACTS = (
    "requests",
    "context_requests",
    "context_tokens",
    "context_kv_tokens",
    "generation_requests",
    "generation_tokens",
    "generation_kv_tokens",
)
ANNOTATIONS = pl.Schema(
    {
        "event": pl.UInt32(),
        "name": pl.String(),
        "framework": pl.String(),
        "kind": pl.Enum(KINDS),
        "start_ns": pl.Int64(),
        "end_ns": pl.Int64(),
        "on_gpu": pl.Boolean(),
        **dict.fromkeys(FACTS, pl.Int64()),
    }
)

_VLLM = re.compile(r"^execute(?:_(\d+))?_context_(\d+)\(([^()]*)\)_generation_(\d+)\(([^()]*)\)")
_VLLM_OLD = re.compile(r"^execute_new_(\d+)_cached_(\d+)$")
_SGLANG = re.compile(r"^step\[(\w+)((?: \w+=\d+)*)\]$")
_ATOM = re.compile(r"^(prefill|decode|mixed)\[((?:\w+=\d+ ?)*)\]$")
_SUMS = re.compile(r"^sq(\d+)sk(\d+)")
_ANY = (  # ASCII ranges: \w and \d of all scripts cost three times as much
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
_SGLANG_SUMS = {
    "c_sq": "context_tokens",
    "c_sk": "context_kv_tokens",
    "g_sq": "generation_tokens",
    "g_sk": "generation_kv_tokens",
}
Facts = dict[str, Any]


def step_annotations(trace: Trace) -> pl.DataFrame:
    """The annotations of server steps, by start: `ANNOTATIONS`; none within another of its thread.

    The facts of an annotation within another are added to the outer one: some servers write two for one step. Where the
    host recorded none, those of the GPU are taken; one that stands on several streams is one step.
    """
    words = vocabulary(trace)
    is_step = words.matching(_ANY)
    if not is_step.any():
        return pl.DataFrame(schema=ANNOTATIONS)
    columns = trace.events.select("event", "name", "category", "lane", "start_ns", "duration_ns")
    events = (
        columns[np.flatnonzero(lookup(is_step, words.code))]
        .filter(pl.col("category").is_in([ANNOTATION, GPU_ANNOTATION]))
        .with_columns(end_ns=pl.col("start_ns") + pl.col("duration_ns").clip(lower_bound=0))
        .drop("duration_ns")
    )
    on_host = events.filter(pl.col("category") == ANNOTATION)
    candidates = on_host if on_host.height else events.with_columns(pl.lit(0, dtype=pl.UInt32).alias("lane"))
    facts_of = {name: facts for name in candidates["name"].unique() if (facts := _facts(name)) is not None}
    candidates = candidates.filter(pl.col("name").is_in(list(facts_of)))
    rows: list[Facts] = []
    lane = -1
    for row in candidates.sort("lane", "start_ns", maintain_order=True).to_dicts():  # as many as there are steps
        facts = facts_of[row["name"]]
        if not rows or row["lane"] != lane or row["start_ns"] >= rows[-1]["end_ns"]:
            lane = row["lane"]
            rows.append({**row, **facts, "on_gpu": not on_host.height})
            continue
        outer = rows[-1]
        if not on_host.height:  # on the GPU a further annotation of the same step may last longer on another stream
            outer["end_ns"] = max(outer["end_ns"], row["end_ns"])
        if facts["framework"] == "sglang":
            outer["framework"] = "sglang"  # its name tells the server; the other form is used by several
        outer |= {name: facts[name] for name in FACTS if outer[name] is None}
    frame = pl.DataFrame(rows, schema_overrides=dict(ANNOTATIONS)) if rows else pl.DataFrame(schema=ANNOTATIONS)
    return frame.select(list(ANNOTATIONS)).cast(ANNOTATIONS).sort("start_ns", maintain_order=True)


def _facts(name: str) -> Facts | None:
    """Framework, kind and facts in a name; None for other names."""
    facts: Facts = dict.fromkeys(FACTS)
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
        return facts | {_SGLANG_SUMS[key]: value for key, value in fields.items() if sglang and key in _SGLANG_SUMS}
    if match := _VLLM.match(name):
        context, generation = int(match[2]), int(match[4])
        facts["context_tokens"], facts["context_kv_tokens"] = _sums(match[3])
        facts["generation_tokens"], facts["generation_kv_tokens"] = _sums(match[5])
    elif match := _VLLM_OLD.match(name):
        context, generation = int(match[1]), int(match[2])
    else:
        return None
    kind = "mixed" if context and generation else "prefill" if context else "decode" if generation else "idle"
    numbers = {"requests": context + generation, "context_requests": context, "generation_requests": generation}
    return {**facts, **numbers, "framework": "vllm", "kind": kind}


def _sums(text: str) -> tuple[int | None, int | None]:
    """Tokens that are computed, and tokens that these attend to."""
    if text.isdigit():
        return int(text), None
    match = _SUMS.match(text)
    return (int(match[1]), int(match[2])) if match else (None, None)


def step_at(steps: pl.DataFrame, time_ns: Ints) -> Ints:
    """Row of the step that holds each instant; -1 for none."""
    start, end = steps["start_ns"].to_numpy(), steps["end_ns"].to_numpy()
    at = np.searchsorted(start, time_ns, side="right") - 1
    return np.where((at >= 0) & (time_ns < np.append(end, 0)[at]), at, -1)
