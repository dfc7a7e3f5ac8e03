"""Calls that wait for the device though nothing needs them to."""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from traceloom import analyze
from traceloom.findings.ground import Ground
from traceloom.findings.rule import Candidate, Rule, Said
from traceloom.model import units
from traceloom.model.finding import Abstention, Evidence
from traceloom.simulate.changes import Change
from traceloom.simulate.selection import Chosen

_KINDS = {
    "item": ("blocking-item", "values read on the host (`.item()`, `float(tensor)`, `if tensor:`)"),
    "data_dependent_shape": (
        "blocking-item",
        "operators whose result's shape depends on data (nonzero, unique, masks)",
    ),
    "synchronize": ("blocking-sync", "synchronisation calls"),
    "event_synchronize": ("blocking-sync", "waits for events"),
    "copy_to_host": ("blocking-copy", "copies to the host"),
    "copy_to_device": ("blocking-copy", "copies to the device"),
    "other_copy": ("blocking-copy", "copies"),
    "allocation": ("device-allocation", "allocations and frees of device memory (cudaMalloc, cudaFree)"),
}
_ADVICE = {
    "blocking-item": "Read values less often, or later: keep sums on the device, read every N steps, use "
    "`non_blocking=True` copies and look at them in the next step.",
    "blocking-sync": "Take the call out of the step; time with events instead of synchronising.",
    "blocking-copy": "Use pinned memory (`pin_memory=True`) and `non_blocking=True`, and copy the next batch while "
    "this one is computed.",
    "device-allocation": "In steady state nothing should be allocated from the device: keep shapes constant, warm up, "
    "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.",
}
_TITLES = {
    "blocking-item": "values are read on the host",
    "blocking-sync": "synchronisation in the step",
    "blocking-copy": "copies that block the host",
    "device-allocation": "device memory is allocated in the step",
}


def _of(slug: str, ground: Ground) -> Iterator[Said]:
    """One candidate per place in the code."""
    if not ground.on_device:
        yield Abstention(slug, "no GPU work was recorded")
        return
    kinds = [kind for kind, (rule, _) in _KINDS.items() if rule == slug]
    for trace in ground.traces:
        found = analyze.blocking_calls(trace)
        calls = found.calls if ground.step is None else found.calls.filter(pl.col("step") == ground.step)
        sites = found.sites.with_row_index("site").filter(pl.col("kind").cast(pl.String).is_in(kinds))
        for site in sites.to_dicts():
            mine = calls.filter(pl.col("site") == site["site"])
            mask = ground.nodes_of(trace, mine["event"])
            if not mask.any():
                continue
            blocked = int(mine["blocked_ns"].sum())
            where = site["frame"] or site["op"] or site["call"]
            yield Candidate(
                title=f"{_KINDS[site['kind']][1]} block the host {units.duration(blocked)}, at {where}",
                changes=(Change("drop", Chosen(f"{site['call']} at {where}", mask, "syncs")),),
                confidence=0.7,
                advice=_ADVICE[slug],
                evidence=tuple(
                    Evidence(site["call"], trace.rank, row["start_ns"], row["blocked_ns"])
                    for row in mine.sort("blocked_ns", descending=True).head(3).to_dicts()
                ),
            )


def _rule(slug: str) -> Rule:
    return Rule(slug, _TITLES[slug], lambda ground: _of(slug, ground))


RULES = tuple(_rule(slug) for slug in _TITLES)
