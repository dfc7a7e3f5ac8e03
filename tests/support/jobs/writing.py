"""Writes the instructions of one rank: ops with kernels, events between streams, communication."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from support.jobs import program as do
from support.jobs.chance import Chance, Shared
from support.jobs.faults import (
    LATE_BY,
    ExtraSync,
    LateHost,
    ShardImbalance,
    SlowLink,
    SlowRank,
    StragglingStep,
)
from support.jobs.layout import DATA, EXPERT, TENSOR, Group
from support.jobs.parallel import ParallelRecipe

COMPUTE = 7
STREAMS = {TENSOR: 20, DATA: 24, EXPERT: 28}
# Messages between stages: one stream for each neighbour and direction.
RECEIVE_FORWARD, SEND_FORWARD, RECEIVE_BACKWARD, SEND_BACKWARD = 32, 36, 40, 44
BF16, FLOAT, LONG, NUMBER = "c10::BFloat16", "float", "long int", "Scalar"
_NCCL = "ncclDevKernelArgsStorage<4096ul>"
_EARLY = 0.25  # the part of a kernel during which a programmatic one may already start
# How PyTorch calls each collective: its op, its name in the arguments, its annotation, its kernel.
_CALLED = {
    "allreduce": ("c10d::allreduce_", "nccl:all_reduce", "AllReduce_Sum_bf16_RING_LL"),
    "_allgather_base": ("c10d::_allgather_base_", "nccl:_all_gather_base", "AllGather_RING_LL"),
    "_reduce_scatter_base": (
        "c10d::_reduce_scatter_base_",
        "nccl:_reduce_scatter_base",
        "ReduceScatter_Sum_bf16_RING_LL",
    ),
    "all_to_allv": ("c10d::alltoall_base_", "nccl:all_to_all", "SendRecv"),
    "send": ("c10d::send", "nccl:send", "SendRecv"),
    "recv": ("c10d::recv_", "nccl:recv", "SendRecv"),
}

Shapes = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Op:
    """An op with one kernel.

    Attributes:
        names: The op and those around it, the outermost first.
        kernel: Name of the kernel.
        us: Median duration of the kernel.
        shapes: Of the inputs.
        types: Of the inputs; bfloat16 where not given.
        small: Whether the kernel can start before the one before it has ended.
        label: Of a fault that makes it longer by `factor`.
        factor: See `label`.
    """

    names: tuple[str, ...]
    kernel: str
    us: float
    shapes: Shapes = ()
    types: tuple[str, ...] = ()
    small: bool = False
    label: str = ""
    factor: float = 1.0


class Writer:
    """One rank's threads, instruction by instruction.

    Args:
        recipe: Of the job.
        rank: The rank.
        shared: Chance that all ranks share.
        groups: The groups of the job.
    """

    def __init__(
        self, recipe: ParallelRecipe, rank: int, shared: Shared, groups: Sequence[Group]
    ) -> None:
        self.recipe = recipe
        self.rank = rank
        self.shared = shared
        self.chance = Chance(recipe.seed, rank, recipe.spread)
        self.groups = {group.role: group for group in groups if rank in group.ranks}
        self.main: list[do.Instruction] = []
        self.autograd: list[do.Instruction] = []
        self.out = self.main
        self.step = 0
        self._sequences: dict[str, int] = {}
        self._captured: list[do.GraphNode] | None = None
        self._graphs: dict[str, int] = {}

    # -- the host ---------------------------------------------------------------------------------------------

    def think(self, us: float, label: str = "") -> None:
        """Host work."""
        self.out.append(do.Work(self.chance.draw(us), label))

    def annotation(self, name: str) -> None:
        """Begin an annotation."""
        self.out.append(do.Begin(name, annotation=True))

    def frame(self, name: str) -> None:
        """Begin a Python frame or module call, where the recipe wants them."""
        if self.recipe.stacks:
            self.out.append(do.Begin(name, python=True))

    def close(self) -> None:
        """End the innermost op or annotation."""
        self.out.append(do.End())

    def close_frame(self) -> None:
        """End the innermost frame."""
        if self.recipe.stacks:
            self.out.append(do.End())

    def late(self, before: str) -> None:
        """What keeps the host from its work here, by the recipe."""
        for fault in self.recipe.faults:
            if not isinstance(fault, LateHost) or fault.rank != self.rank or fault.before != before:
                continue
            if fault.steps and self.step not in fault.steps:
                continue
            # Python is seen where stacks are recorded, the data loader always.
            begin, end = (
                (self.annotation, self.close)
                if fault.by == "data"
                else (self.frame, self.close_frame)
            )
            begin(LATE_BY[fault.by])
            self.out.append(do.Work(round(fault.us * 1000), fault.label))
            end()

    def extra_sync(self) -> None:
        """Wait for what was computed, where the recipe has that fault."""
        for fault in self.recipe.faults:
            if not isinstance(fault, ExtraSync) or fault.rank not in (None, self.rank):
                continue
            if not fault.steps or self.step in fault.steps:
                back = self.chance.draw(self.recipe.back_us)
                # Not for the whole device: a message that waits for a stage that waits like us would never be taken.
                self.out.append(
                    do.Synchronize(do.STREAM, self.call(0.5), back, COMPUTE, label=fault.label)
                )

    # -- the device -------------------------------------------------------------------------------------------

    def op(self, op: Op, sequence: int | None = None, *, backward: bool = False) -> None:
        """An op and its kernel; the kernel alone, where a graph is being captured."""
        duration, slowed, label = self._duration(op)
        if self._captured is not None:
            self._captured.append(do.GraphNode(op.kernel, duration, 0, slowed, label))
            return
        own = self.recipe.op_us
        shapes = [list(shape) for shape in op.shapes]
        args: dict[str, Any] = {"shapes": shapes, "types": list(op.types) or [BF16] * len(shapes)}
        if sequence is not None:
            args |= {"sequence": sequence, "forward_thread": 1 if backward else 0}
        for number in range(self.recipe.modules if self.recipe.stacks else 0):
            self.frame(f"model.py({100 + number}): {op.names[-1].rsplit(':', 1)[-1]}")
        for name in op.names:
            self.out.append(do.Begin(name, args=args))
            self.think(own / 2 / len(op.names))
        early = round(duration * _EARLY) if self.recipe.programmatic and not op.small else 0
        self.out.append(
            do.Submit(
                op.kernel,
                "kernel",
                COMPUTE,
                duration,
                *self._of_launch(),
                slowed=slowed,
                label=label,
                early=early,
                programmatic=self.recipe.programmatic and op.small,
                args=_LAUNCHED,
            )
        )
        for _ in op.names:
            self.think(own / 2 / len(op.names))
            self.out.append(do.End())
        for _ in range(self.recipe.modules if self.recipe.stacks else 0):
            self.close_frame()

    def _duration(self, op: Op) -> tuple[int, int, str]:
        """Duration, the part that a fault is to blame for, and its label; of several faults the strongest."""
        base = self.chance.draw(op.us)
        factor, label = op.factor, op.label
        for fault in self.recipe.faults:
            if isinstance(fault, SlowRank):
                affected = fault.rank == self.rank and (not fault.steps or self.step in fault.steps)
            elif isinstance(fault, StragglingStep):
                affected = fault.step == self.step and fault.rank in (None, self.rank)
            else:
                continue
            if affected and fault.factor > factor:
                factor, label = fault.factor, fault.label
        slower = round(base * factor)
        return slower, slower - base, label

    def shard_factor(self) -> tuple[str, float]:
        """Label and factor of this rank's look-ups."""
        for fault in self.recipe.faults:
            if isinstance(fault, ShardImbalance) and fault.rank == self.rank:
                return fault.label, fault.factor
        return "", 1.0

    def capture(self) -> None:
        """From here on kernels are gathered, to be launched as one CUDA graph."""
        if self.recipe.graphs:
            self._captured = []

    def replay(self, name: str) -> None:
        """Launch what was gathered; a graph of this name keeps its id and the ids of its nodes."""
        gathered, self._captured = self._captured, None
        if not gathered:
            return
        graph = self._graphs.setdefault(name, len(self._graphs) + 1)
        nodes = tuple(
            do.GraphNode(node.name, node.duration, graph * 1000 + number, node.slowed, node.label)
            for number, node in enumerate(gathered)
        )
        self.annotation(f"graph {name}")
        self.think(self.recipe.op_us)
        self.out.append(
            do.Submit(name, "graph", COMPUTE, 0, *self._of_launch(), graph=graph, nodes=nodes)
        )
        self.close()

    def copy(self, name: str, us: float, size: int, *, blocking: bool) -> None:
        """A copy on the compute stream."""
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

    def event(self, name: str, recorded: int, waits: int) -> None:
        """One stream waits for what another was given so far."""
        delay = self.chance.draw(1.5)
        self.out += [
            do.Record(name, recorded, self.call(0.4)),
            do.StreamWait(name, waits, self.call(0.3), delay),
        ]

    def call(self, share: float = 1.0) -> int:
        """What a call takes."""
        return self.chance.draw(self.recipe.call_us * share)

    def _of_launch(self) -> tuple[int, int, int, int]:
        """Cost, latency, gap and return."""
        recipe, draw = self.recipe, self.chance.draw
        return self.call(), draw(recipe.latency_us), draw(recipe.gap_us), draw(recipe.back_us)

    # -- communication ----------------------------------------------------------------------------------------

    def collective(
        self,
        kind: str,
        role: str,
        elements: int,
        share: float = 1.0,
        out_elements: int | None = None,
        splits: tuple[tuple[int, ...], tuple[int, ...]] = ((), ()),
        unequal: tuple[str, float] = ("", 1.0),
    ) -> None:
        """A collective of this rank's group of a role, on that role's stream, after what compute was given.

        Args:
            kind: As PyTorch names it in the arguments.
            role: TENSOR, DATA or EXPERT; nothing happens where the rank has no such group.
            elements: That this rank puts in.
            share: Of the recipe's `transfer_us`.
            out_elements: That it gets; the same where None.
            splits: Elements to and from each member.
            unequal: Label and factor of an imbalance that makes it longer.
        """
        group = self.groups.get(role)
        if group is None:
            return
        number = self._sequences[group.name] = self._sequences.get(group.name, 0) + 1
        base = self.shared.transfer(
            group.name, number, self.recipe.transfer_us * share
        ) + self.chance.draw(0.3)
        transfer, slowed, label = self._slowed(base, role, group.ranks, unequal)
        meeting = do.Meeting(
            kind,
            group.name,
            group.ranks,
            number,
            elements,
            transfer,
            out_elements,
            "BFloat16",
            *splits,
            description=group.description,
            slowed=slowed,
            label=label,
        )
        self._talk(meeting, STREAMS[role], "")

    def message(self, kind: str, members: tuple[int, int], stream: int, number: int) -> None:
        """A message between two stages.

        Args:
            kind: `send` or `recv`.
            members: Sender and receiver.
            stream: Of this neighbour and direction.
            number: Of the messages from this sender to this receiver.
        """
        group = self.groups["pipeline"]
        written = self._sequences[group.name] = self._sequences.get(group.name, 0) + 1
        way = f"{group.name} {members[0]}>{members[1]}"
        base = self.shared.transfer(way, number, self.recipe.transfer_us / 2) + self.chance.draw(
            0.3
        )
        transfer, slowed, label = self._slowed(base, "pipeline", members, ("", 1.0))
        meeting = do.Meeting(
            kind,
            group.name,
            members,
            number,
            self.recipe.tokens * self.recipe.hidden,
            transfer,
            element_type="BFloat16",
            ranks=group.ranks,
            description=group.description,
            written_sequence=written,
            slowed=slowed,
            label=label,
        )
        own, other = (members[0], members[1]) if kind == "send" else (members[1], members[0])
        index, peer = group.ranks.index(own), group.ranks.index(other)
        self._talk(meeting, stream, f" {index}->{peer}" if kind == "send" else f" {index}<-{peer}")

    def _slowed(
        self, base: int, role: str, members: tuple[int, ...], unequal: tuple[str, float]
    ) -> tuple[int, int, str]:
        label, factor = unequal
        for fault in self.recipe.faults:
            if (
                not isinstance(fault, SlowLink)
                or fault.role not in ("", role)
                or not set(fault.ranks) <= set(members)
            ):
                continue
            if (not fault.steps or self.step in fault.steps) and fault.factor > factor:
                factor, label = fault.factor, fault.label
        slower = round(base * factor)
        return slower, slower - base, label

    def _talk(self, meeting: do.Meeting, stream: int, way: str) -> None:
        """The nesting of PyTorch: the op of c10d, the op that describes, the events, the annotation, the launch."""
        op, annotation, kernel = _CALLED[meeting.kind]
        own = self.recipe.op_us
        count = (
            meeting.elements if meeting.kind != "recv" else meeting.out_elements or meeting.elements
        )
        self.out.append(do.Begin(op, args={"shapes": [[count]], "types": [BF16]}))
        self.think(own / 4)
        self.out.append(do.Begin("record_param_comms", meeting=meeting))
        self.think(own / 4)
        self.event(f"before {op} {stream}", COMPUTE, stream)
        self.annotation(annotation + way)
        self.out.append(
            do.Submit(
                f"ncclDevKernel_{kernel}({_NCCL})",
                "kernel",
                stream,
                0,
                *self._of_launch(),
                meeting=meeting,
                call="cudaLaunchKernelExC",
            )
        )
        self.close()
        self.think(own / 4)
        self.close()
        self.close()


_LAUNCHED = {
    "grid": [132, 1, 1],
    "block": [256, 1, 1],
    "registers per thread": 168,
    "shared memory": 0,
}
