"""Steps of inference servers, read from the names of their annotations.

The forms are those of vLLM (`execute_context_2(300)_generation_5(5)`, with and without the detailed sums, and the older
`execute_new_1_cached_3`), SGLang (`step[DECODE bs=32]`, with and without sums) and ATOM (`prefill[bs=2 tok=8192]`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
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
    "EXTEND": "prefill",
    "PREFILL": "prefill",
    "SPLIT_PREFILL": "prefill",
    "DECODE": "decode",
    "MIXED": "mixed",
    "TARGET_VERIFY": "verify",
    "VERIFY": "verify",
    "DRAFT_EXTEND": "draft",
    "DRAFT_EXTEND_V2": "draft",
    "DRAFT": "draft",
    "IDLE": "idle",
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
    recognised = [at for at, name in enumerate(candidates["name"].to_list()) if _told(name) is not None]
    candidates = candidates[recognised].sort("lane", "start_ns", maintain_order=True)
    rows: list[Facts] = []
    lane = -1
    for row in candidates.to_dicts():  # as many as there are steps
        facts = _told(row["name"])
        assert facts is not None
        if rows and row["lane"] == lane and row["start_ns"] < rows[-1]["end_ns"]:
            _merge(rows[-1], row, facts, whole=not on_host.height)
            continue
        lane = row["lane"]
        rows.append({**row, **facts, "on_gpu": not on_host.height})
    frame = pl.DataFrame(rows, schema_overrides=dict(ANNOTATIONS)) if rows else pl.DataFrame(schema=ANNOTATIONS)
    return frame.select(list(ANNOTATIONS)).cast(ANNOTATIONS).sort("start_ns", maintain_order=True)


def _merge(outer: Facts, row: Facts, facts: Facts, *, whole: bool) -> None:
    """Add what a further annotation of the same step says; on the GPU it may last longer on another stream."""
    if whole:
        outer["end_ns"] = max(outer["end_ns"], row["end_ns"])
    if facts["framework"] == "sglang":
        outer["framework"] = "sglang"  # its name tells the server; the other form is used by several
    for name in FACTS:
        if outer[name] is None:
            outer[name] = facts[name]


def _told(name: str) -> Facts | None:
    """Framework, kind and facts in a name; None for other names."""
    for pattern, read in _FORMS:
        match = pattern.match(name)
        if match:
            return {**dict.fromkeys(FACTS), **read(match)}
    return None


def _vllm(match: re.Match[str]) -> Facts:
    context, generation = int(match[2]), int(match[4])
    context_tokens, context_kv = _sums(match[3])
    tokens, kv = _sums(match[5])
    return {
        "framework": "vllm",
        "kind": _kind(context, generation),
        "requests": context + generation,
        "context_requests": context,
        "context_tokens": context_tokens,
        "context_kv_tokens": context_kv,
        "generation_requests": generation,
        "generation_tokens": tokens,
        "generation_kv_tokens": kv,
    }


def _vllm_old(match: re.Match[str]) -> Facts:
    new, cached = int(match[1]), int(match[2])
    return {
        "framework": "vllm",
        "kind": _kind(new, cached),
        "requests": new + cached,
        "context_requests": new,
        "generation_requests": cached,
    }


def _sums(text: str) -> tuple[int | None, int | None]:
    """Tokens that are computed, and tokens that these attend to."""
    if text.isdigit():
        return int(text), None
    match = _SUMS.match(text)
    return (int(match[1]), int(match[2])) if match else (None, None)


def _kind(context: int, generation: int) -> str:
    if context and generation:
        return "mixed"
    return "prefill" if context else "decode" if generation else "idle"


def _sglang(match: re.Match[str]) -> Facts:
    kind = _SGLANG_KINDS.get(match[1], "other")
    fields = {key: int(value) for key, value in (part.split("=") for part in match[2].split())}
    facts = {**_of_batch(kind, fields.get("bs"), fields.get("toks")), "framework": "sglang", "kind": kind}
    if kind == "mixed":
        facts |= {"context_requests": fields.get("c"), "generation_requests": fields.get("g")}
    names = {
        "c_sq": "context_tokens",
        "c_sk": "context_kv_tokens",
        "g_sq": "generation_tokens",
        "g_sk": "generation_kv_tokens",
    }
    return facts | {names[key]: value for key, value in fields.items() if key in names}


def _atom(match: re.Match[str]) -> Facts:
    fields = {key: int(value) for key, value in (part.split("=") for part in match[2].split())}
    tokens = fields.get("tok", fields.get("toks"))
    return {**_of_batch(match[1], fields.get("bs"), tokens), "framework": "atom", "kind": match[1]}


def _of_batch(kind: str, size: int | None, tokens: int | None) -> Facts:
    """What a batch of one kind says: a prefill computes its tokens, a decode one token of each request."""
    if kind == "prefill":
        return {
            "requests": size,
            "context_requests": size,
            "context_tokens": tokens,
            "generation_requests": 0,
            "generation_tokens": 0,
        }
    if kind == "decode":
        made = size if tokens is None else tokens
        return {
            "requests": size,
            "context_requests": 0,
            "context_tokens": 0,
            "generation_requests": size,
            "generation_tokens": made,
        }
    return {"requests": size}


_FORMS: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], Facts]], ...] = (
    (_VLLM, _vllm),
    (_VLLM_OLD, _vllm_old),
    (_SGLANG, _sglang),
    (_ATOM, _atom),
)


def step_at(steps: pl.DataFrame, time_ns: Ints) -> Ints:
    """Row of the step that holds each instant; -1 for none."""
    start, end = steps["start_ns"].to_numpy(), steps["end_ns"].to_numpy()
    at = np.searchsorted(start, time_ns, side="right") - 1
    return np.where((at >= 0) & (time_ns < np.append(end, 0)[at]), at, -1)
