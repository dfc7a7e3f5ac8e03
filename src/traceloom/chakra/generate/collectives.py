"""A collective, as one node per rank, or as the messages of an algorithm."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from traceloom import schedules
from traceloom.chakra.generate.program import Generated, RankProgram
from traceloom.chakra.schema import CollectiveCommType
from traceloom.errors import UsageError
from traceloom.schedules import Schedule

KINDS = tuple(sorted(name.lower() for name in CollectiveCommType.keys()))  # noqa: SIM118  (it is no dict)
ALGORITHMS = ("one-node", *schedules.ALGORITHMS)
_HOST_RANKS = 8  # of two-level


@dataclass(frozen=True)
class CollectiveOptions:
    """What to generate.

    Attributes:
        collective: One of `KINDS`.
        ranks: How many ranks take part, >= 2.
        size: Bytes, with the meaning of comm_size: of all_gather one rank's part, else the full buffer of a rank.
        algorithm: One node per rank, or sends and receives; hosts of two-level have 8 ranks.
        compute_us: Computation before the collective, and for each reduction of an algorithm; 0 for none.
    """

    collective: str = "all_reduce"
    ranks: int = 8
    size: int = 1 << 20
    algorithm: str = "one-node"
    compute_us: int = 0


def collectives(options: CollectiveOptions) -> Generated:
    """One collective.

    Known: of algorithms `sent_bytes` per rank and `messages` of all ranks; else `comm_bytes` per rank, its
    comm_size.

    Raises:
        UsageError: slugs `cannot-generate`: the algorithm cannot do the collective, or the size has too few bytes for
            parts; `no-such-schedule`: not with so many ranks.
    """
    programs = [RankProgram(rank) for rank in range(options.ranks)]
    one_node = options.algorithm == "one-node"
    kinds = () if one_node else schedules.KINDS_OF[options.algorithm]
    if not one_node and options.collective not in kinds:
        raise UsageError(
            f"there is no {options.algorithm} algorithm for {options.collective}",
            slug="cannot-generate",
            hint=f"it does {', '.join(sorted(kinds))}",
        )
    if options.size < options.ranks and options.collective != "barrier":
        raise UsageError(
            f"{options.size} bytes are fewer than one for each of the {options.ranks} ranks",
            slug="cannot-generate",
            hint="give more bytes",
        )
    size = 0 if options.collective == "barrier" else options.size
    made = None
    if not one_node:
        made = schedules.schedule(options.collective, options.algorithm, options.ranks, options.size, local=_HOST_RANKS)
    for program in programs:
        before = [program.compute("compute", us=options.compute_us)] if options.compute_us else []
        if made is None:
            program.collective(options.collective.upper(), size, before)
    totals: dict[str, object]
    if made is None:
        totals = {"comm_bytes": [size] * options.ranks}
    else:
        _write(programs, made, options)
        sent = [program.sent() for program in programs]
        totals = {"sent_bytes": [sent_size for _, sent_size in sent], "messages": sum(count for count, _ in sent)}
    return Generated("collective", asdict(options), programs, {}, totals)


def _write(programs: Sequence[RankProgram], made: Schedule, options: CollectiveOptions) -> None:
    """The messages of a schedule; they begin after each rank's computation, and end in one node.

    A message waits for what holds the newest data of its sender, and for the sender's message before it, so that they
    go in their order; messages of one round do not wait for each other.
    """
    newest = [[len(program)] if len(program) else [] for program in programs]
    before = [list(nodes) for nodes in newest]  # what the next send waits for, too
    unawaited: list[list[int]] = [[] for _ in programs]  # sends for which nothing waits yet
    for tag, part in enumerate(made.rounds):
        messages = list(zip(*(c.tolist() for c in (part.source, part.target, part.bytes, part.reduced)), strict=True))
        sent: dict[int, list[int]] = defaultdict(list)
        taken: dict[int, list[int]] = defaultdict(list)
        reductions = Counter[int]()
        for source, target, size, _ in messages:
            after = [*newest[source], *before[source]]
            sent[source].append(programs[source].send(target, size, after, tag=tag))
        for source, target, size, reduced in messages:
            taken[target].append(programs[target].receive(source, size, newest[target], tag=tag))
            reductions[target] += reduced > 0
        for rank, nodes in sent.items():
            unawaited[rank] = [*(node for node in unawaited[rank] if node not in before[rank]), *nodes]
            before[rank] = nodes if len(nodes) == 1 else []
        for rank, nodes in taken.items():
            newest[rank] = nodes
            if reductions[rank] and options.compute_us:
                us = options.compute_us * reductions[rank]
                newest[rank] = [programs[rank].compute("reduce", nodes, us=us)]
    for program, last, nodes in zip(programs, newest, unawaited, strict=True):
        program.compute(f"end of {options.collective}", [*last, *nodes], us=0)
