"""Programs of made training jobs: forward, backward, reduction of gradients, optimizer, step after step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from support.jobs import program as do
from support.jobs.chance import Chance, Shared

COMPUTE = 7
SIDE = 13
NETWORK = 20
SYNC = "step-sync"  # label of the synchronisation of every step
LAST_SYNC = "last-sync"  # label of the one with which the job ends
_NCCL = "ncclDevKernelArgsStorage<4096ul>"
DELAY = "delay"  # label of what makes a rank late, and its name in traces
DELAY_NAME = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"


@dataclass(frozen=True, slots=True)
class Recipe:
    """What kind of job; times in microseconds are medians of what is drawn.

    Attributes:
        steps: Training steps.
        layers: Layers of the model: each has a few kernels forward and backward.
        kernel_us: Duration of a kernel.
        op_us: Own time of an op around its launch, half before and half after.
        call_us: What a launch takes.
        latency_us: From a launch to its kernel.
        gap_us: Between kernels of one stream.
        back_us: From the end of awaited work to the return of the call.
        think_us: Between steps.
        item: Whether each step reads the loss: a pageable copy, whose call waits, then a synchronisation of the stream.
        sync: What each step waits for at its end: nothing (""), `device`, `stream` or `event`. Its label is SYNC.
        pageable_input: Whether each step begins with copies of its batch from the device's to pageable memory and back.
        side_stream: Whether a part of each layer runs on a stream of its own, between events.
        autograd: Whether backward runs in a thread of its own, which the main thread awaits.
        ranks: Processes; the gradients of each layer are reduced over all of them.
        transfer_us: From the meeting of all ranks to the end of the reduction.
        sharded: Whether the weights of each layer are gathered before it is used, and its gradients scattered.
        pipeline: Whether each rank hands on to the next what it has computed (send and receive); not with `sharded`,
            where each would wait for the other.
        loader_us: What a thread of its own takes to prepare the batch of a step while the step before runs; 0 for none.
        delay_us: Per rank, what it is late by in each step. Its label is DELAY.
        clocks: Per rank, its host and clock.
        queue_limit: How much submitted work a stream holds.
        spread: Width of the distribution that durations are drawn from (of the logarithm).
        seed: Of chance.
    """

    steps: int = 3
    layers: int = 8
    kernel_us: float = 60
    op_us: float = 8
    call_us: float = 4.5
    latency_us: float = 6.5
    gap_us: float = 1.2
    back_us: float = 7
    think_us: float = 60
    item: bool = False
    sync: str = ""
    pageable_input: bool = False
    side_stream: bool = False
    autograd: bool = False
    ranks: int = 1
    transfer_us: float = 150
    sharded: bool = False
    pipeline: bool = False
    loader_us: float = 0
    delay_us: Mapping[int, float] = field(default_factory=dict)
    clocks: Mapping[int, do.Clock] = field(default_factory=dict)
    queue_limit: int = 1022
    spread: float = 0.15
    seed: int = 0


def programs(recipe: Recipe) -> list[do.Rank]:
    """The processes of the job."""
    shared = Shared(recipe.seed, recipe.spread)
    return [
        do.Rank(
            rank,
            _Writer(recipe, rank, shared).threads(),
            recipe.clocks.get(rank, do.Clock()),
            recipe.queue_limit,
        )
        for rank in range(recipe.ranks)
    ]


class _Writer:
    """Writes the instructions of one rank's threads."""

    def __init__(self, recipe: Recipe, rank: int, shared: Shared) -> None:
        self.recipe = recipe
        self.rank = rank
        self.shared = shared
        self.chance = Chance(recipe.seed, rank, recipe.spread)
        self.main: list[do.Instruction] = []
        self.autograd: list[do.Instruction] = []
        self.loader: list[do.Instruction] = []
        self.out = self.main
        self.sequence = 0

    def threads(self) -> list[list[do.Instruction]]:
        for step in range(self.recipe.steps):
            self._step(step)
        self.out.append(
            do.Synchronize(
                do.DEVICE, self._call(), self.chance.draw(self.recipe.back_us), label=LAST_SYNC
            )
        )
        return [self.main, *(thread for thread in (self.autograd, self.loader) if thread)]

    def _step(self, step: int) -> None:
        recipe = self.recipe
        self.out.append(do.Begin(f"ProfilerStep#{step}", annotation=True))
        self._think(recipe.think_us / 2)
        if recipe.delay_us.get(self.rank):
            self.out += [
                do.Begin(DELAY_NAME, annotation=True),
                do.Work(self.chance.draw(recipe.delay_us[self.rank], 0.05), DELAY),
                do.End(),
            ]
        if recipe.loader_us:
            self._load(step)
        if recipe.pageable_input:
            self._pageable()
        if recipe.pipeline and self.rank:
            self._pair(step, "recv", (self.rank - 1, self.rank))
        for layer in range(recipe.layers):
            if recipe.sharded:
                self._together("_allgather_base", layer)
                self._event("gathered", NETWORK, COMPUTE)
            self._forward(layer)
        if recipe.pipeline and self.rank + 1 < recipe.ranks:
            self._pair(step, "send", (self.rank, self.rank + 1))
        self._backward(step)
        self.out.append(do.Begin("Optimizer.step#SGD.step", annotation=True))
        for _ in range(max(recipe.layers // 2, 1)):
            self._op("aten::_foreach_add_", "multi_tensor_apply_kernel", 0.7)
        self.out.append(do.End())
        if recipe.item:
            self._item()
        if recipe.sync:
            self._wait(step)
        self._think(recipe.think_us / 2)
        self.out.append(do.End())

    def _load(self, step: int) -> None:
        """The batch of this step, which another thread has prepared; it goes on with the next."""
        self.loader += [do.Await(f"load {step - 1}", self.chance.draw(15))] if step else []
        self.loader += [
            do.Begin("aten::stack"),
            do.Work(self.chance.draw(self.recipe.loader_us)),
            do.End(),
            do.Post(f"batch {step}"),
        ]
        self.main += [
            do.Begin(
                "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", annotation=True
            ),
            do.Await(f"batch {step}", self.chance.draw(15)),
            do.Post(f"load {step}"),
            do.End(),
        ]

    def _forward(self, layer: int) -> None:
        self._op("aten::addmm", "sm90_xmma_gemm_f32f32", 1.0, outer="aten::linear")
        if self.recipe.side_stream and layer % 2:
            # On the side stream, after what the compute stream had been given, and before what it is given next.
            self._event("fork", COMPUTE, SIDE)
            self._op("aten::mm", "sm90_xmma_gemm_f32f32", 1.3, stream=SIDE)
            self._op("aten::mul", "vectorized_elementwise_kernel", 0.8)
            self._event("join", SIDE, COMPUTE)
        self._op("aten::relu", "vectorized_elementwise_kernel", 0.4)

    def _event(self, name: str, recorded: int, waits: int) -> None:
        delay = self.chance.draw(1.5)
        self.out += [
            do.Record(name, recorded, self._call(0.4)),
            do.StreamWait(name, waits, self._call(0.3), delay),
        ]

    def _backward(self, step: int) -> None:
        recipe = self.recipe
        if recipe.autograd:
            self._think(6)
            self.main.append(do.Post(f"backward {step}"))
            self.autograd.append(do.Await(f"backward {step}", self.chance.draw(12)))
            self.out = self.autograd
        for layer in reversed(range(recipe.layers)):
            self.out.append(do.Begin("autograd::engine::evaluate_function: AddmmBackward0"))
            self._op("aten::mm", "sm90_xmma_gemm_f32f32", 1.1, outer="AddmmBackward0")
            self._op("aten::mm", "sm90_xmma_gemm_f32f32", 0.9)
            if recipe.ranks > 1:
                self._together("_reduce_scatter_base" if recipe.sharded else "allreduce", layer)
            self.out.append(do.End())
        if recipe.autograd:
            self.autograd.append(do.Post(f"done {step}"))
            self.main.append(do.Await(f"done {step}", self.chance.draw(14)))
            self.out = self.main
            self._think(6)
        if recipe.ranks > 1:
            self._event("reduced", NETWORK, COMPUTE)

    def _together(self, kind: str, layer: int) -> None:
        """A collective of all ranks on the network's stream, after what the compute stream has been given."""
        self._event("gradient", COMPUTE, NETWORK)
        transfer = self.shared.transfer(
            "0", self.sequence, self.recipe.transfer_us * (1 + 0.3 * (layer % 3))
        )
        members = tuple(range(self.recipe.ranks))
        meeting = do.Meeting(
            kind,
            "0",
            members,
            self.sequence,
            1 << (16 + layer % 3),
            transfer + self.chance.draw(0.3),
        )
        self.sequence += 1
        name = {"allreduce": "AllReduce_Sum", "_allgather_base": "AllGather"}.get(
            kind, "ReduceScatter_Sum"
        )
        self._op("c10d::" + kind, f"ncclDevKernel_{name}_f32_RING_LL({_NCCL})", 0, NETWORK, meeting)

    def _pair(self, step: int, kind: str, members: tuple[int, int]) -> None:
        self._event("handed on", COMPUTE, NETWORK)
        group = f"pipe {members[0]}"
        transfer = self.shared.transfer(group, step, 80) + self.chance.draw(0.3)
        meeting = do.Meeting(kind, group, members, step, 1 << 20, transfer)
        self._op("c10d::" + kind, f"ncclDevKernel_SendRecv({_NCCL})", 0, NETWORK, meeting)
        if kind == "recv":
            self._event("received", NETWORK, COMPUTE)

    def _pageable(self) -> None:
        for name, blocking in (
            ("DtoH (Device -> Pageable)", True),
            ("HtoD (Pinned -> Device)", False),
        ):
            self.out.append(do.Begin("aten::copy_"))
            self._think(self.recipe.op_us / 2)
            self._copy(name, 90, blocking=blocking, size=1 << 20)
            self.out.append(do.End())

    def _item(self) -> None:
        self.out += [do.Begin("aten::item"), do.Begin("aten::_local_scalar_dense")]
        self._think(self.recipe.op_us / 2)
        self._copy("DtoH (Device -> Pageable)", 1.2, blocking=True, size=4)
        self.out.append(
            do.Synchronize(
                do.STREAM, self._call(0.5), self.chance.draw(self.recipe.back_us), COMPUTE
            )
        )
        self._think(self.recipe.op_us / 4)
        self.out += [do.End(), do.End()]

    def _wait(self, step: int) -> None:
        if self.recipe.sync == do.EVENT:
            self.out.append(do.Record(f"end {step}", COMPUTE, self._call(0.4)))
        cost = (
            self._call() if self.recipe.sync == do.DEVICE else self._call(0.5)
        )  # the same call costs the same
        back = self.chance.draw(self.recipe.back_us)
        self.out.append(
            do.Synchronize(self.recipe.sync, cost, back, COMPUTE, f"end {step}", label=SYNC)
        )

    def _op(
        self,
        name: str,
        kernel: str,
        share: float,
        stream: int = COMPUTE,
        meeting: do.Meeting | None = None,
        outer: str = "",
    ) -> None:
        own = self.recipe.op_us
        self.out += [do.Begin(outer)] if outer else []
        self.out.append(do.Begin(name))
        self._think(own / 2)
        self.out.append(
            do.Submit(
                kernel,
                "kernel",
                stream,
                0 if meeting else self.chance.draw(self.recipe.kernel_us * share),
                *self._of_launch(),
                meeting=meeting,
            )
        )
        self._think(own / 4)
        self.out.append(do.End())
        self.out += [do.Work(self.chance.draw(own / 4)), do.End()] if outer else []

    def _copy(self, name: str, us: float, *, blocking: bool, size: int) -> None:
        self.out.append(
            do.Submit(
                f"Memcpy {name}",
                "copy",
                COMPUTE,
                self.chance.draw(us),
                *self._of_launch(),
                blocking=blocking,
                size=size,
            )
        )

    def _of_launch(self) -> tuple[int, int, int, int]:
        """Cost, latency, gap and return."""
        recipe = self.recipe
        draw = self.chance.draw
        return self._call(), draw(recipe.latency_us), draw(recipe.gap_us), draw(recipe.back_us)

    def _call(self, share: float = 1.0) -> int:
        return self.chance.draw(self.recipe.call_us * share)

    def _think(self, us: float) -> None:
        self.out.append(do.Work(self.chance.draw(us)))
