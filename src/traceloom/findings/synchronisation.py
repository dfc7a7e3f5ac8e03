"""Calls that wait for the device though nothing needs them to."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import polars as pl

from traceloom import analyze
from traceloom.analyze.stacked import stacked
from traceloom.findings.context import Bools, Context
from traceloom.findings.rule import Candidate, FindingRule, Said
from traceloom.findings.wording import brief, place
from traceloom.model import Trace, units
from traceloom.model.finding import Abstention, Evidence
from traceloom.simulate.changes import Change
from traceloom.simulate.selection import Chosen

_KINDS = {
    "item": ("blocking-item", "reading values (`.item()`, `float(tensor)`, `if tensor:`)"),
    "data_dependent_shape": (
        "blocking-item",
        "operators whose result's shape depends on data (nonzero, unique, masks)",
    ),
    "synchronize": ("blocking-sync", "synchronising"),
    "event_synchronize": ("blocking-sync", "waiting for events"),
    "copy_to_host": ("blocking-copy", "copying to the host"),
    "copy_to_device": ("blocking-copy", "copying to the device"),
    "other_copy": ("blocking-copy", "copying"),
    "allocation": ("device-allocation", "taking memory from the device and giving it back"),
    "module_load": ("module-loading", "loading code onto the device, or setting it up,"),
}
_ADVICE = {
    "blocking-item": "Read values less often, or later: keep sums on the device, read every N steps, use "
    "`non_blocking=True` copies and look at them in the next step.",
    "blocking-sync": "Take the call out of the step; time with events instead of synchronising.",
    "blocking-copy": "Use pinned memory (`pin_memory=True`) and `non_blocking=True`, and copy the next batch while "
    "this one is computed.",
    "device-allocation": "In steady state nothing should be taken from the device: keep shapes constant, warm up, "
    "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; cudaFree in a step means that the allocator had to retry.",
    "module-loading": "Warm up before the part that is measured or served, or load at the start: "
    "CUDA_MODULE_LOADING=EAGER.",
}
_TITLES = {
    "blocking-item": "values are read on the host",
    "blocking-sync": "synchronisation in the step",
    "blocking-copy": "copies that block the host",
    "device-allocation": "device memory is allocated in the step",
    "module-loading": "code is loaded onto the device in the step",
}
_GONE = ("device-allocation", "module-loading")  # the calls themselves go, not only their waiting
# A profiler waits for the device when it begins and ends: that is no part of the program.
_PROFILER = re.compile(r"(?i)profil|traceloom/capture")


@dataclass(slots=True)
class _WaitingSite:
    """One place in the code that waits, over all ranks."""

    kind: str
    call: str
    where: str
    nodes: Bools
    blocked_ns: int = 0
    pageable: int = 0
    evidence: list[Evidence] = field(default_factory=list)


def _of(slug: str, context: Context) -> Iterator[Said]:
    """One candidate per place in the code."""
    if not context.on_device:
        yield Abstention(slug, "no GPU work was recorded")
        return
    kinds = [kind for kind, (rule, _) in _KINDS.items() if rule == slug]
    waiting: dict[tuple[str, str], _WaitingSite] = {}
    for trace, row, site_calls in context.ask(context, _sites):
        if row["kind"] not in kinds:
            continue
        where = brief(row["frame"]) if row["frame"] else place(row["op"] or row["call"])
        # an op's copy and the synchronisation behind it wait for the same: only both together can go
        nowhere = np.zeros(context.graph.nodes.height, dtype=np.bool_)
        site = waiting.setdefault((row["kind"], where), _WaitingSite(row["kind"], row["call"], where, nowhere))
        site.nodes |= context.nodes_of(trace, site_calls["event"])
        site.blocked_ns += int(site_calls["blocked_ns"].sum())
        site.pageable += row["pageable_count"]
        site.evidence += [
            Evidence(row["call"], trace.rank, start_ns, blocked_ns, row["lane"])
            for start_ns, blocked_ns in site_calls[["start_ns", "blocked_ns"]].head(3).iter_rows()
        ]
    for site in waiting.values():
        if not site.nodes.any():
            continue
        label = f"{site.call} at {site.where}" if site.where != site.call else site.call
        chosen = Chosen(label, site.nodes, "syncs")
        pageable = " from or to pageable memory" if site.pageable and slug == "blocking-copy" else ""
        at = f", at {site.where}" if site.where != site.call else f" ({site.call})"
        gone = (Change("remove", chosen),) if slug in _GONE else ()
        yield Candidate(
            title=f"{_KINDS[site.kind][1]}{pageable} holds the host {units.duration(site.blocked_ns)}"
            f"{context.over_ranks}{at}",
            changes=(Change("drop", chosen), *gone),
            confidence=0.4 if slug in _GONE and context.steps is None else 0.7,
            advice=_ADVICE[slug],
            evidence=tuple(sorted(site.evidence, key=lambda seen: -(seen.duration_ns or 0))[:4]),
        )


def _sites(context: Context) -> list[tuple[Trace, dict[str, Any], pl.DataFrame]]:
    """Places in the code that wait in the steps: trace, row of its sites, and their calls, the longest first."""
    blocking = [context.ask(trace, analyze.blocking_calls) for trace in context.traces]
    calls = context.in_step(stacked(of_trace.calls for of_trace in blocking))
    longest_first = calls.sort("blocked_ns", descending=True, maintain_order=True)
    by_site = {(of["trace"][0], of["site"][0]): of for of in longest_first.partition_by("trace", "site")}
    return [
        (trace, row, by_site[number, site])
        for number, (trace, of_trace) in enumerate(zip(context.traces, blocking, strict=True))
        for site, row in enumerate(of_trace.sites.to_dicts())
        if (number, site) in by_site
        and not any(text is not None and _PROFILER.search(text) for text in (row["frame"], row["stack"]))
    ]


RULES = tuple(FindingRule(slug, title, partial(_of, slug)) for slug, title in _TITLES.items())
