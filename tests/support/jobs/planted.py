"""Jobs with one fault each, and the same jobs without it: what fixing it saves is what the two runs differ by.

A fault is planted into the instructions of a job that has none, so that both meet the same chance; faults that a
`ParallelRecipe` can declare are left out of its second run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial

from support.jobs import Job, ParallelRecipe, Recipe, Run, parallel_job, program as do, training_job
from support.jobs.faults import (
    ExtraSync,
    Fault,
    LateHost,
    ShardImbalance,
    SlowLink,
    SlowRank,
    TokenImbalance,
)
from support.jobs.simulation import Change

Instructions = list[do.Instruction]
STEPS = 4
_COMPUTE = 7
_STEP = "ProfilerStep#"
_NOTHING = Change()


@dataclass(frozen=True)
class Planted:
    """A job with a fault.

    Attributes:
        fault: Its name.
        slug: The finding that is expected first.
        job: With the fault.
        clean: The job without it.
        change: The run of `clean` that has no fault: for faults that are left out by label.
    """

    fault: str
    slug: str
    job: Job
    clean: Job
    change: Change = _NOTHING

    @cached_property
    def run(self) -> Run:
        """With the fault."""
        return self.job.run()

    @cached_property
    def clean_run(self) -> Run:
        """Without it."""
        return self.clean.run(self.change)

    @property
    def cost_ns(self) -> int:
        """By how much the whole run is longer because of the fault."""
        return self.run.window_ns - self.clean_run.window_ns

    @property
    def cost_per_step_ns(self) -> float:
        """The same per step; every step has the fault."""
        steps = sum(span.name.startswith(_STEP) and span.rank == 0 for span in self.run.spans)
        return self.cost_ns / max(steps, 1)


def edited(job: Job, edit: Callable[[int, Instructions], Instructions]) -> Job:
    """The job with other instructions: `edit` is given each thread's (and its rank)."""
    ranks = [
        replace(rank, threads=[edit(rank.rank, thread) for thread in rank.threads])
        for rank in job.ranks
    ]
    return replace(job, ranks=ranks)


def at_each_step(job: Job, what: Callable[[int], Instructions], *, last: bool = False) -> Job:
    """The job with instructions at the beginning of each step, or before its last instruction.

    Args:
        job: Without them.
        what: Number of the step -> the instructions.
        last: Whether at the end of the step.
    """

    def edit(_rank: int, thread: Instructions) -> Instructions:
        out: Instructions = []
        step, depth = -1, 0
        for instruction in thread:
            if isinstance(instruction, do.End):
                depth -= 1
                if last and depth == 0 and step >= 0:
                    out += what(step)
            out.append(instruction)
            if isinstance(instruction, do.Begin):
                depth += 1
                if instruction.name.startswith(_STEP):
                    step = int(instruction.name.rpartition("#")[2])
                    out += [] if last else what(step)
        return out

    return edited(job, edit)


def after_each(job: Job, name: str, what: Callable[[], Instructions]) -> Job:
    """The job with instructions after each op of a name."""

    def edit(_rank: int, thread: Instructions) -> Instructions:
        out: Instructions = []
        names: list[str] = []
        for instruction in thread:
            out.append(instruction)
            if isinstance(instruction, do.Begin):
                names.append(instruction.name)
            elif isinstance(instruction, do.End) and names.pop() == name:
                out += what()
        return out

    return edited(job, edit)


def awaited_at_once(job: Job) -> Job:
    """Computing waits for each collective as soon as it is launched."""

    def edit(_rank: int, thread: Instructions) -> Instructions:
        out: Instructions = []
        for instruction in thread:
            out.append(instruction)
            if isinstance(instruction, do.Submit) and instruction.meeting is not None:
                out += [
                    do.Record("at once", instruction.stream, 1_800),
                    do.StreamWait("at once", _COMPUTE, 1_300, 1_500),
                ]
        return out

    return edited(job, edit)


def busy(name: str, us: float, *, python: bool = False) -> Instructions:
    """The host is busy with something that the trace names, or (where "") that it does not."""
    work = do.Work(round(us * 1000))
    return (
        [do.Begin(name, annotation=not python, python=python), work, do.End()] if name else [work]
    )


def reads(*, blocking: bool) -> Instructions:
    """A value is read from the device; where it does not block, it is copied and looked at later."""
    out: Instructions = [
        do.Begin("aten::item"),
        do.Begin("aten::_local_scalar_dense"),
        do.Work(4_000),
    ]
    out.append(_copy("Memcpy DtoH (Device -> Pageable)", 1_200, 4, blocking=blocking))
    if blocking:
        out.append(do.Synchronize(do.STREAM, 2_000, 7_000, _COMPUTE))
    return [*out, do.Work(2_000), do.End(), do.End()]


