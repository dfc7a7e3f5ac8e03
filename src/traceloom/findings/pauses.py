"""The host does one other thing for long: a pause, a write, a log."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import polars as pl

from traceloom.analyze.host_wait import COLLECTIONS
from traceloom.findings.ground import NAMELESS, Bools, Ground
from traceloom.findings.rule import Candidate, Rule, Said
from traceloom.model import category as cat
from traceloom.model import graph_schema as gs
from traceloom.model import units
from traceloom.model.finding import Abstention
from traceloom.simulate.changes import Change
from traceloom.simulate.selection import LOADING, Chosen, named

_LONG = 0.02  # of the window: one stretch of host time this long is a pause,
_LONG_NS = 500_000  # if it also takes this long: shorter ones are Python between operators
_STEP = re.compile(r"^(ProfilerStep|traceloom\.step)#\d+$")
_BUSY = 0.5  # of its time a thread runs at least: it works
_MOST_RANKS = 4
_FAR_MORE = 2.0  # times as long as the middle one of the others: the pause is this rank's
_ASLEEP = 0.2  # at most: it waits
IDLE = "the program waits most of the time, for requests or whatever it is that nobody recorded: that costs nothing"


def pauses(ground: Ground) -> Iterator[Said]:
    """The host does one other thing for long: a pause, a write, a log."""
    if waits_for_requests(ground):
        yield Abstention("host-pause", IDLE)
        return
    python = between_operators(ground)
    work = ground.graph.nodes["work_ns"].to_numpy()
    long = python & (work >= long_ns(ground))
    if ground.steps is None:  # threads of a program without steps that sleep, wait for work: that is no pause
        long &= ~ground.asleep(long, _ASLEEP)
    if not long.any():
        return
    ranks = ground.ranks_of(long)
    if len(ranks) > 1:  # one rank alone may be the cause: told first, where it saves as much as all of them
        rank_of = ground.graph.nodes["rank"].fill_null(-1).to_numpy()
        times = {rank: ground.work_ns(long & (rank_of == rank)) for rank in ranks}
        by_time = sorted(ranks, key=lambda rank: (-times[rank], rank))
        for rank in by_time[:_MOST_RANKS]:
            yield _pause(ground, long & (rank_of == rank), (rank,))
        others = [times[rank] for rank in by_time[1:]] + [0] * (ground.rank_count - len(ranks))
        if times[by_time[0]] >= _FAR_MORE * float(np.median(others)):
            return  # the others pause now and then
    yield _pause(ground, long, tuple(ranks))


def between_operators(ground: Ground) -> Bools:
    """Host time between operators that no other rule is about."""
    nodes = ground.graph.nodes
    frames = pl.Series(ground.of_kind(gs.HOST)) & nodes["category"].cast(pl.String).is_in([cat.ANNOTATION, cat.PYTHON])
    mine = ground.of_kind(gs.THINK) | frames.fill_null(value=False).to_numpy()
    others = (named(ground.graph, LOADING) | named(ground.graph, COLLECTIONS)).fill_null(value=False).to_numpy()
    found: Bools = mine & ~others
    return found


def waits_for_requests(ground: Ground) -> bool:
    """Whether a program without steps mostly waits: how long its window is, does not depend on what it does."""
    return ground.steps is None and ground.running is not None and ground.running < _BUSY


def long_ns(ground: Ground) -> float:
    """From how long on a stretch of host time is a pause."""
    return max(_LONG * ground.whole_ns / ground.step_count, _LONG_NS)


def _pause(ground: Ground, long: Bools, ranks: tuple[int, ...]) -> Candidate:
    """The long stretches of some ranks."""
    time = ground.work_ns(long)
    evidence = ground.evidence(long)
    what = evidence[0].what
    count = int(long.sum())
    known = "" if _STEP.match(what) or what == NAMELESS else f": {what}"
    alone = ground.rank_count > 1 and len(ranks) == 1
    who = f"the host of rank {ranks[0]}" if alone else "the host"
    over = "" if len(ranks) == 1 else ground.over_ranks
    return Candidate(
        title=f"{who} {_how(ground, long, time)} {units.duration(time)} outside of operators"
        + ("" if count == 1 else f" in {units.count(count)} long stretches{over}")
        + known,
        changes=(
            Change("remove", Chosen(f"{f'rank {ranks[0]}: ' if alone else ''}long host stretches between operators",
                                    long, "think", ranks if alone else ())),
        ),
        confidence=0.6 if ground.stacks else 0.5,
        advice="Take it out of the step: write, log and check in another thread or less often; without stacks, record "
        "with `--stacks` to see what it is.",
        evidence=evidence,
    )  # fmt: skip


def _how(ground: Ground, nodes: Bools, time_ns: int) -> str:
    """Whether the host works or waits in some stretches, as far as the processor time of its threads tells."""
    ran = ground.ran_ns(nodes)
    if ran is None:
        return "spends"
    return "works" if ran[0] >= _BUSY * time_ns else "waits" if ran[1] <= _ASLEEP * time_ns else "spends"


RULES = (Rule("host-pause", "the host does something else for long", pauses),)
