"""Small runs of every sort that a report must show: one of each, made once, with its document."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from support.jobs import ParallelRecipe, Recipe, parallel_job, training_job
from traceloom.report import build
from traceloom.report.documents import ReportDocument
from traceloom.report.views.page import render_report_page
from traceloom.testing import TraceBuilder
from traceloom.trace.session import Session

EVIL = "</script><img src=x onerror=alert(1)>&amp;`|\"'\x1b[31m\x07\u202e\u2028\n*_[a](b)@all 名"
"""Markup of every language a view is written in, what steers a terminal, and what turns the direction of text."""

Document = ReportDocument


def session_of(name: str, *builders: TraceBuilder) -> Session:
    """The traces of these builders as one run."""
    return Session(tuple(builder.build() for builder in builders), name)


def busy_step(
    made: TraceBuilder, number: int, at: float, *, name: str = "", device: int = 0
) -> TraceBuilder:
    """A step of 1 ms: a frame, an operator with a launch, its kernel, a copy on another stream, a call that waits."""
    first = 10 * number + 1000 * device
    made.step(number, at, 1000).python(f"{name}train.py({number}): forward", at + 5, 900)
    made.op(f"{name}aten::mm", at + 10, 300, shapes=[[8, 16], [16, 4]])
    made.launch("cudaLaunchKernel", at + 20, 10, correlation=first + 1)
    made.kernel(f"{name}gemm", at + 60, 200 + number, correlation=first + 1, device=device)
    made.op(f"{name}aten::copy_", at + 350, 50)
    made.launch("cudaMemcpyAsync", at + 360, 10, correlation=first + 2)
    made.copy(
        "Memcpy HtoD (Pageable -> Device)",
        at + 400,
        40,
        bytes=4096,
        correlation=first + 2,
        stream=8,
        device=device,
    )
    made.op(f"{name}aten::item", at + 500, 300)
    return made.launch("cudaStreamSynchronize", at + 510, 280, correlation=first + 3)


def empty() -> Session:
    """A trace without events."""
    return session_of("empty", TraceBuilder())


def host_only() -> Session:
    """Steps of a run without a device."""
    made = TraceBuilder(device_name=None)
    for step in range(3):
        made.step(step, 1000 * step, 1000).op(
            "aten::mm", 1000 * step + 10, 400 + step, shapes=[[4, 4], [4, 4]]
        )
        made.op("aten::add", 1000 * step + 500, 100, thread=2)
    return session_of("host only", made)


def gpu_only() -> Session:
    """Kernels whose launches nobody recorded, on two streams."""
    made = (
        TraceBuilder()
        .kernel("gemm", 0, 100)
        .kernel("gemm", 150, 120)
        .kernel("relu", 120, 60, stream=8)
    )
    return session_of("gpu only", made.fill(400, 5, bytes=1 << 20))


def no_steps() -> Session:
    """Work of one thread that nothing divides into steps."""
    made = TraceBuilder()
    for number in range(4):
        made.op("aten::mm", 1000 * number, 60).launch(
            "cudaLaunchKernel", 1000 * number + 20, 10, correlation=number
        )
        made.kernel("gemm", 1000 * number + 45, 300, correlation=number)
    return session_of("no steps", made)


def several_devices() -> Session:
    """One process that drives two devices, with several streams, threads and kinds of work."""
    made = TraceBuilder(devices=2)
    for step in range(3):
        busy_step(made, step, 1000 * step)
        made.launch("cudaLaunchKernel", 1000 * step + 820, 10, correlation=500 + step)
        made.kernel("relu", 1000 * step + 840, 100, correlation=500 + step, device=1, stream=20)
        made.op("MmBackward0", 1000 * step + 100, 200, thread=2)
    return session_of("several devices", made)


def unknown_ranks() -> Session:
    """Two traces that do not say their rank beside one that does."""
    traces = [
        busy_step(TraceBuilder(rank=rank, host=f"host{k}"), 0, 0)
        for k, rank in enumerate((None, 1, None))
    ]
    return session_of("unknown ranks", *traces)


def with_memory() -> Session:
    """Allocations on the CPU and on a device, one without an allocator's total, and counters."""
    made = TraceBuilder()
    for step in range(3):
        busy_step(made, step, 1000 * step)
        made.allocation(1000 * step + 20, 1 << 20, address=step + 1, total_reserved=1 << 22)
        made.allocation(1000 * step + 25, 1 << 10, address=100 + step, device_type=0, device=-1)
        made.counter("sm__cycles", 1000 * step + 30, 1.5 + step, key="sum")
    made.allocation(2500, -(1 << 20), address=1, total_reserved=1 << 22)
    return session_of("with memory", made)


