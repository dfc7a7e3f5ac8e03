"""Rules about kernels: slow matrix products and kernels, unused matrix units, recomputation,
unfused optimizers and norms.
"""

import re
from collections.abc import Iterator

import numpy as np
import polars as pl

from traceloom.analyze.ancestry import build_forest
from traceloom.analyze.autograd import find_recomputed_work
from traceloom.analyze.host_time import mask_pass_events
from traceloom.analyze.intervals import compute_coverage, merge_intervals
from traceloom.analyze.kernel_kinds import classify_kinds
from traceloom.analyze.kernel_rules import classify_matrix_units
from traceloom.analyze.roofline import select_modelled_work
from traceloom.changes.changes import Change, NodeSelection
from traceloom.findings.context import Bools, Context, shorten_name
from traceloom.findings.rule import NO_DEVICE, Candidate, FindingRule, Message
from traceloom.findings.vendors import CUDA
from traceloom.graph import graph as graph_schema
from traceloom.system import units
from traceloom.trace import vocabulary as vocab
from traceloom.trace.notice import Abstention, Evidence
from traceloom.trace.trace import Trace

_GOOD_ROOFLINE_SHARE = 0.7  # of the roofline: what good kernels reach
_MIN_TIME_FACTOR = 0.05  # of the time of kernels: the lower bound of the factor
_LOW_ROOFLINE_SHARE = 0.4  # of the roofline: below this there is something to gain
_MAX_OPERATORS = 6
_MIN_SHARE = 0.01  # of the step
_SLOW_FACTOR = 1.5  # times the median of the same kernel
_MIN_OCCURRENCES = 5  # kernels with the same shapes that are required
# Of the time: the least gain from matrix units and aligned sizes, where no roofline is known
_MATRIX_UNITS_FACTOR = 0.5
_MIN_TF32_CAPABILITY = 8.0  # compute capability from which on there is TF32
_HINTS = {
    r"softmax": "Fuse attention: scaled_dot_product_attention never writes the scores that this reads and writes.",
    r"attention|flash|sdpa": "Try another attention backend (torch.nn.attention.sdpa_kernel), head sizes of 64 or 128, "
    "and less padding.",
    r"bmm|mm$|linear|matmul|addmm|conv": "Look at the element type (bf16, fp8), at sizes that are multiples of 8 or "
    "16, at larger batches, and at tuned kernels (max-autotune, TunableOp).",
    r"cat|contiguous|copy|clone|_to|index|gather|scatter|transpose|permute": "Avoid the copy: preallocate and write "
    "into place, keep one memory layout, gather rows that lie together.",
}
_DEFAULT_HINT = "Fuse it with its neighbours (torch.compile) or use a fused implementation."


def _find_slow_matmuls(context: Context) -> tuple[Bools, Bools, bool]:
    """Returns matrix products that a known reason makes slow, and whether their sizes are known.

    The first mask holds those with unaligned sizes, by operator; the second, of the others, those
    that use no matrix units; shape (nodes,).
    """
    size = context.graph.nodes.height
    unaligned, unused = np.zeros(size, dtype=np.bool_), np.zeros(size, dtype=np.bool_)
    rules, matches = context.select_anti_pattern("unaligned_half_matmul")
    for trace, rows in context.split_by_trace(matches):
        unaligned |= context.below(trace, rows["event"])
    for trace in context.traces:
        unused |= context.node_mask(trace, context.ask(trace, _select_scalar_matmuls))
    kernels = context.select_kinds(graph_schema.KERNEL)
    return unaligned & kernels, unused & kernels & ~unaligned, bool(rules["checked"].any())


def _select_scalar_matmuls(trace: Trace) -> pl.Series:
    """Returns events of matrix products on scalar or vector units."""
    kernels = classify_kinds(trace).hstack([trace.events["name"][classify_kinds(trace)["event"]]])
    names = kernels[["name", "kind"]].unique()
    unused = names.filter(classify_matrix_units(names) == "unused")
    return (
        kernels.join(unused, on=["name", "kind"], how="semi")["event"]
        if unused.height
        else kernels["event"].clear()
    )


