"""Made jobs whose times are longest paths, with the true time after any change.

Apart from `support.jobs`, and from the code under test: a job is a list of nodes, and a node starts
after others, and ends no earlier than its own work allows and than what it waits for. A change is
other works, or waits that are left out; the same longest paths give the true time with it. What is
written is what stock PyTorch writes: no records of synchronisation, no streams of host calls.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import mean, median
from typing import Any

_GEMM = "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_execute_kernel__5x_cublas"
_ELEMENTWISE = "void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl>"
_NCCL = "ncclDevKernel_{}(ncclDevKernelArgsStorage<4096ul>)"
COMPUTE, REDUCE, EXCHANGE = 7, 20, 24
_ORIGIN_US = 5_000_000_000.0


@dataclass(frozen=True)
class Recipe:
    """What a job consists of; times in us.

    Attributes:
        late_us: How much later each rank begins than the one before.
        spread: Times are so far from their middle at most, as a share of it.
        slow: The host of rank 1 takes so many times as long.
        uneven: Its kernels take so many times as long.
        workers: Processes of the data loader; 0 for none.
        batch_us: What a worker takes for a batch; the step itself where there is none.
        beside: The batches that the step makes itself are made by so many workers instead.
        warm: Steps before those that are recorded.
        thread: Whether the backward pass runs on a thread of its own.
        exchange: Layers between which ranks exchange; 0 for none.
        overlapped: Whether one more operator is launched before the exchange is waited for.
        reduce: Whether gradients are reduced, and waited for before the optimizer.
        stages: Whether ranks are stages of a pipeline that meet in messages alone.
        copy_us: A copy to the device in each step; 0 for none.
        pageable: Whether that copy holds the host.
        item: Whether each step reads a value of the device at its end.
        middle: Whether each step synchronises between its passes.
        long_call_us: One launch in each step takes this long, while its stream is busy.
        skew_us: How far the clock of a rank is from that of the one before.
        one_host: Whether all ranks name the same host.
    """

    seed: int = 0
    ranks: int = 1
    steps: int = 4
    layers: int = 4
    kernel_us: float = 30.0
    op_us: float = 12.0
    late_us: float = 0.0
    slow: float = 1.0
    uneven: float = 1.0
    spread: float = 0.06
    workers: int = 0
    batch_us: float = 0.0
    beside: int = 0
    warm: int = 0
    thread: bool = True
    exchange: int = 0
    overlapped: bool = False
    reduce: bool = False
    stages: bool = False
    transfer_us: float = 40.0
    copy_us: float = 0.0
    pageable: bool = False
    item: bool = False
    middle: bool = False
    long_call_us: float = 0.0
    skew_us: float = 0.0
    one_host: bool = True


@dataclass(eq=False, slots=True)
class Node:
    """Something that takes time; `after` and `until` are (node, whether its end counts, delay).

    Attributes:
        kind: What it is: of the host, of the device, or a time that is not recorded.
        stream: That of work of the device.
        call: What submitted it.
        submits: What it submits.
        around: The numbers of the operators that it is in.
    """

    kind: str
    work: float
    after: list[Wait] = field(default_factory=list)
    until: list[Wait] = field(default_factory=list)
    name: str = ""
    rank: int = -1
    step: int = -1
    stream: int = -1
    call: Node | None = None
    submits: Node | None = None
    around: tuple[int, ...] = ()
    start: float = 0.0
    end: float = 0.0


Wait = tuple[Node, bool, float]


def _keep_delay(_node: Node, _source: Node, delay: float) -> float:
    return delay


@dataclass(frozen=True)
class Effect:
    """The effect of a change.

    Attributes:
        text: The change.
        factor: Of the work of each node.
        waits: Whether the end of a node waits for another one.
        delay: Of each wait.
        after: What the beginning of a node waits for.
        recipe: The job is another one.
    """

    text: str
    factor: Callable[[Node], float] = lambda node: 1.0
    waits: Callable[[Node, Node], bool] = lambda node, source: True
    delay: Callable[[Node, Node, float], float] = _keep_delay
    after: Callable[[Node], list[Wait]] = lambda node: node.after
    recipe: Recipe | None = None


SLOW_RANK = 1
_HOST = ("op", "think", "launch", "sync", "next")
_DEVICE = ("kernel", "copy")
_OPTIMIZER = "multi_tensor_apply_kernel"


def _scaled(text: str, kinds: tuple[str, ...], factor: float, name: str = "") -> Effect:
    return Effect(text, lambda node: factor if node.kind in kinds and name in node.name else 1.0)


def _not_awaited(text: str, *kinds: str) -> Effect:
    """Nothing on the host waits for this work."""
    return Effect(text, waits=lambda node, source: node.kind != "sync" or source.kind not in kinds)


EFFECTS = (
    _scaled("kernels * 0.5", ("kernel",), 0.5),
    _scaled("kernels ~ gemm * 0.5", ("kernel",), 0.5, "gemm"),
    _scaled("kernels * 1.5", ("kernel",), 1.5),
    _scaled("kernels remove", ("kernel",), 0.0),
    _scaled("copies * 0.5", ("copy",), 0.5),
    _scaled("copies remove", ("copy",), 0.0),
    _scaled("gpu * 0.5", _DEVICE, 0.5),
    _scaled("host * 0.5", _HOST, 0.5),
    _scaled("host * 0.8", _HOST, 0.8),
    _scaled("ops * 0.5", ("op", "next"), 0.5),
    _scaled("ops ~ aten remove", ("op", "next"), 0.0, "aten"),
    _scaled("think remove", ("think",), 0.0),
    _scaled("launches * 0.5", ("launch",), 0.5),
    _scaled("launches remove", ("launch",), 0.0),
    _scaled("syncs * 0.5", ("sync",), 0.5),
    _scaled("network * 2", ("transfer",), 0.5),
    _scaled("collectives * 1.5", ("transfer",), 1.5),
    _scaled("collectives remove", ("transfer",), 0.0),
    _scaled("loading * 0.5", ("batch", "next"), 0.5),
    Effect("syncs remove", waits=lambda node, source: node.kind != "sync"),
    _not_awaited("copies async", "copy"),
    _not_awaited("gpu async", *_DEVICE),
    _not_awaited("collectives async", "collective"),
)
"""Changes whose effect is the same on every job."""


def make_effects(job: MadeJob) -> list[Effect]:
    """Returns the effects of all changes on a job."""
    effects = [
        *EFFECTS,
        *(_overlapped(job, f"{what} overlap", kinds) for what, kinds in _OVERLAPPED.items()),
        _without_idle("idle remove", range(job.recipe.ranks)),
        _without_idle(f"rank {SLOW_RANK} idle remove", (SLOW_RANK,)),
        _fused("kernels fuse", ("kernel",)),
        _fused("gpu fuse", _DEVICE),
        _submitted_once(job, "kernels graph", ("kernel",)),
        _submitted_once(job, "gpu graph", _DEVICE),
    ]
    if job.recipe.ranks > 1:
        effects += [_balanced(job, "kernels balance", ("kernel",)), without_delay(job)]
    if job.recipe.batch_us and not job.recipe.workers:
        effects += [
            Effect(f"loading workers {count}", recipe=replace(job.recipe, beside=count))
            for count in (1, 2, 4)
        ]
    return effects


_OVERLAPPED = {"collectives": ("collective",), "copies": ("copy",)}


def without_delay(job: MadeJob) -> Effect:
    """The slow rank begins when the middle one of the others does, and is as fast as they are."""
    recipe = job.recipe
    begins = {node.rank: node for node in job.nodes if node.kind == "before"}
    middle = median(node.work for rank, node in begins.items() if rank != SLOW_RANK)
    begun = begins[SLOW_RANK].work
    factors = {
        **dict.fromkeys(_HOST, 1 / recipe.slow),
        "kernel": 1 / recipe.uneven,
        "before": min(middle / begun, 1.0),
    }
    return Effect(
        f"rank {SLOW_RANK} delay remove",
        lambda node: factors.get(node.kind, 1.0) if node.rank == SLOW_RANK else 1.0,
    )


def _overlapped(job: MadeJob, text: str, kinds: tuple[str, ...]) -> Effect:
    """What waits for such work on the device waits for what that waited for on the device, but for
    the optimizer, which waits for all of it in its step.
    """
    hidden: dict[tuple[int, int], list[Wait]] = {}
    for node in job.nodes:
        if node.kind in kinds:
            hidden.setdefault((node.rank, node.step), []).append((node, True, 0.0))

    def after(node: Node) -> list[Wait]:
        if node.name == _OPTIMIZER:
            before = [
                wait for wait in hidden.get((node.rank, node.step), []) if precedes(wait[0], node)
            ]
            return [*node.after, *before]
        if node.kind not in _DEVICE or node.kind in kinds:
            return node.after
        waits: list[Wait] = []
        for source, of_end, delay in node.after:
            if source.kind in kinds and of_end:
                waits += [wait for wait in after(source) if wait[0].kind != "launch"]
            else:
                waits.append((source, of_end, delay))
        return waits

    number = {id(node): index for index, node in enumerate(job.nodes)}

    def precedes(one: Node, other: Node) -> bool:
        return number[id(one)] < number[id(other)]

    return Effect(text, after=after)


def _without_idle(text: str, ranks: Collection[int]) -> Effect:
    """Host and launches cost nothing; the device keeps its order, without pauses."""

    def delay(node: Node, source: Node, us: float) -> float:
        launched = node.call is source or (source.stream == node.stream and source.stream >= 0)
        handed = node.kind in (*_HOST, "awaiting")
        return 0.0 if node.rank in ranks and (launched or handed) else us

    return Effect(
        text, lambda node: 0.0 if node.kind in _HOST and node.rank in ranks else 1.0, delay=delay
    )


def _is_behind(node: Node, source: Node, kinds: tuple[str, ...]) -> bool:
    """Whether both are such work, and neighbours on a stream."""
    same = source.stream == node.stream and source.rank == node.rank
    return same and source.kind in kinds and node.kind in kinds


def _fused(text: str, kinds: tuple[str, ...]) -> Effect:
    """No pause between neighbours on a stream, and the calls of all but the first are free; none
    begins before its call.
    """

    def is_inner(node: Node) -> bool:
        work = node.submits
        return work is not None and any(_is_behind(work, wait[0], kinds) for wait in work.after)

    return Effect(
        text,
        lambda node: 0.0 if node.kind == "launch" and is_inner(node) else 1.0,
        delay=lambda node, source, us: 0.0 if _is_behind(node, source, kinds) else us,
    )


def _submitted_once(job: MadeJob, text: str, kinds: tuple[str, ...]) -> Effect:
    """Of each rank and step only the first call, and the operators around it, take time."""
    free: set[int] = set()
    around: set[int] = set()
    begun: dict[tuple[int, int], Node] = {}
    for node in job.nodes:
        if node.submits is None or node.submits.kind not in kinds:
            continue
        if begun.setdefault((node.rank, node.step), node) is not node:
            free.add(id(node))
            around.update(node.around)
    around.difference_update(*(node.around for node in begun.values()))

    def factor(node: Node) -> float:
        inside = node.kind == "op" and node.around and node.around[-1] in around
        return 0.0 if inside or id(node) in free else 1.0

    return Effect(
        text,
        factor,
        delay=lambda node, source, us: min(us, 1.0) if _is_behind(node, source, kinds) else us,
    )


def _balanced(job: MadeJob, text: str, kinds: tuple[str, ...]) -> Effect:
    """Work of a name takes as long in each step on every rank."""
    sums: dict[tuple[int, str], dict[int, float]] = {}
    for node in job.nodes:
        if node.kind in kinds:
            ranks = sums.setdefault((node.step, node.name), {})
            ranks[node.rank] = ranks.get(node.rank, 0.0) + node.work

    def factor(node: Node) -> float:
        if node.kind not in kinds:
            return 1.0
        ranks = sums[node.step, node.name]
        return mean(ranks.values()) / ranks[node.rank]

    return Effect(text, factor)


class MadeJob:
    """One job of a recipe: its nodes, and what a profiler writes of them."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.nodes: list[Node] = []
        self._chance = random.Random(recipe.seed)
        self._meetings: dict[tuple[Any, ...], Node] = {}
        self._events: list[list[tuple[str, str, int, Node, Node, dict[str, Any]]]] = []
        for rank in range(recipe.ranks):
            self._events.append([])
            _Program(self, rank).write()

    def draw(self, us: float) -> float:
        """A time near this one."""
        spread = self.recipe.spread
        return us * self._chance.uniform(1 - spread, 1 + spread)

    def node(self, kind: str, work: float, name: str = "") -> Node:
        self.nodes.append(Node(kind, work, name=name))
        return self.nodes[-1]

    def meet(self, key: tuple[Any, ...], transfer: float, part: Node) -> None:
        """The part ends when all of the same key have begun, plus the transfer."""
        if key not in self._meetings:
            self._meetings[key] = self.node("transfer", self.draw(transfer))
        meeting = self._meetings[key]
        meeting.after.append((part, False, 0.0))
        part.until.append((meeting, True, 0.0))

    def log(
        self, rank: int, category: str, name: str, tid: int, first: Node, last: Node, **args: Any
    ) -> None:
        self._events[rank].append((category, name, tid, first, last, args))

    def evaluate(self, effect: Effect | None = None) -> float:
        """Sets the times of all nodes; returns the time from the first to the last, us."""
        effect = effect or Effect("")
        points: dict[tuple[int, bool], list[tuple[int, bool]]] = {}
        missing: dict[tuple[int, bool], int] = {}
        into: dict[tuple[int, bool], list[Wait]] = {}
        number = {id(node): index for index, node in enumerate(self.nodes)}
        for index, node in enumerate(self.nodes):
            until = [wait for wait in node.until if effect.waits(node, wait[0])]
            for end, sources in ((False, effect.after(node)), (True, [(node, False, 0.0), *until])):
                into[index, end] = sources
                missing[index, end] = len(sources)
                for source, of_end, _ in sources:
                    points.setdefault((number[id(source)], of_end), []).append((index, end))
        ready = [point for point, count in missing.items() if not count]
        done = 0
        while ready:
            index, end = ready.pop()
            done += 1
            node = self.nodes[index]
            times = [
                (source.end if of_end else source.start) + effect.delay(node, source, delay)
                for source, of_end, delay in into[index, end]
                if source is not node
            ]
            if end:
                own = node.start + node.work * effect.factor(node)
                node.end = max([own, *times])
            else:
                node.start = max([0.0, *times])
            for point in points.get((index, end), []):
                missing[point] -= 1
                if not missing[point]:
                    ready.append(point)
        if done != len(missing):
            raise ValueError("the parts of a made job wait for each other in a circle")
        hidden = ("before", "batch", "transfer")
        seen = [node for node in self.nodes if node.kind not in hidden and node.step >= 0]
        return max(node.end for node in seen) - min(node.start for node in seen)

    def true_saving(self, effect: Effect) -> float:
        """What the change saves, us."""
        changed = MadeJob(effect.recipe).evaluate() if effect.recipe else self.evaluate(effect)
        return self.window - changed

    @cached_property
    def window(self) -> float:
        """The time from the first to the last node that is recorded, us."""
        return self.evaluate()

    def write(self, folder: Path) -> Path:
        """Writes a file per rank."""
        folder.mkdir(parents=True, exist_ok=True)
        self.evaluate()
        world = self.recipe.ranks
        for rank, written in enumerate(self._events):
            shift = _ORIGIN_US + rank * self.recipe.skew_us
            events = []
            for category, name, tid, first, last, args in written:
                pid = 0 if category in ("kernel", "gpu_memcpy") else 20_000 + rank
                events.append(
                    {
                        "ph": "X",
                        "cat": category,
                        "name": name,
                        "pid": pid,
                        "tid": tid,
                        "ts": round(first.start + shift, 3),
                        "dur": round(last.end - first.start, 3),
                        "args": args,
                    }
                )
            groups = [
                {"pg_name": name, "pg_desc": about, "pg_size": world, "ranks": list(range(world))}
                for name, about in (("0", "default_pg"), ("10", "dp"), ("11", "ep"), ("12", "pp"))
            ]
            document = {
                "schemaVersion": 1,
                "deviceProperties": [{"id": 0, "name": "NVIDIA H100 80GB HBM3", "computeMajor": 9}],
                "distributedInfo": {
                    "backend": "nccl",
                    "rank": rank,
                    "world_size": world,
                    "pg_count": len(groups),
                    "pg_config": groups,
                },
                "baseTimeNanoseconds": 1_750_000_000_000_000_000,
                "host_name": "node0" if self.recipe.one_host else f"node{rank}",
                "traceEvents": events,
            }
            with gzip.open(folder / f"rank{rank}.json.gz", "wt", compresslevel=1) as file:
                json.dump(document, file)
        return folder


