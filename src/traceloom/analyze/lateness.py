"""Causes of lateness: why the last arriver of each collective was late, chains of causes, and blame
by rank and host.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl
from msgspec import Struct
from numpy.typing import NDArray

from traceloom.analyze.idle import CAUSES
from traceloom.analyze.matched_collectives import INSTANCE_SCHEMA, MatchedCollectives
from traceloom.analyze.rank_summary import COMMUNICATION, COMPUTE, COPIES, TIME_CLASSES, RankSummary
from traceloom.graph.job import ENDS_TOGETHER
from traceloom.system.units import format_duration
from traceloom.trace.frames import build_schema, cast_to_schema

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

BEGAN_LATER = "began_later"
"""Lateness that exists already where counting begins, beyond what standing in the anchor made up
for.
"""

PIPELINE_SCHEDULE = "pipeline_schedule"
"""The part of a wait for a message that the same stages of other pipelines wait as well."""

PEER_CAME_EARLY = "peer_came_early"
"""Lateness that the account of the last arriver does not contain, because its peer came earlier
than those of other pipelines.
"""

CAUSE_LABELS = {
    **CAUSES,
    COMPUTE: "it computed longer",
    COMMUNICATION: "it waited in an earlier communication",
    COPIES: "it copied longer",
    PIPELINE_SCHEDULE: "the order of the pipeline: other pipelines wait as well",
    PEER_CAME_EARLY: "its peer came earlier than those of other pipelines",
    BEGAN_LATER: "it was behind already where counting begins (the last meeting, the step, the recording)",
}
"""Every cause of lateness in a few words."""

CAUSE_NAMES = (*TIME_CLASSES, PIPELINE_SCHEDULE, PEER_CAME_EARLY, BEGAN_LATER)
CauseType = pl.Enum(CAUSE_NAMES)
NOT_EXPLAINED = (
    "unexplained",
    "host_unobserved",
    "launch_not_recorded",
    PEER_CAME_EARLY,
    BEGAN_LATER,
)
"""Causes without a reason."""

_ANCHOR_KINDS = (*ENDS_TOGETHER, "send_recv")
_COMMUNICATION_CODE = TIME_CLASSES.index(COMMUNICATION)
_SCHEDULE_CODE, _PEER_CODE, _BEGAN_CODE = (
    CAUSE_NAMES.index(name) for name in (PIPELINE_SCHEDULE, PEER_CAME_EARLY, BEGAN_LATER)
)
# Of the waiting, at least, that nothing hides: the ranks were blocked, and began again together
_MIN_IDLE_SHARE = 0.5


@dataclass(frozen=True)
class Lateness:
    """The lateness of each collective, in the order of `instances`; arrays of shape (collectives,)
    or (collectives, causes).

    Attributes:
        late_ns: How much later the last arriver came than the middle half of the others, on
            average.
        excess_ns: Parts of it by `CAUSE_NAMES`: the time of the last arriver in each since the
            anchor, less that of the others. They add up to `late_ns`.
        follow: The earlier collective that made the last arriver late: of other ranks, where
            waiting in it is the main cause; the anchor, where this rank was last there too and that
            is the main cause; else -1.
        cause: Number of the main cause.
        excess_cause: The same without the order of the pipeline and the effect of peers.
        last_part: Row (of `parts`) of the last arriver.
        others: For each row of `parts` whether it is one of those that the last arriver is compared
            with.
        base_of_part: Position in its ledger where counting begins, for each row of `parts`; -1
            where it is unknown.
        stood_of_part: Position where counting of communication begins: the end of the anchor.
        start_of_part: Position in its ledger where it came.
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