def _collect_modelled_work(context: Context) -> pl.DataFrame:
    """Returns modelled work with a known roofline: rank, event, op_name, shapes, ns, roofline_ns,
    bound; rank after rank.
    """
    parts = []
    for trace in context.traces:
        rows, events = (
            select_modelled_work(trace, context.peak).drop_nulls("roofline_ns"),
            trace.events,
        )
        rank = pl.Series("rank", [trace.rank], dtype=pl.Int32).new_from_index(0, rows.height)
        name, ns = (
            events["name"][rows["op"]].alias("op_name"),
            events["duration_ns"][rows["event"]].alias("ns"),
        )
        shapes = rows.select(event="op").join(
            trace.tensors[["event", "shapes"]], on="event", how="left", maintain_order="left"
        )["shapes"]
        parts.append(
            pl.DataFrame(
                [rank, rows["event"], name, shapes, ns, rows["roofline_ns"], rows["bound"]]
            )
        )
    return pl.concat(parts)


def _select_modelled_nodes(context: Context) -> pl.DataFrame:
    """Returns nodes of such work: node, op_name, shapes, duration_ns, roofline_ns (the time at the
    roofline), reached (the share of the roofline of all work of the operator with such shapes).
    """
    keys = ["rank", "event"] if len(context.traces) > 1 else ["event"]
    work = context.ask(context, _collect_modelled_work).select(
        *keys, "op_name", "shapes", "roofline_ns"
    )
    nodes = context.graph.nodes.select(*keys, "node", "duration_ns").join(work, on=keys)
    share = pl.col("roofline_ns").sum() / pl.col("duration_ns").sum().clip(1)
    return nodes.with_columns(reached=share.over("op_name", "shapes"))


def _compute_roofline_share(context: Context, mask: Bools) -> float | None:
    """Returns the share of the roofline that some kernels reach; None where no peak is known."""
    nodes = context.ask(context, _select_modelled_nodes)
    selected = mask[nodes["node"].to_numpy()]
    ns, roof = (
        int(nodes[name].to_numpy()[selected].sum()) for name in ("duration_ns", "roofline_ns")
    )
    return roof / ns if ns else None


def _compute_time_factor(reached: float) -> float:
    """Returns the factor on the time of kernels that reach this share of the roofline, if they ran
    as well as good ones.
    """
    return min(max(reached / _GOOD_ROOFLINE_SHARE, _MIN_TIME_FACTOR), 1.0)


def find_unaligned_matmuls(context: Context) -> Iterator[Message]:
    """Reports matrix products in half precision with sizes that are no multiples of 8."""
    unaligned, _, checked = context.ask(context, _find_slow_matmuls)
    if not checked:
        yield Abstention("unaligned-matmul", "shapes and types of inputs were not recorded")
        return
    if context.work_ns(unaligned) < _MIN_SHARE * context.ranks_ns:
        return
    reached = _compute_roofline_share(context, unaligned)
    time = context.work_ns(context.own(unaligned))
    yield Candidate(
        title=f"{context.format_time_per_step(time)} of matrix products have sizes that are no multiples of 8{context.rank_sum_suffix}",
        changes=(
            Change(
                "scale",
                NodeSelection("matrix products of odd sizes", unaligned, "kernels"),
                _MATRIX_UNITS_FACTOR if reached is None else _compute_time_factor(reached),
            ),
        ),
        confidence=0.6,
        advice="Pad the last dimensions to a multiple of 8 (better 64): vocabulary, sequence length, hidden sizes; in "
        "attention, scaled_dot_product_attention pads by itself.",
        evidence=context.evidence(unaligned),
    )


