"""Why the last arriver of each collective came late: what it did since these ranks last met, against the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl
from msgspec import Struct
from numpy.typing import NDArray

from traceloom.analyze.across.ledger import CLASSES, COMMUNICATION, COMPUTE, MEMORY
from traceloom.analyze.across.matched import Matched
from traceloom.analyze.across.rank_part import RankPart
from traceloom.analyze.idle_causes import CAUSES
from traceloom.link.clocks import ENDS_TOGETHER

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

BEGAN = "began_later"
"""What it was late by already where counting begins, beyond what standing in the anchor made up for."""

SCHEDULE = "pipeline_schedule"
"""The part of a wait for a message that the same stages of other pipelines wait as well."""

PEER = "peer_came_early"
"""What the account of the last arriver does not hold, because its peer came earlier than those of other pipelines."""

CAUSE_WORDS = {
    **CAUSES,
    COMPUTE: "it computed longer",
    COMMUNICATION: "it waited in an earlier communication",
    MEMORY: "it copied longer",
    SCHEDULE: "the order of the pipeline: other pipelines wait as well",
    PEER: "its peer came earlier than those of other pipelines",
    BEGAN: "it was behind already where counting begins (the last meeting, the step, the recording)",
}
"""Every cause of lateness in a few words."""

CAUSE_NAMES = (*CLASSES, SCHEDULE, PEER, BEGAN)
CauseType = pl.Enum(CAUSE_NAMES)
NOT_EXPLAINED = ("unexplained", "host_unobserved", "launch_not_recorded", PEER, BEGAN)
"""Causes that name no reason."""

_ANCHORS = (*ENDS_TOGETHER, "send_recv")
_COMMUNICATION = CLASSES.index(COMMUNICATION)
_SCHEDULE, _PEER, _BEGAN = (CAUSE_NAMES.index(name) for name in (SCHEDULE, PEER, BEGAN))
_STANDS = 0.5  # of the waiting that nothing hides at least: the ranks stood, and began again together


@dataclass(frozen=True)
class Lateness:
    """Of each collective, in the order of `instances`; arrays of shape (collectives,) or (collectives, causes).

    Attributes:
        late_ns: How much later the last arriver came than the middle half of the others, on average.
        excess_ns: Parts of it by `CAUSE_NAMES`: what the last arriver spent on each since the anchor, less what the
            others did. They add up to `late_ns`.
        follow: The earlier collective that made the last arriver late: of other ranks, where waiting in it is the main
            cause; the anchor, where this rank was last there too and that is the main cause; else -1.
        cause: Number of the main cause.
        excess_cause: The same without the order of the pipeline and what peers did.
        last_part: Row (of `parts`) of the last arriver.
        others: For each row of `parts` whether it is one of those that the last arriver is compared with.
        base_of_part: Place in its ledger where counting begins, for each row of `parts`; -1 where it cannot be told.
        stood_of_part: Place where counting of communication begins: the end of the anchor.
        start_of_part: Place in its ledger where it came.
    """

    late_ns: Ints
    excess_ns: Ints
    follow: Ints
    cause: Ints
    excess_cause: Ints
    last_part: Ints
    others: Bools
    base_of_part: Ints
    stood_of_part: Ints
    start_of_part: Ints


class _Arrivals(Struct, frozen=True):
    """The rows of `parts` as arrays of shape (parts,)."""

    inst: Ints
    part: Ints
    begun: Ints
    wait: Ints
    step: Ints
    last: Bools
    start_place: Ints
    end_place: Ints


def lateness(ranks: Sequence[RankPart], matched: Matched, stages: pl.DataFrame) -> Lateness:
    """Compare every last arriver with the others. Definition: docs/concepts/across-ranks.md.

    Args:
        ranks: The ranks.
        matched: Their collectives.
        stages: rank, pipeline, stage (of `pipeline`); may be empty.
    """
    many = matched.instances.height
    part = matched.parts["part"].to_numpy()
    start_place, end_place = (np.zeros(matched.parts.height, dtype=np.int64) for _ in range(2))
    duration = matched.parts["duration_ns"].to_numpy()
    for number, rank in enumerate(ranks):
        of_rank = np.flatnonzero(part == number)
        calls = rank.calls.select("event", "start_ns").unique("event", keep="first")
        events = matched.parts["event"][of_rank].to_frame()
        # on the rank's own clock, as its ledger is
        starts = events.join(calls, on="event", how="left", maintain_order="left")["start_ns"].to_numpy()
        start_place[of_rank] = rank.ledger.at(starts)
        end_place[of_rank] = rank.ledger.at(starts + duration[of_rank])
    rows = _Arrivals(
        inst=matched.parts["instance"].rank("dense").to_numpy().astype(np.int64) - 1,
        part=part,
        begun=matched.parts["start_ns"].to_numpy(),
        wait=matched.parts["wait_ns"].to_numpy(),
        step=matched.parts["step"].fill_null(-1).to_numpy().astype(np.int64),
        last=matched.parts["last"].to_numpy(),
        start_place=start_place,
        end_place=end_place,
    )
    anchor = _anchors(ranks, matched, rows)
    base, stood = _bases(ranks, rows, anchor)
    last = np.flatnonzero(rows.last)
    # the last arriver is compared with the middle half, by arrival, of those that were not last
    size = np.bincount(rows.inst)
    first = np.concatenate([[0], np.cumsum(size)[:-1]])[: size.size]
    order = np.lexsort((rows.begun, rows.last, rows.inst))  # in each collective by arrival, the last at the end
    at = np.empty(order.size, dtype=np.int64)
    at[order] = np.arange(order.size) - first[rows.inst[order]]
    rest = size[rows.inst] - 1
    others: Bools = (at >= rest // 4) & (at < rest - rest // 4) & (base >= 0)
    spent = np.zeros((rows.part.size, len(CLASSES)), dtype=np.int64)  # by each row of parts since counting began
    for number, rank in enumerate(ranks):
        own_rows = np.flatnonzero(rows.part == number)
        begun = rank.ledger.sums[np.maximum(base[own_rows], 0)]
        # standing in the anchor is no cause; what was computed beside it need not be computed after it
        begun[:, _COMMUNICATION] = rank.ledger.sums[np.maximum(stood[own_rows], 0), _COMMUNICATION]
        spent[own_rows] = rank.ledger.sums[rows.start_place[own_rows]] - begun
    compared = (base[last] >= 0) & (np.bincount(rows.inst[others], minlength=many) > 0)
    late, excess = _excess(rows, spent, others, many)
    late[~compared], excess[~compared] = 0, 0
    pairs, more, usual = _pair_excess(matched, stages, spent, base, last)
    excess[pairs, : len(CLASSES)], excess[pairs, -1] = more, 0
    excess[pairs, _SCHEDULE] = np.clip(usual, 0, late[pairs])
    excess[pairs, _PEER] = late[pairs] - more.sum(axis=1) - excess[pairs, _SCHEDULE]
    beyond = excess.copy()
    beyond[:, [_SCHEDULE, _PEER]] = 0
    cause = np.where(compared, np.argmax(excess, axis=1), len(CAUSE_NAMES) - 1)
    excess_cause = np.where(compared, np.argmax(beyond, axis=1), len(CAUSE_NAMES) - 1)
    follow = _followed(rows, stood, excess_cause, rows.wait - excess[rows.inst, _SCHEDULE])
    was_last = (anchor >= 0) & (rows.part[last[np.maximum(anchor, 0)]] == rows.part[last])
    follow = np.where(compared & was_last & (excess_cause == _BEGAN), anchor, follow)
    return Lateness(late, excess, follow, cause, excess_cause, last, others, base, stood, rows.start_place)


def _anchors(ranks: Sequence[RankPart], matched: Matched, rows: _Arrivals) -> Ints:
    """Of each collective its anchor: the latest one before at whose end all its ranks stood together; -1 without.

    It held all recorded ranks of the collective, they stood idle while they waited in it, and it was over when the last
    one came. Who computes on beside a collective does not stand: what it was late by there, it is late by afterwards.
    """
    parts, instances = matched.parts, matched.instances
    many = instances.height
    exposed = np.zeros(rows.part.size, dtype=np.int64)
    for number, rank in enumerate(ranks):
        own_rows = np.flatnonzero(rows.part == number)
        sums = rank.ledger.sums[:, _COMMUNICATION]
        exposed[own_rows] = sums[rows.end_place[own_rows]] - sums[rows.start_place[own_rows]]
    waited, idle_ns = np.zeros((2, many), dtype=np.int64)
    np.add.at(waited, rows.inst, rows.wait)
    np.add.at(idle_ns, rows.inst, np.minimum(exposed, rows.wait))
    stood = idle_ns >= _STANDS * waited
    masks: list[int] = [0] * many  # of the ranks of each collective
    for number, part in zip(rows.inst.tolist(), parts["part"].to_list(), strict=True):
        masks[number] |= 1 << part
    usable = instances["kind"].is_in(_ANCHORS).fill_null(value=True).to_numpy() & stood
    met = instances["met_ns"].to_numpy()
    ends = parts.group_by("instance", maintain_order=True).agg((pl.col("start_ns") + pl.col("duration_ns")).max())
    end = ends["start_ns"].to_numpy()
    different = list(dict.fromkeys(masks))
    code = {mask: number for number, mask in enumerate(different)}
    codes = np.array([code[mask] for mask in masks], dtype=np.int64)
    anchor = np.full(many, -1, dtype=np.int64)
    for mask in different:
        wide = np.array([bool(other & mask == mask) for other in different])
        candidates = np.flatnonzero(usable & wide[codes])
        if not candidates.size:
            continue
        candidates = candidates[np.argsort(end[candidates], kind="stable")]
        targets = np.flatnonzero(codes == code[mask])
        before = np.searchsorted(end[candidates], met[targets], side="right") - 1
        previous = candidates[np.maximum(before, 0)]
        anchor[targets] = np.where((before >= 0) & (previous != targets), previous, -1)
    return anchor


def _bases(ranks: Sequence[RankPart], rows: _Arrivals, anchor: Ints) -> tuple[Ints, Ints]:
    """Where counting begins, in places of the ledgers: arrival at the anchor; and the end of standing in it.

    Without an anchor both are the start of the step, if all have it, else of the recording.
    """
    key = rows.inst * len(ranks) + rows.part
    order = np.argsort(key, kind="stable")
    if not order.size:
        return order, order
    # for each row of parts the row of the same rank in the anchor
    anchor_key = np.where(anchor[rows.inst] >= 0, anchor[rows.inst] * len(ranks) + rows.part, -1)
    candidate = order[np.minimum(np.searchsorted(key[order], anchor_key), order.size - 1)]
    free = (anchor_key < 0) | (key[candidate] != anchor_key)
    base = np.where(free, -1, rows.start_place[candidate])
    in_step = np.full(base.size, -1, dtype=np.int64)
    for number, rank in enumerate(ranks):
        own_rows = np.flatnonzero((rows.part == number) & free)
        starts = dict(zip(rank.steps["step"].to_list(), rank.steps["start_ns"].to_list(), strict=True))
        if own_rows.size and starts:
            times = np.array([starts.get(step, -1) for step in rows.step[own_rows].tolist()], dtype=np.int64)
            places = rank.ledger.at(np.maximum(times, rank.ledger.time_ns[0]))
            in_step[own_rows] = np.where((times >= 0) & (places <= rows.start_place[own_rows]), places, -1)
    all_know = np.ones(int(rows.inst.max()) + 1, dtype=np.bool_)
    np.logical_and.at(all_know, rows.inst[free], in_step[free] >= 0)
    base[free] = np.where(all_know[rows.inst[free]], in_step[free], 0)
    # a receive may stand on its stream already when the rank comes to the anchor on another
    stood = np.where(free, base, rows.end_place[candidate])
    return np.minimum(base, rows.start_place), np.minimum(stood, rows.start_place)


def _excess(rows: _Arrivals, spent: Ints, others: Bools, many: int) -> tuple[Ints, Ints]:
    """Lateness against the mean of the others, and its parts; what the classes do not hold lies before the base."""
    inst, last = rows.inst[others], np.flatnonzero(rows.last)
    count = np.maximum(np.bincount(inst, minlength=many), 1)

    def beyond(values: Ints) -> Ints:
        # against the last arriver's own, so that times since 1970 keep their digits
        less = np.zeros(many, dtype=np.int64)
        np.add.at(less, inst, values[last][inst] - values[others])
        difference: Ints = np.rint(less / count).astype(np.int64)
        return difference

    late = beyond(rows.begun)
    excess = np.zeros((many, len(CAUSE_NAMES)), dtype=np.int64)
    for number in range(len(CLASSES)):
        column = np.ascontiguousarray(spent[:, number])
        if column.any():
            excess[:, number] = beyond(column)
    excess[:, -1] = late - excess[:, :-1].sum(axis=1)
    return late, excess


def _pair_excess(
    matched: Matched, stages: pl.DataFrame, spent: Ints, base: Ints, last: Ints
) -> tuple[Ints, Ints, Ints]:
    """What the last arrivers of pairs spent more than the same stage of the other pipelines in the same step.

    In a pipeline one stage computes while the next waits for it: comparing the two says nothing. The counterpart of a
    pair is the pair of another pipeline between the same stages, as many pairs into the same step.

    Args:
        matched: The collectives.
        stages: rank, pipeline, stage (of `pipeline`).
        spent: What each row of `parts` spent since counting began; shape (parts, classes).
        base: Where counting began for each row; -1 where that is not known.
        last: The row of the last arriver of each instance.

    Returns:
        The numbers of the instances that have a counterpart, their excess by class against the median, and how late
        the last arrivers of the counterparts came (median).
    """
    nothing = np.zeros(0, dtype=np.int64)
    none = nothing, np.zeros((0, spent.shape[1]), dtype=np.int64), nothing
    pairs = matched.instances.with_row_index("number").filter(
        (pl.col("kind") == "send_recv") & (pl.col("recorded") == 2)
    )
    if not pairs.height or not stages.height:
        return none
    parts = matched.parts.with_row_index("row").select(pl.col("row").cast(pl.Int64), "instance", "rank", "sends")
    staged = parts.join(
        pairs.select("number", "instance", "step", "met_ns"), on="instance", how="inner", maintain_order="left"
    ).join(stages.select("rank", "pipeline", "stage"), on="rank", how="inner", maintain_order="left")
    ends = staged.select("number", "sends", "stage")
    for word, sends in (("from", True), ("to", False)):
        side = ends.filter(pl.col("sends") == sends).select("number", pl.col("stage").alias(word))
        staged = staged.join(side, on="number", how="inner", maintain_order="left")
    nth = pl.int_range(pl.len()).over("step", "rank", "sends", "from", "to").alias("nth")
    rows = staged.sort("met_ns", "number").with_columns(nth)
    rows = rows.filter(pl.Series(base[rows["row"].to_numpy()] >= 0))
    last_rows = rows.filter(pl.col("row").is_in(pl.Series(last).implode()))
    both = last_rows.join(rows, on=["step", "sends", "from", "to", "nth"], how="inner", suffix="_other").filter(
        pl.col("number") != pl.col("number_other")
    )
    if not both.height:
        return none
    columns = [f"c{number}" for number in range(spent.shape[1])]
    counterparts = pl.DataFrame(spent[both["row_other"].to_numpy()], schema=columns).with_columns(
        both["number"], both["row"], late=matched.parts["late_ns"].gather(both["row_other"])
    )
    middle = counterparts.group_by("number", "row", maintain_order=True).agg(
        pl.col(*columns, "late").median().round().cast(pl.Int64)
    )
    excess = spent[middle["row"].to_numpy()] - middle.select(columns).to_numpy()
    return middle["number"].to_numpy().astype(np.int64), excess, middle["late"].to_numpy()


def _followed(rows: _Arrivals, stood: Ints, cause: Ints, wait: Ints) -> Ints:
    """Where communication made a rank late: the collective in which it then waited longest, beyond what is usual."""
    last = np.flatnonzero(rows.last)
    follow = np.full(last.size, -1, dtype=np.int64)
    candidates = np.flatnonzero(cause == _COMMUNICATION)
    rows_of: dict[int, Ints] = {}
    for number in np.unique(rows.part[last[candidates]]).tolist():
        own_rows = np.flatnonzero(rows.part == number)
        rows_of[number] = own_rows[np.argsort(rows.end_place[own_rows], kind="stable")]
    for number in candidates.tolist():
        row = int(last[number])
        own_rows = rows_of[int(rows.part[row])]
        low = np.searchsorted(rows.end_place[own_rows], stood[row], side="right")
        high = np.searchsorted(rows.end_place[own_rows], rows.start_place[row], side="right")
        inside = own_rows[low:high]
        inside = inside[(rows.inst[inside] != number) & (wait[inside] > 0)]
        if inside.size:
            follow[number] = rows.inst[inside[int(np.argmax(wait[inside]))]]
    return follow


def roots(late: Lateness, met_ns: Ints) -> tuple[Ints, Ints]:
    """The collective at the end of each chain, and its cause; a chain goes back in time, so it has an end."""
    identity = np.arange(met_ns.size)
    if not met_ns.size:
        return identity, identity
    earlier = (late.follow >= 0) & (met_ns[np.maximum(late.follow, 0)] < met_ns)
    forward = np.where(earlier, late.follow, -1)
    root = identity
    for _ in range(32):  # the deepest chain that is followed
        onward = forward[root]
        if (onward < 0).all():
            break
        root = np.where(onward >= 0, onward, root)
    return root, late.excess_cause[root]
