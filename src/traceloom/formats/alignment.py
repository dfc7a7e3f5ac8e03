"""Matches the same ops in two recordings by their order.

Sequences are arrays of tokens: uint64, well mixed (see `hash_numbers`), equal where the elements
are. All work is done on whole arrays with hashes of stretches, so that the cost grows as n log n
however often names repeat.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import polars as pl
from msgspec import Struct
from numpy.typing import NDArray

from traceloom.trace import vocabulary as vocab
from traceloom.trace.array_types import Bools, Ints
from traceloom.trace.arrays import find_longest_increasing_subsequence, find_nearest_ancestor
from traceloom.trace.trace import HostTrace, Trace

Tokens = NDArray[np.uint64]

_BASE = 0x9E3779B97F4A7C15 | 1
_INVERSE = pow(_BASE, -1, 1 << 64)
_STRETCHES = (64, 16, 4, 1)  # lengths of stretches that must be unique to be trusted, longest first
_MAX_ROUNDS = 8  # max rounds with the shortest stretches
# Of the tables for gaps in which everything repeats; larger gaps stay unmatched.
_MAX_TABLE_CELLS = 1 << 22


def hash_numbers(values: NDArray[Any], salt: int = 0) -> Tokens:
    """Turns small numbers into tokens with splitmix64, so that hashes of stretches do not collide
    because the numbers are regular.
    """
    out = values.astype(np.uint64) + np.uint64((salt * _BASE + 0x632BE59BD9B4E019) % 2**64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        out ^= out >> np.uint64(shift)
        out *= np.uint64(factor)
    out ^= out >> np.uint64(31)
    return out


class RollingHashes(Struct, frozen=True):
    """Hashes of all stretches of a sequence, in constant time each.

    Attributes:
        tokens: The sequence, shape (n,).
        sums: Sum of the tokens before each place, each times a power of the base, shape (n + 1,),
            modulo 2^64.
        inverse: Powers of the base's inverse, shape (n + 1,): they make stretches comparable
            wherever they begin.
    """

    tokens: Tokens
    sums: Tokens
    inverse: Tokens

    def of(self, start: Ints, length: Ints | int) -> Tokens:
        """Returns the hash of the stretch at each start; starts and lengths must lie inside the
        sequence.
        """
        between: Tokens = self.sums[start + length] - self.sums[start]
        return between * self.inverse[start]


def build_hashes(tokens: Tokens) -> RollingHashes:
    """Prepares a sequence for comparing its stretches."""
    powers = np.full(tokens.size, _BASE, dtype=np.uint64)
    powers[:1] = 1
    inverse = np.full(tokens.size + 1, _INVERSE, dtype=np.uint64)
    inverse[:1] = 1
    sums = np.zeros(tokens.size + 1, dtype=np.uint64)
    np.cumsum(tokens * np.cumprod(powers, dtype=np.uint64), dtype=np.uint64, out=sums[1:])
    return RollingHashes(tokens, sums, np.cumprod(inverse, dtype=np.uint64))


def find_occurrences(pattern: RollingHashes, text: RollingHashes) -> Ints:
    """Returns all positions where the whole pattern occurs in the text, ascending."""
    length, last = pattern.tokens.size, text.tokens.size - pattern.tokens.size
    if last < 0 or not length:
        return np.empty(0, dtype=np.int64)
    pattern_hash = pattern.of(np.zeros(1, dtype=np.int64), length)[0]
    positions: Ints = np.flatnonzero(text.tokens[: last + 1] == pattern.tokens[0])
    positions = positions[text.of(positions, length) == pattern_hash]
    if positions.size and not np.array_equal(
        text.tokens[positions[0] : positions[0] + length], pattern.tokens
    ):
        equal = [
            np.array_equal(text.tokens[start : start + length], pattern.tokens)
            for start in positions
        ]  # pragma: no cover
        positions = positions[equal]  # pragma: no cover - hash collisions
    return positions


class SimilarStretches(Struct, frozen=True):
    """Approximate places of a pattern in a text.

    Attributes:
        start: Approximate beginning, ascending; may lie a little outside of the text.
        votes: How many stretches of the pattern support the place.
        slack: Max error of the places.
    """

    start: Ints
    votes: Ints
    slack: int


def find_similar(pattern: RollingHashes, text: RollingHashes) -> SimilarStretches:
    """Finds places where most stretches of the pattern occur in the text at about the right
    distances from each other.
    """
    slack, stretch_length = (
        max(4, pattern.tokens.size // 8),
        choose_stretch_length(pattern.tokens.size),
    )
    none = np.empty(0, dtype=np.int64)
    if min(pattern.tokens.size, text.tokens.size) < stretch_length:
        return SimilarStretches(none, none, slack)
    pattern_hashes = pattern.of(np.arange(pattern.tokens.size - stretch_length + 1), stretch_length)
    text_hashes = text.of(np.arange(text.tokens.size - stretch_length + 1), stretch_length)
    order = np.argsort(text_hashes, kind="stable")
    text_hashes = text_hashes[order]
    low = np.searchsorted(text_hashes, pattern_hashes, side="left")
    count = np.searchsorted(text_hashes, pattern_hashes, side="right") - low
    # The rarest stretches first, limited in number; equally rare ones in random order, so that no
    # part of the pattern is preferred.
    rare = np.lexsort((hash_numbers(np.arange(pattern_hashes.size)), count))
    rare = rare[count[rare] > 0]
    rare = rare[np.cumsum(count[rare]) <= 4096 + 8 * (pattern.tokens.size + text.tokens.size)]
    # Offsets from pattern to text at which stretches match.
    shift = order[expand_ranges(low[rare], count[rare])] - np.repeat(rare, count[rare])
    if not shift.size:
        return SimilarStretches(none, none, slack)
    shift.sort()
    votes = np.searchsorted(shift, shift + slack, side="right") - np.arange(shift.size)
    candidates = np.flatnonzero(votes >= 0.8 * votes.max())
    starts, top_votes = [], []
    index = 0
    while index < candidates.size:
        group_end = int(
            np.searchsorted(
                shift[candidates],
                shift[candidates[index]] + max(slack, pattern.tokens.size // 2),
                side="right",
            )
        )
        best = candidates[index:group_end][int(np.argmax(votes[candidates[index:group_end]]))]
        values, counts = np.unique(shift[best : best + votes[best]], return_counts=True)
        # Of places with equal votes, prefer the one that leaves least of the pattern outside.
        last_shift = text.tokens.size - pattern.tokens.size
        overhang = np.maximum(-values, 0) + np.maximum(values - max(last_shift, 0), 0)
        overhang[counts < 0.9 * counts.max()] = pattern.tokens.size + text.tokens.size
        starts.append(int(values[np.argmin(overhang)]))
        top_votes.append(int(votes[best]))
        index = max(group_end, index + 1)
    return SimilarStretches(
        np.array(starts, dtype=np.int64), np.array(top_votes, dtype=np.int64), slack
    )


def expand_ranges(start: Ints, length: Ints) -> Ints:
    """Returns the numbers start, start + 1, ... of each range, concatenated."""
    return np.repeat(start - (np.cumsum(length) - length), length) + np.arange(int(length.sum()))


# -- two similar sequences -------------------------------------------------------------------------


def align(
    first: RollingHashes, second: RollingHashes, shift: int | None = None
) -> tuple[Ints, Ints]:
    """Returns indices of equal elements in both sequences, each strictly ascending; nearly as many
    as possible.

    Stretches that occur once in both, between existing matches, are anchors; the longest chain of
    anchors in the same order is kept and extended by all equal elements next to them; then shorter
    stretches between them are tried.

    Args:
        first: The first sequence.
        second: The second.
        shift: Offset of most of the first in the second, where known; among repetitions only this
            identifies the right match.
    """
    in_first = in_second = np.empty(0, dtype=np.int64)
    if shift is not None:  # where stretches of both are equal at exactly this shift
        low, high = max(0, -shift), min(first.tokens.size, second.tokens.size - shift)
        if high > low:
            equal = np.pad(first.tokens[low:high] == second.tokens[low + shift : high + shift], 1)
            change_positions = np.flatnonzero(np.diff(equal))
            start, length = change_positions[::2], change_positions[1::2] - change_positions[::2]
            long = length >= choose_stretch_length(first.tokens.size)
            in_first = low + expand_ranges(start[long], length[long])
        in_second = in_first + shift
    # Chance matches at the ends must not precede anchors inside.
    for outer in (False, True):
        if outer:
            in_first, in_second = _extend_matches(first, second, in_first, in_second, outer=True)
        for stretch_length in (*_STRETCHES, *([1] * _MAX_ROUNDS)):
            left, right = _find_anchors(first, second, in_first, in_second, stretch_length)
            if left.size:
                in_first, in_second = _merge_matches(in_first, in_second, left, right)
                in_first, in_second = _extend_matches(
                    first, second, in_first, in_second, outer=outer
                )
            elif stretch_length == 1:
                break
    # In the gaps everything repeats: use a longest common subsequence of each gap that is not too
    # large.
    left, left_end = _find_gaps(in_first, first.tokens.size)
    right, right_end = _find_gaps(in_second, second.tokens.size)
    cells = (left_end - left) * (right_end - right)
    order = np.argsort(cells, kind="stable")
    order = order[(cells[order] > 0) & (np.cumsum(cells[order]) <= _MAX_TABLE_CELLS)]
    more_first, more_second = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
    for gap in order.tolist():
        first_indices, to = _find_common_subsequence(
            first.tokens[left[gap] : left_end[gap]], second.tokens[right[gap] : right_end[gap]]
        )
        more_first.append(first_indices + left[gap])
        more_second.append(to + right[gap])
    return _merge_matches(
        in_first, in_second, np.concatenate(more_first), np.concatenate(more_second)
    )


def choose_stretch_length(size: int) -> int:
    return max(1, min(8, size // 4))


def _merge_matches(in_first: Ints, in_second: Ints, left: Ints, right: Ints) -> tuple[Ints, Ints]:
    in_first = np.concatenate([in_first, left])
    order = np.argsort(in_first, kind="stable")
    return in_first[order], np.concatenate([in_second, right])[order]


def _find_gaps(matched: Ints, size: int) -> tuple[Ints, Ints]:
    """Returns start and end of the gaps between matched places, including the outer ones and empty
    ones.
    """
    return np.concatenate([[0], matched + 1]), np.concatenate([matched, [size]])


def _find_anchors(
    first: RollingHashes,
    second: RollingHashes,
    in_first: Ints,
    in_second: Ints,
    stretch_length: int,
) -> tuple[Ints, Ints]:
    """Finds the starts of stretches that occur once in both, between the same two matched pairs and
    in the same order.
    """
    keys: list[Tokens] = []
    unique_positions: list[Ints] = []
    for sequence, matched in ((first, in_first), (second, in_second)):
        start, end = _find_gaps(matched, sequence.tokens.size)
        candidates = expand_ranges(
            start, np.maximum(end - start - stretch_length + 1, 0)
        )  # they overlap no matched place
        if not candidates.size:
            return candidates, candidates
        candidate_hashes = sequence.of(candidates, stretch_length) ^ hash_numbers(
            np.searchsorted(matched, candidates), 1
        )
        values, first_index, counts = np.unique(
            candidate_hashes, return_index=True, return_counts=True
        )
        keys.append(values[counts == 1])
        unique_positions.append(candidates[first_index[counts == 1]])
    _, left, right = np.intersect1d(keys[0], keys[1], assume_unique=True, return_indices=True)
    in_left, in_right = unique_positions[0][left], unique_positions[1][right]
    order = np.argsort(in_left)
    chain = find_longest_increasing_subsequence(in_right[order])
    return in_left[order][chain], in_right[order][chain]


def _find_common_subsequence(first: Tokens, second: Tokens) -> tuple[Ints, Ints]:
    """Returns a longest common subsequence, as early in both as possible."""
    best = np.zeros((first.size + 1, second.size + 1), dtype=np.int32)
    for row in range(first.size - 1, -1, -1):
        lengths = np.where(second == first[row], best[row + 1, 1:] + 1, best[row + 1, :-1])
        best[row, :-1] = np.maximum.accumulate(lengths[::-1])[::-1]
    first_indices, to = [], []
    row = column = 0
    while row < first.size and column < second.size and best[row, column]:
        if first[row] == second[column]:
            first_indices.append(row)
            to.append(column)
            row, column = row + 1, column + 1
        elif best[row + 1, column] > best[row, column + 1]:
            row += 1
        else:
            column += 1
    return np.array(first_indices, dtype=np.int64), np.array(to, dtype=np.int64)


def _extend_matches(
    first: RollingHashes, second: RollingHashes, in_first: Ints, in_second: Ints, *, outer: bool
) -> tuple[Ints, Ints]:
    """Adds equal elements directly after and before matched pairs; with `outer` also at the ends of
    both sequences.
    """
    for backward in (False, True):
        left, left_end = _find_gaps(in_first, first.tokens.size)
        right, right_end = _find_gaps(in_second, second.tokens.size)
        max_length = np.minimum(left_end - left, right_end - right)
        if not outer:
            max_length[-1 if backward else 0] = 0
        # Count the equal elements after (or before) each pair of places, by halving steps.
        length = np.zeros(left.size, dtype=np.int64)
        step = 1 << max(0, int(max_length.max(initial=0)).bit_length() - 1)
        while step:
            longer = length + step
            may = np.flatnonzero(longer <= max_length)
            starts = (left_end - longer, right_end - longer) if backward else (left, right)
            same = first.of(starts[0][may], longer[may]) == second.of(starts[1][may], longer[may])
            length[may[same]] = longer[may[same]]
            step >>= 1
        starts = (left_end - length, right_end - length) if backward else (left, right)
        in_first, in_second = _merge_matches(
            in_first, in_second, expand_ranges(starts[0], length), expand_ranges(starts[1], length)
        )
    return in_first, in_second


# -- the sequences of traces, one for each thread ----------------------------------------------


@dataclass(frozen=True, slots=True)
class ThreadOps:
    """The ops of one thread in the order in which they began.

    Attributes:
        key: Thread of the host trace, or lane of the device trace.
        row: Rows of the host trace's ops, or of the trace's events.
        order: Ids of host ops, or start times in ns; ascending.
        names: Hashes of the names.
        nested: Hashes of the names with those of the ops around them.
    """

    key: int
    row: Ints
    order: Ints
    names: RollingHashes
    nested: RollingHashes

    @property
    def size(self) -> int:
        return self.row.size


def encode_shared_names(host: pl.Series, device: pl.Series) -> tuple[Ints, Ints]:
    both = pl.concat([host.rename("name"), device.rename("name")]).fill_null("")
    code = both.cast(pl.Categorical).to_physical().cast(pl.Int64).to_numpy()
    return code[: host.len()], code[host.len() :]


def is_op(trace: Trace) -> Bools:
    """Returns which events can be ops of a host trace: ops and annotations on host threads."""
    events = trace.events
    on_host = (
        (trace.lanes["kind"] == "host").to_numpy()[events["lane"].to_numpy()]
        if events.height
        else np.zeros(0)
    )
    return events["category"].is_in([vocab.OP, vocab.ANNOTATION]).to_numpy() & on_host.astype(
        np.bool_
    )


def split_by_thread(host: HostTrace, codes: Ints, selected: Bools) -> list[ThreadOps]:
    """Returns the selected rows of the host trace by thread, the thread with most ops first."""
    ids = host.ops["id"].to_numpy()
    parent_id = host.ops["parent"].fill_null(-1).to_numpy()
    parent = np.searchsorted(ids, parent_id)
    # An op begins after its parent; following parents in a file that violates this could loop
    # forever.
    valid_parent = (parent < np.arange(ids.size)) & (
        ids[np.minimum(parent, ids.size - 1)] == parent_id
    )
    enclosing = find_nearest_ancestor(np.where(valid_parent, parent, -1), selected)
    return _split_ops(host.ops["thread"].fill_null(0).to_numpy(), ids, codes, enclosing, selected)


def split_by_lane(trace: Trace, codes: Ints, selected: Bools) -> list[ThreadOps]:
    """Returns the selected events by lane, the lane with most of them first."""
    return [
        line
        for _, line in split_by_step_and_lane(
            trace, codes, selected, np.zeros(selected.size, dtype=np.int64)
        )
    ]


def split_by_step_and_lane(
    trace: Trace, codes: Ints, selected: Bools, step: Ints
) -> list[tuple[int, ThreadOps]]:
    """Returns the selected events by step (a number >= 0 for each event) and lane, the longest
    first.

    Events that begin in the same microsecond have no reliable order in the trace; their external
    ids increase with the ops, whatever the numbers mean.
    """
    events, lanes = trace.events, trace.lanes.height
    enclosing = find_nearest_ancestor(
        events["parent"].cast(pl.Int64).fill_null(-1).to_numpy(), selected
    )
    start, lane = events["start_ns"].to_numpy(), events["lane"].to_numpy().astype(np.int64)
    tie = events["external_id"].fill_null(-1).to_numpy()
    lines = _split_ops(step * lanes + lane, start, codes, enclosing, selected, tie)
    return [(line.key // lanes, replace(line, key=line.key % lanes)) for line in lines]


def _split_ops(  # noqa: PLR0917
    key: Ints, order: Ints, codes: Ints, enclosing: Ints, selected: Bools, tie: Ints | None = None
) -> list[ThreadOps]:
    rows = np.flatnonzero(selected)
    rows = rows[np.lexsort((tie[rows] if tie is not None else rows, order[rows], key[rows]))]
    if not rows.size:
        return []
    bounds = np.flatnonzero(np.diff(key[rows], prepend=key[rows[0]] - 1))
    lines = []
    for row in np.split(rows, bounds[1:]):
        outer = enclosing[row]
        name = hash_numbers(codes[row])
        nested = name + hash_numbers(np.where(outer >= 0, codes[outer] + 1, 0), 2)
        lines.append(
            ThreadOps(int(key[row[0]]), row, order[row], build_hashes(name), build_hashes(nested))
        )
    return sorted(lines, key=lambda line: -line.size)


RECORDER_ANNOTATIONS = r"^traceloom\.(?:step#|scope:)"  # annotations of the recorder itself


def find_timed_ops(timed_trace: Trace) -> Bools:
    """Returns which events of a timed window are ops or annotations of the program, on any thread,
    inside or outside of steps.
    """
    is_recorder: Bools = (
        timed_trace.events["name"]
        .str.contains(RECORDER_ANNOTATIONS)
        .fill_null(value=False)
        .to_numpy()
    )
    return is_op(timed_trace) & ~is_recorder


def match_ops(timed_trace: Trace, graph: Trace, recorded: Bools) -> Ints:
    """Returns the event of the graph step that is the same op as each event of the timed steps; -1
    where there is none.

    The graph step and each timed step are compared by the order of names on each thread of the
    process; remaining ops are matched by their position among ops of the same name, since ops of a
    thread pool run on varying threads.

    Args:
        timed_trace: The trace of the timed window.
        graph: The trace of the graph step, of the same process.
        recorded: Which events of the graph step may be matched.
    """
    graph_code, timed_code = encode_shared_names(graph.events["name"], timed_trace.events["name"])
    threads, timed_threads = (
        trace.lanes.select("process", "thread").rows() for trace in (graph, timed_trace)
    )
    pattern = {threads[line.key]: line for line in split_by_lane(graph, graph_code, recorded)}
    step = timed_trace.events["step"].fill_null(-1).cast(pl.Int64).to_numpy()
    is_timed_op = find_timed_ops(timed_trace) & (step >= 0)
    same = np.full(timed_trace.events.height, -1, dtype=np.int64)
    for _, line in split_by_step_and_lane(
        timed_trace, timed_code, is_timed_op, np.maximum(step, 0)
    ):
        like = pattern.get(timed_threads[line.key])
        if like is not None:
            if like.size == line.size and np.array_equal(like.names.tokens, line.names.tokens):
                in_graph = in_step = np.arange(like.size)
            else:
                in_graph, in_step = align(like.names, line.names)
            same[line.row[in_step]] = like.row[in_graph]
    rows = np.flatnonzero(is_timed_op)
    rows = rows[np.argsort(step[rows], kind="stable")]
    for step_rows in np.split(rows, np.flatnonzero(np.diff(step[rows])) + 1):
        unmatched = recorded.copy()
        unmatched[same[step_rows][same[step_rows] >= 0]] = False
        sources, targets = np.flatnonzero(unmatched), step_rows[same[step_rows] < 0]
        if sources.size and targets.size:
            turn_frames = []
            for events, codes, event_rows in (
                (graph.events, graph_code, sources),
                (timed_trace.events, timed_code, targets),
            ):
                ordered = event_rows[
                    np.argsort(events["start_ns"].to_numpy()[event_rows], kind="stable")
                ]
                turn_frames.append(
                    pl.DataFrame({"row": ordered, "code": codes[ordered]}).with_columns(
                        pl.int_range(pl.len()).over("code").alias("turn"),
                        pl.len().over("code").alias("count"),
                    )
                )
            both = turn_frames[0].join(turn_frames[1], on=["code", "turn", "count"])
            same[both["row_right"].to_numpy()] = both["row"].to_numpy()
    return same
