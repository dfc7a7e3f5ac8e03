"""What kind of work takes the time of each GPU?

Every piece of GPU work has one kind, told by its name and, where that is ambiguous, by who launched it. Two accounts:
the *sum* of durations, and the *exclusive* time, in which every busy nanosecond of a device belongs to one kind only,
so that all kinds and the idle time are the window.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from traceloom.analyze.gpu_time import SHARES, shares
from traceloom.analyze.kernel_rules import (
    KINDS,
    KindOfWork,
    KindRule,
    Matcher,
    built_in_kind_rules,
    gpu_work,
    stepped_work,
)
from traceloom.analyze.names import vocabulary
from traceloom.analyze.steps import per_step, whole_steps
from traceloom.trace import vocabulary as cat
from traceloom.trace.array_types import Ints
from traceloom.trace.arrays import column
from traceloom.trace.batch import TRACE, divide_by_part, of_each, per_trace, stacked, unstacked
from traceloom.trace.frames import Result, cast_to_schema, schema
from traceloom.trace.trace import Trace

_NAMED = np.array([category in (cat.OP, cat.ANNOTATION) for category in cat.CATEGORIES])

KIND_SCHEMA = schema("event kind rule", {"kind": KindOfWork})
PRIORITY: tuple[str, ...] = (
    "gemm",
    "convolution",
    "attention",
    "embedding",
    "normalisation",
    "optimizer",
    "reduction",
    "elementwise",
    "other",
    "communication",
    "copy",
)
"""Who owns a nanosecond in which several kinds run at once: the first of these that does. Calculating comes before
communicating and that before copying, as in `gpu_time`, so that hidden communication stays hidden."""

KINDS_SCHEMA = schema("device kind count sum_ns exclusive_ns fraction", {"kind": KindOfWork})
RULES_SCHEMA = schema("kind rule count sum_ns fraction", {"kind": KindOfWork})


@dataclass(frozen=True)
class KernelKinds(Result):
    """GPU time by kind. Definitions: docs/concepts/kernel-kinds.md.

    Attributes:
        devices: device, window_ns (first start to last end), busy_ns, idle_ns, sum_ns (of all durations), count.
        kinds: One row per device and kind, also of kinds that do not occur: device, kind, count, sum_ns,
            exclusive_ns, fraction (of the sum; null without any). Per device the sums add up to `sum_ns`, and the
            exclusive times and `idle_ns` to `window_ns`.
        rules: Which rules decided: kind, rule (`category`: the event's own category or the rule for communication and
            memory named `category:...`; `none`: no rule knows the name), count, sum_ns, fraction.
        steps: Per device, step (null outside all steps) and kind: count (of what starts there), sum_ns, exclusive_ns,
            clipped to the step.
        per_step: Per device and kind the mean, least and most over whole steps of count, sum_ns and exclusive_ns.
    """

    devices: pl.DataFrame
    kinds: pl.DataFrame
    rules: pl.DataFrame
    steps: pl.DataFrame
    per_step: pl.DataFrame

    def check(self) -> None:
        """Raise AssertionError where the parts do not add up."""
        for row in self.devices.rows(named=True):
            part = self.kinds.filter(pl.col("device").eq_missing(row["device"]))
            assert part["sum_ns"].sum() == row["sum_ns"]
            assert part["exclusive_ns"].sum() + row["idle_ns"] == row["window_ns"]


def kernel_kinds(trace: Trace, rules: Iterable[KindRule] = ()) -> KernelKinds:
    """Account for the time of each GPU by kind; `rules` of the user's come before the table."""
    return _kernel_kinds(trace, tuple(rules))