def uploads(us: float, *, pageable: bool) -> Instructions:
    """A batch is copied to the device: from pageable memory the call returns when that is done."""
    kind = "Pageable" if pageable else "Pinned"
    copy = _copy(
        f"Memcpy HtoD ({kind} -> Device)", round(us * 1000), round(us * 12_000), blocking=pageable
    )
    return [do.Begin("aten::to"), do.Begin("aten::copy_"), do.Work(4_000), copy, do.End(), do.End()]


def _copy(name: str, duration: int, size: int, *, blocking: bool) -> do.Submit:
    return do.Submit(
        name, "copy", _COMPUTE, duration, 4_500, 6_500, 1_200, 7_000, blocking=blocking, size=size
    )


def kernel(names: tuple[str, ...], kernel_name: str, us: float, op_us: float = 8.0) -> Instructions:
    """An op with a kernel, the outermost name first."""
    out: Instructions = [do.Begin(name) for name in names]
    out.append(do.Work(round(op_us * 500)))
    out.append(
        do.Submit(kernel_name, "kernel", _COMPUTE, round(us * 1000), 4_500, 6_500, 1_200, 7_000)
    )
    out.append(do.Work(round(op_us * 500)))
    return out + [do.End() for _ in names]


def repeated_forward(job: Job) -> Job:
    """Each layer's backward begins by repeating its forward, as activation checkpointing does."""

    def edit(_rank: int, thread: Instructions) -> Instructions:
        out: Instructions = []
        for instruction in thread:
            out.append(instruction)
            if isinstance(instruction, do.Begin) and instruction.name.startswith(
                "autograd::engine::evaluate_function"
            ):
                frame = "torch/utils/checkpoint.py(1130): recompute_fn"
                out.append(do.Begin(frame, python=True))
                out += kernel(("aten::linear", "aten::addmm"), "sm90_xmma_gemm_f32f32", 60)
                out += kernel(("aten::relu",), "vectorized_elementwise_kernel", 24)
                out.append(do.End())
        return out

    return edited(job, edit)


def one_graph(job: Job) -> Job:
    """The ops of each step launched at once, as one CUDA graph; for jobs of one thread that wait for nothing."""

    def edit(_rank: int, thread: Instructions) -> Instructions:
        out: Instructions = []
        nodes: list[do.GraphNode] = []
        depth, step = 0, False
        for instruction in thread:
            if isinstance(instruction, do.Begin):
                depth += 1
                step |= instruction.name.startswith(_STEP)
                out += [instruction] if depth <= 1 else []
            elif isinstance(instruction, do.End):
                if depth == 1 and nodes:
                    out += [
                        do.Submit(
                            "step",
                            "graph",
                            _COMPUTE,
                            0,
                            9_000,
                            6_500,
                            1_000,
                            7_000,
                            graph=1,
                            nodes=tuple(nodes),
                        )
                    ]
                    nodes = []
                out += [instruction] if depth <= 1 else []
                depth -= 1
            elif isinstance(instruction, do.Submit) and depth:
                nodes.append(do.GraphNode(instruction.name, instruction.duration, len(nodes) + 1))
            elif depth <= 1:
                out.append(instruction)
        return out

    return edited(job, edit)


BASE = Recipe(steps=STEPS, layers=8, kernel_us=60)
PARALLEL = ParallelRecipe(data=4, steps=STEPS, layers=3, kernel_us=100)


def _declared(name: str, slug: str, recipe: ParallelRecipe, fault: Fault) -> Planted:
    job = parallel_job(replace(recipe, faults=(fault,)))
    return Planted(name, slug, job, job, Change(without=frozenset({fault.label})))


def single_rank() -> Iterator[Planted]:
    """Faults of a job of one process."""
    clean = training_job(replace(BASE, sync="device"))
    for fault, slug, name, python in (
        (
            "slow loader",
            "data-starved",
            "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__",
            False,
        ),
        ("sleep", "host-pause", "", False),
        ("Python in the loop", "host-pause", "train.py(88): write_metrics", True),
        ("collection", "garbage-collection", "<built-in function collect>", True),
    ):
        yield Planted(fault, slug, at_each_step(clean, partial(_busy, name, python)), clean)
    ahead = training_job(replace(BASE, kernel_us=30))
    for fault, slug, wrong, right in (
        ("synchronisation", "blocking-sync", _synchronises, list),
        ("item", "blocking-item", partial(reads, blocking=True), partial(reads, blocking=False)),
        (
            "pageable copy",
            "blocking-copy",
            partial(uploads, 40, pageable=True),
            partial(uploads, 40, pageable=False),
        ),
    ):
        yield Planted(
            fault,
            slug,
            after_each(ahead, "aten::linear", wrong),
            after_each(ahead, "aten::linear", right),
        )
    # the next step begins when the value was read; the last one has none, so that there are many
    read = training_job(Recipe(steps=16, layers=4, kernel_us=40, think_us=300))
    waits, runs_on = (
        at_each_step(read, partial(_reads, blocking), last=True) for blocking in (True, False)
    )
    yield Planted("value at the end of a step", "blocking-item", waits, runs_on)
    waiting = busy("threading.py(324): wait", 7_000, python=True)
    beside = [replace(rank, threads=[*rank.threads, waiting]) for rank in clean.ranks]
    monitored = replace(clean, ranks=beside)
    write = partial(_busy, "train.py(88): write_metrics", True)
    yield Planted(
        "Python beside a thread that waits", "host-pause", at_each_step(monitored, write), monitored
    )
    small = training_job(Recipe(steps=STEPS, layers=16, kernel_us=5, op_us=16, sync="device"))
    yield Planted("launches", "launch-bound", small, one_graph(small))
    yield Planted("recomputation", "recomputation", repeated_forward(clean), clean)
    on_host = training_job(replace(BASE, kernel_us=5, op_us=16, sync="device"))
    marked = after_each(on_host, "aten::linear", partial(busy, "traceloom.checkpoint", 25))
    yield Planted(
        "recomputation by a busy host", "recomputation", repeated_forward(marked), on_host
    )