def find_unused_matrix_units(context: Context) -> Iterator[Message]:
    """Reports matrix products on scalar units."""
    _, unused, _ = context.ask(context, _find_slow_matmuls)
    if context.work_ns(unused) < _MIN_SHARE * context.ranks_ns:
        return
    abilities = [
        float(capability)
        for trace in context.traces
        for capability in trace.devices["compute_capability"].drop_nulls().to_list()
    ]
    time = context.work_ns(context.own(unused))
    tf32 = context.vendor == CUDA and max(abilities, default=0.0) >= _MIN_TF32_CAPABILITY
    yield Candidate(
        title=f"{context.format_time_per_step(time)} of matrix products use no tensor cores"
        + (": TF32 is off" if tf32 else "")
        + context.rank_sum_suffix,
        changes=(
            Change(
                "scale",
                NodeSelection("matrix products without matrix units", unused, "kernels"),
                _MATRIX_UNITS_FACTOR,
            ),
        ),
        confidence=0.6 if tf32 else 0.4,
        advice="torch.set_float32_matmul_precision('high') allows TF32; better, train in bf16: torch.autocast('cuda', "
        "dtype=torch.bfloat16)."
        if tf32
        else "Use half precision: torch.autocast('cuda', dtype=torch.float16) with a "
        "gradient scaler, or bfloat16 where the device has it.",
        evidence=context.evidence(unused),
    )


def find_low_roofline(context: Context) -> Iterator[Message]:
    """Reports modelled operators far below what the device can do, that no other rule explains."""
    unaligned, unused, _ = context.ask(context, _find_slow_matmuls)
    work, nodes = (
        context.ask(context, _collect_modelled_work),
        context.ask(context, _select_modelled_nodes),
    )
    op_groups = work.partition_by("op_name", maintain_order=True)
    for op_work in sorted(op_groups, key=lambda of_op: -of_op["ns"].sum())[:_MAX_OPERATORS]:
        name = op_work["op_name"][0]
        mask = np.zeros(context.graph.nodes.height, dtype=np.bool_)
        is_slow = pl.col("reached") < _LOW_ROOFLINE_SHARE  # with other shapes it may be good
        mask[nodes.filter(is_slow, pl.col("op_name").eq_missing(name))["node"].to_numpy()] = True
        mask &= ~unaligned & ~unused
        reached = _compute_roofline_share(context, mask) if mask.any() else None
        if reached is None:
            continue
        bounds = op_work.group_by(pl.col("bound").cast(pl.String)).agg(pl.col("ns").sum())
        bound = bounds.drop_nulls().sort("ns", "bound", descending=[True, False])["bound"][0]
        limit = "memory's bandwidth" if bound == "memory" else "its arithmetic"
        hint = next(
            (text for pattern, text in _HINTS.items() if re.search(pattern, name)), _DEFAULT_HINT
        )
        in_steps = context.own(mask)
        yield Candidate(
            title=f"{shorten_name(name)} reaches {units.format_share(reached, 1)} of what {limit} allows: "
            f"{context.format_time_per_step(context.work_ns(in_steps))} in {context.many(int(in_steps.sum()), 'kernel')}{context.rank_sum_suffix}",
            changes=(
                Change(
                    "scale",
                    NodeSelection(f"kernels of {shorten_name(name)}", mask, "kernels"),
                    _compute_time_factor(reached),
                ),
            ),
            confidence=0.4,
            advice=f"{hint} The saving assumes {_GOOD_ROOFLINE_SHARE:.0%} of the roofline.",
            evidence=context.evidence(mask, 3),
        )
    if not work.height:
        yield Abstention(
            "low-roofline",
            "the device's peaks are unknown (--device NAME gives them), or shapes were not recorded",
        )