def compute_lateness(
    ranks: Sequence[RankSummary], matched: MatchedCollectives, stages: pl.DataFrame
) -> Lateness:
    """Compares every last arriver with the others. Definition: docs/concepts/across-ranks.md.

    Args:
        ranks: The ranks.
        matched: Their collectives.
        stages: rank, pipeline, stage (of `Pipeline.stages`); may be empty.
    """
    collective_count = matched.instances.height
    part = matched.parts["part"].to_numpy()
    start_place, end_place = (np.zeros(matched.parts.height, dtype=np.int64) for _ in range(2))
    duration = matched.parts["duration_ns"].to_numpy()
    for number, rank in enumerate(ranks):
        rank_rows = np.flatnonzero(part == number)
        calls = rank.calls.select("event", "start_ns").unique("event", keep="first")
        events = matched.parts["event"][rank_rows].to_frame()
        # On the rank's own clock, like its ledger.
        starts = events.join(calls, on="event", how="left", maintain_order="left")[
            "start_ns"
        ].to_numpy()
        start_place[rank_rows] = rank.ledger.at(starts)
        end_place[rank_rows] = rank.ledger.at(starts + duration[rank_rows])
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
    anchor = _find_anchors(ranks, matched, rows)
    base, counting_start = _find_counting_start(ranks, rows, anchor)
    last = np.flatnonzero(rows.last)
    # The last arriver is compared with the middle half, by arrival, of those that were not last.
    size = np.bincount(rows.inst)
    first = np.concatenate([[0], np.cumsum(size)[:-1]])[: size.size]
    # In each collective by arrival, the last at the end
    order = np.lexsort((rows.begun, rows.last, rows.inst))
    arrival_index = np.empty(order.size, dtype=np.int64)
    arrival_index[order] = np.arange(order.size) - first[rows.inst[order]]
    last_index = size[rows.inst] - 1
    is_peer: Bools = (
        (arrival_index >= last_index // 4)
        & (arrival_index < last_index - last_index // 4)
        & (base >= 0)
    )
    # By each row of parts since counting began
    class_ns = np.zeros((rows.part.size, len(TIME_CLASSES)), dtype=np.int64)
    for number, rank in enumerate(ranks):
        own_rows = np.flatnonzero(rows.part == number)
        begun = rank.ledger.sums[np.maximum(base[own_rows], 0)]
        # Standing in the anchor is not a cause; work computed beside it need not be computed after
        # it.
        begun[:, _COMMUNICATION_CODE] = rank.ledger.sums[
            np.maximum(counting_start[own_rows], 0), _COMMUNICATION_CODE
        ]
        class_ns[own_rows] = rank.ledger.sums[rows.start_place[own_rows]] - begun
    compared = (base[last] >= 0) & (np.bincount(rows.inst[is_peer], minlength=collective_count) > 0)
    late, excess = _compute_excess(rows, class_ns, is_peer, collective_count)
    late[~compared], excess[~compared] = 0, 0
    pairs, pair_excess, schedule_ns = _compute_pair_excess(matched, stages, class_ns, base, last)
    excess[pairs, : len(TIME_CLASSES)], excess[pairs, -1] = pair_excess, 0
    excess[pairs, _SCHEDULE_CODE] = np.clip(schedule_ns, 0, late[pairs])
    excess[pairs, _PEER_CODE] = (
        late[pairs] - pair_excess.sum(axis=1) - excess[pairs, _SCHEDULE_CODE]
    )
    beyond = excess.copy()
    beyond[:, [_SCHEDULE_CODE, _PEER_CODE]] = 0
    cause = np.where(compared, np.argmax(excess, axis=1), len(CAUSE_NAMES) - 1)
    excess_cause = np.where(compared, np.argmax(beyond, axis=1), len(CAUSE_NAMES) - 1)
    follow = _find_earlier_collective(
        rows, counting_start, excess_cause, rows.wait - excess[rows.inst, _SCHEDULE_CODE]
    )
    was_last = (anchor >= 0) & (rows.part[last[np.maximum(anchor, 0)]] == rows.part[last])
    follow = np.where(compared & was_last & (excess_cause == _BEGAN_CODE), anchor, follow)
    return Lateness(
        late,
        excess,
        follow,
        cause,
        excess_cause,
        last,
        is_peer,
        base,
        counting_start,
        rows.start_place,
    )


def _find_anchors(
    ranks: Sequence[RankSummary], matched: MatchedCollectives, rows: _Arrivals
) -> Ints:
    """Returns for each collective its anchor: the latest earlier one at whose end all its ranks
    stood together; -1 without.

    The anchor held all recorded ranks of the collective, they stood idle while they waited in it,
    and it was over when the last one came. A rank that computes on beside a collective does not
    stand: its lateness there persists afterwards.
    """
    parts, instances = matched.parts, matched.instances
    collective_count = instances.height
    exposed = np.zeros(rows.part.size, dtype=np.int64)
    for number, rank in enumerate(ranks):
        own_rows = np.flatnonzero(rows.part == number)
        sums = rank.ledger.sums[:, _COMMUNICATION_CODE]
        exposed[own_rows] = sums[rows.end_place[own_rows]] - sums[rows.start_place[own_rows]]
    waited, idle_ns = np.zeros((2, collective_count), dtype=np.int64)
    np.add.at(waited, rows.inst, rows.wait)
    np.add.at(idle_ns, rows.inst, np.minimum(exposed, rows.wait))
    is_idle = idle_ns >= _MIN_IDLE_SHARE * waited
    masks: list[int] = [0] * collective_count  # Bit masks of the ranks of each collective.
    for number, part in zip(rows.inst.tolist(), parts["part"].to_list(), strict=True):
        masks[number] |= 1 << part
    usable = instances["kind"].is_in(_ANCHOR_KINDS).fill_null(value=True).to_numpy() & is_idle
    met = instances["met_ns"].to_numpy()
    instance_ends = parts.group_by("instance", maintain_order=True).agg(
        (pl.col("start_ns") + pl.col("duration_ns")).max()
    )
    end = instance_ends["start_ns"].to_numpy()
    different = list(dict.fromkeys(masks))
    code = {mask: number for number, mask in enumerate(different)}
    codes = np.array([code[mask] for mask in masks], dtype=np.int64)
    anchor = np.full(collective_count, -1, dtype=np.int64)
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


def _find_counting_start(
    ranks: Sequence[RankSummary], rows: _Arrivals, anchor: Ints
) -> tuple[Ints, Ints]:
    """Returns where counting begins, as positions in the ledgers: arrival at the anchor; and the
    end of standing in it.

    Without an anchor both are the start of the step, if all have it, else of the recording.
    """
    key = rows.inst * len(ranks) + rows.part
    order = np.argsort(key, kind="stable")
    if not order.size:
        return order, order
    # For each row of parts the row of the same rank in the anchor.
    anchor_key = np.where(anchor[rows.inst] >= 0, anchor[rows.inst] * len(ranks) + rows.part, -1)
    candidate = order[np.minimum(np.searchsorted(key[order], anchor_key), order.size - 1)]
    free = (anchor_key < 0) | (key[candidate] != anchor_key)
    base = np.where(free, -1, rows.start_place[candidate])
    in_step = np.full(base.size, -1, dtype=np.int64)
    for number, rank in enumerate(ranks):
        own_rows = np.flatnonzero((rows.part == number) & free)
        starts = dict(
            zip(rank.steps["step"].to_list(), rank.steps["start_ns"].to_list(), strict=True)
        )
        if own_rows.size and starts:
            times = np.array(
                [starts.get(step, -1) for step in rows.step[own_rows].tolist()], dtype=np.int64
            )
            time_places = rank.ledger.at(np.maximum(times, rank.ledger.time_ns[0]))
            in_step[own_rows] = np.where(
                (times >= 0) & (time_places <= rows.start_place[own_rows]), time_places, -1
            )
    all_know = np.ones(int(rows.inst.max()) + 1, dtype=np.bool_)
    np.logical_and.at(all_know, rows.inst[free], in_step[free] >= 0)
    base[free] = np.where(all_know[rows.inst[free]], in_step[free], 0)
    # A receive may be waiting on its stream already when the rank comes to the anchor on another.
    counting_start = np.where(free, base, rows.end_place[candidate])
    return np.minimum(base, rows.start_place), np.minimum(counting_start, rows.start_place)


def _compute_excess(
    rows: _Arrivals, spent: Ints, is_peer: Bools, collective_count: int
) -> tuple[Ints, Ints]:
    """Returns lateness against the mean of the others, and its parts; the remainder that the
    classes do not contain comes from before the base.
    """
    inst, last = rows.inst[is_peer], np.flatnonzero(rows.last)
    count = np.maximum(np.bincount(inst, minlength=collective_count), 1)

    def beyond(values: Ints) -> Ints:
        # Relative to the last arriver's own, so that times since 1970 keep their digits.
        less = np.zeros(collective_count, dtype=np.int64)
        np.add.at(less, inst, values[last][inst] - values[is_peer])
        return np.rint(less / count).astype(np.int64)

    late = beyond(rows.begun)
    excess = np.zeros((collective_count, len(CAUSE_NAMES)), dtype=np.int64)
    for number in range(len(TIME_CLASSES)):
        column = np.ascontiguousarray(spent[:, number])
        if column.any():
            excess[:, number] = beyond(column)
    excess[:, -1] = late - excess[:, :-1].sum(axis=1)
    return late, excess


def _compute_pair_excess(
    matched: MatchedCollectives, stages: pl.DataFrame, spent: Ints, base: Ints, last: Ints
) -> tuple[Ints, Ints, Ints]:
    """Returns the excess of the last arrivers of pairs over the same stage of the other pipelines
    in the same step.

    In a pipeline one stage computes while the next waits for it, so comparing the two is
    meaningless. The counterpart of a pair is the pair of another pipeline between the same stages,
    as many pairs into the same step.

    Args:
        matched: The collectives.
        stages: rank, pipeline, stage (of `Pipeline.stages`).
        spent: Time of each row of `parts` in each class since counting began; shape (parts,
            classes).
        base: Where counting began for each row; -1 where that is not known.
        last: The row of the last arriver of each instance.

    Returns:
        The numbers of the instances that have a counterpart, their excess by class against the
        median, and how late the last arrivers of the counterparts came (median).
    """
    nothing = np.zeros(0, dtype=np.int64)
    none = nothing, np.zeros((0, spent.shape[1]), dtype=np.int64), nothing
    pairs = matched.instances.with_row_index("number").filter(
        (pl.col("kind") == "send_recv") & (pl.col("recorded") == 2)
    )
    if not pairs.height or not stages.height:
        return none
    parts = matched.parts.with_row_index("row").select(
        pl.col("row").cast(pl.Int64), "instance", "rank", "sends"
    )
    staged = parts.join(
        pairs.select("number", "instance", "step", "met_ns"),
        on="instance",
        how="inner",
        maintain_order="left",
    ).join(
        stages.select("rank", "pipeline", "stage"), on="rank", how="inner", maintain_order="left"
    )
    pair_stages = staged.select("number", "sends", "stage")
    for word, sends in (("from", True), ("to", False)):
        side = pair_stages.filter(pl.col("sends") == sends).select(
            "number", pl.col("stage").alias(word)
        )
        staged = staged.join(side, on="number", how="inner", maintain_order="left")
    nth = pl.int_range(pl.len()).over("step", "rank", "sends", "from", "to").alias("nth")
    rows = staged.sort("met_ns", "number").with_columns(nth)
    rows = rows.filter(pl.Series(base[rows["row"].to_numpy()] >= 0))
    last_rows = rows.filter(pl.col("row").is_in(pl.Series(last).implode()))
    both = last_rows.join(
        rows, on=["step", "sends", "from", "to", "nth"], how="inner", suffix="_other"
    ).filter(pl.col("number") != pl.col("number_other"))
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


def _find_earlier_collective(
    rows: _Arrivals, counting_start: Ints, cause: Ints, wait: Ints
) -> Ints:
    """Returns the collective that made a rank late where communication did: the one in which it
    then waited longest, beyond the usual wait.
    """
    last = np.flatnonzero(rows.last)
    follow = np.full(last.size, -1, dtype=np.int64)
    candidates = np.flatnonzero(cause == _COMMUNICATION_CODE)
    rows_of: dict[int, Ints] = {}
    for number in np.unique(rows.part[last[candidates]]).tolist():
        own_rows = np.flatnonzero(rows.part == number)
        rows_of[number] = own_rows[np.argsort(rows.end_place[own_rows], kind="stable")]
    for number in candidates.tolist():
        row = int(last[number])
        own_rows = rows_of[int(rows.part[row])]
        low = np.searchsorted(rows.end_place[own_rows], counting_start[row], side="right")
        high = np.searchsorted(rows.end_place[own_rows], rows.start_place[row], side="right")
        earlier_waits = own_rows[low:high]
        earlier_waits = earlier_waits[
            (rows.inst[earlier_waits] != number) & (wait[earlier_waits] > 0)
        ]
        if earlier_waits.size:
            follow[number] = rows.inst[earlier_waits[int(np.argmax(wait[earlier_waits]))]]
    return follow


def follow_to_root(late: Lateness, met_ns: Ints) -> tuple[Ints, Ints]:
    """Returns the collective at the end of each chain, and its cause; a chain goes back in time, so
    it ends.
    """
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


COLLECTIVE_SCHEMA = build_schema(
    INSTANCE_SCHEMA,
    "late_ns cause cause_ns explained_ns unexplained_ns schedule_ns root_instance root_rank root_cause",
    {"cause": CauseType, "root_cause": CauseType},
)
RANK_SCHEMA = build_schema(
    "rank host collective_count last_count wait_ns blame_ns root_ns alone_ns"
)
HOST_SCHEMA = build_schema("host collective_count last_count wait_ns blame_ns root_ns alone_ns")
HEAT_SCHEMA = build_schema("step rank wait_ns blame_ns root_ns")
REASON_SCHEMA = build_schema(
    "rank cause collective_count waited_ns late_ns max_late_ns", {"cause": CauseType}
)

# Causes that the order of a pipeline does not require
_UNSCHEDULED_WAIT = pl.col("wait_ns") - pl.col("schedule_ns")


def add_causes(matched: MatchedCollectives, lateness: Lateness) -> pl.DataFrame:
    """Returns the instances with why their last rank was late and where the chain of causes
    ends.
    """
    frame = matched.instances
    rows = np.arange(frame.height)
    root, root_cause = follow_to_root(lateness, frame["met_ns"].to_numpy())
    names = pl.Series(list(CAUSE_NAMES), dtype=CauseType)
    nameless = [CAUSE_NAMES.index(name) for name in NOT_EXPLAINED]
    schedule_ns, peer = (
        lateness.excess_ns[:, CAUSE_NAMES.index(name)]
        for name in (PIPELINE_SCHEDULE, PEER_CAME_EARLY)
    )
    lost = lateness.excess_ns[:, nameless].sum(axis=1)
    return frame.with_columns(
        pl.Series("late_ns", lateness.late_ns),
        names[lateness.cause].alias("cause"),
        pl.Series("cause_ns", lateness.excess_ns[rows, lateness.cause] if rows.size else rows),
        pl.Series("explained_ns", lateness.late_ns - lost),
        pl.Series("unexplained_ns", lost),
        # A longer wait only because of an earlier arrival is a wait for the order, too.
        pl.min_horizontal(
            pl.Series("schedule_ns", schedule_ns + np.maximum(peer, 0)), "wait_ns"
        ).alias("schedule_ns"),
        frame["instance"][root].alias("root_instance"),
        frame["last_rank"][root].alias("root_rank"),
        names[root_cause].alias("root_cause"),
    ).pipe(cast_to_schema, COLLECTIVE_SCHEMA)


def summarize_by_rank(matched: MatchedCollectives, collectives: pl.DataFrame) -> pl.DataFrame:
    """Returns how long each rank waited, and how long the others waited for it."""
    schema = {"rank": pl.Int32(), "host": pl.String()}
    hosts = pl.DataFrame({"rank": matched.ranks, "host": matched.hosts}, schema=schema)
    waits = matched.parts.group_by("rank").agg(
        pl.len().alias("collective_count"),
        pl.col("last").sum().alias("last_count"),
        pl.col("wait_ns").sum(),
    )
    blame = collectives.group_by(rank="last_rank").agg(
        pl.col("wait_ns").sum().alias("blame_ns"), pl.col("alone_ns").sum()
    )
    root = collectives.group_by(rank="root_rank").agg(_UNSCHEDULED_WAIT.sum().alias("root_ns"))
    out = hosts.unique("rank", keep="first", maintain_order=True)
    for part in (waits, blame, root):
        out = out.join(part, on="rank", how="left", maintain_order="left")
    filled = out.with_columns(
        pl.col(name).fill_null(0) for name in RANK_SCHEMA if name not in ("rank", "host")
    )
    return filled.pipe(cast_to_schema, RANK_SCHEMA).sort("rank")


def summarize_by_host(ranks: pl.DataFrame) -> pl.DataFrame:
    """Returns the same, summed over the ranks of each host."""
    sums = ranks.group_by("host", maintain_order=True).agg(
        pl.col(name).sum() for name in HOST_SCHEMA if name != "host"
    )
    return sums.sort("root_ns", "host", descending=[True, False])


def wait_heat_map(matched: MatchedCollectives, collectives: pl.DataFrame) -> pl.DataFrame:
    """Returns steps × ranks: how long each rank waited in a step, and how long it kept others
    waiting.
    """
    waits = matched.parts.group_by("step", "rank").agg(pl.col("wait_ns").sum())
    blame = collectives.group_by("step", rank="last_rank").agg(
        pl.col("wait_ns").sum().alias("blame_ns")
    )
    root = collectives.group_by("step", rank="root_rank").agg(
        _UNSCHEDULED_WAIT.sum().alias("root_ns")
    )
    keys = pl.concat([part.select("step", "rank") for part in (waits, blame, root)]).unique()
    for part in (waits, blame, root):
        keys = keys.join(part, on=["step", "rank"], how="left", nulls_equal=True)
    filled = keys.with_columns(
        pl.col(name).fill_null(0) for name in ("wait_ns", "blame_ns", "root_ns")
    )
    return filled.pipe(cast_to_schema, HEAT_SCHEMA).sort("step", "rank", nulls_last=True)


@dataclass(frozen=True)
class SlowRank:
    """A rank that waiting goes back to.

    Attributes:
        rank: The rank.
        waited_ns: How long others waited for it, summed over them, beyond what the order of a
            pipeline requires.
        fraction: Its share of all such waiting.
        collective_count: The number of collectives at which others waited for it.
        cause: The main cause, one of CAUSE_NAMES.
    """

    rank: int
    waited_ns: int
    fraction: float
    collective_count: int
    cause: str


def find_slow_ranks(collectives: pl.DataFrame) -> list[SlowRank]:
    """Returns the ranks where the chains of these collectives end, the one with the most waiting
    first.
    """
    waits = collectives.filter(_UNSCHEDULED_WAIT > 0, pl.col("root_rank").is_not_null())
    total_ns = int(waits.select(_UNSCHEDULED_WAIT.sum()).item())
    causes = (
        waits.group_by("root_rank", "root_cause")
        .agg(_UNSCHEDULED_WAIT.sum().alias("ns"), count=pl.len())
        .sort("ns", "root_cause", descending=[True, False])
    )
    ranks = (
        causes.group_by("root_rank", maintain_order=True)
        .agg(pl.col("ns", "count").sum(), pl.col("root_cause").first().cast(pl.String))
        .sort("ns", "root_rank", descending=[True, False])
    )
    return [
        SlowRank(rank, ns, ns / total_ns, count, cause) for rank, ns, count, cause in ranks.rows()
    ]


def summarize_reasons(collectives: pl.DataFrame) -> pl.DataFrame:
    """Returns how long others waited, by the rank and the cause where chains end, the largest
    first.

    The part of a wait that is the order of a pipeline is separate, with the rank that was awaited.
    """
    beyond = pl.col("late_ns") - pl.col("schedule_ns")
    chained = collectives.select(
        rank="root_rank", cause="root_cause", waited_ns=_UNSCHEDULED_WAIT, late_ns=beyond
    )
    schedule = pl.lit(PIPELINE_SCHEDULE, CauseType)
    ordered = collectives.select(
        rank="last_rank", cause=schedule, waited_ns="schedule_ns", late_ns="schedule_ns"
    )
    return (
        pl.concat([chained, ordered])
        .filter(pl.col("waited_ns") > 0)
        .group_by("rank", "cause")
        .agg(
            pl.len().alias("collective_count"),
            pl.col("waited_ns").sum(),
            pl.col("late_ns").sum(),
            pl.col("late_ns").max().alias("max_late_ns"),
        )
        .pipe(cast_to_schema, REASON_SCHEMA)
        .sort("waited_ns", "rank", "cause", descending=[True, False, False])
    )


LINK_SCHEMA = build_schema(
    "chain link instance rank late_ns cause ns detail follows",
    {"link": pl.Int32, "cause": CauseType},
)
_MAX_CHAIN_LENGTH = 8
_MIN_PART_SHARE = 0.02  # of the lateness: smaller parts are summed


def build_chains(
    ranks: Sequence[RankSummary],
    matched: MatchedCollectives,
    collectives: pl.DataFrame,
    lateness: Lateness,
    limit: int,
) -> pl.DataFrame:
    """Returns the chains of the `limit` collectives with the longest waits.

    Returns:
        chain (instance it explains), link (0 = the last arriver of that), instance (whose last
        arriver the link is about), rank, late_ns (of that rank there), cause, ns (parts of late_ns;
        they add up to it; small ones together in a row with cause null), detail (what ran longer
        there than elsewhere), follows (the earlier collective that the rank waited in: the next
        link is about its last arriver).
    """
    order = collectives.with_row_index("row").filter(pl.col("wait_ns") > 0)
    worst = order.sort("wait_ns", "instance", descending=[True, False]).head(limit)["row"].to_list()
    numbers = collectives["instance"].to_list()
    met = collectives["met_ns"].to_list()
    rows: list[tuple[object, ...]] = []
    causes_of: dict[int, list[tuple[object, ...]]] = {}
    for start in worst:
        current, link = start, 0
        while True:
            if current not in causes_of:  # the largest cause first; they add up to its lateness
                excess = lateness.excess_ns[current].tolist()
                min_ns = max(int(abs(int(lateness.late_ns[current])) * _MIN_PART_SHARE), 1)
                large = [
                    number
                    for number in np.argsort(-lateness.excess_ns[current], kind="stable").tolist()
                    if abs(excess[number]) >= min_ns
                ]
                causes_of[current] = [
                    (
                        CAUSE_NAMES[number],
                        excess[number],
                        _describe_detail(ranks, matched, lateness, current, CAUSE_NAMES[number]),
                    )
                    for number in large
                ]
                remaining_ns = sum(excess) - sum(excess[number] for number in large)
                if remaining_ns:
                    causes_of[current].append((None, remaining_ns, "smaller parts together"))
            onward = int(lateness.follow[current])
            goes_on = onward >= 0 and met[onward] < met[current] and link + 1 < _MAX_CHAIN_LENGTH
            follows = numbers[onward] if goes_on else None
            rank = collectives["last_rank"][current]
            head = (numbers[start], link, numbers[current], rank, int(lateness.late_ns[current]))
            leads = CAUSE_NAMES[lateness.excess_cause[current]]
            rows += [
                (*head, *cause, follows if cause[0] == leads else None)
                for cause in causes_of[current]
            ]
            if not goes_on:
                break
            current, link = onward, link + 1
    return pl.DataFrame(rows, schema=LINK_SCHEMA, orient="row")


def _describe_detail(
    ranks: Sequence[RankSummary],
    matched: MatchedCollectives,
    lateness: Lateness,
    collective: int,
    cause: str,
) -> str | None:
    """Returns where the last arriver spent more time than the others within a class: its
    collectives, or the largest.
    """
    if cause not in TIME_CLASSES:
        return None
    parts = matched.parts
    row = int(lateness.last_part[collective])
    if cause == COMMUNICATION:  # the collectives that it was in since counting began
        own_rows = np.flatnonzero(parts["part"].to_numpy() == parts["part"][row])
        position = lateness.start_of_part[own_rows]
        waits_between = own_rows[
            (position >= lateness.stood_of_part[row]) & (position < lateness.start_of_part[row])
        ]
        if not waits_between.size:
            return None
        waits = parts["wait_ns"].gather(waits_between)
        longest = waits_between[int(waits.arg_max() or 0)]
        last = matched.instances.filter(pl.col("instance") == parts["instance"][int(longest)])[
            "last_rank"
        ][0]
        count_text = (
            "1 collective" if waits_between.size == 1 else f"{waits_between.size} collectives"
        )
        return f"{count_text}, waiting {format_duration(int(waits.sum()))}; longest for rank {last}"
    instance = parts["instance"].to_numpy()
    low, high = (int(np.searchsorted(instance, instance[row], side)) for side in ("left", "right"))
    peers = low + np.flatnonzero(lateness.others[low:high])
    # Time in the class since counting began, by name: its own less that of the others, times their
    # number.
    times = []
    for part_row in (row, *peers.tolist()):
        details = ranks[parts["part"][part_row]].ledger.details
        bounds = lateness.base_of_part[part_row], lateness.start_of_part[part_row]
        first, last = np.searchsorted(details["stretch"].to_numpy(), bounds).tolist()
        times.append(details[first:last])
    weight = np.repeat([max(peers.size, 1), *[-1] * peers.size], [time.height for time in times])
    class_times = (
        pl.concat(times).hstack([pl.Series("weight", weight)]).filter(pl.col("class") == cause)
    )
    class_times = class_times.group_by("name").agg((pl.col("ns") * pl.col("weight")).sum())
    largest = (
        class_times.filter(pl.col("ns") > 0).sort("ns", "name", descending=[True, False]).head(2)
    )
    clauses = [
        f"{name} +{format_duration(round(ns / max(peers.size, 1)))}" for name, ns in largest.rows()
    ]
    return "; ".join(clauses) or None
