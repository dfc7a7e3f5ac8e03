"""GPU time by kind of work.

Every piece of GPU work has one kind, determined by its name and, where that is ambiguous, by the
operator that launched it. Two accounts: the *sum* of durations, and the *exclusive* time, in which
every busy nanosecond of a device belongs to one kind only, so that all kinds and the idle time are
the window.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from traceloom.analyze.gpu_time import SHARES, compute_shares
from traceloom.analyze.kernel_rules import (
    WORK_KINDS,
    KindMatcher,
    KindRule,
    WorkKindType,
    load_built_in_kind_rules,
    select_gpu_work,
    select_gpu_work_with_steps,
)
from traceloom.analyze.names import build_vocabulary
from traceloom.analyze.steps import select_whole_steps, summarize_per_step
from traceloom.trace import vocabulary as vocab
from traceloom.trace.array_types import Ints
from traceloom.trace.arrays import get_event_column
from traceloom.trace.batch import (
    TRACE_COLUMN,
    cache_per_trace,
    concatenate_by_trace,
    divide_by_trace_total,
    run_in_batches,
    split_by_trace,
)
from traceloom.trace.frames import Result, build_schema, cast_to_schema
from traceloom.trace.trace import Trace

_NAMED_CATEGORIES = np.array(
    [category in (vocab.OP, vocab.ANNOTATION) for category in vocab.CATEGORIES]
)

KIND_SCHEMA = build_schema("event kind rule", {"kind": WorkKindType})
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
"""The order of kinds for a nanosecond in which several run at once: the first of them owns it.
Compute comes before communication and that before copies, as in `gpu_time`, so that hidden
communication stays hidden.
"""

KINDS_SCHEMA = build_schema(
    "device kind count sum_ns exclusive_ns fraction", {"kind": WorkKindType}
)
RULES_SCHEMA = build_schema("kind rule count sum_ns fraction", {"kind": WorkKindType})


@dataclass(frozen=True)
class KernelKinds(Result):
    """GPU time by kind. Definitions: docs/concepts/kernel-kinds.md.

    Attributes:
        devices: device, window_ns (first start to last end), busy_ns, idle_ns, sum_ns (of all
            durations), count.
        kinds: One row per device and kind, also of kinds that do not occur: device, kind, count,
            sum_ns, exclusive_ns, fraction (of the sum; null without any). Per device the sums add
            up to `sum_ns`, and the exclusive times and `idle_ns` to `window_ns`.
        rules: The deciding rules: kind, rule (`category`: the event's own category or the rule for
            communication and memory named `category:...`; `none`: no rule matches the name), count,
            sum_ns, fraction.
        steps: Per device, step (null outside all steps) and kind: count (of what starts there),
            sum_ns, exclusive_ns, clipped to the step.
        per_step: Per device and kind the mean, min and max over whole steps of count, sum_ns and
            exclusive_ns.
    """

    devices: pl.DataFrame
    kinds: pl.DataFrame
    rules: pl.DataFrame
    steps: pl.DataFrame
    per_step: pl.DataFrame

    def check(self) -> None:
        """Raises AssertionError where the parts do not add up."""
        for row in self.devices.rows(named=True):
            part = self.kinds.filter(pl.col("device").eq_missing(row["device"]))
            assert part["sum_ns"].sum() == row["sum_ns"]
            assert part["exclusive_ns"].sum() + row["idle_ns"] == row["window_ns"]


def kernel_kinds(trace: Trace, rules: Iterable[KindRule] = ()) -> KernelKinds:
    """Accounts for the time of each GPU by kind; the user's `rules` come before the table."""
    return _summarize_kinds(trace, tuple(rules))