def find_slow_kernels(context: Context) -> Iterator[Message]:
    """Reports kernels of the step that take longer than the same kernels elsewhere in the run."""
    for trace in context.traces:
        slow = context.ask(trace, _select_slow_kernels)
        computing = context.select_kinds(graph_schema.KERNEL)  # communication waits for others
        mask = context.own(context.node_mask(trace, slow["event"])) & computing
        if not mask.any():
            continue
        slow = slow.filter(
            pl.col("event").is_in(context.graph.nodes["event"].filter(pl.Series(mask)).implode())
        )
        lost = int((slow["duration_ns"] - slow["usual"]).sum())
        factor = float(slow["usual"].sum()) / max(float(slow["duration_ns"].sum()), 1.0)
        # How long communication of the same rank runs beside them.
        nodes = context.graph.nodes.with_columns(end_ns=pl.col("start_ns") + pl.col("duration_ns"))
        kernels = nodes.filter(pl.Series(mask))
        communication = nodes.filter(
            pl.Series(context.select_kinds(*graph_schema.COMMUNICATION)),
            pl.col("rank").is_in(kernels["rank"].implode(), nulls_equal=True),
        )
        spans = merge_intervals(
            communication["start_ns"].to_numpy(), communication["end_ns"].to_numpy()
        )
        shared = int(
            compute_coverage(
                spans, kernels["start_ns"].to_numpy(), kernels["end_ns"].to_numpy()
            ).sum()
        )
        is_overlapped = 2 * shared > context.work_ns(mask)
        rank_note = f" of rank {trace.rank}" if len(context.traces) > 1 else ""
        yield Candidate(
            title=f"{context.many(slow.height)} kernels{rank_note} take {context.format_time_per_step(lost)} longer than the same "
            "ones elsewhere in the run"
            + (", while communication runs beside them" if is_overlapped else ""),
            changes=(Change("scale", NodeSelection("slow kernels", mask, "kernels"), factor),),
            confidence=0.3 if is_overlapped else 0.4,
            advice="Give communication fewer SMs (NCCL_MAX_CTAS, NCCL_MIN_CTAS) or another moment; what is won there "
            "may be lost where it was hidden."
            if is_overlapped
            else "Look at clocks, power and temperature at that time, and "
            "at what else runs on the device.",
            evidence=context.evidence(mask),
            at_most_ns=min(lost, shared) if is_overlapped else None,
        )


def _select_slow_kernels(trace: Trace) -> pl.DataFrame:
    """Returns kernels that take far longer than `usual`, the median of their name, shapes and grid
    in the trace.

    Shapes without a size (`[[], []]`: lists, no tensors) do not determine how much there is to do.
    """
    shapes = trace.tensors.select("shapes", op="event").filter(
        pl.col("shapes").str.contains("[0-9]")
    )
    kernels = (
        trace.events[["event", "name", "op", "duration_ns"]]
        .filter(trace.events["category"] == vocab.KERNEL)
        .join(shapes, on="op", maintain_order="left")
        .join(
            trace.kernels[["event", "blocks_per_sm"]], on="event", how="left", maintain_order="left"
        )
    )
    alike = ["name", "shapes", "blocks_per_sm"]
    typical = pl.col("duration_ns").median().over(alike).round().cast(pl.Int64)
    rows = kernels.with_columns(usual=typical, known=pl.len().over(alike))
    return rows.filter(
        pl.col("known") >= _MIN_OCCURRENCES, pl.col("duration_ns") > _SLOW_FACTOR * pl.col("usual")
    )


RULES = (
    FindingRule(
        "unaligned-matmul", "matrix products of odd sizes", find_unaligned_matmuls, (NO_DEVICE,)
    ),
    FindingRule(
        "matrix-units-unused",
        "matrix products without tensor cores",
        find_unused_matrix_units,
        (NO_DEVICE,),
    ),
    FindingRule(
        "low-roofline", "operators far below the device's roofline", find_low_roofline, (NO_DEVICE,)
    ),
    FindingRule(
        "slow-kernels", "kernels slower than the same kernels elsewhere", find_slow_kernels
    ),
)

# Of the host time of an optimizer that goes tensor by tensor, when it is fused
_FUSED_OPTIMIZER_FACTOR = 0.15
_FUSED_NORM_FACTOR = (
    0.35  # of the time of a normalisation made of several operators, when it is one
)
_ADD_OPS = ("aten::add", "aten::add_")
# Operators around the root of a normalisation that may belong to it
_OPS_BEFORE_RSQRT, _OPS_AFTER_ROOT = (
    5,
    4,
)
_NORM_OPS = (
    "aten::pow",
    "aten::square",
    "aten::mean",
    "aten::var",
    "aten::add",
    "aten::sub",
    "aten::mul",
    "aten::to",
    "aten::rsqrt",
    "aten::sqrt",
    "aten::div",
    "aten::reciprocal",
    "aten::add_",
    "aten::mul_",
)