def _busy(name: str, python: bool, _step: int) -> Instructions:
    return busy(name, 600, python=python)


def _reads(blocking: bool, _step: int) -> Instructions:
    return reads(blocking=blocking)


def _synchronises() -> Instructions:
    return [do.Synchronize(do.DEVICE, 2_000, 7_000)]


def several_ranks() -> Iterator[Planted]:
    """Faults of jobs of several processes."""
    yield _declared("slow rank", "straggler", PARALLEL, SlowRank(2, 1.4))
    yield _declared("late host", "straggler", PARALLEL, LateHost(1, 3000, by="python"))
    yield _declared("late loader", "data-starved", PARALLEL, LateHost(1, 3000, by="data"))
    two = replace(PARALLEL, tensor=2, data=2)
    yield _declared("slow link", "slow-link", two, SlowLink(4.0, "tensor"))
    yield _declared("slow link of one group", "slow-link", two, SlowLink(4.0, "tensor", (0, 1)))
    passes = replace(PARALLEL, data=2, microbatches=4, kernel_us=25, layers=1, item=False)
    yield _declared("synchronisation per pass", "blocking-sync", passes, ExtraSync())
    yield _declared(
        "unequal tokens",
        "compute-imbalance",
        replace(PARALLEL, expert=4, layers=2),
        TokenImbalance((3, 1, 1, 1)),
    )
    even = tuple(ShardImbalance(rank, 63 / 4) for rank in range(4))
    large = parallel_job(replace(PARALLEL, faults=(ShardImbalance(3, 60.0),)))
    yield Planted(
        "large shard", "compute-imbalance", large, parallel_job(replace(PARALLEL, faults=even))
    )
    reduced = training_job(replace(BASE, ranks=2, transfer_us=60, sync="device"))
    yield Planted("exposed collectives", "exposed-communication", awaited_at_once(reduced), reduced)
    piped = ParallelRecipe(pipeline=4, steps=3, layers=2, kernel_us=100, microbatches=4)
    more = replace(piped, microbatches=16, kernel_us=25)
    yield Planted("bubbles", "pipeline-bubbles", parallel_job(piped), parallel_job(more))
    flushed, finer = (replace(recipe, schedule="gpipe") for recipe in (piped, more))
    yield Planted(
        "bubbles of GPipe", "pipeline-bubbles", parallel_job(flushed), parallel_job(finer)
    )


def that_never_meet(recipe: Recipe, ranks: int) -> Job:
    """Processes of one job that share no communication; the last one's kernels take twice as long."""
    last = ranks - 1
    alone = [
        training_job(
            replace(recipe, seed=rank, kernel_us=recipe.kernel_us * (2 if rank == last else 1))
        ).ranks[0]
        for rank in range(ranks)
    ]
    return Job(
        [
            do.Rank(rank, single.threads, single.clock, single.queue_limit)
            for rank, single in enumerate(alone)
        ]
    )


def clean_jobs() -> dict[str, Job]:
    """Jobs without a fault: the device is busy all the time, with kernels near what it can do."""
    base = replace(BASE, kernel_us=120)
    return {
        "one process": training_job(base),
        "several streams": training_job(replace(base, side_stream=True, autograd=True)),
        "a loader in time": training_job(replace(base, loader_us=300)),
        "data parallel": parallel_job(replace(PARALLEL, op_us=2, transfer_us=20, item=False)),
        "ranks that never meet": that_never_meet(base, 2),
        "a copy of a hundredth": at_each_step(
            training_job(base), lambda _: uploads(30, pageable=False)
        ),
        "two ranks": training_job(
            replace(base, ranks=2, transfer_us=40, spread=0.04)
        ),  # else one does more by chance
    }
