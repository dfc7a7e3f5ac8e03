"""Collectives, as one node per rank, or as the messages of an algorithm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

from traceloom.chakra.generate.program import Generated, Program, parts
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
    programs = [Program(rank) for rank in range(options.ranks)]
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

    def __init__(self, program: Program, options: CollectiveOptions, number: int, before: list[int]) -> None:
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


def _ring_steps(turn: _Turn, first: int, steps: int, *, reduce: bool, offset: int) -> None:
    """`steps` times: hand a piece to the next rank, take one from the previous; pieces go round."""
    count, rank = turn.ranks, turn.rank
    for step in range(steps):
        out, into = (rank + offset - step) % count, (rank + offset - 1 - step) % count
        turn.send((rank + 1) % count, turn.pieces[out], first + step)
        turn.receive((rank - 1) % count, turn.pieces[into], first + step, reduce=reduce)


def _ring_all_reduce(turn: _Turn) -> None:
    _ring_steps(turn, 0, turn.ranks - 1, reduce=True, offset=0)
    _ring_steps(turn, turn.ranks - 1, turn.ranks - 1, reduce=False, offset=1)
    turn.finish([*turn.last, *turn.last_send])


def _ring_reduce_scatter(turn: _Turn) -> None:
    _ring_steps(turn, 0, turn.ranks - 1, reduce=True, offset=-1)
    turn.finish([*turn.last, *turn.last_send])


def _ring_all_gather(turn: _Turn) -> None:
    turn.pieces = [turn.options.size] * turn.ranks
    _ring_steps(turn, 0, turn.ranks - 1, reduce=False, offset=0)
    turn.finish([*turn.last, *turn.last_send])


def _ring_broadcast(turn: _Turn) -> None:
    if turn.rank > 0:
        turn.receive(turn.rank - 1, turn.options.size, turn.rank - 1)
    if turn.rank < turn.ranks - 1:
        turn.send(turn.rank + 1, turn.options.size, turn.rank)
    turn.finish(list({*turn.last, *turn.last_send}))


def _up(turn: _Turn) -> None:
    """Reduce to rank 0 along a binomial tree."""
    step = 1
    while step < turn.ranks:
        if turn.rank & step:
            turn.send(turn.rank - step, turn.options.size, step.bit_length())
            return
        if turn.rank + step < turn.ranks:
            turn.receive(turn.rank + step, turn.options.size, step.bit_length(), reduce=True)
        step *= 2


def _down(turn: _Turn) -> None:
    """Broadcast from rank 0 along the same tree; its tags come after those of the way up."""
    step = 1 << (turn.ranks - 1).bit_length() - 1
    low = turn.rank & -turn.rank if turn.rank else 2 * step
    while step:
        if step == low:
            turn.receive(turn.rank - step, turn.options.size, turn.ranks + step.bit_length())
        elif step < low and turn.rank + step < turn.ranks:
            turn.send(turn.rank + step, turn.options.size, turn.ranks + step.bit_length())
        step //= 2


def _tree_all_reduce(turn: _Turn) -> None:
    _up(turn)
    _down(turn)
    turn.finish(list({*turn.last, *turn.last_send}))


def _tree_reduce(turn: _Turn) -> None:
    _up(turn)
    turn.finish(list({*turn.last, *turn.last_send}))


def _tree_broadcast(turn: _Turn) -> None:
    _down(turn)
    turn.finish(list({*turn.last, *turn.last_send}))


def _exchange(
    turn: _Turn, first: int, out: Callable[[int], int], into: Callable[[int], int], *, reduce: bool
) -> list[int]:
    """Everybody sends to everybody at once: `out(peer)` bytes to a peer, `into(peer)` bytes from it."""
    begin = turn.last
    sent = [turn.program.send(peer, out(peer), begin, tag=turn.tag(first)) for peer in turn.others]
    came = [turn.program.receive(peer, into(peer), begin, tag=turn.tag(first)) for peer in turn.others]
    if reduce and turn.options.compute_us:
        came = [turn.program.compute("reduce", came, us=turn.options.compute_us * len(turn.others))]
    turn.last = came
    return [*sent, *came]


def _direct_all_reduce(turn: _Turn) -> None:
    own_piece = turn.pieces[turn.rank]
    first = _exchange(turn, 0, lambda peer: turn.pieces[peer], lambda _: own_piece, reduce=True)
    second = _exchange(turn, 1, lambda _: own_piece, lambda peer: turn.pieces[peer], reduce=False)
    turn.finish([*first, *second])


def _direct_reduce_scatter(turn: _Turn) -> None:
    own_piece = turn.pieces[turn.rank]
    turn.finish(_exchange(turn, 0, lambda peer: turn.pieces[peer], lambda _: own_piece, reduce=True))


def _direct_all_to_all(turn: _Turn) -> None:
    # The k-th part of every buffer goes to rank k: what comes in is as large as this rank's own part.
    own_piece = turn.pieces[turn.rank]
    turn.finish(_exchange(turn, 0, lambda peer: turn.pieces[peer], lambda _: own_piece, reduce=False))


def _direct_all_gather(turn: _Turn) -> None:
    size = turn.options.size
    turn.finish(_exchange(turn, 0, lambda _: size, lambda _: size, reduce=False))


def _direct_rooted(turn: _Turn) -> None:
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
    ("ring", "all_reduce"): _ring_all_reduce,
    ("ring", "reduce_scatter"): _ring_reduce_scatter,
    ("ring", "all_gather"): _ring_all_gather,
    ("ring", "broadcast"): _ring_broadcast,
    ("tree", "all_reduce"): _tree_all_reduce,
    ("tree", "reduce"): _tree_reduce,
    ("tree", "broadcast"): _tree_broadcast,
    ("direct", "all_reduce"): _direct_all_reduce,
    ("direct", "reduce_scatter"): _direct_reduce_scatter,
    ("direct", "all_to_all"): _direct_all_to_all,
    ("direct", "all_gather"): _direct_all_gather,
    ("direct", "broadcast"): _direct_rooted,
    ("direct", "reduce"): _direct_rooted,
    ("direct", "gather"): _direct_rooted,
    ("direct", "scatter"): _direct_rooted,
}
