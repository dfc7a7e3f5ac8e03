"""Collectives, as one node per rank, or as the messages of an algorithm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from traceloom.chakra.generate.program import Generated, RankProgram, parts
from traceloom.chakra.schema import CollectiveCommType
from traceloom.errors import UsageError

KINDS = tuple(sorted(name.lower() for name in CollectiveCommType.keys()))  # noqa: SIM118  (it is no dict)
ALGORITHMS = ("one-node", "ring", "tree", "direct")


@dataclass(frozen=True)
class CollectiveOptions:
    """What to generate.

    Attributes:
        collective: One of `KINDS`.
        ranks: How many ranks take part, >= 2.
        size: Bytes, with the meaning of comm_size: of all_gather one rank's part, else the full buffer of a rank.
        count: How many collectives, one after the other.
        algorithm: One node per rank and collective, or sends and receives.
        compute_us: Computation before each collective, and for each reduction of an algorithm; 0 for none.
    """

    collective: str = "all_reduce"
    ranks: int = 8
    size: int = 1 << 20
    count: int = 1
    algorithm: str = "one-node"
    compute_us: int = 0


def collectives(options: CollectiveOptions) -> Generated:
    """Collectives one after the other.

    Known: of algorithms `sent_bytes` per rank and `messages` of all ranks; else `comm_bytes` per rank, the sum of
    comm_size.

    Raises:
        UsageError: `cannot-generate`: the algorithm cannot do the collective, or the size has too few bytes for parts.
    """
    programs = [RankProgram(rank) for rank in range(options.ranks)]
    write = _ALGORITHMS.get((options.algorithm, options.collective))
    if options.algorithm != "one-node" and write is None:
        able = sorted(kind for name, kind in _ALGORITHMS if name == options.algorithm)
        raise UsageError(
            f"there is no {options.algorithm} algorithm for {options.collective}",
            slug="cannot-generate",
            hint=f"it does {', '.join(able)}",
        )
    if options.size < options.ranks and options.collective != "barrier":
        raise UsageError(
            f"{options.size} bytes are fewer than one for each of the {options.ranks} ranks",
            slug="cannot-generate",
            hint="give more bytes",
        )
    size = 0 if options.collective == "barrier" else options.size
    for number in range(options.count):
        for program in programs:
            before = [len(program)] if len(program) else []
            if options.compute_us:
                before = [program.compute(f"compute {number}", before, us=options.compute_us)]
            if write is None:
                program.collective(options.collective.upper(), size, before)
            else:
                write(_Turn(program, options, number, before))
    totals: dict[str, object]
    if write is None:
        totals = {"comm_bytes": [size * options.count] * options.ranks, "collectives": options.count}
    else:
        sent = [program.sent() for program in programs]
        totals = {"sent_bytes": [sent_size for _, sent_size in sent], "messages": sum(count for count, _ in sent)}
    return Generated("collective", asdict(options), programs, {}, totals)


class _Turn:
    """One collective of one rank, as messages: what is added, and what comes next waits for it."""

    def __init__(self, program: RankProgram, options: CollectiveOptions, number: int, before: list[int]) -> None:
        self.program, self.options, self.number = program, options, number
        self.ranks, self.rank = options.ranks, program.rank
        self.begin = before
        self.last_send: list[int] = before
        self.last: list[int] = before  # what holds the newest data
        self.pieces = parts(options.size, options.ranks)
        self.others = [(self.rank + k) % self.ranks for k in range(1, self.ranks)]

    def tag(self, step: int) -> int:
        """A tag of its own for every step of every collective of the workload."""
        return self.number * 4 * self.ranks + step

    def send(self, to: int, size: int, step: int, *, fresh: bool = False) -> int:
        """Send what the rank holds; `fresh`: what it held at the beginning."""
        after = self.begin if fresh else [*self.last, *self.last_send]
        node = self.program.send(to, size, after, tag=self.tag(step))
        self.last_send = [node]
        return node

    def receive(self, source: int, size: int, step: int, *, reduce: bool = False) -> int:
        """Receive, and reduce where that takes time."""
        node = self.program.receive(source, size, self.last, tag=self.tag(step))
        if reduce and self.options.compute_us:
            node = self.program.compute("reduce", [node], us=self.options.compute_us)
        self.last = [node]
        return node

    def finish(self, nodes: list[int]) -> None:
        """A node that ends the collective, so that the next one waits for all of it."""
        self.program.compute(f"end of {self.options.collective} {self.number}", nodes, us=0)


def _ring(turn: _Turn) -> None:
    """Every rank hands pieces to the next one and takes them from the previous one; a broadcast goes round once."""
    kind, count, rank, size = turn.options.collective, turn.ranks, turn.rank, turn.options.size
    if kind == "broadcast":
        if rank > 0:
            turn.receive(rank - 1, size, rank - 1)
        if rank < count - 1:
            turn.send(rank + 1, size, rank)
    elif kind == "all_gather":
        turn.pieces = [size] * count
    rounds = {  # tag of the first step, whether pieces are reduced, the piece that a rank sends first
        "all_reduce": ((0, True, 0), (count - 1, False, 1)),
        "reduce_scatter": ((0, True, -1),),
        "all_gather": ((0, False, 0),),
    }
    for first, reduce, offset in rounds.get(kind, ()):
        for step in range(count - 1):
            out, into = (rank + offset - step) % count, (rank + offset - 1 - step) % count
            turn.send((rank + 1) % count, turn.pieces[out], first + step)
            turn.receive((rank - 1) % count, turn.pieces[into], first + step, reduce=reduce)
    turn.finish([*turn.last, *turn.last_send])


def _tree(turn: _Turn) -> None:
    """Reduce to rank 0 along a binomial tree, broadcast from it along the same one, or both."""
    kind, ranks, rank, size = turn.options.collective, turn.ranks, turn.rank, turn.options.size
    step = 1 if kind != "broadcast" else ranks
    while step < ranks:
        if rank & step:
            turn.send(rank - step, size, step.bit_length())
            break
        if rank + step < ranks:
            turn.receive(rank + step, size, step.bit_length(), reduce=True)
        step *= 2
    step = 1 << (ranks - 1).bit_length() - 1 if kind != "reduce" else 0
    low = rank & -rank if rank else 2 * step
    while step:  # the tags of the way down come after those of the way up
        if step == low:
            turn.receive(rank - step, size, ranks + step.bit_length())
        elif step < low and rank + step < ranks:
            turn.send(rank + step, size, ranks + step.bit_length())
        step //= 2
    turn.finish([*turn.last, *turn.last_send])


def _direct(turn: _Turn) -> None:
    """Everybody sends to everybody at once: whole buffers, or the k-th part of every buffer to rank k."""
    kind = turn.options.collective
    compute_us = turn.options.compute_us * len(turn.others)

    def exchange(step: int, out: Sequence[int], into: Sequence[int], *, reduce: bool) -> list[int]:
        """Exchange `out[peer]` bytes for `into[peer]` with each peer."""
        before = turn.last
        sent = [turn.program.send(peer, out[peer], before, tag=turn.tag(step)) for peer in turn.others]
        turn.last = [turn.program.receive(peer, into[peer], before, tag=turn.tag(step)) for peer in turn.others]
        if reduce and compute_us:
            turn.last = [turn.program.compute("reduce", turn.last, us=compute_us)]
        return [*sent, *turn.last]

    # What comes in is as large as this rank's own part.
    own, whole = [turn.pieces[turn.rank]] * turn.ranks, [turn.options.size] * turn.ranks
    if kind == "all_gather":
        nodes = exchange(0, whole, whole, reduce=False)
    else:
        nodes = exchange(0, turn.pieces, own, reduce=kind != "all_to_all")
        if kind == "all_reduce":
            nodes += exchange(1, own, turn.pieces, reduce=False)
    turn.finish(nodes)


def _rooted(turn: _Turn) -> None:
    """Rank 0 exchanges with every other one: broadcast, scatter from it; reduce, gather to it."""
    kind, size = turn.options.collective, turn.options.size
    outward = kind in ("broadcast", "scatter")
    whole = kind in ("broadcast", "reduce")
    nodes = list(turn.begin)
    peers = turn.others if turn.rank == 0 else [0]
    for peer in peers:
        message = size if whole else turn.pieces[peer or turn.rank]
        if outward == (turn.rank == 0):
            nodes.append(turn.program.send(peer, message, turn.begin, tag=turn.tag(0)))
        else:
            nodes.append(turn.program.receive(peer, message, turn.begin, tag=turn.tag(0)))
    if kind == "reduce" and turn.rank == 0 and turn.options.compute_us:
        nodes = [turn.program.compute("reduce", nodes, us=turn.options.compute_us * len(peers))]
    turn.finish(nodes)


_ALGORITHMS: dict[tuple[str, str], Callable[[_Turn], None]] = {
    **{("ring", kind): _ring for kind in ("all_reduce", "reduce_scatter", "all_gather", "broadcast")},
    **{("tree", kind): _tree for kind in ("all_reduce", "reduce", "broadcast")},
    **{("direct", kind): _direct for kind in ("all_reduce", "reduce_scatter", "all_to_all", "all_gather")},
    **{("direct", kind): _rooted for kind in ("broadcast", "reduce", "gather", "scatter")},
}
