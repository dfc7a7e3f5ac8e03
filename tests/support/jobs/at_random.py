"""Jobs at random: to ask what changes do to them, and with a rank that is late, to ask who is found."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from support.jobs import (
    Fault,
    Job,
    ParallelRecipe,
    Recipe,
    Run,
    parallel_job,
    program as do,
    training_job,
)
from support.jobs.faults import LateHost, SlowRank
from support.jobs.planted import Instructions, edited
from support.jobs.simulation import Change
from support.jobs.training import DELAY, LAST_SYNC, SYNC

_COMPUTE, _NETWORK = 7, 20
_STEP = "ProfilerStep#"


@dataclass(frozen=True)
class Changed:
    """A job, and changes that both a what-if and the simulation can make.

    Attributes:
        job: The job.
        changes: As `traceloom whatif` reads them, each with what is different in a run.
    """

    job: Job
    changes: tuple[tuple[str, Change], ...]


@dataclass(frozen=True)
class Late:
    """A job in which one rank is late or slow.

    Attributes:
        job: The job.
        rank: Which rank.
        change: The run in which it is not.
    """

    job: Job
    rank: int
    change: Change

    @property
    def cost_ns(self) -> float:
        """What that costs each step when the job runs on: by when the work of the first and the last step ends."""
        late, clean = (step_ends(self.job.run(change)) for change in (Change(), self.change))
        return ((late[-1] - late[0]) - (clean[-1] - clean[0])) / (len(late) - 1)


def step_ends(run: Run) -> list[int]:
    """When the last work on a device that was launched in each step ends, over all ranks; ns of the job's true time."""
    begins: dict[int, list[tuple[int, int]]] = defaultdict(list)
    calls = {}
    for span in run.spans:
        if span.name.startswith(_STEP):
            begins[span.rank].append((span.start, int(span.name.rpartition("#")[2])))
        if span.thread is not None and span.correlation is not None:
            calls[span.rank, span.correlation] = span.start
    for steps in begins.values():
        steps.sort()
    ends: dict[int, int] = defaultdict(int)
    for span in run.spans:
        if span.stream is not None:
            steps = begins[span.rank]
            _, step = steps[
                max(bisect_right(steps, (calls[span.rank, span.correlation or 0], 2**62)) - 1, 0)
            ]
            ends[step] = max(ends[step], span.end)
    return [ends[step] for step in sorted(ends)]


def awaited_by_autograd(job: Job) -> Job:
    """A collective between forward and backward: the main thread lets its stream wait, autograd launches what waits."""
    members = tuple(rank.rank for rank in job.ranks)

    def edit(_rank: int, thread: Instructions) -> Instructions:
        out: Instructions = []
        for instruction in thread:
            if isinstance(instruction, do.Post) and instruction.flag.startswith("backward"):
                number = int(instruction.flag.rpartition(" ")[2])
                meeting = do.Meeting("allreduce", "loss", members, number, 1 << 20, 700_000)
                out += [
                    do.Record("loss", _COMPUTE, 1_800),
                    do.StreamWait("loss", _NETWORK, 1_300, 1_500),
                    do.Begin("c10d::allreduce"),
                    do.Work(4_000),
                    do.Submit(
                        "ncclDevKernel_AllReduce_Sum_f32_RING_LL",
                        "kernel",
                        _NETWORK,
                        0,
                        4_500,
                        6_500,
                        1_200,
                        7_000,
                        meeting=meeting,
                    ),
                    do.End(),
                    do.Record("loss known", _NETWORK, 1_800),
                    do.StreamWait("loss known", _COMPUTE, 1_300, 1_500),
                ]
            out.append(instruction)
        return out

    return edited(job, edit)


def to_change(count: int, seed: int) -> Iterator[Changed]:
    """So many jobs to change."""
    chance = random.Random(seed)
    pick = chance.choice
    for _ in range(count):
        ranks = pick([1, 2, 3, 4])
        recipe = Recipe(
            steps=pick([2, 3, 4]),
            layers=pick([2, 4, 6]),
            kernel_us=pick([5, 20, 60, 150]),
            op_us=pick([4, 12, 30]),
            think_us=pick([20, 200]),
            item=chance.random() < 0.4,
            sync=pick(["", "", "device", "stream", "event"]),
            pageable_input=chance.random() < 0.3,
            side_stream=chance.random() < 0.4,
            autograd=chance.random() < 0.7,
            loader_us=pick([0, 0, 400]),
            ranks=ranks,
            transfer_us=pick([30, 150, 600]),
            sharded=ranks > 1 and chance.random() < 0.4,
            delay_us={0: 800} if ranks > 1 and chance.random() < 0.4 else {},
            spread=pick([0, 0.15, 0.3]),
            seed=chance.randrange(1000),
        )
        job = training_job(recipe)
        if recipe.autograd and ranks > 1 and chance.random() < 0.6:
            job = awaited_by_autograd(job)
        yield Changed(job, tuple(_changes(recipe)))


def _changes(recipe: Recipe) -> Iterator[tuple[str, Change]]:
    yield "gpu * 0.5", Change(kernels=0.5)
    yield "gpu * 0.1", Change(kernels=0.1)
    yield "host * 0.7", Change(host=0.7)
    if recipe.ranks > 1:
        yield "network * 2", Change(collectives=0.5)
        yield "collectives * 4", Change(collectives=4)
        yield "collectives remove", Change(collectives=0)
    if recipe.sync and not recipe.item:
        yield (
            "syncs ~ cuda(Device|Stream|Event)Synchronize remove",
            Change(without=frozenset({SYNC, LAST_SYNC})),
        )
    if recipe.delay_us and recipe.ranks > 2:
        yield "rank 0 delay remove", Change(without=frozenset({DELAY}))


def with_a_late_rank(count: int, seed: int, steps: int = 6) -> Iterator[Late]:
    """So many jobs with a late rank: by its loader, by Python, by slow kernels."""
    chance = random.Random(seed)
    pick = chance.choice
    for _ in range(count):
        if chance.random() < 0.5:
            data, tensor = pick([(2, 1), (4, 1), (2, 2), (3, 1)])
            rank = chance.randrange(data * tensor)
            late = LateHost(rank, pick([500, 1500, 4000]), by=pick(["python", "data"]))
            slow = SlowRank(rank, pick([1.2, 1.5]))
            fault: Fault = late if chance.random() < 0.5 else slow
            parallel = ParallelRecipe(
                data=data,
                tensor=tensor,
                steps=steps,
                layers=pick([1, 2, 3]),
                kernel_us=pick([20, 60, 120]),
                item=chance.random() < 0.5,
                microbatches=pick([1, 2]),
                faults=(fault,),
                seed=chance.randrange(100),
                transfer_us=pick([20, 100]),
            )
            yield Late(parallel_job(parallel), rank, Change(without=frozenset({fault.label})))
            continue
        ranks = pick([2, 3, 4])
        rank = chance.randrange(ranks)
        recipe = Recipe(
            steps=steps,
            layers=pick([3, 6]),
            kernel_us=pick([10, 40, 100]),
            ranks=ranks,
            delay_us={rank: pick([300, 800, 2500])},
            item=chance.random() < 0.4,
            sync=pick(["", "device"]),
            autograd=chance.random() < 0.5,
            transfer_us=pick([40, 200]),
            sharded=chance.random() < 0.3,
            seed=chance.randrange(100),
        )
        yield Late(training_job(recipe), rank, Change(without=frozenset({DELAY})))
