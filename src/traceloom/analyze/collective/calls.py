"""Each communication kernel, and each collective that runs on the host, with what is known of it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import numpy as np
import polars as pl

from traceloom.analyze.ancestry import forest
from traceloom.analyze.classify import Rule, gpu_work
from traceloom.analyze.collective.kernel_names import backend_of
from traceloom.analyze.collective_names import described, host_calls, kinds_of_kernels
from traceloom.analyze.intervals import union
from traceloom.analyze.phases import BACKWARD, FORWARD, LOADING, OPTIMIZER, PHASES, around_passes, meaning
from traceloom.analyze.remembered import of_each, per_trace
from traceloom.analyze.splitting import contains
from traceloom.analyze.stacked import TRACE, of_events, stacked, unstacked
from traceloom.array_types import Ints
from traceloom.model import Trace
from traceloom.model.arrays import column, row_numbers

WhereType = pl.Enum(["device", "host"])
PhaseType = pl.Enum(PHASES)
FIELDS = (
    "kind", "group", "group_size", "members", "sequence", "element_type",
    "in_bytes", "out_bytes", "peer", "in_splits", "out_splits", "bytes",
)  # fmt: skip
"""What the file can say of a collective."""

_OWN_BYTES = ("in_bytes", "out_bytes", "in_splits", "out_splits", "bytes", "sequence")
_OF_AMD = re.compile(r"\bMI\d|AMD|Radeon", re.IGNORECASE)
_LEVELS = 4  # annotation > (op >) launch; more than enough, and bounded


def communication_calls(trace: Trace, rules: Iterable[Rule] = ()) -> pl.DataFrame:
    """Communication of a trace, kernels first, each by start.

    Returns:
        Columns where (device, host), event, name, backend, device, stream (null on the host), step, phase, start_ns,
        end_ns (>= start), launch (the call that submitted it; null on the host and where it is not recorded) and
        `FIELDS`.
    """
    rules = tuple(rules)
    return _calls([trace], rules)[0] if rules else _without_rules(trace)


def sum_or_null(column: str) -> pl.Expr:
    """The sum of a column; null where a value is not recorded."""
    return pl.when(pl.col(column).is_not_null().all()).then(pl.col(column).sum())


def _calls(traces: Sequence[Trace], rules: tuple[Rule, ...] = ()) -> list[pl.DataFrame]:
    kernels = stacked(gpu_work(trace, rules) for trace in traces).filter(pl.col("category") == "communication")
    descriptions = described(traces)
    on_host = host_calls(traces, descriptions)
    own = list(zip(traces, unstacked(kernels, traces), unstacked(on_host, traces), strict=True))
    annotations = pl.concat([row_numbers(_annotations(*each)) for each in own])
    # a kernel's own arguments, else those of the op that launched it, else those of the annotation, else its name
    sources = []
    keys = [TRACE, "event"]
    for events, descriptions_of in (
        (kernels["event"], descriptions),
        (kernels["op"], descriptions),
        (annotations, on_host),
    ):
        # sizes only where the event comes once, or they would count several times
        rows = pl.DataFrame([kernels[TRACE], events.alias("event")])
        joined = rows.with_columns(once=pl.struct(keys).is_unique() & pl.col("event").is_not_null())
        joined = joined.join(descriptions_of, on=keys, how="left", maintain_order="left")
        sources.append(joined.with_columns(pl.when("once").then(name).alias(name) for name in _OWN_BYTES))
    by_name = kinds_of_kernels(tuple(kernels["name"].unique().sort().to_list()))
    sources.append(kernels[["name"]].join(by_name, on="name", how="left", maintain_order="left"))
    amd = pl.Series([_of_amd(trace) for trace in traces], dtype=pl.Boolean)[kernels[TRACE]]
    kernels = kernels.with_columns(
        *(pl.coalesce(*(source[name] for source in sources if name in source)).alias(name) for name in FIELDS),
        backend_of("rule", amd=amd).alias("backend"),
    )
    others_ns = np.concatenate([_others_ns(trace, calls) for trace, _, calls in own])
    names = of_events(traces, on_host, "event", "name").alias("name")
    hosted = on_host.with_columns(
        names,
        pl.lit(None, pl.UInt32).alias("launch"),
        pl.lit(None, pl.UInt32).alias("op"),
        pl.lit(None, pl.Int32).alias("device"),
        pl.lit(None, pl.Int64).alias("stream"),
        backend=pl.lit(names).str.extract(r"^(\w+):").str.to_lowercase(),
        end_ns=pl.col("end_ns") - pl.Series(others_ns, dtype=pl.Int64),
    )
    calls = pl.concat([_placed(traces, kernels, "device"), _placed(traces, hosted, "host")])
    return unstacked(calls.sort(TRACE, maintain_order=True), traces)


_without_rules = per_trace(of_each(_calls))


def _of_amd(trace: Trace) -> bool:
    """Whether the devices of a trace are AMD's."""
    return any(name.startswith(("hip", "roc")) for name in trace.meta.versions) or any(
        _OF_AMD.search(name or "") is not None for name in trace.devices["name"]
    )