def find_recomputation(context: Context) -> Iterator[Message]:
    """Reports the recomputation of activation checkpointing."""
    mask = np.zeros(context.graph.nodes.height, dtype=np.bool_)
    for trace in context.traces:
        repeated = find_recomputed_work(trace)
        if repeated.root.any():
            mask |= context.inside(trace, repeated.root | repeated.own) | _select_recomputing_nodes(
                context, trace, repeated.root
            )
    if not mask.any():
        return
    on_device = mask & context.select_kinds(
        graph_schema.KERNEL, graph_schema.COPY, graph_schema.FILL
    )
    time = context.work_ns(context.own(on_device if on_device.any() else mask))
    yield Candidate(
        title=f"activation checkpointing repeats {context.format_time_per_step(time)} of forward work{context.rank_sum_suffix}",
        changes=(Change("remove", NodeSelection("recomputation", mask)),),
        confidence=0.6,
        advice="Checkpoint less: only the layers whose activations are large and cheap to repeat, or selective "
        "checkpointing, as far as memory allows.",
        evidence=context.evidence(on_device if on_device.any() else mask),
    )


def _select_recomputing_nodes(context: Context, trace: Trace, roots: Bools) -> Bools:
    """Returns what the autograd nodes that repeat do themselves until the repetition is over: the
    Python of the checkpoint.
    """
    tree = build_forest(trace)
    parents = tree.parent[roots]
    root_rows, holder_rows = tree.row[roots][parents >= 0], tree.row[parents[parents >= 0]]
    nodes = context.graph.nodes.with_row_index("at").with_columns(
        end=pl.col("start_ns") + pl.col("duration_ns")
    )
    tree_nodes = nodes.filter(
        pl.Series(context.node_mask(trace, pl.Series([*root_rows, *holder_rows], dtype=pl.UInt32)))
    )
    holders = pl.DataFrame({"event": root_rows, "holder": holder_rows}).cast(pl.UInt32)
    until = (
        tree_nodes.with_columns(pl.col("event").cast(pl.UInt32))
        .join(holders, on="event")
        .group_by("holder")
        .agg(pl.col("end").max().alias("until"))
    )
    holder_nodes = tree_nodes.with_columns(pl.col("event").cast(pl.UInt32)).join(
        until, left_on="event", right_on="holder"
    )
    mask = np.zeros(nodes.height, dtype=np.bool_)
    mask[holder_nodes.filter(pl.col("start_ns") <= pl.col("until"))["at"].to_numpy()] = True
    return mask


def find_unfused_optimizer(context: Context) -> Iterator[Message]:
    """Reports an optimizer that updates its parameters one by one."""
    mask = np.zeros(context.graph.nodes.height, dtype=np.bool_)
    rules, matches = context.select_anti_pattern("single_tensor_optimizer")
    if not rules["checked"].any():
        yield Abstention(
            "unfused-optimizer",
            next((reason for reason in reversed(rules["reason"]) if reason), ""),
        )
        return
    matches = context.in_step(matches)
    for trace, rows in context.split_by_trace(matches):  # a closure makes the passes inside of it
        mask |= context.below(trace, rows["event"]) & ~context.inside(
            trace, context.ask(trace, mask_pass_events)
        )
    host = mask & context.select_kinds(graph_schema.HOST, graph_schema.THINK, graph_schema.LAUNCH)
    if not host.any():
        return
    gpu = mask & context.select_kinds(graph_schema.KERNEL, graph_schema.COPY, graph_schema.FILL)
    time = context.work_ns(host)
    yield Candidate(
        title=f"the optimizer steps tensor by tensor: {units.format_duration(time)} of host time, "
        f"{units.format_quantity(int(gpu.sum()), 'kernel')}{context.rank_sum_suffix}",
        changes=(
            Change(
                "scale",
                NodeSelection("optimizer on the host", host, "host"),
                _FUSED_OPTIMIZER_FACTOR,
            ),
        ),
        confidence=0.7,
        advice="Use the fused or foreach implementation: `torch.optim.AdamW(..., fused=True)`.",
        evidence=(
            Evidence("optimizer steps", count=matches.height, total_ns=time),
            *context.evidence(host, 2),
        ),
    )