class _Program:
    """What one rank does, in the order of its calls."""

    def __init__(self, job: MadeJob, rank: int) -> None:
        self.job, self.rank, self.recipe = job, rank, job.recipe
        self.main, self.backward = 20_000 + rank, 30_000 + rank
        self.thread = self.main
        self.last: dict[int, Node] = {}  # of each thread
        self.on_stream: dict[int, Node] = {}
        self.held: dict[int, list[tuple[Node, bool, float]]] = {}  # of the next work of a stream
        self.number = 1_000 + 100_000 * rank
        self.batches: list[Node] = []
        self.asked: list[Node] = []
        self.sequence = 0
        self.number_of_step = -1
        self.around: tuple[int, ...] = ()

    # -- pieces ----------------------------------------------------------------------------------

    def own(self, node: Node) -> Node:
        """Says where the program is."""
        node.rank, node.step, node.around = self.rank, self.number_of_step, self.around
        return node

    def log(self, category: str, name: str, tid: int, first: Node, last: Node, **args: Any) -> None:
        """Records a region, but for those before the first step."""
        if self.number_of_step >= 0:
            self.job.log(self.rank, category, name, tid, first, last, **args)

    def host(self, kind: str, us: float, name: str = "") -> Node:
        """A piece of the current thread's time."""
        slow = self.recipe.slow if self.rank == SLOW_RANK and kind in _HOST else 1.0
        node = self.own(self.job.node(kind, slow * self.job.draw(us), name))
        if self.thread in self.last:
            node.after.append((self.last[self.thread], True, 0.0))
        self.last[self.thread] = node
        return node

    def call(self, name: str, us: float, kind: str = "launch") -> Node:
        """A call of the runtime."""
        node = self.host(kind, us, name)
        self.number += 1
        self.log("cuda_runtime", name, self.thread, node, node, correlation=self.number)
        return node

    def launch(
        self,
        name: str,
        us: float,
        stream: int,
        kind: str = "kernel",
        call_us: float = 4.0,
        call: str = "cudaLaunchKernel",
        **args: Any,
    ) -> Node:
        """A call, and its work on the device."""
        called = self.call(call, call_us)
        draw = self.job.draw
        uneven = self.recipe.uneven if self.rank == SLOW_RANK and kind == "kernel" else 1.0
        work = self.own(self.job.node(kind, uneven * draw(us), name))
        work.stream, work.call, called.submits = stream, called, work
        work.after = [(called, False, draw(5.0)), *self.held.pop(stream, [])]
        if stream in self.on_stream:
            work.after.append((self.on_stream[stream], True, draw(1.1)))
        self.on_stream[stream] = work
        category = "gpu_memcpy" if kind == "copy" else "kernel"
        about = {"correlation": self.number, "stream": stream, "device": 0, "context": 1, **args}
        self.log(category, name, stream, work, work, **about)
        return work

    def op(
        self, name: str, inside: Callable[[], Any], category: str = "cpu_op", **args: Any
    ) -> Any:
        """An operator around something."""
        outside = self.around
        self.number += 1
        if category == "cpu_op":
            self.around = (*outside, self.number)
        first = self.host("op", self.recipe.op_us / 2, name)
        result = inside()
        last = self.host("op", self.recipe.op_us / 2, name)
        self.around = outside
        self.log(category, name, self.thread, first, last, **args)
        return result

    def record(self, stream: int) -> Node | None:
        """Records an event on a stream."""
        self.call("cudaEventRecord", 1.5, "op")
        return self.on_stream.get(stream)

    def wait(self, event: Node | None, stream: int) -> None:
        """Lets a stream wait for an event."""
        self.call("cudaStreamWaitEvent", 1.5, "op")
        if event is not None:
            self.held.setdefault(stream, []).append((event, True, self.job.draw(1.3)))

    def talk(
        self, kind: str, group: tuple[str, str], stream: int, key: tuple[Any, ...]
    ) -> Node | None:
        """A communication after what compute was given; returns the event of its end."""
        op, kernel, named = {
            "allreduce": ("c10d::allreduce_", "AllReduce_Sum_bf16_RING_LL", "nccl:all_reduce"),
            "all_to_allv": ("c10d::alltoall_base_", "SendRecv", "nccl:all_to_all"),
            "send": ("c10d::send", "SendRecv", "nccl:send 0->1"),
            "recv": ("c10d::recv_", "SendRecv", "nccl:recv 1<-0"),
        }[kind]
        world = list(range(self.recipe.ranks))
        self.sequence += 1
        about: dict[str, Any] = {
            "Collective name": kind,
            "In msg nelems": 1_048_576,
            "Out msg nelems": 1_048_576,
            "Group size": self.recipe.ranks,
            "dtype": "BFloat16",
            "Process Group Name": group[0],
            "Process Group Description": group[1],
            "Process Group Ranks": str(world),
            "Rank": self.rank,
            "Seq": self.sequence,
        }
        if kind in ("send", "recv"):
            about |= {"Src Rank": key[1], "Dst Rank": key[2]}

        def inside() -> Node | None:
            before, begun = self.record(COMPUTE), self.last[self.thread]
            self.wait(before, stream)
            part = self.launch(
                _NCCL.format(kernel), 0.0, stream, "collective", call="cudaLaunchKernelExC", **about
            )
            self.log("user_annotation", named, self.thread, begun, self.last[self.thread])
            self.job.meet(key, self.recipe.transfer_us, part)
            return self.record(stream)

        event: Node | None = self.op(op, lambda: self.op("record_param_comms", inside, **about))
        return event

    # -- the job ---------------------------------------------------------------------------------

    def write(self) -> None:
        recipe = self.recipe
        # Nothing is recorded before the first step
        start = self.host("before", 20.0 + recipe.late_us * self.rank)
        for number in range(recipe.warm + recipe.steps):
            self.number_of_step = number - recipe.warm
            if self.number_of_step == 0 and number:
                self.number_of_step = -1
                start = self.synchronize("cudaDeviceSynchronize", kind="before")
                self.number_of_step = 0
            if self.number_of_step > 0:
                self.host("think", 15.0)
            first = self.host("op", 20.0)
            self.step(number)
            name = f"ProfilerStep#{10 + number}"
            self.log("user_annotation", name, self.main, first, self.last[self.main])
        self.synchronize("cudaDeviceSynchronize")
        self.log("Trace", "PyTorch Profiler (0)", 99, start, self.last[self.main])

    def synchronize(
        self, name: str, streams: tuple[int, ...] | None = None, kind: str = "sync"
    ) -> Node:
        """Waits for the work of some streams, or of all."""
        called = self.call(name, 3.0, kind)
        called.until = [
            (work, True, self.job.draw(4.0))
            for stream, work in self.on_stream.items()
            if streams is None or stream in streams
        ]
        return called

    def step(self, number: int) -> None:
        recipe = self.recipe
        if recipe.workers:
            self.load(number)
        elif recipe.batch_us:
            self.load_within_step(number)
        if recipe.copy_us:
            self.op("aten::to", lambda: self.op("aten::copy_", self.copy))
        arriving = recipe.stages and self.rank > 0
        if arriving:
            self.receive(number, self.rank - 1, self.rank)
        for layer in range(recipe.layers):
            self.layer("aten::linear", "aten::addmm", layer, forward=True)
        if recipe.stages and self.rank + 1 < recipe.ranks:
            self.talk("send", ("12", "pp"), 40, ("message", self.rank, self.rank + 1, number))
            self.receive(number, self.rank + 1, self.rank)
        if recipe.middle:
            self.synchronize("cudaDeviceSynchronize")
        reduced = self.run_backward()
        if arriving:
            self.talk("send", ("12", "pp"), 40, ("message", self.rank, self.rank - 1, number))
        for event in reduced:
            self.wait(event, COMPUTE)
        update = lambda: self.launch(_OPTIMIZER, recipe.kernel_us / 2, COMPUTE)  # noqa: E731
        self.op(
            "Optimizer.step#AdamW.step",
            lambda: self.op("aten::_fused_adamw_", update),
            "user_annotation",
        )
        if recipe.item:
            self.op("aten::item", self.read)

    def load(self, number: int) -> None:
        """The next batch: its worker made the one before, and began when it was asked for."""
        recipe, draw = self.recipe, self.job.draw
        batch = self.job.node("batch", draw(recipe.batch_us))
        if number >= recipe.workers:
            batch.after.append((self.batches[number - recipe.workers], True, 0.0))
        elif not number:
            batch.work *= self.job.draw(0.5)
        else:
            batch.work *= (number + 0.5) / recipe.workers
        ahead = 2 * recipe.workers
        if number >= ahead:
            batch.after.append((self.asked[number - ahead], True, 0.0))
        self.batches.append(batch)
        waits = self.host("next", 15.0)
        waits.until.append((batch, True, draw(8.0)))
        self.asked.append(waits)
        name = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
        self.log("user_annotation", name, self.thread, waits, waits)

    def load_within_step(self, number: int) -> None:
        """The next batch, made by the step itself, or by processes beside it that begin one when
        they are free and it was asked for.
        """
        work, beside = self.job.draw(self.recipe.batch_us), self.recipe.beside
        first, inner, last = [self.host("next", 0.0, name) for name in ("", "aten::stack", "")]
        if beside:
            batch = self.job.node("batch", work)
            if number >= beside:
                batch.after.append((self.batches[number - beside], True, 0.0))
            if number >= 2 * beside:
                batch.after.append((self.asked[number - 2 * beside], True, 0.0))
            last.until.append((batch, True, 0.0))
            self.batches.append(batch)
            self.asked.append(last)
        else:
            first.work, inner.work, last.work = 0.3 * work, 0.5 * work, 0.2 * work
        self.log("cpu_op", "aten::stack", self.thread, inner, inner)
        name = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
        self.log("user_annotation", name, self.thread, first, last)

    def copy(self) -> None:
        kind = "Pageable" if self.recipe.pageable else "Pinned"
        self.launch(
            f"Memcpy HtoD ({kind} -> Device)",
            self.recipe.copy_us,
            COMPUTE,
            "copy",
            call="cudaMemcpyAsync",
            bytes=4_194_304,
        )
        if self.recipe.pageable:
            self.synchronize("cudaStreamSynchronize", (COMPUTE,))

    def read(self) -> None:
        self.launch(
            "Memcpy DtoH (Device -> Pageable)",
            1.5,
            COMPUTE,
            "copy",
            call="cudaMemcpyAsync",
            bytes=4,
        )
        self.synchronize("cudaStreamSynchronize", (COMPUTE,))

    def layer(self, outer: str, inner: str, layer: int, *, forward: bool) -> None:
        recipe = self.recipe
        call_us = 4.0
        if forward and layer == recipe.layers - 1 and recipe.long_call_us:
            call_us = recipe.long_call_us
        gemm = lambda: self.launch(_GEMM, recipe.kernel_us, COMPUTE, call_us=call_us)  # noqa: E731
        small = lambda: self.launch(_ELEMENTWISE, recipe.kernel_us / 5, COMPUTE)  # noqa: E731
        self.op(outer, lambda: self.op(inner, gemm))
        self.op("aten::gelu", small)
        if recipe.exchange and layer % recipe.exchange == 0:
            event = self.talk(
                "all_to_allv",
                ("11", "ep"),
                EXCHANGE,
                ("exchange", forward, layer, len(self.job.nodes) and self.sequence),
            )
            if recipe.overlapped:
                self.op(outer, lambda: self.op(inner, gemm))
            self.wait(event, COMPUTE)

    def receive(self, number: int, source: int, target: int) -> None:
        self.wait(self.talk("recv", ("12", "pp"), 41, ("message", source, target, number)), COMPUTE)

    def run_backward(self) -> list[Node | None]:
        """The backward pass, perhaps on a thread of its own, which the main thread waits for."""
        recipe, reduced = self.recipe, []
        if recipe.thread:
            handed = self.host("op", 15.0)
            self.thread = self.backward
            begun = self.host("think", 0.0)
            begun.after.append((handed, True, 3.0))
        for layer in reversed(range(recipe.layers)):
            for _ in range(2):
                self.layer(
                    "autograd::engine::evaluate_function: AddmmBackward0",
                    "AddmmBackward0",
                    layer,
                    forward=False,
                )
            if recipe.reduce:
                reduced.append(
                    self.talk("allreduce", ("10", "dp"), REDUCE, ("reduce", self.sequence))
                )
        if recipe.thread:
            done = self.last[self.backward]
            self.thread = self.main
            waits = self.host("awaiting", 0.0)
            waits.until.append((done, True, 3.0))
        return reduced


