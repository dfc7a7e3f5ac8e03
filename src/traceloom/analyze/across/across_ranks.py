"""Who arrived last at each collective of a job, why, and whom it cost."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl

from traceloom.analyze.across import blame
from traceloom.analyze.across.chain import chains
from traceloom.analyze.across.imbalance import Imbalance, imbalance
from traceloom.analyze.across.lateness import lateness
from traceloom.analyze.across.matched import match
from traceloom.analyze.across.pipeline import Pipeline, pipeline
from traceloom.analyze.across.rank_part import RankPart, rank_part
from traceloom.analyze.across.slow_steps import SlowSteps, slow_steps
from traceloom.model import Session
from traceloom.model.notice import Notice
from traceloom.model.result import Result

CHAINS = 20


@dataclass(frozen=True)
class AcrossRanks(Result):
    """The ranks of a job against each other. Definitions: docs/concepts/across-ranks.md.

    Attributes:
        collectives: One row per collective that at least two ranks hold, by order: who came first and last, how long
            the others waited (wait_ns = launch_skew_ns + arrival_wait_ns), the transfer, how late the last one was
            (late_ns = explained_ns + unexplained_ns), its main cause, and the rank and cause where the chain ends.
        parts: One row per rank of each: wait_ns + transfer_ns = duration_ns.
        chains: The links of the longest waits (`chain.py`).
        ranks: Per rank: own waits, waits of others for it (blame_ns), those that chains end at (root_ns).
        hosts: The same per host.
        reasons: By rank and cause at the ends of the chains.
        heat: Steps × ranks.
        clocks: How clocks were corrected, with the residual.
        unmatched: Calls without a partner on another recorded rank.
        slow: Slow steps.
        balance: Imbalance of load.
        pipeline: Stages and bubbles.
        notices: What did not match, and what the result cannot see.
    """

    collectives: pl.DataFrame
    parts: pl.DataFrame
    chains: pl.DataFrame
    ranks: pl.DataFrame
    hosts: pl.DataFrame
    reasons: pl.DataFrame
    heat: pl.DataFrame
    clocks: pl.DataFrame
    unmatched: pl.DataFrame
    slow: SlowSteps
    balance: Imbalance
    pipeline: Pipeline
    notices: tuple[Notice, ...] = ()

    @property
    def collective_ns(self) -> int:
        """Time in matched collectives, added over ranks."""
        return int(self.parts["duration_ns"].sum())

    @property
    def slowest(self) -> blame.SlowRank | None:
        """The rank that most of the waiting goes back to; None where nobody waits for another."""
        return next(iter(blame.slow_ranks(self.collectives)), None)

    @property
    def wait_ns(self) -> int:
        """The part of it that was waiting."""
        return int(self.parts["wait_ns"].sum())


def across_ranks(session: Session | Sequence[RankPart], *, chain_count: int = CHAINS) -> AcrossRanks:
    """Compare the ranks of a job; the last comparison is remembered as long as what was taken of its ranks lives.

    Args:
        session: The run; or what `rank_part` took from each of its traces, so that ranks can be read one by one.
        chain_count: For how many of the longest waits the chain of causes is written out.
    """
    global _LAST
    all_parts = [rank_part(trace) for trace in session.traces] if isinstance(session, Session) else list(session)
    if (
        _LAST is not None
        and (chain_count, len(all_parts)) == (_LAST[0], len(_LAST[1]))
        and all(ref() is part for ref, part in zip(_LAST[1], all_parts, strict=True))
    ):
        return _LAST[2]
    best: dict[object, RankPart] = {}  # of several windows of a rank the one with most communication
    for number, part in enumerate(all_parts):
        key: object = part.rank if part.rank is not None else f"unknown {number}"
        if key not in best or part.calls.height > best[key].calls.height:
            best[key] = part
    parts = list(best.values())
    matched = match(parts)
    piped = pipeline(parts, matched)
    late = lateness(parts, matched, piped.stages)
    collectives = blame.with_causes(matched, late)
    ranks = blame.by_rank(matched, collectives)
    notices = list(matched.notices)
    world = max((part.world_size for part in parts if part.world_size is not None), default=0)
    if 2 <= len(parts) < world and any(part.calls.height for part in parts):
        cut = matched.instances.filter(~pl.col("whole").fill_null(value=False)).height
        text = (
            f"{len(parts)} of {world} ranks are recorded: the last to arrive at a collective may be one that is not, "
            f"and waits are at least what is shown; {cut} of {matched.instances.height} joined collectives miss ranks"
        )
        notices.append(Notice("ranks-missing", "warning", text, world - len(parts)))
    compared = AcrossRanks(
        collectives,
        matched.parts,
        chains(parts, matched, collectives, late, chain_count),
        ranks,
        blame.by_host(ranks),
        blame.reasons(collectives),
        blame.heat(matched, collectives),
        matched.clocks,
        matched.unmatched,
        slow_steps(parts),
        imbalance(parts),
        piped,
        tuple(notices),
    )
    _LAST = chain_count, [weakref.ref(part) for part in all_parts], compared
    return compared


_LAST: tuple[int, list[weakref.ref[RankPart]], AcrossRanks] | None = None
