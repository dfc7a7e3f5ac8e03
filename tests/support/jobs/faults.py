"""Faults that a made job can have; each bears a label, by which a run can leave it out."""

from __future__ import annotations

from dataclasses import dataclass

# What a late host does, and what its trace shows of it.
LATE_BY = {
    "data": "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__",
    "sleep": "<built-in function sleep>",
    "gc": "<built-in function collect>",
    "python": "train.py(88): write_metrics",
}


def _at(steps: tuple[int, ...]) -> str:
    return f" in steps {','.join(map(str, steps))}" if steps else ""


@dataclass(frozen=True, slots=True)
class SlowRank:
    """The kernels of a rank take longer by a factor, in some steps or (where none are named) in all."""

    rank: int
    factor: float
    steps: tuple[int, ...] = ()

    @property
    def label(self) -> str:
        """Of the fault."""
        return f"slow rank {self.rank}{_at(self.steps)}"


@dataclass(frozen=True, slots=True)
class StragglingStep:
    """The kernels of all ranks (or of one) take longer by a factor in one step."""

    step: int
    factor: float
    rank: int | None = None

    @property
    def label(self) -> str:
        """Of the fault."""
        return f"straggling step {self.step}" + (
            "" if self.rank is None else f" on rank {self.rank}"
        )


@dataclass(frozen=True, slots=True)
class LateHost:
    """A rank's main thread is busy with something else.

    Attributes:
        rank: The rank.
        us: For how long.
        steps: In which steps; all where none are named.
        by: `data` (waits for a batch), `sleep`, `gc` or `python`: see LATE_BY.
        before: `step` (at its beginning), `backward` (of the first microbatch) or `optimizer`.
    """

    rank: int
    us: float
    steps: tuple[int, ...] = ()
    by: str = "data"
    before: str = "step"

    @property
    def label(self) -> str:
        """Of the fault."""
        return f"late host of rank {self.rank} by {self.by} before {self.before}{_at(self.steps)}"


@dataclass(frozen=True, slots=True)
class SlowLink:
    """Communication of some groups takes longer by a factor.

    Attributes:
        factor: On transfers.
        role: Only groups of this role; all where "".
        ranks: Only groups that have all of these members.
        steps: In which steps; all where none are named.
    """

    factor: float
    role: str = ""
    ranks: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()

    @property
    def label(self) -> str:
        """Of the fault."""
        return f"slow link {self.role or 'of all roles'} {','.join(map(str, self.ranks))}{_at(self.steps)}"


@dataclass(frozen=True, slots=True)
class ExtraSync:
    """A rank (all where None) waits for its compute stream after every pass of a microbatch."""

    rank: int | None = None
    steps: tuple[int, ...] = ()

    @property
    def label(self) -> str:
        """Of the fault."""
        return f"extra sync {'everywhere' if self.rank is None else f'on rank {self.rank}'}{_at(self.steps)}"


@dataclass(frozen=True, slots=True)
class TokenImbalance:
    """Experts get unequal shares of the tokens: one relative share per place in the expert group."""

    shares: tuple[float, ...]

    @property
    def label(self) -> str:
        """Of the fault."""
        return "token imbalance"


@dataclass(frozen=True, slots=True)
class ShardImbalance:
    """A rank of the first stage holds larger embedding tables: its look-ups take longer by a factor."""

    rank: int
    factor: float

    @property
    def label(self) -> str:
        """Of the fault."""
        return f"large shard on rank {self.rank}"


Fault = (
    SlowRank | StragglingStep | LateHost | SlowLink | ExtraSync | TokenImbalance | ShardImbalance
)
