"""Made jobs without a device: collectives on threads of the host (gloo), and work that threads hand to each other.

The main thread computes, hands each communication to a thread of the back end, and sleeps until that is done, as
DistributedDataParallel (at the end of the backward pass) and FSDP (before each block) do. The back end's thread is
inside one call from when it takes the communication up until the result lies where it belongs; between two small
operators of that call it waits for its peers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from support.jobs import Job, program as do

_BACK_ENDS = 2  # threads of the back end
_WAKE = 25_000  # from a hand-over until the other thread goes on
LATE, LOADING = "late", "loading"
"""Labels of the planted lateness, and of the waits for batches: a run can leave them out."""

Instructions = list[do.Instruction]


@dataclass(frozen=True)
class HostedRecipe:
    """A data parallel job on CPUs.

    Attributes:
        ranks: Processes.
        sharded: Whether parameters are gathered before each block, and gradients scattered after it, as FSDP does;
            else gradients are reduced in the backward pass, as DistributedDataParallel does.
        steps: Steps of the window.
        blocks: Blocks of the model.
        block_ns: What the forward pass of a block takes; the backward pass takes twice as long.
        transfer_ns: Of one communication, when all have come.
        late_rank: Who is late.
        late_ns: By how much, in each step; 0 where nobody is.
        busy: Whether the late rank computes meanwhile; else it sleeps.
        loader_ns: How long every rank waits for its batch in each step.
        wake_ns: From a hand-over to the back end until its thread goes on: long on busy machines.
        seed: Of chance.
    """

    ranks: int = 2
    sharded: bool = False
    steps: int = 3
    blocks: int = 4
    block_ns: int = 1_500_000
    transfer_ns: int = 900_000
    late_rank: int = 1
    late_ns: int = 0
    busy: bool = False
    loader_ns: int = 0
    wake_ns: int = _WAKE
    seed: int = 0


def hosted_job(recipe: HostedRecipe) -> Job:
    """The job of a recipe."""
    return Job([do.Rank(rank, _Rank(recipe, rank).threads()) for rank in range(recipe.ranks)])


class _Rank:
    """Writes the program of one rank."""

    def __init__(self, recipe: HostedRecipe, rank: int) -> None:
        self.recipe = recipe
        self.rank = rank
        self.chance = np.random.default_rng([recipe.seed, rank])
        self.main: Instructions = []
        self.back_ends: list[Instructions] = [[] for _ in range(_BACK_ENDS)]
        self.sequence = 0

    def threads(self) -> list[Instructions]:
        for step in range(self.recipe.steps):
            self.main.append(do.Begin(f"ProfilerStep#{step}", annotation=True))
            self._load()
            self._late()
            self._forward()
            self._backward()
            self._region(
                "Optimizer.step#SGD.step", self._op("aten::_foreach_add_", 400_000), annotation=True
            )
            self.main.append(do.End())
        return [self.main, *self.back_ends]

    def _load(self) -> None:
        if self.recipe.loader_ns:
            name = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
            wait = do.Work(self._some(self.recipe.loader_ns), LOADING)
            self.main += [do.Begin(name, annotation=True), wait, do.End()]

    def _late(self) -> None:
        recipe = self.recipe
        if self.rank != recipe.late_rank or not recipe.late_ns:
            return
        work = do.Work(recipe.late_ns, LATE)
        self.main += [do.Begin("aten::tanh"), work, do.End()] if recipe.busy else [work]

    def _forward(self) -> None:
        for block in range(self.recipe.blocks):
            if self.recipe.sharded:
                self._region(
                    f"FSDP::pre_forward ({block})",
                    self._gathered("all_gather", block),
                    annotation=True,
                )
            self.main += [
                *self._op("aten::linear", self.recipe.block_ns),
                do.Work(self._some(40_000)),
            ]

    def _backward(self) -> None:
        pending: list[str] = []
        for block in reversed(range(self.recipe.blocks)):
            inside = self._gathered("all_gather", block) if self.recipe.sharded else []
            inside += self._op("aten::mm", 2 * self.recipe.block_ns)
            if self.recipe.sharded:
                inside += self._gathered("all_reduce", block)  # gloo reduces all, and keeps a part
            elif block % 2 == 0:
                call, done = self._handed("all_reduce", "c10d::allreduce_")
                inside += call
                pending.append(done)
            self._region("autograd::engine::evaluate_function: AddmmBackward0", inside)
        for done in pending:
            self.main += [do.Await(done, _WAKE), *self._op("aten::copy_", 60_000)]

    def _gathered(self, kind: str, block: int) -> Instructions:
        """A communication that the main thread waits for at once."""
        op = "c10d::_allgather_base_" if kind == "all_gather" else "c10d::_reduce_scatter_base_"
        call, done = self._handed(kind, op)
        name = f"FSDP::{kind} ({block})"
        return [do.Begin(name, annotation=True), *call, do.Await(done, _WAKE), do.End()]

    def _handed(self, kind: str, op: str) -> tuple[Instructions, str]:
        """The call that hands a communication over, and the flag that says when it is done."""
        recipe, number = self.recipe, self.sequence
        self.sequence += 1
        members = tuple(range(recipe.ranks))
        spelled = {"all_reduce": "allreduce", "all_gather": "_allgather_base"}[kind]
        # of one size, and of nearly one length on each rank
        meeting = do.Meeting(
            spelled, "0", members, number, 1 << 18, recipe.transfer_ns + self._some(8_000)
        )
        requested, done = f"asked {number}", f"done {number}"
        self.back_ends[number % _BACK_ENDS] += [
            do.Await(requested, recipe.wake_ns),
            do.Begin(f"gloo:{kind}", annotation=True, meeting=meeting),
            do.Begin("aten::empty"),
            do.Work(4_000),
            do.End(),
            do.Work(3_000),
            do.Meet(meeting),
            do.Begin("aten::copy_"),
            do.Work(30_000),
            do.End(),
            do.End(),
            do.Post(done),
        ]
        return [do.Begin(op), do.Work(self._some(60_000)), do.Post(requested), do.End()], done

    def _region(self, name: str, inside: Instructions, *, annotation: bool = False) -> None:
        self.main += [
            do.Begin(name, annotation=annotation),
            *inside,
            do.End(),
            do.Work(self._some(30_000)),
        ]

    def _op(self, name: str, duration: int) -> Instructions:
        return [do.Begin(name), do.Work(self._some(duration)), do.End()]

    def _some(self, duration: int) -> int:
        """About so long: 2 % more or less."""
        return round(duration * self.chance.normal(1.0, 0.02))