def _annotations(trace: Trace, kernels: pl.DataFrame, on_host: pl.DataFrame) -> Ints:
    """The annotation (`nccl:all_to_all`) around the launch of each kernel, within a few levels; -1 for none."""
    around = np.full(kernels.height, -1)
    if on_host.height and kernels.height:
        above = kernels["launch"].cast(pl.Int64).fill_null(-1).to_numpy()
        parent, is_call = column(trace, "parent", -1), np.zeros(trace.events.height + 1, dtype=np.bool_)
        is_call[on_host["event"].to_numpy()] = True
        for _ in range(_LEVELS):
            above = np.where(above >= 0, parent[above], -1)
            around = np.where((around < 0) & is_call[above], above, around)
    return around


def _others_ns(trace: Trace, on_host: pl.DataFrame) -> Ints:
    """How much longer each call takes because it is a region around other parts of the step."""
    if not on_host.height or not around_passes(trace).any():
        return np.zeros(on_host.height, dtype=np.int64)
    tree = forest(trace)
    part = tree.topmost(np.isin(meaning(trace).phase, (LOADING, FORWARD, BACKWARD, OPTIMIZER)))
    at = tree.position[on_host["event"].to_numpy()]
    inside_ns = tree.subtree_sums(np.where(part, tree.span_ns(), 0))
    return np.where(around_passes(trace)[at] & ~part[at], inside_ns[at], 0)


def _placed(traces: Sequence[Trace], rows: pl.DataFrame, where: str) -> pl.DataFrame:
    """With step and phase: of the kernel's launch, or of the call itself."""
    members = stacked(trace.groups.select("group", of_group="ranks", of_size="size") for trace in traces)
    grouped = rows.join(
        members.unique([TRACE, "group"], keep="first"), on=[TRACE, "group"], how="left", maintain_order="left"
    )
    members_of = pl.coalesce("members", "of_group")
    size = pl.coalesce("group_size", "of_size", members_of.list.len().cast(pl.Int32))
    sources = unstacked(rows.select(TRACE, event=pl.coalesce("launch", "op", "event")), traces)
    return grouped.select(
        TRACE,
        pl.lit(where, WhereType).alias("where"),
        "event",
        "name",
        "backend",
        "device",
        "stream",
        of_events(traces, rows, "event", "step"),
        pl.concat([_phases(trace, source["event"]) for trace, source in zip(traces, sources, strict=True)]),
        "start_ns",
        "end_ns",
        "launch",
        *({"members": members_of, "group_size": size}.get(name, pl.col(name)).alias(name) for name in FIELDS),
    )


def _phases(trace: Trace, events: pl.Series) -> pl.Series:
    """Forward, backward or optimizer, where something around the event says so, or where a call that is alone on its
    thread begins while the backward pass runs on another; null elsewhere.
    """
    none = pl.Series("phase", [None] * events.len(), dtype=PhaseType)
    tree = forest(trace)
    if not events.len() or not tree.row.size:
        return none
    phase_of = meaning(trace).phase
    rows = events.cast(pl.Int64).fill_null(-1).to_numpy()
    at = np.where(rows >= 0, tree.position[rows], -1)
    phased = np.isin(phase_of, (FORWARD, BACKWARD, OPTIMIZER))
    nearest = tree.nearest_or_self(phased)
    source = np.where(at >= 0, nearest[np.maximum(at, 0)], -1)
    # gloo's calls stand alone on threads of their own: their phase is what autograd's thread does meanwhile
    alone = np.flatnonzero((at >= 0) & (source < 0) & (tree.parent[np.maximum(at, 0)] < 0))
    codes = np.where(source >= 0, phase_of[np.maximum(source, 0)], len(PHASES))
    backward = np.flatnonzero((phase_of == BACKWARD) & (tree.parent < 0))
    if alone.size and backward.size:
        spans = union(tree.start_ns[backward], tree.end_ns[backward])
        codes[alone[contains(spans, tree.start_ns[at[alone]])]] = BACKWARD
    return pl.Series([*PHASES, None], dtype=PhaseType)[codes].alias("phase")
