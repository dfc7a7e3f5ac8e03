"""Recipe of a parallel training job: data x tensor x pipeline x expert, with declared faults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from support.jobs import program as do
from support.jobs.faults import Fault
from support.jobs.layout import Layout

SCHEDULES = ("1f1b", "gpipe")


@dataclass(frozen=True, slots=True)
class ParallelRecipe:
    """What kind of parallel job; times in microseconds are medians of what is drawn.

    Attributes:
        data: Copies of the model (ranks that reduce gradients together).
        tensor: Ranks that share each layer.
        pipeline: Stages.
        expert: Ranks among the data ranks that share the experts of each layer; 1 for a dense model.
        steps: Training steps.
        layers: Layers of each stage.
        microbatches: Parts of a batch that go through the pipeline one after the other.
        schedule: `1f1b` or `gpipe`.
        sharded: Whether the data ranks gather weights and scatter gradients, instead of reducing these.
        hidden: Width of the model.
        heads: Attention heads.
        tokens: Of a microbatch.
        top_experts: To how many experts each token goes.
        kernel_us: Duration of a matrix product of `hidden` x `hidden`; other kernels follow from it.
        op_us: Own time of an op around its launch.
        call_us: What a launch takes.
        latency_us: From a launch to its kernel.
        gap_us: Between kernels of one stream.
        back_us: From the end of awaited work to the return of the call.
        think_us: Between steps.
        transfer_us: From the meeting of all ranks to the end of a collective; of messages half of that.
        item: Whether each step ends with reading a number from the device (the norm of the gradients).
        autograd: Whether backward runs in a thread of its own.
        programmatic: Whether small kernels start while the one before them on their stream still runs.
        graphs: Whether the forward pass between two communications is one launch of a CUDA graph.
        stacks: Whether the traces show Python frames and module calls.
        modules: Frames of Python around each op, where `stacks`: larger files.
        ranks_per_host: Hosts are named host0, host1, ...
        clocks: Offset (ns) and drift of the clocks of hosts, by number.
        faults: What is wrong with the job.
        spread: Width of the distribution that durations are drawn from (of the logarithm).
        seed: Of chance.
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    steps: int = 3
    layers: int = 2
    microbatches: int = 1
    schedule: str = "1f1b"
    sharded: bool = False
    hidden: int = 4096
    heads: int = 32
    tokens: int = 2048
    top_experts: int = 2
    kernel_us: float = 60
    op_us: float = 4
    call_us: float = 3
    latency_us: float = 5
    gap_us: float = 1.2
    back_us: float = 7
    think_us: float = 40
    transfer_us: float = 60
    item: bool = True
    autograd: bool = True
    programmatic: bool = False
    graphs: bool = False
    stacks: bool = False
    modules: int = 2
    ranks_per_host: int = 8
    clocks: Mapping[int, tuple[int, float]] = field(default_factory=dict)
    faults: tuple[Fault, ...] = ()
    spread: float = 0.05
    seed: int = 0

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise ValueError(f'expected a schedule ({", ".join(SCHEDULES)}), got "{self.schedule}"')

    @property
    def layout(self) -> Layout:
        """The places of the ranks."""
        return Layout(self.data, self.tensor, self.pipeline, self.expert)

    def clock(self, rank: int) -> do.Clock:
        """The clock of a rank's host."""
        host = rank // self.ranks_per_host
        offset, drift = self.clocks.get(host, (0, 0.0))
        return do.Clock(f"host{host}", offset, drift)
