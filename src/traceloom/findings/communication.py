"""Communication that the step waits for."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import polars as pl

from traceloom.findings.ground import Ground
from traceloom.findings.rule import Candidate, Rule, Said
from traceloom.model import units
from traceloom.model.finding import Abstention, Evidence
from traceloom.simulate.changes import Change
from traceloom.simulate.selection import Chosen, Selection

_SMALL_BYTES = 256 * 1024
_MANY = 8


def exposed(ground: Ground) -> Iterator[Said]:
    """Collectives that nothing hides."""
    chosen = Selection("collectives")
    mask = chosen.nodes(ground.graph)
    if not mask.any():
        yield Abstention("exposed-communication", "no communication was recorded")
        return
    if not ground.on_device:
        return
    kinds = ground.graph.communication["kind"].drop_nulls().unique().to_list()
    for kind in sorted(kinds):
        one = Selection("collectives", f"^{kind}$")
        nodes = one.nodes(ground.graph)
        if not nodes.any():
            continue
        yield Candidate(
            title=f"{kind} could run beside computing: {units.count(int(nodes.sum()))} calls, "
            f"{units.duration(int(ground.graph.nodes['duration_ns'].to_numpy()[nodes].sum()))}",
            changes=(Change("overlap", Chosen(f"{one} overlap", nodes, "collectives")),),
            confidence=0.5,
            advice="Start it earlier and wait for it later: gradient buckets in DDP, prefetching in FSDP "
            "(forward_prefetch, backward_prefetch), asynchronous handles, a stream of its own.",
            evidence=_longest(ground, nodes),
        )


def _longest(ground: Ground, nodes: np.ndarray) -> tuple[Evidence, ...]:
    rows = ground.graph.nodes.filter(pl.Series(nodes)).sort("duration_ns", descending=True).head(5)
    return tuple(
        Evidence(r["name"], r["rank"], r["start_ns"] + ground.graph.epoch_ns, r["duration_ns"]) for r in rows.to_dicts()
    )


def small_messages(ground: Ground) -> Iterator[Said]:
    """Many small collectives that could be one."""
    rows = ground.graph.communication.filter(pl.col("in_bytes").is_not_null(), pl.col("in_bytes") < _SMALL_BYTES)
    if rows.height < _MANY:
        return
    mask = np.zeros(ground.graph.nodes.height, dtype=np.bool_)
    mask[rows["node"].to_numpy()] = True
    yield Candidate(
        title=f"{units.count(rows.height)} collectives send less than {units.size(_SMALL_BYTES)} each",
        changes=(Change("scale", Chosen("small collectives", mask, "collectives"), 1 / _MANY),),
        confidence=0.5,
        advice="Put them together: larger buckets (bucket_cap_mb), flattened tensors, coalesced calls.",
        evidence=_longest(ground, mask),
    )


RULES = (
    Rule("exposed-communication", "communication that nothing hides", exposed),
    Rule("small-collectives", "many small collectives", small_messages),
)
