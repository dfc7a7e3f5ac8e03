"""How collectives move their bytes: one schedule of messages per algorithm, for whoever writes or times them."""

from __future__ import annotations

from collections.abc import Callable

from traceloom.array_types import Ints
from traceloom.errors import UsageError
from traceloom.schedules.direct import direct
from traceloom.schedules.halving_doubling import halving_doubling
from traceloom.schedules.ring import ring
from traceloom.schedules.schedule import Round, Schedule, pieces, round_of
from traceloom.schedules.trees import depths, double_tree, one_tree, parents, tree
from traceloom.schedules.two_level import two_level

_BARRIER_BYTES = 8  # of each rank

KINDS_OF: dict[str, tuple[str, ...]] = {
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
"""What each algorithm can do; a barrier is an all_reduce of 8 bytes per rank."""
ALGORITHMS = tuple(KINDS_OF)


def schedule(
    kind: str,
    algorithm: str,
    ranks: int,
    size: int,
    *,
    chunks: int = 1,
    local: int = 1,
    splits: Ints | None = None,
) -> Schedule:
    """The messages of a collective.

    Args:
        kind: all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, reduce, gather, scatter (position 0 is the
            root), barrier.
        algorithm: One of `ALGORITHMS`.
        ranks: How many, >= 1.
        size: Bytes: of all_gather one rank's part, else a rank's whole buffer.
        chunks: Of chains and double trees: in how many parts buffers are handed on.
        local: Of two-level: ranks of a host.
        splits: Of a direct all_to_all: bytes from each position (row) to each position.

    Raises:
        UsageError: `no-such-schedule`: the algorithm cannot do it, with so many ranks or at all.
    """
    if kind == "barrier":
        kind, size = "all_reduce", _BARRIER_BYTES * ranks
    if kind not in KINDS_OF.get(algorithm, ()):
        able = [name for name, kinds in KINDS_OF.items() if kind in kinds]
        raise UsageError(
            f"there is no {algorithm} algorithm for {kind}",
            slug="no-such-schedule",
            hint=f"{', '.join(able)} can do it" if able else f"collectives are {', '.join(KINDS_OF['direct'])}",
        )
    if ranks < 2:
        return Schedule(ranks, ())
    make: dict[str, Callable[[], Schedule]] = {
        "ring": lambda: ring(kind, ranks, size, chunks=chunks),
        "direct": lambda: direct(kind, ranks, size, splits=splits),
        "halving-doubling": lambda: halving_doubling(kind, ranks, size),
        "tree": lambda: tree(kind, ranks, size),
        "double-tree": lambda: double_tree(kind, ranks, size, chunks=chunks),
        "two-level": lambda: two_level(kind, ranks, size, local=local),
    }
    return make[algorithm]()


__all__ = [
    "ALGORITHMS",
    "KINDS_OF",
    "Round",
    "Schedule",
    "depths",
    "direct",
    "double_tree",
    "halving_doubling",
    "one_tree",
    "parents",
    "pieces",
    "ring",
    "round_of",
    "schedule",
    "tree",
    "two_level",
]
