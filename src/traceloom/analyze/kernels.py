"""Kernels and operators by name, input shapes, launch and step."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from traceloom.analyze.ancestry import build_forest
from traceloom.analyze.gpu_work import attribute_to_launches
from traceloom.analyze.host_events import classify_events
from traceloom.analyze.intervals import merge_intervals
from traceloom.analyze.kernel_kinds import classify_kinds
from traceloom.analyze.kernel_rules import (
    WORK_CATEGORIES,
    CategoryType,
    EventKindType,
    Rule,
    WorkKindType,
    select_gpu_work,
    select_gpu_work_with_steps,
)
from traceloom.analyze.names import build_vocabulary
from traceloom.analyze.steps import (
    build_spread_schema,
    select_whole_steps,
    summarize_durations,
    summarize_per_step,
)
from traceloom.formats.arguments import can_reread_events, read_numeric_arguments
from traceloom.trace.arrays import choose_engine
from traceloom.trace.batch import (
    TRACE_COLUMN,
    concatenate_by_trace,
    divide_by_trace_total,
    gather_event_column,
    run_in_batches,
    split_by_trace,
)
from traceloom.trace.frames import Result, build_schema, cast_to_schema
from traceloom.trace.trace import Trace
from traceloom.trace.vocabulary import KERNEL

KERNEL_SCHEMA = build_schema(
    "name category rule kind count total_ns mean_ns min_ns max_ns fraction",
    {"category": CategoryType, "kind": EventKindType},
)
CATEGORY_SCHEMA = build_schema("category count total_ns union_ns", {"category": CategoryType})


@dataclass(frozen=True)
class Kernels(Result):
    """GPU work by name and by category, all devices of the trace together.

    Attributes:
        kernels: One row per name and kind, largest total first: name, category, rule (the rule that
            decided, see docs/concepts/kernel-categories.md), kind, count, total_ns (sum of
            durations), mean_ns (rounded down), min_ns, max_ns, fraction (of the sum of all GPU
            work).
        categories: category, count, total_ns (sum), union_ns (time in which at least one such piece
            of work runs, per device, added over devices). A sum above its union is work that
            overlaps its own kind.
    """

    kernels: pl.DataFrame
    categories: pl.DataFrame


def kernels(trace: Trace, rules: Iterable[Rule] = ()) -> Kernels:
    """Sums GPU work by name and by category; `rules` come before the built-in table."""
    work = select_gpu_work(trace, rules).with_columns(
        (pl.col("end_ns") - pl.col("start_ns")).alias("duration_ns")
    )
    name_table = (
        work.lazy()
        .group_by("name", "kind")
        .agg(pl.col("category", "rule").first(), *summarize_durations(pl.col("duration_ns")))
        .with_columns(
            (pl.col("total_ns") / pl.col("total_ns").sum()).fill_nan(0.0).alias("fraction")
        )
        .sort("total_ns", "name", "kind", descending=[True, False, False])
        .collect(engine=choose_engine(trace))
        .pipe(cast_to_schema, KERNEL_SCHEMA)
    )
    unions = dict.fromkeys(WORK_CATEGORIES, 0)
    for part in work[["category", "device", "start_ns", "end_ns"]].partition_by(
        "category", "device"
    ):
        unions[part["category"][0]] += merge_intervals(
            part["start_ns"].to_numpy(), part["end_ns"].to_numpy()
        ).total
    sums = work.group_by("category").agg(
        pl.len().alias("count"), pl.col("duration_ns").sum().alias("total_ns")
    )
    category_table = (
        pl.DataFrame({"category": list(unions), "union_ns": list(unions.values())})
        .cast({"category": CategoryType})
        .join(sums, on="category", how="left", maintain_order="left")
        .with_columns(pl.col("count", "total_ns").fill_null(0))
        .pipe(cast_to_schema, CATEGORY_SCHEMA)
    )
    return Kernels(name_table, category_table)


KEYS = ("op", "shapes", "types", "kernel", "kind")
SHAPES_SCHEMA = build_schema(
    "op shapes types kernel kind count total_ns mean_ns min_ns max_ns",
    "fraction mean_total_ns min_total_ns max_total_ns step_count",
    {"kind": WorkKindType},
)


@dataclass(frozen=True)
class KernelShapes(Result):
    """GPU work by the operator that launched it and the shapes of its inputs.

    Attributes:
        rows: One row per operator, input shapes, input types and kernel, the largest total first:
            op (the innermost operator around the launch; null where none is recorded), shapes and
            types (JSON text; null where not recorded), kernel, kind, count, total_ns, mean_ns
            (rounded down), min_ns, max_ns (of single pieces of work), fraction (of all GPU work),
            then per whole step mean_total_ns, min_total_ns, max_total_ns and step_count (in how
            many of them it occurs); null without whole steps.
        total_ns: Summed duration of all GPU work; the rows add up to it.
    """

    rows: pl.DataFrame
    total_ns: int


def kernel_shapes(trace: Trace) -> KernelShapes:
    """Sums GPU work by operator, input shapes and kernel."""
    return _summarize_shapes(trace)


@run_in_batches
def _summarize_shapes(traces: Sequence[Trace]) -> Iterable[KernelShapes]:
    work = collect_shaped_work(traces).with_columns(row=pl.struct(KEYS).rank("dense"))
    total = pl.col("total_ns")
    table = (
        work.group_by(TRACE_COLUMN, "row")
        .agg(pl.col(KEYS).first(), *summarize_durations(pl.col("ns")))
        .with_columns(
            fraction=divide_by_trace_total(
                total, total.sum().over(TRACE_COLUMN).clip(lower_bound=1)
            )
        )
    )
    per_step = summarize_per_step(
        work.select(TRACE_COLUMN, "row", "step", total_ns="ns"),
        [TRACE_COLUMN, "row"],
        ["total_ns"],
        concatenate_by_trace(map(select_whole_steps, traces)),
    )
    rows = table.join(per_step, on=[TRACE_COLUMN, "row"], how="left").sort(
        [TRACE_COLUMN, "total_ns", "op", "kernel", "shapes", "types"],
        descending=[False, True, False, False, False, False],
        nulls_last=True,
    )
    return (
        KernelShapes(trace_rows, int(trace_rows["total_ns"].sum()))
        for trace_rows in split_by_trace(rows, traces, SHAPES_SCHEMA)
    )


def collect_shaped_work(traces: Sequence[Trace]) -> pl.DataFrame:
    """Returns every piece of GPU work with the operator around its launch: trace, event, step, op,
    kernel, ns, shapes, types, kind; see `traceloom.trace.batch`.
    """
    work = select_gpu_work_with_steps(traces).select(
        TRACE_COLUMN, "event", "step", "op", "ns", kernel="name"
    )
    inputs = work.select(TRACE_COLUMN, event="op").join(
        concatenate_by_trace(trace.tensors[["event", "shapes", "types"]] for trace in traces),
        on=[TRACE_COLUMN, "event"],
        how="left",
        maintain_order="left",
    )
    operator = gather_event_column(traces, work, "op", "name").alias("op")
    return work.with_columns(
        operator,
        inputs["shapes"],
        inputs["types"],
        concatenate_by_trace(map(classify_kinds, traces))["kind"],
    )


_AXES: dict[str, str | tuple[str, int]] = {
    f"{what}_{axis}": (what, position)
    for what in ("grid", "block")
    for position, axis in enumerate("xyz")
}
_KEYS = {**_AXES, "registers": "registers per thread", "shared_bytes": "shared memory"}
LAUNCHES_SCHEMA = build_schema("event", *_KEYS, "blocks_per_sm warps_per_sm occupancy")


@dataclass(frozen=True)
class KernelLaunches(Result):
    """The launch of each kernel, as the profiler recorded it.

    Attributes:
        rows: One row per kernel, in the order of events: event; grid_x, grid_y, grid_z (blocks);
            block_x, block_y, block_z (threads); registers (per thread); shared_bytes (per block);
            blocks_per_sm, warps_per_sm (of the whole grid, over the multiprocessors of the device);
            occupancy (estimated by the profiler, 0 to 1). Null where not recorded.
        absent: Why grids, blocks, registers and shared memory are all unknown: `no-file`, since
            they are read again from it, or `not-recorded`; None where some are known.
    """

    rows: pl.DataFrame
    absent: str | None


def kernel_launches(trace: Trace) -> KernelLaunches:
    """Returns grid, block, registers, shared memory and occupancy of each kernel; the file is read
    again for them.
    """
    kernel = (trace.events["category"] == KERNEL).to_numpy()
    events = np.flatnonzero(kernel).astype(np.int64)
    rows = trace.events.select("event").filter(kernel)
    if can_reread_events(trace) and events.size:
        rows = rows.join(
            read_numeric_arguments(trace, events, _KEYS),
            on="event",
            how="left",
            maintain_order="left",
        )
    else:
        rows = rows.with_columns(pl.lit(None, dtype=pl.Float64).alias(name) for name in _KEYS)
    filling = trace.kernels.with_columns(occupancy=pl.col("occupancy_percent") / 100).drop(
        "occupancy_percent"
    )
    rows = rows.join(filling, on="event", how="left", maintain_order="left").cast(
        LAUNCHES_SCHEMA, strict=False
    )
    unknown = all(rows[name].null_count() == rows.height for name in _KEYS)
    return KernelLaunches(
        rows, None if not unknown else "not-recorded" if can_reread_events(trace) else "no-file"
    )


OPERATORS = build_schema(
    "name shapes count self_ns total_ns mean_ns device_ns self_device_ns kernel_count fraction"
)


@dataclass(frozen=True)
class Operators(Result):
    """Operators by name (and by input shapes where requested), the largest self time first.

    Attributes:
        operators: `self_ns` is the host time in which the op is the innermost one (its launch calls
            and Python frames count to it); self times add up to the time the host spends in ops.
            `total_ns` counts nested calls of the same row once; `mean_ns` is the mean duration of a
            call. `self_device_ns` is the summed duration of the GPU work launched under the op with
            no other op between, `device_ns` and `kernel_count` that of any descendant, once where
            calls nest. `shapes` is null unless requested, and for ops recorded without them.
        unattributed_device_ns: GPU work of no op: orphans, and work launched outside ops. Together
            with all `self_device_ns` it is `gpu_work_ns`.
        unattributed_count: How many pieces of GPU work these are.
        gpu_work_ns: Summed duration of all GPU work.
    """

    operators: pl.DataFrame
    unattributed_device_ns: int
    unattributed_count: int
    gpu_work_ns: int


def operators(trace: Trace, by_shape: bool = False) -> Operators:
    """Accounts for ops by name, or by name and input shapes.

    In the backward pass `autograd::engine::evaluate_function: X` encloses the op `X`, which
    encloses the ATen ops: the three are rows of their own, separated by self times.

    Args:
        trace: A checked trace; without ops the table is empty.
        by_shape: One row per name and input shapes.
    """
    tree = build_forest(trace)
    is_op = classify_events(trace).op
    enclosing_op = tree.nearest(is_op)
    work = attribute_to_launches(trace)
    direct_ns, direct_kernels, direct_count = work.sum_by_owner(
        tree.nearest_or_self(is_op, enclosing_op)
    )
    # For each host event the row of the table, by its name
    kind = build_vocabulary(trace).code[tree.row].astype(np.int64)
    shapes = pl.Series("shapes", [], dtype=pl.String)  # of the inputs of every event, as JSON text
    if by_shape:
        shapes = trace.events[["event"]].join(
            trace.tensors[["event", "shapes"]], on="event", how="left", maintain_order="left"
        )["shapes"]
        shape = (
            shapes.cast(pl.Categorical)
            .to_physical()
            .cast(pl.Int64)
            .fill_null(-1)
            .to_numpy()[tree.row]
        )
        pair = kind * (int(shape.max(initial=0)) + 2) + shape + 1
        kind = np.unique(pair, return_inverse=True)[1].astype(np.int64)
    top = is_op & tree.topmost_of_kind(np.where(is_op, kind + 1, 0))
    self_ns = tree.self_ns(is_op, enclosing_op)
    ops = pl.LazyFrame(
        {
            "kind": kind,
            "top": top,
            "self_ns": self_ns,
            "span_ns": tree.span_ns(),
            "self_device_ns": direct_ns,
            "device_ns": tree.subtree_sums(direct_ns),
            "kernel_count": tree.subtree_sums(direct_kernels),
            "is_op": is_op,
        }
    ).filter("is_op")
    summed = ops.group_by("kind").agg(
        pl.len().alias("count"),
        pl.col("self_ns", "self_device_ns").sum(),
        pl.col("span_ns").filter("top").sum().alias("total_ns"),
        (pl.col("span_ns").sum() / pl.len()).round().cast(pl.Int64).alias("mean_ns"),
        pl.col("device_ns", "kernel_count").filter("top").sum(),
        (pl.col("self_ns").sum() / max(int(self_ns.sum()), 1)).alias("fraction"),
    )
    used, first = np.unique(kind, return_index=True)
    example = tree.row[first]
    example_shapes = shapes[example] if by_shape else shapes.extend_constant(None, used.size)
    names = pl.DataFrame(
        {"kind": used, "name": trace.events["name"][example], "shapes": example_shapes}
    )
    rows = summed.collect(engine=choose_engine(trace)).join(names, on="kind", how="left")
    table = rows.sort(
        ["self_ns", "total_ns", "name", "shapes"], descending=[True, True, False, False]
    )
    gpu_ns = int(work.duration_ns.sum())
    return Operators(
        table.pipe(cast_to_schema, OPERATORS),
        gpu_ns - int(direct_ns.sum()),
        work.launch_position.size - int(direct_count.sum()),
        gpu_ns,
    )


KERNELS, OPERATORS_PER_STEP = (
    build_schema("name", build_spread_schema(time, "call_count"))
    for time in ("total_ns", "self_ns")
)


@dataclass(frozen=True)
class WorkPerStep(Result):
    """Kernels and operators per usual step.

    Attributes:
        steps: Number of whole steps that the figures are taken over.
        kernels: name, mean_total_ns, min_total_ns, max_total_ns (summed duration of such GPU work
            launched in one step), mean_call_count, min_call_count, max_call_count, step_count
            (steps in which it occurs); the largest mean first. Over the steps, `mean * steps` is
            the sum.
        operators: The same with the operators' self time on the host.
    """

    steps: int
    kernels: pl.DataFrame
    operators: pl.DataFrame


def work_per_step(trace: Trace) -> WorkPerStep:
    """Sums kernels and operators per step; work belongs to the step that launched it.

    Without steps: no rows.
    """
    return _compute_work_per_step(trace)


@run_in_batches
def _compute_work_per_step(traces: Sequence[Trace]) -> Iterable[WorkPerStep]:
    steps = [select_whole_steps(trace) for trace in traces]
    kernels, operators = (
        summarize_per_step(
            rows.with_columns(call_count=pl.lit(1, pl.Int64)),
            [TRACE_COLUMN, "name"],
            [time, "call_count"],
            concatenate_by_trace(steps),
        ).sort(TRACE_COLUMN, f"mean_{time}", "name", descending=[False, True, False])
        for rows, time in (
            (select_gpu_work_with_steps(traces).rename({"ns": "total_ns"}), "total_ns"),
            (concatenate_by_trace(map(_list_operator_calls, traces)), "self_ns"),
        )
    )
    counts = (complete_steps.height for complete_steps in steps)
    return map(
        WorkPerStep,
        counts,
        split_by_trace(kernels, traces, KERNELS),
        split_by_trace(operators, traces, OPERATORS_PER_STEP),
    )


def _list_operator_calls(trace: Trace) -> pl.DataFrame:
    """Returns each call of an operator: name, step, self_ns."""
    tree = build_forest(trace)
    is_op = classify_events(trace).op
    ops = np.flatnonzero(is_op)
    self_ns = tree.self_ns(is_op, tree.nearest(is_op))[ops]
    return trace.events[["name", "step"]][tree.row[ops]].hstack(
        [pl.Series("self_ns", self_ns, dtype=pl.Int64)]
    )
