"""Algorithms of collectives as schedules of messages: ring, tree, halving-doubling, direct,
two-level.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from traceloom.errors import UsageError, broken
from traceloom.trace.array_types import Ints


@dataclass(frozen=True, eq=False, slots=True)
class Round:
    """Messages that ranks send in one round, in the order in which each rank sends its own.

    Attributes:
        source: Sender, as a position in the group; shape (messages,).
        target: Receiver, likewise.
        bytes: Size of each message.
        reduced: Bytes that the target reduces on arrival; 0 if it only stores them.
    """

    source: Ints
    target: Ints
    bytes: Ints
    reduced: Ints


@dataclass(frozen=True, eq=False, slots=True)
class Schedule:
    """The messages of one collective.

    A rank goes through the rounds in order. It sends its messages of a round at once, as soon as
    all messages that earlier rounds sent it have arrived and are reduced; it does not wait for
    rounds that do not involve it, nor for other ranks. Equal rounds are one object, to keep a
    schedule small.

    Attributes:
        ranks: Number of participating ranks: positions 0 to ranks - 1 of the group.
        rounds: The rounds.
    """

    ranks: int
    rounds: tuple[Round, ...]

    @property
    def messages(self) -> int:
        return sum(len(part.source) for part in self.rounds)

    def sent_bytes(self) -> Ints:
        """Returns the bytes that each rank sends; shape (ranks,)."""
        sent = np.zeros(self.ranks, np.int64)
        for part in self.rounds:
            np.add.at(sent, part.source, part.bytes)
        return sent

    def check(self) -> None:
        """Raise InvariantError if a message leaves the group, has its source as its target, or
        reduces more bytes than it carries.
        """
        for part in self.rounds:
            endpoints = np.concatenate([part.source, part.target])
            if endpoints.size and (endpoints.min() < 0 or endpoints.max() >= self.ranks):
                raise broken("schedule", f"a message leaves the group of {self.ranks} ranks")
            if (part.source == part.target).any():
                raise broken("schedule", "a rank sends itself a message")
            if (part.bytes < 0).any() or (part.reduced < 0).any():
                raise broken("schedule", "a message has less than no bytes")


def build_round(
    source: ArrayLike, target: ArrayLike, size: ArrayLike, *, reduce: bool = False
) -> Round:
    """Returns a round in which all messages are reduced, or none; scalars apply to every
    message.
    """
    columns = np.broadcast_arrays(
        np.asarray(source, np.int64), np.asarray(target, np.int64), np.asarray(size, np.int64)
    )
    first, second, sizes = (np.atleast_1d(values) for values in columns)
    return Round(
        first, second, sizes, sizes if reduce else np.broadcast_to(np.int64(0), sizes.shape)
    )


def split_evenly(size: int, count: int) -> Ints:
    """Returns the sizes of `count` pieces of `size` bytes, which differ by at most one byte; shape
    (count,).
    """
    return np.diff(size * np.arange(count + 1, dtype=object) // count).astype(np.int64)


def merge_schedules(parts: Sequence[tuple[Schedule, Ints]]) -> tuple[Round, ...]:
    """Returns the rounds of schedules that run at the same time in disjoint groups.

    Args:
        parts: Each schedule, and the positions in the whole group of its own positions.
    """
    rounds: dict[tuple[int, ...], Round] = {}  # equal rounds of all parts are merged once
    merged = []
    for k in range(max(len(schedule.rounds) for schedule, _ in parts)):
        part_rounds = [(s.rounds[k], positions) for s, positions in parts if k < len(s.rounds)]
        key = tuple(id(part) for part, _ in part_rounds)
        if key not in rounds:
            rounds[key] = merge_rounds(
                Round(positions[part.source], positions[part.target], part.bytes, part.reduced)
                for part, positions in part_rounds
            )
        merged.append(rounds[key])
    return tuple(merged)


def merge_rounds(parts: Iterable[Round]) -> Round:
    rounds = list(parts)
    return Round(
        np.concatenate([part.source for part in rounds]),
        np.concatenate([part.target for part in rounds]),
        np.concatenate([part.bytes for part in rounds]),
        np.concatenate([part.reduced for part in rounds]),
    )


def compute_log2(ranks: int, algorithm: str) -> int:
    """Returns the binary logarithm of a number of ranks.

    Raises:
        UsageError: `no-such-schedule`: it is not a power of two.
    """
    if ranks & (ranks - 1):
        lower_power = 1 << (ranks.bit_length() - 1)
        raise UsageError(
            f"{algorithm} needs a power of two ranks, not {ranks}",
            slug="no-such-schedule",
            hint=f"take {lower_power} or {2 * lower_power} ranks, or another algorithm",
        )
    return ranks.bit_length() - 1


def build_direct(kind: str, ranks: int, size: int, *, splits: Ints | None = None) -> Schedule:
    """Returns a schedule that sends whole buffers, or the k-th piece of every buffer to position k,
    in order of distance.

    Args:
        kind: all_reduce, reduce_scatter, all_gather, all_to_all; rooted at position 0: broadcast,
            reduce, gather, scatter.
        ranks: Number of ranks.
        size: Bytes; one rank's part for all_gather, else a rank's whole buffer (the root's for
            gather and scatter).
        splits: For all_to_all: bytes from each position (row) to each position; equal pieces if
            None.
    """
    if kind in {"broadcast", "reduce", "gather", "scatter"}:
        other_ranks = np.arange(1, ranks)
        sizes = (
            np.full(ranks - 1, size)
            if kind in {"broadcast", "reduce"}
            else split_evenly(size, ranks)[1:]
        )
        first, last = (0, other_ranks) if kind in {"broadcast", "scatter"} else (other_ranks, 0)
        return Schedule(ranks, (build_round(first, last, sizes, reduce=kind == "reduce"),))
    source = np.tile(np.arange(ranks), ranks - 1)
    target = (source + np.repeat(np.arange(1, ranks), ranks)) % ranks
    piece_sizes = split_evenly(size, ranks)
    rounds: list[Round] = []
    if kind == "all_gather":
        rounds.append(build_round(source, target, size))
    elif kind == "all_to_all":
        rounds.append(
            build_round(
                source, target, piece_sizes[target] if splits is None else splits[source, target]
            )
        )
    else:
        rounds.append(build_round(source, target, piece_sizes[target], reduce=True))
        if kind == "all_reduce":
            rounds.append(build_round(source, target, piece_sizes[source]))
    return Schedule(ranks, tuple(rounds))


def build_halving_doubling(kind: str, ranks: int, size: int) -> Schedule:
    """Recursive halving, recursive doubling, or both in sequence (thakur2005optimization).

    Args:
        kind: all_reduce, reduce_scatter, all_gather.
        ranks: Number of ranks, a power of two.
        size: Bytes; one rank's part for all_gather, else a rank's whole buffer.

    Raises:
        UsageError: `no-such-schedule`: not a power of two.
    """
    steps = compute_log2(ranks, "halving-doubling")
    position = np.arange(ranks)
    piece_sizes = split_evenly(size * ranks if kind == "all_gather" else size, ranks)
    halving = []
    for step in range(steps):
        # A rank sends the pieces of all positions that agree with its partner in the bits so far.
        partner = position ^ (1 << step)
        low = (1 << (step + 1)) - 1
        sums = np.zeros(low + 1, np.int64)
        np.add.at(sums, position & low, piece_sizes)
        halving.append((partner, sums[partner & low]))
    rounds = []
    if kind != "all_gather":
        rounds += [build_round(position, partner, out, reduce=True) for partner, out in halving]
    if kind != "reduce_scatter":  # in reverse: each sends what its partner sent it
        rounds += [
            build_round(position, partner, out[partner]) for partner, out in reversed(halving)
        ]
    return Schedule(ranks, tuple(rounds))


def build_ring(kind: str, ranks: int, size: int, *, chunks: int = 1) -> Schedule:
    """Pieces travel around the ring: patarasuk2009bandwidth for all_reduce; broadcast and reduce
    use the ring as a chain.

    Args:
        kind: all_reduce, reduce_scatter, all_gather, all_to_all (blocks are forwarded to their
            target), broadcast, reduce (both rooted at position 0).
        ranks: Number of ranks.
        size: Bytes; one rank's part for all_gather, else a rank's whole buffer.
        chunks: Number of parts in which a chain forwards its buffer.
    """
    position = np.arange(ranks)
    following = (position + 1) % ranks
    if kind in {"broadcast", "reduce"}:
        return Schedule(ranks, _build_chain(ranks, size, chunks, reduce=kind == "reduce"))
    rounds: list[Round] = []
    if kind == "all_gather":
        rounds = [build_round(position, following, size)] * (ranks - 1)
    elif kind == "all_to_all":
        rounds = [build_round(position, following, size // ranks)] * (ranks * (ranks - 1) // 2)
    else:
        piece_sizes = split_evenly(size, ranks)
        even = size % ranks == 0
        # The piece that a rank sends first; after a reduction it holds the piece after its own,
        # or its own.
        phases = {"all_reduce": ((0, True), (1, False)), "reduce_scatter": ((-1, True),)}[kind]
        for first, reduce in phases:
            same = build_round(position, following, piece_sizes, reduce=reduce)
            for step in range(ranks - 1):
                out = piece_sizes if even else piece_sizes[(position + first - step) % ranks]
                rounds.append(
                    same if even else build_round(position, following, out, reduce=reduce)
                )
    return Schedule(ranks, tuple(rounds))


def _build_chain(ranks: int, size: int, chunks: int, *, reduce: bool) -> tuple[Round, ...]:
    """From position 0 to the last one, chunk after chunk; a reduction runs from the last one to
    position 0.
    """
    chunk = split_evenly(size, chunks)
    rounds = []
    for step in range(ranks - 1 + chunks - 1):
        link = np.arange(
            max(step - chunks + 1, 0), min(step, ranks - 2) + 1
        )  # between two neighbors
        senders, receivers = (ranks - 1 - link, ranks - 2 - link) if reduce else (link, link + 1)
        rounds.append(build_round(senders, receivers, chunk[step - link], reduce=reduce))
    return tuple(rounds)


def build_tree(kind: str, ranks: int, size: int) -> Schedule:
    """A binomial tree under position 0.

    Args:
        kind: all_reduce (up and down), reduce, broadcast.
        ranks: Number of ranks.
        size: Bytes of a rank's buffer.
    """
    steps = (ranks - 1).bit_length()
    up, down = [], []
    for step in range(steps):
        child = np.arange(1 << step, ranks, 2 << step)
        up.append(build_round(child, child - (1 << step), size, reduce=True))
        down.append(build_round(child - (1 << step), child, size))
    rounds = [*(up if kind != "broadcast" else []), *(reversed(down) if kind != "reduce" else [])]
    return Schedule(ranks, tuple(rounds))


def build_double_tree(kind: str, ranks: int, size: int, *, chunks: int = 1) -> Schedule:
    """Two binary trees with half the buffer each; a leaf of one is an inner node of the other
    (sanders2009two).

    Args:
        kind: all_reduce, broadcast, reduce.
        ranks: Number of ranks.
        size: Bytes of a rank's buffer.
        chunks: Number of parts in which each half travels along its tree.
    """
    slots: dict[int, list[Round]] = {}
    for parent, half in zip(
        (compute_parents(ranks, 0), compute_parents(ranks, ranks - 1)),
        split_evenly(size, 2).tolist(),
        strict=True,
    ):
        for slot, part in _send_along_tree(parent, half, chunks, kind):
            slots.setdefault(slot, []).append(part)
    return Schedule(ranks, tuple(merge_rounds(slots[slot]) for slot in sorted(slots)))


def build_single_tree(parent: Ints, size: int) -> Schedule:
    """An all_reduce along one tree, given as the parent of each position (-1 for the root)."""
    rounds: dict[int, list[Round]] = {}
    for slot, part in _send_along_tree(parent, size, 1, "all_reduce"):
        rounds.setdefault(slot, []).append(part)
    return Schedule(len(parent), tuple(merge_rounds(rounds[slot]) for slot in sorted(rounds)))


def compute_parents(ranks: int, root: int) -> Ints:
    """Returns a balanced binary tree of all other positions, in order, under the first or the last
    position.

    Args:
        ranks: Number of ranks.
        root: 0 or ranks - 1.

    Returns:
        The parent of each position, -1 for the root.
    """
    parent = np.full(ranks, -1, np.int64)
    first = 0 if root else 1
    spans = [(first, first + ranks - 1, root)]
    while spans:
        low, high, parent_position = spans.pop()
        if low < high:
            middle = (low + high) // 2
            parent[middle] = parent_position
            spans += [(low, middle, middle), (middle + 1, high, middle)]
    return parent


def compute_depths(parent: Ints) -> Ints:
    """Returns the distance of each position from the root."""
    depth, ancestor = np.zeros(len(parent), np.int64), parent.copy()
    while (ancestor >= 0).any():
        depth += ancestor >= 0
        ancestor = np.where(ancestor >= 0, parent[ancestor], -1)
    return depth


def _send_along_tree(parent: Ints, size: int, chunks: int, kind: str) -> list[tuple[int, Round]]:
    depth = compute_depths(parent)
    position = np.flatnonzero(parent >= 0)
    height = np.zeros(len(parent), np.int64)  # longest path down
    for level in range(int(depth.max(initial=0)), 0, -1):
        positions = np.flatnonzero(depth == level)
        np.maximum.at(height, parent[positions], height[positions] + 1)
    highest = int(height.max(initial=0)) if kind != "broadcast" else 0
    messages: list[tuple[int, Round]] = []
    for number, bytes_of in enumerate(split_evenly(size, chunks).tolist()):
        if kind != "broadcast":
            for level in range(1, highest + 1):
                child = position[height[parent[position]] == level]
                messages.append(
                    (number + level - 1, build_round(child, parent[child], bytes_of, reduce=True))
                )
        if kind != "reduce":
            for level in range(1, int(depth.max(initial=0)) + 1):
                child = position[depth[position] == level]
                messages.append(
                    (number + highest + level - 1, build_round(parent[child], child, bytes_of))
                )
    return messages


def build_two_level(kind: str, ranks: int, size: int, *, local: int) -> Schedule:
    """Rings within hosts of `local` neighboring ranks, and rings between hosts of the ranks with
    the same position in their host.

    Args:
        kind: all_reduce, reduce_scatter, all_gather.
        ranks: Number of ranks, a multiple of `local`.
        size: Bytes; one rank's part for all_gather, else a rank's whole buffer.
        local: Ranks per host.

    Raises:
        UsageError: `no-such-schedule`: the hosts would differ in size.
    """
    if ranks % local:
        raise UsageError(
            f"two-level needs hosts of one size, and {ranks} ranks are no multiple of {local}",
            slug="no-such-schedule",
        )
    hosts = ranks // local
    within_hosts = [np.arange(local) + host * local for host in range(hosts)]
    between = [np.arange(hosts) * local + position for position in range(local)]

    def level(phase: str, positions: list[Ints], bytes_of: int) -> tuple[Round, ...]:
        count = len(positions[0])
        ring = build_ring(phase, count, bytes_of)
        return (
            merge_schedules([(ring, group_positions) for group_positions in positions])
            if count > 1
            else ()
        )

    part = max(size // local, 1)
    rounds: tuple[Round, ...] = ()
    if kind == "all_gather":
        rounds = (*level(kind, between, size), *level(kind, within_hosts, size * hosts))
    elif kind == "reduce_scatter":
        rounds = (*level(kind, within_hosts, size), *level(kind, between, part))
    else:
        rounds = (
            *level("reduce_scatter", within_hosts, size),
            *level("all_reduce", between, part),
            *level("all_gather", within_hosts, part),
        )
    return Schedule(ranks, rounds)


_BARRIER_BYTES = 8  # per rank

KINDS_BY_ALGORITHM: dict[str, tuple[str, ...]] = {
    "ring": ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce"),
    "direct": (
        "all_reduce",
        "reduce_scatter",
        "all_gather",
        "all_to_all",
        "broadcast",
        "reduce",
        "gather",
        "scatter",
    ),
    "halving-doubling": ("all_reduce", "reduce_scatter", "all_gather"),
    "tree": ("all_reduce", "broadcast", "reduce"),
    "double-tree": ("all_reduce", "broadcast", "reduce"),
    "two-level": ("all_reduce", "reduce_scatter", "all_gather"),
}
"""The kinds of collectives that each algorithm supports; a barrier is an all_reduce of 8 bytes per
rank.
"""
ALGORITHMS = tuple(KINDS_BY_ALGORITHM)


def build_schedule(
    kind: str,
    algorithm: str,
    ranks: int,
    size: int,
    *,
    chunks: int = 1,
    local: int = 1,
    splits: Ints | None = None,
) -> Schedule:
    """Returns the messages of a collective.

    Args:
        kind: all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, reduce, gather, scatter
            (position 0 is the root), barrier.
        algorithm: A key of `KINDS_BY_ALGORITHM`.
        ranks: Number of ranks, >= 1.
        size: Bytes; one rank's part for all_gather, else a rank's whole buffer.
        chunks: For chains and double trees: number of parts in which buffers are forwarded.
        local: For two-level: ranks per host.
        splits: For a direct all_to_all: bytes from each position (row) to each position.

    Raises:
        UsageError: `no-such-schedule`: the algorithm does not support the kind, or not this number
            of ranks.
    """
    if kind == "barrier":
        kind, size = "all_reduce", _BARRIER_BYTES * ranks
    if kind not in KINDS_BY_ALGORITHM.get(algorithm, ()):
        able = [name for name, kinds in KINDS_BY_ALGORITHM.items() if kind in kinds]
        raise UsageError(
            f"there is no {algorithm} algorithm for {kind}",
            slug="no-such-schedule",
            hint=f"{', '.join(able)} can do it"
            if able
            else f"collectives are {', '.join(KINDS_BY_ALGORITHM['direct'])}",
        )
    if ranks < 2:
        return Schedule(ranks, ())
    make: dict[str, Callable[[], Schedule]] = {
        "ring": lambda: build_ring(kind, ranks, size, chunks=chunks),
        "direct": lambda: build_direct(kind, ranks, size, splits=splits),
        "halving-doubling": lambda: build_halving_doubling(kind, ranks, size),
        "tree": lambda: build_tree(kind, ranks, size),
        "double-tree": lambda: build_double_tree(kind, ranks, size, chunks=chunks),
        "two-level": lambda: build_two_level(kind, ranks, size, local=local),
    }
    return make[algorithm]()