@of_each
def _kernel_kinds(traces: Sequence[Trace], rules: tuple[KindRule, ...]) -> Iterable[KernelKinds]:
    named = stacked(kinds(trace, rules) for trace in traces)
    work = stepped_work(traces).with_columns(named["kind"], named["rule"].alias("named"))
    kind_shares = shares(traces, work, "kind", PRIORITY)
    sum_ns = pl.col("sum_ns")
    by_rule = (
        work.group_by(TRACE, "kind", rule="named")
        .agg(pl.len().alias("count"), pl.col("ns").sum().alias("sum_ns"))
        .with_columns(divide_by_part(sum_ns, sum_ns.sum().over(TRACE)).fill_nan(None).alias("fraction"))
        .sort(TRACE, "sum_ns", "kind", "rule", descending=[False, True, False, False])
    )
    steps = stacked(map(whole_steps, traces))
    spread = per_step(kind_shares.steps, [TRACE, "device", "kind"], list(SHARES), steps)
    return map(
        KernelKinds,
        unstacked(kind_shares.devices, traces),
        unstacked(kind_shares.parts, traces, KINDS_SCHEMA),
        unstacked(by_rule, traces, RULES_SCHEMA),
        unstacked(kind_shares.steps, traces),
        unstacked(spread, traces),
    )


def kinds(trace: Trace, rules: Iterable[KindRule] = ()) -> pl.DataFrame:
    """The kind of every piece of GPU work.

    Returns:
        Columns event, kind, rule; one row per kernel, copy and fill, in the order of `events`.
    """
    rules = tuple(rules)
    return _kinds(trace, rules) if rules else _kinds_by_table(trace)


@per_trace
def _kinds_by_table(trace: Trace) -> pl.DataFrame:
    return _kinds(trace, ())


def _kinds(trace: Trace, rules: tuple[KindRule, ...]) -> pl.DataFrame:
    work = gpu_work(trace)
    matcher = Matcher.of((*rules, *built_in_kind_rules()))
    words = vocabulary(trace)
    bits = matcher.context_bits(words.ordered)[words.place]
    op, launch = (work[name].cast(pl.Int64).fill_null(-1).to_numpy() for name in ("op", "launch"))
    own, under = _around_launch(trace, op, launch, bits)
    used, name = np.unique(words.place[words.code[work["event"].to_numpy()]], return_inverse=True)
    first = matcher.first(words.ordered[used], name.astype(np.int64), own, under)
    by_user = first < len(rules)
    category = work["category"].to_physical().to_numpy()
    settled = ~by_user & (category > 0)  # 0 is compute: only the name and the launch can tell
    labels = [*matcher.rules, KindRule("none", "other", "")]
    kind = np.array([KINDS.index(label.kind) for label in labels], dtype=np.uint32)[first]
    kind[settled] = np.array([0, KINDS.index("communication"), KINDS.index("copy")], dtype=np.uint32)[category[settled]]
    rule = pl.Series([label.name for label in labels])[first.astype(np.uint32)]
    rule = rule.zip_with(pl.Series(~settled), "category:" + work["rule"].cast(pl.String)).replace(
        "category:category", "category"
    )
    kind_names = pl.Series(KINDS, dtype=KindOfWork)[kind]
    return pl.DataFrame({"event": work["event"], "kind": kind_names, "rule": rule}).pipe(cast_to_schema, KIND_SCHEMA)


def _around_launch(
    trace: Trace, op: Ints, launch: Ints, bits_of_name: NDArray[np.uint64]
) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Bits of the operator that launched each piece of work, and of all operators and annotations around it.

    Args:
        trace: The trace.
        op: Row of the operator of each piece; -1 for none.
        launch: Row of its launch; -1 for none.
        bits_of_name: Bits of each name of `vocabulary(trace)`.

    Returns:
        Two arrays of shape (work,): of the innermost operator, and of it and whatever stands above the launch. Python
        frames have no bits: their names are paths.
    """
    names = vocabulary(trace).code
    if not op.size or not names.size:
        return np.zeros(op.size, dtype=np.uint64), np.zeros(op.size, dtype=np.uint64)
    own = np.where(op >= 0, bits_of_name[names[np.maximum(op, 0)]], 0).astype(np.uint64)
    origin, origin_index = np.unique(np.where(launch >= 0, launch, op), return_inverse=True)
    category, parent = column(trace, "category"), column(trace, "parent", -1)
    gathered = np.zeros(origin.size, dtype=np.uint64)
    at = np.flatnonzero(origin >= 0)
    current = origin[at]
    while at.size:  # one turn per level of nesting
        gathered[at] |= np.where(_NAMED[category[current]], bits_of_name[names[current]], np.uint64(0))
        current = parent[current]
        kept = current >= 0
        at, current = at[kept], current[kept]
    return own, gathered[origin_index] | own
