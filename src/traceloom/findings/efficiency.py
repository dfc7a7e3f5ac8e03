"""Kernels that could be faster: matrix units unused, far below the roofline, slower than the same kernel elsewhere."""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from traceloom.analyze.roofline import modelled
from traceloom.findings.ground import Ground
from traceloom.findings.rule import Candidate, Rule, Said
from traceloom.model import Trace, units
from traceloom.model.category import KERNEL
from traceloom.model.finding import Abstention, Evidence
from traceloom.simulate.changes import Change
from traceloom.simulate.selection import Chosen

_REACHABLE = 0.7  # of the roofline: what good kernels reach
_FAR = 0.4  # of the roofline: below this there is something to gain
_LARGEST = 6
_SLOW = 1.5  # times the median of the same kernel


def low_roofline(ground: Ground) -> Iterator[Said]:
    """Modelled operators far below what the device could do."""
    told = False
    for trace in ground.traces:
        rows = modelled(trace).drop_nulls("roofline_ns")
        told |= bool(rows.height)
        if not rows.height:
            continue
        events = trace.events
        work = rows.with_columns(
            ns=events["duration_ns"].gather(rows["event"]),
            step=events["step"].gather(rows["event"]),
            op_name=events["name"].gather(rows["op"]),
            kernel=events["name"].gather(rows["event"]),
        )
        if ground.step is not None:
            work = work.filter(pl.col("step") == ground.step)
        sums = (
            work.group_by("op_name", "kernel")
            .agg(pl.col("ns", "roofline_ns").sum(), pl.col("event"), pl.len().alias("count"), pl.col("bound").first())
            .filter(pl.col("ns") > 0)
            .with_columns(reached=pl.col("roofline_ns") / pl.col("ns"))
            .filter(pl.col("reached") < _FAR)
            .sort("ns", descending=True)
            .head(_LARGEST)
        )
        for row in sums.to_dicts():
            mask = ground.nodes_of(trace, pl.Series(row["event"]))
            if not mask.any():
                continue
            share = units.share(row["reached"], 1)
            yield Candidate(
                title=f"{row['op_name']} reaches {share} of the roofline ({row['bound']}-bound, "
                f"{units.duration(row['ns'])} in {row['count']} kernels)",
                changes=(
                    Change("scale", Chosen(f"kernels of {row['op_name']}", mask, "kernels"),
                           max(row["reached"] / _REACHABLE, 0.05)),
                ),
                confidence=0.4,
                advice="Look at element type (bf16, TF32), alignment of sizes to 8 or 16, layout, and fused "
                "implementations (scaled_dot_product_attention, compiled kernels).",
                evidence=(Evidence(row["kernel"], trace.rank, count=row["count"], total_ns=row["ns"]),),
            )  # fmt: skip
    if not told:
        yield Abstention("low-roofline", "the device's peaks are unknown, or shapes were not recorded")


def slow_kernels(ground: Ground) -> Iterator[Said]:
    """Kernels of the step that take longer than the same kernels elsewhere in the run."""
    for trace in ground.traces:
        slow = _slow_in_step(trace, ground.step)
        if not slow.height:
            continue
        mask = ground.nodes_of(trace, slow["event"])
        if not mask.any():
            continue
        lost = int((slow["duration_ns"] - slow["usual"]).sum())
        factor = float(slow["usual"].sum()) / max(float(slow["duration_ns"].sum()), 1.0)
        top = slow.sort("duration_ns", descending=True).head(3)
        yield Candidate(
            title=f"{units.count(slow.height)} kernels take {units.duration(lost)} longer than the same ones elsewhere",
            changes=(Change("scale", Chosen("slow kernels", mask, "kernels"), factor),),
            confidence=0.4,
            advice="Look at what runs beside them (communication on the same device), at clocks and at power.",
            evidence=tuple(Evidence(r["name"], trace.rank, r["start_ns"], r["duration_ns"]) for r in top.to_dicts()),
        )


def _slow_in_step(trace: Trace, step: int | None) -> pl.DataFrame:
    """Kernels of the step with `usual`, the median of their name and grid in the trace."""
    shapes = trace.events.select("event", "op").join(
        trace.tensors.select(pl.col("event").alias("op"), "shapes"), on="op", how="left", maintain_order="left"
    )["shapes"]
    kernels = (
        trace.events.select("event", "name", "category", "step", "start_ns", "duration_ns")
        .with_columns(shapes=shapes)
        .filter(pl.col("category") == KERNEL)
    )
    usual = pl.col("duration_ns").median().over("name", "shapes").round().cast(pl.Int64)
    rows = kernels.with_columns(usual=usual, known=pl.len().over("name", "shapes"))
    if step is not None:
        rows = rows.filter(pl.col("step") == step)
    return rows.filter(
        pl.col("known") >= 5, pl.col("shapes").is_not_null(), pl.col("duration_ns") > _SLOW * pl.col("usual")
    )


RULES = (
    Rule("low-roofline", "kernels far below the device's roofline", low_roofline),
    Rule("slow-kernels", "kernels slower than the same kernels elsewhere", slow_kernels),
)
