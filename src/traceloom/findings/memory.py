"""Memory: leaks, nearly full devices, fragmentation."""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from traceloom.findings.context import Context
from traceloom.findings.rule import FindingRule, MemoryCandidate, Said
from traceloom.model import units
from traceloom.model.finding import Abstention, Evidence

_FULL = 0.9  # of the device
_LEAST_GROWTH = 10_000  # bytes per step; less takes more than 100,000 steps to become a gigabyte
_ORDINALS = {2: "second", 3: "third"}
_NOT_RECORDED = "allocations were not recorded"
_FRAGMENTED = 0.25  # of what is reserved, unused at the peak


def growth(context: Context) -> Iterator[Said]:
    """Memory that every step leaves behind, or every second or third."""
    if not context.allocations:
        yield Abstention("memory-growth", _NOT_RECORDED)
    for trace, allocations in context.allocations:
        for row in allocations.growth.filter(pl.col("bytes_per_step") >= _LEAST_GROWTH).to_dicts():
            per_step, period = round(row["bytes_per_step"]), row["period"]
            steps = "step" if period == 1 else f"{_ORDINALS.get(period, f'{period}th')} step"
            yield MemoryCandidate(
                title=f"{row['site']} leaves {units.size(per_step * period)} behind in every {steps}",
                saving_bytes=row["bytes"],
                risk=f"memory grows by {units.size(per_step)} per step until it is full",
                severe=True,
                confidence=0.7,
                advice="Do not keep tensors with their graph: detach what is collected, or turn it into numbers.",
                evidence=(Evidence(row["site"], trace.rank, count=row["block_count"]),),
            )


def fragmentation(context: Context) -> Iterator[Said]:
    """Memory that the allocator holds and cannot give out."""
    if not context.allocations:
        yield Abstention("memory-fragmentation", _NOT_RECORDED)
    for trace, allocations in context.allocations:
        for row in allocations.pools.drop_nulls("reserved_at_peak_bytes").to_dicts():
            spare = row["reserved_at_peak_bytes"] - row["peak_bytes"]
            if spare > _FRAGMENTED * row["reserved_at_peak_bytes"]:
                yield MemoryCandidate(
                    title=f"{units.size(spare)} of {units.size(row['reserved_at_peak_bytes'])} reserved are unused "
                    "at the peak",
                    saving_bytes=spare,
                    risk=None,
                    severe=False,
                    confidence=0.5,
                    advice="Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; keep shapes constant.",
                    evidence=(Evidence("peak", trace.rank, row["peak_time_ns"]),),
                )


def nearly_full(context: Context) -> Iterator[Said]:
    """A device that is nearly full."""
    if not context.allocations:
        yield Abstention("memory-nearly-full", _NOT_RECORDED)
    for trace, allocations in context.allocations:
        sizes = {d.get("device"): d.get("memory_bytes") for d in (trace.meta.capture or {}).get("devices") or []}
        for row in allocations.pools.to_dicts():
            whole = sizes.get(row["device"]) if row["device_type"] != "cpu" else None
            used = max(row["peak_bytes"], row["reserved_at_peak_bytes"] or 0)
            if isinstance(whole, int) and used > _FULL * whole:
                yield MemoryCandidate(
                    title=f"{units.size(used)} of {units.size(whole)} are taken at the peak",
                    saving_bytes=None,
                    risk="a larger batch, a longer sequence or fragmentation ends the run",
                    severe=True,
                    confidence=0.8,
                    advice="See who holds it: traceloom memory; checkpoint activations, shard states, lower the batch.",
                    evidence=(Evidence("peak", trace.rank, row["peak_time_ns"]),),
                )


RULES = (
    FindingRule("memory-growth", "memory grows with every step", growth),
    FindingRule("memory-fragmentation", "reserved memory that is not used", fragmentation),
    FindingRule("memory-nearly-full", "a device that is nearly full", nearly_full),
)
