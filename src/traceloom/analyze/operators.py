"""Which framework operators take the time, on the host and on the devices."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from traceloom.analyze.ancestry import forest
from traceloom.analyze.attribution import launched_work
from traceloom.analyze.phases import meaning
from traceloom.analyze.vocabulary import vocabulary
from traceloom.model import Trace
from traceloom.model.arrays import engine
from traceloom.model.frames import as_declared, schema
from traceloom.model.result import Result

OPERATORS = schema("name shapes count self_ns total_ns mean_ns device_ns self_device_ns kernel_count fraction")


@dataclass(frozen=True)
class Operators(Result):
    """Operators by name (and by input shapes where asked for), the largest self time first.

    Attributes:
        operators: `self_ns` is the host time in which the op is the innermost one (its launch calls and Python frames
            count to it); self times add up to the time the host spends in ops. `total_ns` counts nested calls of the
            same row once; `mean_ns` is the mean duration of a call. `self_device_ns` is the summed duration of the GPU
            work launched under the op with no other op between, `device_ns` and `kernel_count` that of any descendant,
            once where calls nest. `shapes` is null unless asked for, and for ops recorded without them.
        unattributed_device_ns: GPU work of no op: orphans, and work launched outside ops. Together with all
            `self_device_ns` it is `gpu_work_ns`.
        unattributed_count: How many pieces of GPU work these are.
        gpu_work_ns: Summed duration of all GPU work.
    """

    operators: pl.DataFrame
    unattributed_device_ns: int
    unattributed_count: int
    gpu_work_ns: int


def operators(trace: Trace, by_shape: bool = False) -> Operators:
    """Account for ops by name, or by name and input shapes.

    In the backward pass `autograd::engine::evaluate_function: X` encloses the op `X`, which encloses the ATen ops: the
    three are rows of their own, self times tell them apart.

    Args:
        trace: A checked trace; without ops the table is empty.
        by_shape: One row per name and input shapes.
    """
    tree = forest(trace)
    is_op = meaning(trace).op
    above = tree.nearest(is_op)
    work = launched_work(trace)
    direct_ns, direct_kernels, direct_count = work.by_owner(tree.nearest_or_self(is_op, above))
    kind = vocabulary(trace).code[tree.row].astype(np.int64)  # for each host event the row of the table, by its name
    shapes = pl.Series("shapes", [], dtype=pl.String)  # of the inputs of every event, as JSON text
    if by_shape:
        shapes = trace.events[["event"]].join(
            trace.tensors[["event", "shapes"]], on="event", how="left", maintain_order="left"
        )["shapes"]
        shape = shapes.cast(pl.Categorical).to_physical().cast(pl.Int64).fill_null(-1).to_numpy()[tree.row]
        pair = kind * (int(shape.max(initial=0)) + 2) + shape + 1
        kind = np.unique(pair, return_inverse=True)[1].astype(np.int64)
    top = is_op & tree.topmost_of_kind(np.where(is_op, kind + 1, 0))
    self_ns = tree.self_ns(is_op, above)
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
    names = pl.DataFrame({"kind": used, "name": trace.events["name"][example], "shapes": example_shapes})
    rows = summed.collect(engine=engine(trace)).join(names, on="kind", how="left")
    table = rows.sort(["self_ns", "total_ns", "name", "shapes"], descending=[True, True, False, False])
    gpu_ns = int(work.duration_ns.sum())
    return Operators(
        table.pipe(as_declared, OPERATORS),
        gpu_ns - int(direct_ns.sum()),
        work.origin.size - int(direct_count.sum()),
        gpu_ns,
    )