def compiled() -> Session:
    """Compiled regions, a compilation, modules."""
    made = TraceBuilder()
    for step in range(2):
        at = 2000 * step
        made.step(step, at, 1900).python("nn.Module: Net_0", at + 5, 1000, module_id=1)
        made.op("Torch-Compiled Region: 0/0", at + 20, 200).op("CompiledFunction", at + 30, 100)
        made.op("Torch-Compiled Region: 1/0", at + 250, 40).op("CompiledFunction", at + 255, 20)
        made.op("_compile.compile_inner (dynamo_timed)", at + 300, 100)
        made.op("aten::mm", at + 600, 50, shapes=[[64, 128], [128, 32]])
        made.launch("cudaLaunchKernel", at + 610, 5, correlation=step + 1)
        made.kernel("gemm", at + 630, 100, correlation=step + 1)
    return session_of("compiled", made)


def serving_ranks(count: int) -> list[TraceBuilder]:
    """So many ranks that answer three requests each."""
    traces = []
    for rank in range(count):
        made = TraceBuilder(rank=rank, world_size=count)
        for number in range(3):
            at = 1000 * number
            made.annotation("execute_context_0(0)_generation_4(4)", at, 200)
            made.op("aten::mm", at + 10, 50).launch(
                "cudaLaunchKernel", at + 20, 5, correlation=number + 1
            )
            made.kernel("gemm", at + 50, 100 + 10 * rank, correlation=number + 1)
        traces.append(made)
    return traces


def serving() -> Session:
    """Ranks that answer requests."""
    return session_of("serving", *serving_ranks(2))


def training() -> Session:
    """Four ranks of data parallel training with a late loader on one of them."""
    recipe = Recipe(
        ranks=4,
        steps=2,
        layers=1,
        item=True,
        sync="stream",
        pageable_input=True,
        autograd=True,
        delay_us={3: 700.0},
        seed=4,
    )
    return session_of("training", *training_job(recipe).run().traces())


def stages() -> Session:
    """Two ranks that are the stages of a pipeline, with graphs."""
    recipe = ParallelRecipe(
        data=1, pipeline=2, microbatches=2, steps=2, layers=1, graphs=True, seed=3
    )
    return session_of("stages", *parallel_job(recipe).run().traces())


def hostile() -> Session:
    """Two ranks in which every name that a stranger chooses is `EVIL`."""
    traces = []
    for rank in range(2):
        made = TraceBuilder(rank=rank, world_size=2, device_name=EVIL, host=EVIL)
        for step in range(3):
            busy_step(made, step, 1000 * step, name=EVIL)
            made.kernel(
                f"ncclDevKernel_AllReduce{EVIL}",
                1000 * step + 700,
                50 + rank,
                stream=9,
                **TraceBuilder.collective_args("allreduce", EVIL, 2, 1024, "Float"),
            )
            made.annotation(EVIL, 1000 * step + 820, 30).counter(
                EVIL, 1000 * step + 30, 1.5, key=EVIL
            )
            made.python(f"nn.Module: {EVIL}_0", 1000 * step + 860, 30, module_id=1)
            made.allocation(1000 * step + 20, 1 << 20, address=step + 1)
        made.thread_name(1, EVIL).thread_name(2, EVIL).op(EVIL, 100, 20, thread=2)
        made.group(EVIL, [0, 1], description=EVIL).metadata(with_stack=EVIL)
        traces.append(made)
    return session_of(EVIL, *traces)


def enormous() -> Session:
    """Hours of work at the end of what 64 bits hold, and sizes of exabytes."""
    made = TraceBuilder(base_ns=1_700_000_000_000_000_000)
    hour = 3.6e9
    for step in range(3):
        made.step(step, hour * step, hour).op(
            "aten::mm", hour * step + 1, hour / 2, shapes=[[2**40, 2**20], [2**20, 2]]
        )
        made.launch("cudaMemcpyAsync", hour * step + 2, 10, correlation=step + 1)
        made.copy(
            "Memcpy DtoH (Device -> Pinned)",
            hour * step + 20,
            hour / 3,
            bytes=2**61,
            correlation=step + 1,
        )
        made.allocation(hour * step + 5, 2**60, address=step + 1, total_reserved=2**62)
    return session_of("enormous", made)


SORTS: tuple[Callable[[], Session], ...] = (
    empty,
    host_only,
    gpu_only,
    no_steps,
    several_devices,
    unknown_ranks,
    with_memory,
    compiled,
    serving,
    training,
    stages,
    hostile,
    enormous,
)


@cache
def made(sort: Callable[[], Session]) -> tuple[Session, Document]:
    """A run of that sort and its whole document; both are shared, so nobody may change them."""
    session = sort()
    return session, build(session)


@cache
def page(sort: Callable[[], Session]) -> str:
    """The page of that report."""
    session, document = made(sort)
    return render_report_page(document, session)


def sound() -> TraceBuilder:
    """A trace that no check objects to: four steps of 100 µs with an operator, a frame, a launch and a kernel each: 20 events, 12 of them on the host."""
    builder = TraceBuilder()
    for step in range(4):
        at = 100 * step
        builder.step(step, at, 100).python("train.py(1): f", at, 90)
        builder.op("aten::mm", at + 10, 20, shapes=[[2, 2], [2, 2]])
        builder.launch("cudaLaunchKernel", at + 12, 4, correlation=step + 1).kernel(
            "gemm", at + 40, 10, correlation=step + 1
        )
    return builder