def random_recipe(seed: int, about: str) -> Recipe:
    """A recipe by chance, of one of `SUBJECTS`."""
    chance = random.Random(f"{about} {seed}")
    recipe = Recipe(
        seed=seed,
        steps=chance.randint(3, 5),
        layers=chance.randint(2, 4),
        kernel_us=chance.choice([12.0, 30.0, 60.0, 90.0]),
        op_us=chance.uniform(8.0, 16.0),
        thread=chance.random() < 0.6,
        copy_us=chance.choice([0.0, 60.0]),
        item=chance.random() < 0.4,
    )
    several = chance.choice([2, 2, 3, 4])
    return {
        "loader": replace(
            recipe,
            workers=chance.randint(1, 3),
            batch_us=chance.uniform(1.2, 3.0) * 3_000.0,
            item=chance.random() < 0.7,
        ),
        "stages": replace(
            recipe,
            ranks=2,
            stages=True,
            item=False,
            transfer_us=20.0,
            skew_us=chance.uniform(-3_000, 3_000),
            one_host=chance.random() < 0.5,
        ),
        "reduced": replace(
            recipe,
            ranks=several,
            reduce=True,
            late_us=chance.uniform(0, 80),
            skew_us=chance.choice([0.0, chance.uniform(-2_000, 2_000)]),
            one_host=chance.random() < 0.5,
        ),
        "two communicators": replace(
            recipe,
            ranks=2,
            exchange=1,
            reduce=True,
            overlapped=chance.random() < 0.5,
            thread=True,
            transfer_us=chance.choice([20.0, 45.0]),
        ),
        "long calls": replace(
            recipe,
            long_call_us=chance.uniform(60, 300),
            kernel_us=chance.choice([60.0, 90.0]),
            middle=chance.random() < 0.5,
        ),
        "blocking copies": replace(
            recipe, copy_us=chance.uniform(100, 400), pageable=True, item=chance.random() < 0.3
        ),
        "two synchronisations": replace(recipe, middle=True, item=True, steps=5),
        "loaded within steps": replace(
            recipe,
            batch_us=chance.choice([100.0, 400.0, 1_000.0, 2_500.0]),
            steps=6,
            warm=12,
            item=True,  # each step ends alike, so that the first is like the others
        ),
        "slow rank": replace(
            recipe,
            ranks=several,
            reduce=True,
            slow=chance.uniform(1.0, 1.6),
            late_us=chance.choice([0.0, 40.0, 200.0]),
        ),
        "uneven": replace(
            recipe,
            ranks=several,
            reduce=chance.random() < 0.5,
            exchange=1,
            uneven=chance.uniform(1.0, 1.5),
        ),
    }[about]


def measure_error(told_us: float, true_us: float, window_us: float) -> float:
    """The difference as a share of the larger saving, or of 1 % of the window where both are
    smaller.
    """
    return abs(told_us - true_us) / max(abs(true_us), abs(told_us), 0.01 * window_us)


SUBJECTS = (
    "loader",
    "stages",
    "reduced",
    "two communicators",
    "long calls",
    "blocking copies",
    "two synchronisations",
    "loaded within steps",
    "slow rank",
    "uneven",
)
