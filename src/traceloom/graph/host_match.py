"""The join of a host trace to a device trace of the same process."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import polars as pl
from msgspec import Struct, field as msgspec_field
from numpy.typing import NDArray

from traceloom.errors import InputError
from traceloom.formats.alignment import (
    SimilarStretches,
    ThreadOps,
    align,
    build_hashes,
    encode_shared_names,
    find_occurrences,
    find_similar,
    is_op,
    split_by_lane,
    split_by_thread,
)
from traceloom.graph.graph import GRAPH_SCHEMAS
from traceloom.trace.array_types import Bools, Ints
from traceloom.trace.frames import build_schema, cast_to_schema
from traceloom.trace.notice import Notice
from traceloom.trace.trace import GROUP_LIST, HostTrace, Trace

BY_RECORD_ID = "matched: record function id"
BY_RECORD_ID_RENAMED = "matched: record function id, name spelled otherwise"
BY_EXTERNAL_ID = "matched: External id, names equal"
BY_NAMES = "matched: names in order"
NO_NAME = "unmatched: no event of this name"
NO_ID = "unmatched: no event with its id"
OUTSIDE = "unmatched: before or after the device trace"
NOT_IN_ORDER = "unmatched: not in this order on its thread"
ROOT = "no op: process or thread"
GROUP_LIST_NODE = "no op: list of process groups"
OUTCOMES = (
    BY_RECORD_ID,
    BY_RECORD_ID_RENAMED,
    BY_EXTERNAL_ID,
    BY_NAMES,
    NO_NAME,
    NO_ID,
    OUTSIDE,
    NOT_IN_ORDER,
    ROOT,
    GROUP_LIST_NODE,
)
Outcome = pl.Enum(list(OUTCOMES))
THREADS = build_schema("thread lane ops matched", {"thread": pl.Int64})


@dataclass(frozen=True)
class Matching:
    """The join of a host trace to a device trace of the same process.

    Attributes:
        host: The host trace.
        host_op: Id in the host trace of each event of the device trace, -1 where it has none; shape
            (events,).
        outcome: The outcome for each row of `host.ops`; one of OUTCOMES.
        exact: Whether ids join them; else the order of names does.
        iterations: How many iterations of the device trace the host trace fits; 1 where ids
            identify it.
        threads: Thread of the host trace, lane of the device trace, `ops` of the thread, and how
            many of them were `matched`.
        carried: Where a host trace of another step was carried over to the steps of the device
            trace by the order of names: how many of the device trace's ops got a host op that way,
            and how many have none.
        notices: Notices about the host trace and the join.
        rank: The rank of the device trace.
    """

    host: HostTrace
    host_op: Ints
    outcome: pl.Series
    exact: bool
    iterations: int = 1
    threads: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=THREADS))
    carried: tuple[int, int] | None = None
    notices: tuple[Notice, ...] = ()
    rank: int | None = None

    @property
    def evidence(self) -> str:
        """The evidence of what the graph takes from the host trace: `correlated` or `inferred`."""
        return "correlated" if self.exact else "inferred"

    @property
    def ops(self) -> int:
        """The number of host ops to match: all nodes but processes, threads and lists of groups."""
        return int((~self.outcome.is_in([ROOT, GROUP_LIST_NODE])).sum())

    @property
    def matched(self) -> int:
        """The number of host ops that were matched."""
        return int(self.outcome.cast(pl.String).str.starts_with("matched").sum())

    def coverage(self) -> pl.DataFrame:
        """How many host ops were joined how, and why the others were not: columns as the graph's
        `coverage`.
        """
        counts = dict(self.outcome.value_counts().iter_rows())
        rows = [
            ("host-ops", outcome, counts[outcome]) for outcome in OUTCOMES if counts.get(outcome)
        ]
        if self.carried is not None:
            matched, without = self.carried
            rows.append(("timed-ops", "matched: names in the order of the graph step", matched))
            rows += [("timed-ops", "unmatched: not in the graph step", without)] if without else []
        frame = pl.DataFrame(rows, schema=["subject", "outcome", "count"], orient="row")
        return frame.with_columns(
            pl.lit(self.rank or 0, dtype=pl.Int32).alias("rank"),
            pl.lit(None, dtype=pl.Int64).alias("time_ns"),
        ).select(pl.col(name).cast(kind) for name, kind in GRAPH_SCHEMAS["coverage"].items())

    def with_notices(self, *notices: Notice) -> Matching:
        return replace(
            self, notices=(*self.notices, *(notice.of_rank(self.rank) for notice in notices))
        )


def explain_non_ops(host: HostTrace) -> pl.Series:
    """Returns for each row of `host.ops` why it is not an op; null for ops."""
    group_list = host.ops["name"] == GROUP_LIST
    return (
        pl.select(
            pl.when(host.roots())
            .then(pl.lit(ROOT))
            .when(group_list)
            .then(pl.lit(GROUP_LIST_NODE))
            .otherwise(None)
        )
        .to_series()
        .cast(Outcome)
        .alias("outcome")
    )


MIN_MATCHED_SHARE = 0.9  # of the host ops must be found, or the two traces are not of one run
_MAX_PLACES = 4  # places, where the ops fit only nearly
_MIN_MATCHED_BY_ID = 0.5  # where ids and names agree, one of the traces may be cut
# An op gets its id and its start time one after the other; in between another thread may get both.
_MAX_RACE_NS = 200_000
_MAX_LANES = 64  # tried for each thread: those with most ops


class _TracePair(Struct, frozen=True):
    """The two traces with the columns that are compared.

    Attributes:
        trace: The device trace.
        host: The host trace.
        no_op: Why a row of the host trace is not an op; null for ops.
        op: Which rows of the host trace are ops.
        event: Which events can be ops.
        host_code: Numbers of the names of host ops.
        event_code: The same of events.
    """

    trace: Trace
    host: HostTrace
    no_op: pl.Series
    op: Bools
    event: Bools
    host_code: Ints
    event_code: Ints

    @property
    def ops(self) -> int:
        return int(self.op.sum())


def match(trace: Trace, host: HostTrace) -> Matching:
    """Finds the event of each host op.

    Exactly by record function id; by the older key, where `External id` is the record function id
    and the names agree; else by the order of the names of each thread, including the ops around
    them where that fits, all threads in the same iteration. Where several iterations fit, the first
    is taken, and a notice reports it.

    Args:
        trace: The device trace.
        host: The host trace.

    Returns:
        The join, with an outcome for every host op.

    Raises:
        InputError: `host-mismatch`: the host trace is of another run, process or rank;
            `empty-host-trace`.
    """
    no_op = explain_non_ops(host)
    host_code, event_code = encode_shared_names(host.ops["name"], trace.events["name"])
    op = no_op.is_null().to_numpy()
    if not op.any():
        raise InputError("the host trace holds no op", slug="empty-host-trace", where=host.path)
    both = _TracePair(trace, host, no_op, op, is_op(trace), host_code, event_code)
    op_events = trace.events.filter(pl.Series(both.event))
    # A quick check by how often each name occurs, which bounds the matches. Fewer are required
    # where every event has an id: the device trace may be truncated.
    size = int(max(host_code.max(initial=0), event_code.max(initial=0))) + 1
    host_counts = np.bincount(host_code[op], minlength=size)
    event_counts = np.bincount(event_code[both.event], minlength=size)
    max_matches = int(np.minimum(host_counts, event_counts).sum())
    min_share = (
        _MIN_MATCHED_BY_ID if op_events["record_function_id"].count() > 0 else MIN_MATCHED_SHARE
    )
    if max_matches < min_share * both.ops:
        raise _describe_mismatch(both, max_matches, "are in the device trace at all", min_share)
    # By the process id, where both have it: ranks of one job run the same ops, so names do not
    # distinguish them.
    processes = op_events["process"].unique().drop_nulls()
    if host.process is not None and processes.len() and host.process not in processes:
        device_process = trace.meta.process if trace.meta.process is not None else processes[0]
        raise InputError(
            f"the host trace is of process {host.process}, the device trace of process {device_process}",
            slug="host-mismatch",
            where=f"{host.path}, {trace.meta.path}",
            hint="give the two traces of one process; ranks of one job look alike but are not the same",
        )
    return _match_by_ids(both) or _match_by_names(both)


def _describe_mismatch(both: _TracePair, count: int, clause: str, min_share: float) -> InputError:
    host_process, device_process = both.host.process, both.trace.meta.process
    processes = (
        f" (process {host_process}, process {device_process})"
        if None not in {host_process, device_process} and host_process != device_process
        else ""
    )
    return InputError(
        f"host trace and device trace are not of one run{processes}: only {count:,} of {both.ops:,} host ops "
        f"({100 * count / both.ops:.1f} %) {clause}, {100 * min_share:.0f} % are needed",
        slug="host-mismatch",
        where=f"{both.host.path}, {both.trace.meta.path}",
        hint="give the host trace of the same run and process, or the device trace alone",
    )


def _match_by_ids(both: _TracePair) -> Matching | None:
    """Matches by record function id, or by `External id`, which was the record function id in some
    older versions.

    The former is exact, whatever the names; most names have to agree, to show that it is one run.
    The latter only counts where the names agree.
    """
    host_ids = both.host.ops["record_function_id"]
    for column in ("record_function_id", "external_id"):
        # Rows of host ops and of events whose ids are equal; of several with one id the first.
        ids = both.trace.events[column]
        event = np.flatnonzero(both.event & ids.is_not_null().to_numpy())
        row = np.flatnonzero(both.op & host_ids.is_not_null().to_numpy())
        keys, first = np.unique(ids.fill_null(0).to_numpy()[event], return_index=True)
        event = event[first]
        own_keys, first = np.unique(host_ids.fill_null(0).to_numpy()[row], return_index=True)
        row = row[first]
        _, event_index, own_at = np.intersect1d(
            keys, own_keys, assume_unique=True, return_indices=True
        )
        row, event = row[own_at], event[event_index]
        same = both.host_code[row] == both.event_code[event]
        if not row.size or same.sum() < MIN_MATCHED_SHARE * row.size:
            continue
        # Before the first id or after the last of the device trace: the profiler begins a little
        # later.
        recorded = ids.filter(pl.Series(both.event))
        is_outside = ((host_ids < recorded.min()) | (host_ids > recorded.max())).fill_null(
            value=False
        ).to_numpy() & both.op
        if column == "record_function_id" and row.size >= _MIN_MATCHED_BY_ID * both.ops:
            matching = _build_matching(
                both,
                row,
                event,
                [
                    (NO_ID, both.op),
                    (OUTSIDE, is_outside),
                    (BY_RECORD_ID, row),
                    (BY_RECORD_ID_RENAMED, row[~same]),
                ],
                exact=True,
            )
            if row.size >= MIN_MATCHED_SHARE * both.ops:
                return matching
            share = f"{100 * row.size / both.ops:.1f} %"
            text = f"only {row.size:,} of {both.ops:,} host ops ({share}) are in the device trace"
            return matching.with_notices(
                Notice(
                    "host-ops-missing", "warning", text, both.ops - row.size, where=both.host.path
                )
            )
        if column == "external_id" and same.sum() >= MIN_MATCHED_SHARE * both.ops:
            row, event = row[same], event[same]
            outcomes = [(NO_ID, both.op), (OUTSIDE, is_outside), (BY_EXTERNAL_ID, row)]
            return _build_matching(both, row, event, outcomes, exact=True)
    return None


def _match_by_names(both: _TracePair) -> Matching:
    """Matches by the order of the names of each thread, all threads in the same iteration."""
    in_trace = np.isin(both.host_code, both.event_code[both.event])
    in_host = np.isin(both.event_code, both.host_code[both.op])
    threads = split_by_thread(both.host, both.host_code, both.op & in_trace)
    fit = _LaneAssignment.of(
        threads, split_by_lane(both.trace, both.event_code, both.event & in_host)
    )
    row, event = fit.pairs()
    for iteration in range(1, min(fit.iterations, _MAX_PLACES)):
        if row.size >= MIN_MATCHED_SHARE * both.ops:
            break
        row, event = max((row, event), fit.pairs(iteration), key=lambda pair: pair[0].size)
    if row.size < MIN_MATCHED_SHARE * both.ops:
        row, event = max((row, event), fit.pairs(shifted=False), key=lambda pair: pair[0].size)
    if row.size < MIN_MATCHED_SHARE * both.ops:
        raise _describe_mismatch(both, row.size, "are found in the same order", MIN_MATCHED_SHARE)
    outcomes = [(NOT_IN_ORDER, both.op), (NO_NAME, both.op & ~in_trace), (BY_NAMES, row)]
    matching = _build_matching(both, row, event, outcomes, exact=False, iterations=fit.iterations)
    if fit.iterations == 1:
        return matching
    text = (
        f"the host trace fits {fit.iterations} iterations of the device trace equally well; the first is taken, and "
        "what the graph says because of it is inferred"
    )
    return matching.with_notices(
        Notice("several-iterations", "info", text, fit.iterations, where=both.host.path)
    )


def _build_matching(
    both: _TracePair,
    row: Ints,
    event: Ints,
    outcomes: Iterable[tuple[str, NDArray[Any]]],
    *,
    exact: bool,
    iterations: int = 1,
) -> Matching:
    """Builds the result from matching rows, and the outcomes of rows of the host trace; a later
    outcome overrides an earlier one.
    """
    outcome = both.no_op.to_physical().cast(pl.Int64).fill_null(0).to_numpy().copy()
    for word, rows in outcomes:
        outcome[rows] = OUTCOMES.index(word)
    rank = both.trace.rank if both.trace.rank is not None else both.host.rank
    host_op = np.full(both.trace.events.height, -1, dtype=np.int64)
    host_op[event] = both.host.ops["id"].to_numpy()[row]
    thread = both.host.ops["thread"]
    ops = pl.DataFrame({"thread": thread.filter(pl.Series(both.op))}).group_by("thread").len("ops")
    matched = (
        pl.DataFrame(
            {"thread": thread.gather(row), "lane": both.trace.events["lane"].gather(event)}
        )
        .group_by("thread", "lane")
        .len("matched")
    )
    threads = (
        ops.join(matched, on="thread", how="left", nulls_equal=True)
        .with_columns(pl.col("matched").fill_null(0))
        .pipe(cast_to_schema, THREADS)
        .sort("thread", "lane")
    )
    return Matching(
        host=both.host,
        host_op=host_op,
        outcome=pl.Series("outcome", OUTCOMES, dtype=Outcome).gather(outcome),
        exact=exact,
        iterations=iterations,
        threads=threads,
        notices=tuple(notice.of_rank(rank) for notice in both.host.notices),
        rank=rank,
    )


class _ThreadMatch(Struct, frozen=True):
    """The positions of the ops of one host thread in a lane.

    Attributes:
        line: The thread.
        lane: The lane.
        start: Where in the lane they begin, for each iteration that fits.
        slack: How far off that may be; 0 where the ops are exactly there, one after the other.
    """

    line: ThreadOps
    lane: ThreadOps
    start: Ints
    slack: int


class _LaneAssignment(Struct):
    """A choice of lanes for threads.

    Attributes:
        placed: The match of each thread that has a place.
        ops: How many ops these threads hold.
    """

    placed: list[_ThreadMatch] = msgspec_field(default_factory=list)
    ops: int = 0

    @classmethod
    def of(cls, threads: list[ThreadOps], lanes: list[ThreadOps]) -> _LaneAssignment:
        """Chooses a lane for every thread, so that as many ops as possible fit in the same
        iterations.

        The thread with the most ops comes first. The ids of the host trace count ops of all threads
        in the order in which they began, so they show between which of its ops each other thread
        begins.

        Args:
            threads: Lines of the host trace, longest first.
            lanes: Lines of the device trace.
        """
        best = cls()
        if not threads:
            return best
        positions = [_find_positions(thread, lanes[:_MAX_LANES]) for thread in threads]
        for first_lane, first in positions[0].items():
            attempt = cls(
                [_ThreadMatch(threads[0], lanes[first_lane], first.start, first.slack)],
                threads[0].size,
            )
            used_lanes = {first_lane}
            for thread, thread_places in zip(threads[1:], positions[1:], strict=True):
                # The lane in which the thread fits most of the iterations, if there is one.
                best_match: tuple[Bools, Ints, int] | None = None
                for lane_index, in_lane in thread_places.items():
                    if lane_index in used_lanes:
                        continue
                    valid, selected = _match_iterations(
                        attempt.placed[0], thread, lanes[lane_index], in_lane
                    )
                    if valid.any() and (best_match is None or valid.sum() > best_match[0].sum()):
                        best_match = valid, in_lane.start[selected], lane_index
                if best_match is None:
                    continue
                valid, start, lane_index = best_match
                attempt.placed = [
                    _ThreadMatch(other.line, other.lane, other.start[valid], other.slack)
                    for other in attempt.placed
                ]
                attempt.placed.append(
                    _ThreadMatch(
                        thread, lanes[lane_index], start[valid], thread_places[lane_index].slack
                    )
                )
                attempt.ops += thread.size
                used_lanes.add(lane_index)
            if (attempt.ops, attempt.iterations) > (best.ops, best.iterations):
                best = attempt
        return best

    @property
    def iterations(self) -> int:
        return self.placed[0].start.size if self.placed else 0

    def pairs(self, iteration: int = 0, *, shifted: bool = True) -> tuple[Ints, Ints]:
        """Returns the matching rows of host ops and of events, in one of the iterations that fit.

        Args:
            iteration: Which of those that fit.
            shifted: Whether to assume that most ops are as far apart in both as the position
                implies. Where a short pattern repeats and ops are missing, that pairs repetitions
                wrongly.
        """
        host_rows, event_rows = [], []
        for placed in self.placed:
            start = int(placed.start[iteration])
            if placed.slack == 0:
                left, right = (
                    np.arange(placed.line.size),
                    np.arange(start, start + placed.line.size),
                )
            else:
                low = max(0, start - placed.slack)
                high = min(placed.lane.size, start + placed.line.size + 2 * placed.slack)
                shift = start - low if shifted else None
                left, right = align(
                    placed.line.names, build_hashes(placed.lane.names.tokens[low:high]), shift
                )
                right = right + low
            host_rows.append(placed.line.row[left])
            event_rows.append(placed.lane.row[right])
        nothing = np.empty(0, dtype=np.int64)
        return np.concatenate([nothing, *host_rows]), np.concatenate([nothing, *event_rows])


def _find_positions(thread: ThreadOps, lanes: list[ThreadOps]) -> dict[int, SimilarStretches]:
    """Returns lane -> the positions of the thread's ops in it: exact with the ops around them,
    exact, or approximate.
    """
    for nested in (True, False):
        exact = {
            lane_index: SimilarStretches(start, np.full(start.size, thread.size), 0)
            for lane_index, lane in enumerate(lanes)
            if (
                start := find_occurrences(
                    thread.nested if nested else thread.names, lane.nested if nested else lane.names
                )
            ).size
        }
        if exact:
            return exact
    similar = {
        lane_index: find_similar(thread.names, lane.names) for lane_index, lane in enumerate(lanes)
    }
    max_votes = max(
        (int(candidate.votes.max(initial=0)) for candidate in similar.values()), default=0
    )
    return {
        lane_index: candidate
        for lane_index, candidate in similar.items()
        if max_votes and candidate.votes.max(initial=0) >= 0.8 * max_votes
    }


def _match_iterations(
    first: _ThreadMatch, thread: ThreadOps, lane: ThreadOps, stretches: SimilarStretches
) -> tuple[Bools, Ints]:
    """Returns for each iteration of the first thread whether the other has a position in it, and
    which.
    """

    def times(lane: ThreadOps, index: Ints) -> Ints:
        return lane.order[np.clip(index, 0, lane.size - 1)]

    before = int(np.searchsorted(first.line.order, thread.order[0])) - 1
    low = times(first.lane, first.start + before - first.slack)
    high = times(first.lane, first.start + before + 1 + first.slack)
    early = times(lane, stretches.start - stretches.slack)
    late = times(lane, stretches.start + stretches.slack)
    last = stretches.start.size - 1
    if before < 0:
        selected = np.searchsorted(early, high, side="right") - 1
        valid = (selected >= 0) | (early[0] <= high + _MAX_RACE_NS)
    else:
        selected = np.searchsorted(late, low)
        bounded = before + 1 < first.line.size
        valid = (selected <= last) & (
            (early[np.minimum(selected, last)] <= high + _MAX_RACE_NS) | (not bounded)
        )
        # One that came a little before, only where none comes after.
        nearly_valid = (
            ~valid & (selected > 0) & (late[np.maximum(selected - 1, 0)] >= low - _MAX_RACE_NS)
        )
        selected = np.where(nearly_valid, selected - 1, selected)
        valid |= nearly_valid
    selected = np.clip(selected, 0, stretches.start.size - 1)
    # One position cannot belong to two iterations
    repeated = np.flatnonzero(selected[1:] == selected[:-1])
    valid[repeated if before >= 0 else repeated + 1] = False
    return valid, selected
