"""Kernels that could be faster: matrix units unused, odd sizes, far below the roofline, slower than usual."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import polars as pl

from traceloom.analyze.intervals import coverage, union
from traceloom.analyze.kernel_kinds import kinds
from traceloom.analyze.matrix_units import matrix_units
from traceloom.analyze.roofline import modelled
from traceloom.findings.context import Bools, Context
from traceloom.findings.rule import Candidate, FindingRule, Said
from traceloom.findings.wording import brief
from traceloom.model import Trace, units
from traceloom.model import category as cat
from traceloom.model import graph_schema as gs
from traceloom.model.finding import Abstention
from traceloom.simulate.changes import Change
from traceloom.simulate.selection import Chosen

_REACHABLE = 0.7  # of the roofline: what good kernels reach
_LEAST_LEFT = 0.05  # of the time of kernels, however far they are from it
_FAR = 0.4  # of the roofline: below this there is something to gain
_LARGEST = 6
_LEAST_SHARE = 0.01  # of the step
_SLOW = 1.5  # times the median of the same kernel
_KNOWN = 5  # times that a kernel with these shapes has to be seen
_ON_MATRIX_UNITS = 0.5  # of the time: what matrix units and aligned sizes at least bring, where no roofline is known
_TF32 = 8.0  # compute capability from which on there is TF32
_HINTS = {
    r"softmax": "Fuse attention: scaled_dot_product_attention never writes the scores that this reads and writes.",
    r"attention|flash|sdpa": "Try another attention backend (torch.nn.attention.sdpa_kernel), head sizes of 64 or 128, "
    "and less padding.",
    r"bmm|mm$|linear|matmul|addmm|conv": "Look at the element type (bf16, fp8), at sizes that are multiples of 8 or "
    "16, at larger batches, and at tuned kernels (max-autotune, TunableOp).",
    r"cat|contiguous|copy|clone|_to|index|gather|scatter|transpose|permute": "Avoid the copy: preallocate and write "
    "into place, keep one memory layout, gather rows that lie together.",
}
_HINT = "Fuse it with its neighbours (torch.compile) or use a fused implementation."


def _products(context: Context) -> tuple[Bools, Bools, bool]:
    """Matrix products that a known reason makes slow, and whether sizes could be looked at.

    Those whose sizes do not fit, by operator; and of the others those that use no matrix units; shape (nodes,).
    """
    size = context.graph.nodes.height
    odd, unused = np.zeros(size, dtype=np.bool_), np.zeros(size, dtype=np.bool_)
    rules, matches = context.anti_pattern("unaligned_half_matmul")
    for trace, rows in context.by_trace(matches):
        odd |= context.below(trace, rows["event"])
    for trace in context.traces:
        unused |= context.nodes_of(trace, context.ask(trace, _without_units))
    kernels = context.of_kind(gs.KERNEL)
    return odd & kernels, unused & kernels & ~odd, bool(rules["checked"].any())


def _without_units(trace: Trace) -> pl.Series:
    """Events of matrix products on scalar or vector units."""
    kernels = kinds(trace).hstack([trace.events["name"][kinds(trace)["event"]]])
    names = kernels[["name", "kind"]].unique()
    unused = names.filter(matrix_units(names) == "unused")
    return kernels.join(unused, on=["name", "kind"], how="semi")["event"] if unused.height else kernels["event"].clear()


def _bounded(context: Context) -> pl.DataFrame:
    """Modelled work with a known roofline: rank, event, op_name, ns, roofline_ns, bound; rank after rank."""
    parts = []
    for trace in context.traces:
        rows, events = modelled(trace).drop_nulls("roofline_ns"), trace.events
        rank = pl.Series("rank", [trace.rank], dtype=pl.Int32).new_from_index(0, rows.height)
        name, ns = events["name"][rows["op"]].alias("op_name"), events["duration_ns"][rows["event"]].alias("ns")
        parts.append(pl.DataFrame([rank, rows["event"], name, ns, rows["roofline_ns"], rows["bound"]]))
    return pl.concat(parts)


def _bounded_nodes(context: Context) -> pl.DataFrame:
    """Nodes of such work: node, op_name, duration_ns, roofline_ns (what the roofline allows)."""
    keys = ["rank", "event"] if len(context.traces) > 1 else ["event"]
    work = context.ask(context, _bounded).select(*keys, "op_name", "roofline_ns")
    return context.graph.nodes.select(*keys, "node", "duration_ns").join(work, on=keys)


def _reached(context: Context, mask: Bools) -> float | None:
    """The share of the roofline that some kernels reach; None where no peak is known."""
    nodes = context.ask(context, _bounded_nodes)
    chosen = mask[nodes["node"].to_numpy()]
    ns, roof = (int(nodes[name].to_numpy()[chosen].sum()) for name in ("duration_ns", "roofline_ns"))
    return roof / ns if ns else None


def _factor(reached: float) -> float:
    """The factor on the time of kernels that reach so much, if they ran as well as good ones."""
    return min(max(reached / _REACHABLE, _LEAST_LEFT), 1.0)


def odd_sizes(context: Context) -> Iterator[Said]:
    """Matrix products in half precision whose sizes are no multiples of 8."""
    if not context.on_device:
        yield Abstention("unaligned-matmul", "no GPU work was recorded")
        return
    odd, _, checked = context.ask(context, _products)
    if not checked:
        yield Abstention("unaligned-matmul", "shapes and types of inputs were not recorded")
        return
    if context.work_ns(odd) < _LEAST_SHARE * context.whole_ns:
        return
    reached = _reached(context, odd)
    time = context.work_ns(context.own(odd))
    yield Candidate(
        title=f"{context.in_words(time)} of matrix products have sizes that are no multiples of 8{context.over_ranks}",
        changes=(Change("scale", Chosen("matrix products of odd sizes", odd, "kernels"),
                        _ON_MATRIX_UNITS if reached is None else _factor(reached)),),
        confidence=0.6,
        advice="Pad the last dimensions to a multiple of 8 (better 64): vocabulary, sequence length, hidden sizes; in "
        "attention, scaled_dot_product_attention pads by itself.",
        evidence=context.evidence(odd),
    )  # fmt: skip


def no_matrix_units(context: Context) -> Iterator[Said]:
    """Matrix products on scalar units."""
    if not context.on_device:
        yield Abstention("matrix-units-unused", "no GPU work was recorded")
        return
    _, unused, _ = context.ask(context, _products)
    if context.work_ns(unused) < _LEAST_SHARE * context.whole_ns:
        return
    abilities = [
        float(capability)
        for trace in context.traces
        for capability in trace.devices["compute_capability"].drop_nulls().to_list()
    ]
    time = context.work_ns(context.own(unused))
    tf32 = bool(abilities) and max(abilities) >= _TF32
    yield Candidate(
        title=f"{context.in_words(time)} of matrix products use no tensor cores"
        + (": TF32 is off" if tf32 else "") + context.over_ranks,
        changes=(Change("scale", Chosen("matrix products without matrix units", unused, "kernels"), _ON_MATRIX_UNITS),),
        confidence=0.6 if tf32 else 0.4,
        advice="torch.set_float32_matmul_precision('high') allows TF32; better, train in bf16: torch.autocast('cuda', "
        "dtype=torch.bfloat16)." if tf32 else "Use half precision: torch.autocast('cuda', dtype=torch.float16) with a "
        "gradient scaler, or bfloat16 where the device has it.",
        evidence=context.evidence(unused),
    )  # fmt: skip


def low_roofline(context: Context) -> Iterator[Said]:
    """Modelled operators far below what the device could do, that no other rule explains."""
    if not context.on_device:
        yield Abstention("low-roofline", "no GPU work was recorded")
        return
    odd, unused, _ = context.ask(context, _products)
    work, nodes = context.ask(context, _bounded), context.ask(context, _bounded_nodes)
    of_ops = work.partition_by("op_name", maintain_order=True)
    for op_work in sorted(of_ops, key=lambda of_op: -of_op["ns"].sum())[:_LARGEST]:
        name = op_work["op_name"][0]
        mask = np.zeros(context.graph.nodes.height, dtype=np.bool_)
        mask[nodes.filter(pl.col("op_name").eq_missing(name))["node"].to_numpy()] = True
        mask &= ~odd & ~unused
        reached = _reached(context, mask) if mask.any() else None
        if reached is None or reached >= _FAR:
            continue
        of_first = op_work.filter(pl.col("rank").eq_missing(op_work["rank"][0]))
        bound = of_first["bound"].drop_nulls().cast(pl.String).mode()[0]
        limit = "memory's bandwidth" if bound == "memory" else "its arithmetic"
        hint = next((text for pattern, text in _HINTS.items() if re.search(pattern, name)), _HINT)
        own = context.own(mask)
        yield Candidate(
            title=f"{brief(name)} reaches {units.share(reached, 1)} of what {limit} allows: "
            f"{context.in_words(context.work_ns(own))} in {context.many(int(own.sum()), 'kernel')}{context.over_ranks}",
            changes=(Change("scale", Chosen(f"kernels of {brief(name)}", mask, "kernels"), _factor(reached)),),
            confidence=0.4,
            advice=f"{hint} The saving assumes {_REACHABLE:.0%} of the roofline.",
            evidence=context.evidence(mask, 3),
        )
    if not work.height:
        yield Abstention("low-roofline", "the device's peaks are unknown, or shapes were not recorded")


def slow_kernels(context: Context) -> Iterator[Said]:
    """Kernels of the step that take longer than the same kernels elsewhere in the run."""
    for trace in context.traces:
        slow = context.ask(trace, _slow)
        computing = context.of_kind(gs.KERNEL)  # communication waits for others
        mask = context.own(context.nodes_of(trace, slow["event"])) & computing
        if not mask.any():
            continue
        slow = slow.filter(pl.col("event").is_in(context.graph.nodes["event"].filter(pl.Series(mask)).implode()))
        lost = int((slow["duration_ns"] - slow["usual"]).sum())
        factor = float(slow["usual"].sum()) / max(float(slow["duration_ns"].sum()), 1.0)
        # for how long communication of the same rank runs beside them
        nodes = context.graph.nodes.with_columns(end_ns=pl.col("start_ns") + pl.col("duration_ns"))
        kernels = nodes.filter(pl.Series(mask))
        communication = nodes.filter(
            pl.Series(context.of_kind(*gs.COMMUNICATION)),
            pl.col("rank").is_in(kernels["rank"].implode(), nulls_equal=True),
        )
        spans = union(communication["start_ns"].to_numpy(), communication["end_ns"].to_numpy())
        shared = int(coverage(spans, kernels["start_ns"].to_numpy(), kernels["end_ns"].to_numpy()).sum())
        beside = 2 * shared > context.work_ns(mask)
        of_rank = f" of rank {trace.rank}" if len(context.traces) > 1 else ""
        yield Candidate(
            title=f"{context.many(slow.height)} kernels{of_rank} take {context.in_words(lost)} longer than the same "
            "ones elsewhere in the run" + (", while communication runs beside them" if beside else ""),
            changes=(Change("scale", Chosen("slow kernels", mask, "kernels"), factor),),
            confidence=0.3 if beside else 0.4,
            advice="Give communication fewer SMs (NCCL_MAX_CTAS, NCCL_MIN_CTAS) or another moment; what is won there "
            "may be lost where it was hidden." if beside else "Look at clocks, power and temperature at that time, and "
            "at what else runs on the device.",
            evidence=context.evidence(mask),
            at_most_ns=min(lost, shared) if beside else None,
        )  # fmt: skip


def _slow(trace: Trace) -> pl.DataFrame:
    """Kernels with `usual`, the median of their name, shapes and grid in the trace, that take far longer than that.

    Shapes without a size (`[[], []]`: lists, no tensors) say nothing about how much there is to do.
    """
    shapes = trace.tensors.select("shapes", op="event").filter(pl.col("shapes").str.contains("[0-9]"))
    kernels = (
        trace.events[["event", "name", "op", "duration_ns"]]
        .filter(trace.events["category"] == cat.KERNEL)
        .join(shapes, on="op", maintain_order="left")
        .join(trace.kernels[["event", "blocks_per_sm"]], on="event", how="left", maintain_order="left")
    )
    alike = ["name", "shapes", "blocks_per_sm"]
    usual = pl.col("duration_ns").median().over(alike).round().cast(pl.Int64)
    rows = kernels.with_columns(usual=usual, known=pl.len().over(alike))
    return rows.filter(pl.col("known") >= _KNOWN, pl.col("duration_ns") > _SLOW * pl.col("usual"))


RULES = (
    FindingRule("unaligned-matmul", "matrix products of odd sizes", odd_sizes),
    FindingRule("matrix-units-unused", "matrix products without tensor cores", no_matrix_units),
    FindingRule("low-roofline", "operators far below the device's roofline", low_roofline),
    FindingRule("slow-kernels", "kernels slower than the same kernels elsewhere", slow_kernels),
)
