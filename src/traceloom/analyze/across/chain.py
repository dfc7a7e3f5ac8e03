"""Chains of causes, link by link, for the collectives in which most was waited."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl

from traceloom.analyze.across.lateness import CAUSE_NAMES, CauseType, Lateness
from traceloom.analyze.across.ledger import CLASSES, COMMUNICATION
from traceloom.analyze.across.matched import Matched
from traceloom.analyze.across.rank_part import RankPart
from traceloom.model.frames import schema
from traceloom.model.units import duration

LINK_SCHEMA = schema("chain link instance rank late_ns cause ns detail follows", {"link": pl.Int32, "cause": CauseType})
_LONGEST = 8
_SMALL = 0.02  # of the lateness: smaller parts are told together


def chains(
    ranks: Sequence[RankPart], matched: Matched, collectives: pl.DataFrame, lateness: Lateness, most: int
) -> pl.DataFrame:
    """The chains of the `most` collectives with the longest waits.

    Returns:
        chain (instance it explains), link (0 = the last arriver of that), instance (whose last arriver the link is
        about), rank, late_ns (of that rank there), cause, ns (parts of late_ns; they add up to it; small ones together
        in a row with cause null), detail (what ran longer there than elsewhere), follows (the earlier collective that
        the rank waited in: the next link is about its last arriver).
    """
    order = collectives.with_row_index("row").filter(pl.col("wait_ns") > 0)
    worst = order.sort("wait_ns", "instance", descending=[True, False]).head(most)["row"].to_list()
    numbers = collectives["instance"].to_list()
    met = collectives["met_ns"].to_list()
    rows: list[tuple[object, ...]] = []
    causes_of: dict[int, list[tuple[object, ...]]] = {}
    for start in worst:
        at, link = start, 0
        while True:
            if at not in causes_of:  # the largest cause first; they add up to its lateness
                excess = lateness.excess_ns[at].tolist()
                least = max(int(abs(int(lateness.late_ns[at])) * _SMALL), 1)
                large = [
                    number
                    for number in np.argsort(-lateness.excess_ns[at], kind="stable").tolist()
                    if abs(excess[number]) >= least
                ]
                causes_of[at] = [
                    (CAUSE_NAMES[number], excess[number], _detail(ranks, matched, lateness, at, CAUSE_NAMES[number]))
                    for number in large
                ]
                rest = sum(excess) - sum(excess[number] for number in large)
                if rest:
                    causes_of[at].append((None, rest, "smaller parts together"))
            onward = int(lateness.follow[at])
            goes_on = onward >= 0 and met[onward] < met[at] and link + 1 < _LONGEST
            follows = numbers[onward] if goes_on else None
            rank = collectives["last_rank"][at]
            head = (numbers[start], link, numbers[at], rank, int(lateness.late_ns[at]))
            leads = CAUSE_NAMES[lateness.excess_cause[at]]
            rows += [(*head, *cause, follows if cause[0] == leads else None) for cause in causes_of[at]]
            if not goes_on:
                break
            at, link = onward, link + 1
    return pl.DataFrame(rows, schema=LINK_SCHEMA, orient="row")


def _detail(ranks: Sequence[RankPart], matched: Matched, lateness: Lateness, at: int, cause: str) -> str | None:
    """What the last arriver spent more time on than the others within a class: its collectives, or the largest."""
    if cause not in CLASSES:
        return None
    parts = matched.parts
    row = int(lateness.last_part[at])
    if cause == COMMUNICATION:  # the collectives that it was in since counting began
        own_rows = np.flatnonzero(parts["part"].to_numpy() == parts["part"][row])
        position = lateness.start_of_part[own_rows]
        inside = own_rows[(position >= lateness.stood_of_part[row]) & (position < lateness.start_of_part[row])]
        if not inside.size:
            return None
        waits = parts["wait_ns"].gather(inside)
        longest = inside[int(waits.arg_max() or 0)]
        last = matched.instances.filter(pl.col("instance") == parts["instance"][int(longest)])["last_rank"][0]
        many = "1 collective" if inside.size == 1 else f"{inside.size} collectives"
        return f"{many}, waiting {duration(int(waits.sum()))}; longest for rank {last}"
    instance = parts["instance"].to_numpy()
    low, high = (int(np.searchsorted(instance, instance[row], side)) for side in ("left", "right"))
    others = low + np.flatnonzero(lateness.others[low:high])
    # time in the class since counting began, by name: its own less that of the others, times their number
    times = []
    for of in (row, *others.tolist()):
        details = ranks[parts["part"][of]].ledger.details
        bounds = lateness.base_of_part[of], lateness.start_of_part[of]
        first, last = np.searchsorted(details["stretch"].to_numpy(), bounds).tolist()
        times.append(details[first:last])
    weight = np.repeat([max(others.size, 1), *[-1] * others.size], [time.height for time in times])
    more = pl.concat(times).hstack([pl.Series("weight", weight)]).filter(pl.col("class") == cause)
    more = more.group_by("name").agg((pl.col("ns") * pl.col("weight")).sum())
    largest = more.filter(pl.col("ns") > 0).sort("ns", "name", descending=[True, False]).head(2)
    clauses = [f"{name} +{duration(round(ns / max(others.size, 1)))}" for name, ns in largest.rows()]
    return "; ".join(clauses) or None
