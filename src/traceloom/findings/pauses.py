"""The host does one other thing for long: a pause, a write, a log."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import reduce
from operator import or_

import numpy as np
import polars as pl

from traceloom.analyze.host_wait import COLLECTIONS
from traceloom.analyze.phases import BACKWARD, COMMUNICATION, SPAN_PHASES, WORD_PHASES
from traceloom.findings.context import NAMELESS, Bools, Context
from traceloom.findings.rule import Candidate, FindingRule, Said
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
_BACKWARD = next(pattern for phase, pattern in WORD_PHASES if phase == BACKWARD)
_COLLECTIVES = "|".join(pattern for phase, pattern in SPAN_PHASES if phase == COMMUNICATION)
_ENGINE = "autograd::engine::"
_ADDS_UP = "AccumulateGrad"  # runs on the main thread, too
_UNSEEN = "what the host waits for in the backward pass was not recorded: the operators of another thread"
SAMPLED = "most operators were left out of the file: nobody knows what lies between those in it"
IDLE = "the program waits most of the time, for requests or for something that was not recorded: that costs nothing"


def pauses(context: Context) -> Iterator[Said]:
    """The host does one other thing for long: a pause, a write, a log."""
    if waits_for_requests(context):
        yield Abstention("host-pause", IDLE)
        return
    if context.sampled:
        yield Abstention("host-pause", SAMPLED)
        return
    python = between_operators(context)
    work = context.graph.nodes["work_ns"].to_numpy()
    long = python & (work >= long_ns(context))
    if not long.any():
        return
    # regions named backward, on ranks of whose backward pass no derivative was recorded: they run elsewhere
    nodes = context.graph.nodes
    name, of_rank = nodes["name"].cast(pl.String).fill_null(""), nodes["rank"].fill_null(-1)
    seen = of_rank.filter(name.str.starts_with(_ENGINE) & ~name.str.ends_with(_ADDS_UP)).unique()
    backward = (nodes["category"].cast(pl.String) == cat.ANNOTATION) & name.str.contains(_BACKWARD)
    unseen: Bools = long & (backward.fill_null(value=False) & ~of_rank.is_in(seen.implode())).to_numpy()
    if unseen.any():
        yield Abstention("host-pause", _UNSEEN)
        long &= ~unseen
    if context.steps is None:  # threads of a program without steps that sleep, wait for work: that is no pause
        long &= ~context.asleep(long, _ASLEEP)
    if not long.any():
        return
    ranks = context.ranks_of(long)
    if len(ranks) > 1:  # one rank alone may be the cause: told first, where it saves as much as all of them
        rank_of = context.graph.rank_numbers
        times = {rank: context.work_ns(long & (rank_of == rank)) for rank in ranks}
        by_time = sorted(ranks, key=lambda rank: (-times[rank], rank))
        for rank in by_time[:_MOST_RANKS]:
            yield _pause(context, long & (rank_of == rank), (rank,))
        others = [times[rank] for rank in by_time[1:]] + [0] * (context.rank_count - len(ranks))
        if times[by_time[0]] >= _FAR_MORE * float(np.median(others)):
            return  # the others pause now and then
    yield _pause(context, long, tuple(ranks))


def between_operators(context: Context) -> Bools:
    """Host time between operators that no other rule is about."""
    nodes = context.graph.nodes
    frames = pl.Series(context.of_kind(gs.HOST)) & nodes["category"].cast(pl.String).is_in([cat.ANNOTATION, cat.PYTHON])
    between = context.of_kind(gs.THINK) | frames.fill_null(value=False).to_numpy()
    others = (named(context.graph, pattern) for pattern in (LOADING, COLLECTIONS, _COLLECTIVES))
    unclaimed: Bools = between & ~reduce(or_, others)
    return unclaimed


def waits_for_requests(context: Context) -> bool:
    """Whether a program without steps mostly waits: how long its window is, does not depend on what it does."""
    return context.steps is None and context.running is not None and context.running < _BUSY


def long_ns(context: Context) -> float:
    """From how long on a stretch of host time is a pause."""
    return max(_LONG * context.whole_ns / context.step_count, _LONG_NS)


def _pause(context: Context, long: Bools, ranks: tuple[int, ...]) -> Candidate:
    """The long stretches of some ranks."""
    time = context.work_ns(long)
    evidence = context.evidence(long)
    label = evidence[0].what
    count = int(long.sum())
    detail = "" if _STEP.match(label) or label == NAMELESS else f": {label}"
    alone = context.rank_count > 1 and len(ranks) == 1
    who = f"the host of rank {ranks[0]}" if alone else "the host"
    over = "" if len(ranks) == 1 else context.over_ranks
    # whether the host works or waits, as far as the processor time of its threads tells
    ran = context.ran_ns(long)
    if ran is None:
        verb = "spends"
    else:
        verb = "works" if ran[0] >= _BUSY * time else "waits" if ran[1] <= _ASLEEP * time else "spends"
    return Candidate(
        title=f"{who} {verb} {units.duration(time)} outside of operators"
        + ("" if context.step_count == 1 else f" in {context.where}")
        + ("" if count == 1 else f" in {units.count(count)} long stretches{over}")
        + detail,
        changes=(
            Change("remove", Chosen(f"{f'rank {ranks[0]}: ' if alone else ''}long host stretches between operators",
                                    long, "think", ranks if alone else ())),
        ),
        confidence=0.6 if context.stacks else 0.5,
        advice="Take it out of the step: write, log and check in another thread or less often; without stacks, record "
        "with `--stacks` to see what it is.",
        evidence=evidence,
    )  # fmt: skip


RULES = (FindingRule("host-pause", "the host does something else for long", pauses),)