@run_in_batches
def _summarize_kinds(traces: Sequence[Trace], rules: tuple[KindRule, ...]) -> Iterable[KernelKinds]:
    classified = concatenate_by_trace(classify_kinds(trace, rules) for trace in traces)
    work = select_gpu_work_with_steps(traces).with_columns(
        classified["kind"], classified["rule"].alias("named")
    )
    kind_shares = compute_shares(traces, work, "kind", PRIORITY)
    sum_ns = pl.col("sum_ns")
    rule_table = (
        work.group_by(TRACE_COLUMN, "kind", rule="named")
        .agg(pl.len().alias("count"), pl.col("ns").sum().alias("sum_ns"))
        .with_columns(
            divide_by_trace_total(sum_ns, sum_ns.sum().over(TRACE_COLUMN))
            .fill_nan(None)
            .alias("fraction")
        )
        .sort(TRACE_COLUMN, "sum_ns", "kind", "rule", descending=[False, True, False, False])
    )
    steps = concatenate_by_trace(map(select_whole_steps, traces))
    spread = summarize_per_step(
        kind_shares.steps, [TRACE_COLUMN, "device", "kind"], list(SHARES), steps
    )
    return map(
        KernelKinds,
        split_by_trace(kind_shares.devices, traces),
        split_by_trace(kind_shares.parts, traces, KINDS_SCHEMA),
        split_by_trace(rule_table, traces, RULES_SCHEMA),
        split_by_trace(kind_shares.steps, traces),
        split_by_trace(spread, traces),
    )


@cache_per_trace
def classify_kinds(trace: Trace, rules: Iterable[KindRule] = ()) -> pl.DataFrame:
    """Returns the kind of every piece of GPU work.

    Returns:
        Columns event, kind, rule; one row per kernel, copy and fill, in the order of `events`.
    """
    rules = tuple(rules)
    work = select_gpu_work(trace)
    matcher = KindMatcher.of((*rules, *load_built_in_kind_rules()))
    vocabulary = build_vocabulary(trace)
    name_bits = matcher.compute_op_bits(vocabulary.ordered)[vocabulary.place]
    op, launch = (work[name].cast(pl.Int64).fill_null(-1).to_numpy() for name in ("op", "launch"))
    op_bits, enclosing_bits = _collect_context_bits(trace, op, launch, name_bits)
    used, name = np.unique(
        vocabulary.place[vocabulary.code[work["event"].to_numpy()]], return_inverse=True
    )
    first = matcher.first(vocabulary.ordered[used], name.astype(np.int64), op_bits, enclosing_bits)
    is_user_rule = first < len(rules)
    category = work["category"].to_physical().to_numpy()
    # 0 is compute: only the name and the launch can refine it
    settled = ~is_user_rule & (category > 0)
    labels = [*matcher.rules, KindRule("none", "other", "")]
    kind = np.array([WORK_KINDS.index(label.kind) for label in labels], dtype=np.uint32)[first]
    kind[settled] = np.array(
        [0, WORK_KINDS.index("communication"), WORK_KINDS.index("copy")], dtype=np.uint32
    )[category[settled]]
    rule = pl.Series([label.name for label in labels])[first.astype(np.uint32)]
    rule = rule.zip_with(pl.Series(~settled), "category:" + work["rule"].cast(pl.String)).replace(
        "category:category", "category"
    )
    kind_names = pl.Series(WORK_KINDS, dtype=WorkKindType)[kind]
    return pl.DataFrame({"event": work["event"], "kind": kind_names, "rule": rule}).pipe(
        cast_to_schema, KIND_SCHEMA
    )


def _collect_context_bits(
    trace: Trace, op: Ints, launch: Ints, bits_of_name: NDArray[np.uint64]
) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Returns bits of the operator that launched each piece of work, and of all operators and
    annotations around it.

    Args:
        trace: The trace.
        op: Row of the operator of each piece; -1 for none.
        launch: Row of its launch; -1 for none.
        bits_of_name: Bits of each name of the trace's vocabulary.

    Returns:
        Two arrays of shape (work,): of the innermost operator, and of it and everything above the
        launch. Python frames have no bits: their names are paths.
    """
    names = build_vocabulary(trace).code
    if not op.size or not names.size:
        return np.zeros(op.size, dtype=np.uint64), np.zeros(op.size, dtype=np.uint64)
    op_bits = np.where(op >= 0, bits_of_name[names[np.maximum(op, 0)]], 0).astype(np.uint64)
    origin, origin_index = np.unique(np.where(launch >= 0, launch, op), return_inverse=True)
    category, parent = get_event_column(trace, "category"), get_event_column(trace, "parent", -1)
    gathered = np.zeros(origin.size, dtype=np.uint64)
    rows = np.flatnonzero(origin >= 0)
    current = origin[rows]
    while rows.size:  # one iteration per level of nesting
        gathered[rows] |= np.where(
            _NAMED_CATEGORIES[category[current]], bits_of_name[names[current]], np.uint64(0)
        )
        current = parent[current]
        has_parent = current >= 0
        rows, current = rows[has_parent], current[has_parent]
    return op_bits, gathered[origin_index] | op_bits