def find_unfused_norms(context: Context) -> Iterator[Message]:
    """Reports normalisations made of single operators: a root, and the powers, means and products
    around it.
    """
    mask = np.zeros(context.graph.nodes.height, dtype=np.bool_)
    count = 0
    for trace in context.traces:
        rows = context.ask(trace, _find_norm_operators)
        count += context.in_step(rows)["norm"].n_unique()
        if rows.height:
            mask |= context.below(trace, rows["event"])
    if not mask.any():
        return
    kernels = mask & context.select_kinds(graph_schema.KERNEL)
    if not kernels.any():
        return
    in_steps = context.own(kernels)
    all_but_waits = mask & context.select_kinds(
        graph_schema.KERNEL,
        graph_schema.COPY,
        graph_schema.FILL,
        graph_schema.HOST,
        graph_schema.LAUNCH,
    )
    yield Candidate(
        title=f"{context.many(count)} normalisations are made of {context.many(int(in_steps.sum()))} kernels "
        f"({context.format_time_per_step(context.work_ns(in_steps))}{context.rank_sum_suffix})",
        changes=(
            Change(
                "scale",
                NodeSelection("normalisations, fused", all_but_waits, "gpu"),
                _FUSED_NORM_FACTOR,
            ),
        ),
        confidence=0.6,
        advice="Use torch.nn.RMSNorm or torch.nn.LayerNorm, a fused kernel (Liger, Apex), or torch.compile.",
        evidence=(
            Evidence("normalisations", count=count, total_ns=context.work_ns(kernels)),
            *context.evidence(kernels, 3),
        ),
    )


def _find_norm_operators(trace: Trace) -> pl.DataFrame:
    """Returns operators of normalisations made by hand: norm (number), event, step.

    `aten::rsqrt` after a mean (or a variance) and before a product, with only such operators
    between them.
    """
    nothing = pl.DataFrame(schema={"norm": pl.Int64(), "event": pl.UInt32(), "step": pl.Int32()})
    events = trace.events[["event", "name", "step", "lane", "parent", "start_ns"]]
    if not (events["name"] == "aten::rsqrt").any():
        return nothing
    is_op = trace.events["category"] == vocab.OP
    is_outermost = events["parent"].is_null() | ~is_op.gather(events["parent"].fill_null(0))
    top = events.filter(is_op & is_outermost).sort("lane", "start_ns")
    names, lanes, rows = top["name"].to_list(), top["lane"].to_list(), top["event"].to_list()
    steps = top["step"].to_list()
    members: list[tuple[int, int, int | None]] = []
    norm_ops = set(_NORM_OPS)
    for index, name in enumerate(names):
        if name != "aten::rsqrt":
            continue
        low = index
        while (
            low > 0
            and index - low < _OPS_BEFORE_RSQRT
            and names[low - 1] in norm_ops
            and lanes[low - 1] == lanes[index]
        ):
            low -= 1
        # A residual connection: the sum that is normalised
        while names[low] in _ADD_OPS and low < index:
            low += 1
        high = index
        while (
            high + 1 < len(names)
            and high - index < _OPS_AFTER_ROOT
            and names[high + 1] in norm_ops
            and lanes[high + 1] == lanes[index]
        ):
            high += 1
        before, after = names[low:index], names[index + 1 : high + 1]
        if ("aten::mean" in before or "aten::var" in before) and (
            "aten::mul" in after or "aten::mul_" in after
        ):
            members += [(index, rows[k], steps[k]) for k in range(low, high + 1)]
    return pl.DataFrame(members, schema=nothing.schema, orient="row")


CAUSE_RULES = (
    FindingRule("recomputation", "activation checkpointing repeats work", find_recomputation),
    FindingRule(
        "unfused-optimizer", "an optimizer that steps tensor by tensor", find_unfused_optimizer
    ),
    FindingRule(
        "unfused-normalisation", "normalisations made of single operators", find_unfused_norms
    ),
)
