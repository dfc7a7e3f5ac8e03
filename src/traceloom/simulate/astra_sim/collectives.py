"""Collectives as ASTRA-sim carries them out: chunks, phases over dimensions, and the schedule of each phase.

Definitions: astra-sim 518bd51 with its analytical network 599a047; what differs from the textbook is said here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from traceloom.array_types import Ints
from traceloom.errors import UsageError
from traceloom.schedules import Schedule, direct, halving_doubling, one_tree, parents, ring

FAST_DELAY_NS = 10  # of a group's endpoints, whatever the configuration says


@dataclass(frozen=True, eq=False, slots=True)
class Phase:
    """A part of a collective that stays within one dimension.

    Attributes:
        dimension: Whose queue it waits in.
        schedule: Its messages, among positions of the dimension.
        stride: Ranks between neighbours of the dimension; 0 where the positions are those of a group.
        delay_ns: What an endpoint needs before its first message, and after each one it receives.
        eager: Whether a rank goes on, once all messages of a round are there, with one message for each that is
            reduced; else once all are reduced.
        backwards: Whether the ring goes the other way round, as the last half of an all_reduce over dimensions does.
    """

    dimension: int
    schedule: Schedule
    stride: int
    delay_ns: int
    eager: bool
    backwards: bool = False


@dataclass(frozen=True, slots=True)
class Dimensions:
    """The machine as collectives see it.

    Attributes:
        sizes: Ranks of each dimension, innermost first.
        implementations: Of each kind (all_reduce, ...): the algorithm of each dimension.
        splits: Into how many chunks a collective is cut.
        baseline: Whether an all_reduce is done in full in each dimension.
        delay_ns: Of an endpoint.
    """

    sizes: tuple[int, ...]
    implementations: dict[str, tuple[str, ...]]
    splits: int
    baseline: bool
    delay_ns: int

    @property
    def ranks(self) -> int:
        """All ranks."""
        return math.prod(self.sizes)

    def chunks(self, kind: str, size: int) -> tuple[int, int]:
        """How many chunks, and their bytes: no chunk but an all_gather's has fewer bytes than there are ranks.

        Raises:
            UsageError: `bad-collective`: an all_gather of fewer bytes than chunks, which ASTRA-sim never ends.
        """
        chunk = size // self.splits
        if kind != "all_gather" and self.ranks > chunk:
            chunk, size = self.ranks, self.ranks * self.splits
        if not chunk:
            raise UsageError(
                f"ASTRA-sim never ends an all_gather of {size} bytes in {self.splits} chunks",
                slug="bad-collective",
                hint="set preferred-dataset-splits to 1",
            )
        return -(-size // chunk), chunk

    def phases(self, kind: str, chunk: int, members: int, number: int) -> list[Phase]:
        """The phases of one chunk.

        Args:
            kind: all_reduce, all_gather, reduce_scatter, all_to_all.
            chunk: Its bytes.
            members: Ranks of the group; all ranks use the dimensions, fewer a single one.
            number: How many chunks of all ranks' all_reduces came before, which decides the tree.
        """
        names = self._names(kind)
        if members < self.ranks:
            name = names[0] if len(names) == 1 else "ring"
            return [self._phase(kind, name, chunk, (0, members, 0), number)]
        order = [d for d, size in enumerate(self.sizes[: len(names)]) if size > 1]
        strides = np.cumprod([1, *self.sizes]).tolist()
        if len(names) == 1 and names[0].startswith("one"):
            return [self._phase(kind, _plain(names[0]), chunk, (0, self.ranks, 1), number)]
        if kind == "all_reduce" and not self.baseline:
            turn = [("reduce_scatter", d) for d in order[:-1]] + [("all_reduce", order[-1])]
            turn += [("all_gather", d) for d in reversed(order[:-1])]
        elif kind == "all_gather":
            turn = [(kind, d) for d in reversed(order)]
        else:
            turn = [(kind, d) for d in order]
        phases = []
        for part, d in turn:
            phase = self._phase(part, names[d], chunk, (d, self.sizes[d], strides[d]), number)
            phases.append(replace(phase, backwards=kind == "all_reduce" and part == "all_gather"))
            chunk = {"reduce_scatter": chunk // self.sizes[d], "all_gather": chunk * self.sizes[d]}.get(part, chunk)
        return phases

    def _names(self, kind: str) -> tuple[str, ...]:
        names = self.implementations.get(kind)
        if not names:
            raise UsageError(
                f"the system file has no {kind.replace('_', '-')}-implementation", slug="bad-astra-sim-config"
            )
        return names

    def _phase(self, kind: str, name: str, chunk: int, along: tuple[int, int, int], number: int) -> Phase:
        """One phase along (dimension, ranks, stride)."""
        dimension, ranks, stride = along
        name = _plain(name)
        if name == "doubleBinaryTree" and not stride:
            raise UsageError(
                "ASTRA-sim crashes at a doubleBinaryTree in a group of some ranks",
                slug="bad-collective",
                hint="set all-reduce-implementation to ring",
            )
        if name.startswith("direct") and name != "direct":
            raise UsageError(
                f"`{name}` keeps so many messages under way at once, which is not simulated",
                slug="bad-collective",
                hint="use direct",
            )
        tree = number % 2 if name == "doubleBinaryTree" else 0
        made = _schedule(kind, name, ranks, chunk, tree=tree, whole=bool(stride))
        eager = name == "direct" and kind == "all_reduce"
        return Phase(dimension, made, stride, self.delay_ns if stride else FAST_DELAY_NS, eager)


def _plain(name: str) -> str:
    return name[3].lower() + name[4:] if name.startswith("one") else name


@lru_cache(maxsize=256)
def _schedule(kind: str, name: str, ranks: int, chunk: int, *, tree: int, whole: bool) -> Schedule:
    """The schedule of one phase; all messages of a round have the same bytes, rounded down."""
    size = chunk if kind == "all_gather" else chunk // ranks * ranks
    if name == "ring":
        return ring(kind, ranks, size)
    if name == "direct":
        made = direct(kind, ranks, size)
        if kind == "all_reduce" and not whole and ranks > 2:  # groups reduce the second half like the first
            first, second = made.rounds
            made = replace(made, rounds=(first, replace(second, reduced=second.bytes)))
        return made
    if name == "halvingDoubling":
        return _halving(kind, ranks, chunk)
    if name == "doubleBinaryTree" and kind == "all_reduce":
        parent = parents(ranks, 0 if tree else ranks - 1)
        made = one_tree(parent, chunk)
        inner = np.isin(np.arange(ranks), parent)
        return replace(  # who hands on what comes from above pays for a reduction of it
            made,
            rounds=tuple(
                part if part.reduced.any() else replace(part, reduced=np.where(inner[part.target], chunk, 0))
                for part in made.rounds
            ),
        )
    raise UsageError(f"ASTRA-sim does no {kind} with {name}", slug="bad-collective", hint="use ring or direct")


def _halving(kind: str, ranks: int, chunk: int) -> Schedule:
    """Halving and doubling: a message is reduced at the price of the next, smaller one, the last one for nothing."""
    made = halving_doubling(kind, ranks, ranks)
    steps = len(made.rounds) // (2 if kind == "all_reduce" else 1)
    halves = [chunk >> (k + 1) for k in range(steps)]
    sizes = {
        "reduce_scatter": halves,
        "all_reduce": [*halves, *reversed(halves)],
        "all_gather": [chunk << k for k in range(steps)],
    }[kind]
    reduced = [0] * len(sizes) if kind == "all_gather" else [*halves[1:], 0, *([0] * (len(sizes) - steps))]
    return replace(
        made,
        rounds=tuple(
            replace(part, bytes=np.full(ranks, size), reduced=np.full(ranks, taken))
            for part, size, taken in zip(made.rounds, sizes, reduced, strict=True)
        ),
    )


def members_of(phase: Phase, rank: int, group: Sequence[int]) -> Ints:
    """The ranks at the positions of a phase's schedule, for one rank of the group."""
    if not phase.stride:
        return np.asarray(group, np.int64)
    position = rank // phase.stride % phase.schedule.ranks
    members = rank + (np.arange(phase.schedule.ranks) - position) * phase.stride
    return members[::-1] if phase.backwards else members
