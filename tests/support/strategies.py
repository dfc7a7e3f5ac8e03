"""Hypothesis strategies for random traces; needs the package `hypothesis`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

from traceloom.testing.trace_builder import TraceBuilder

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn, SearchStrategy

GENERATIONS = ("2021", "2022", "2023", "2024", "2026", "cuspy", "rocm")
_NAMES = st.one_of(
    st.sampled_from(
        [
            "aten::mm",
            "aten::add",
            "ncclDevKernel_AllReduce",
            'say "hi"',
            "back\\slash",
            "}, {",
            "日本語",
        ]
    ),
    st.text(max_size=12),
)


@st.composite
def builders(draw: DrawFn, max_events: int = 12, generation: str | None = None) -> TraceBuilder:
    """Builders of random traces: crossing spans, orphans, equal times, several threads and streams.

    Args:
        draw: Given by hypothesis.
        max_events: In all.
        generation: Fixed generation; random where None.
    """
    chosen = generation or draw(st.sampled_from(GENERATIONS))
    builder = TraceBuilder(
        rank=draw(st.one_of(st.none(), st.integers(0, 3))), world_size=4, generation=chosen
    )
    whole = chosen in ("2021", "2022", "2023")
    times = (
        st.integers(0, 200).map(float)
        if whole
        else st.integers(0, 200_000).map(lambda ns: ns / 1000)
    )
    for _ in range(draw(st.integers(0, max_events))):
        draw(st.sampled_from(_ADDERS))(draw, builder, times)
    return builder


def _op(draw: DrawFn, builder: TraceBuilder, times: SearchStrategy[float]) -> None:
    shapes: Any = draw(st.none() | st.lists(st.lists(st.integers(0, 64), max_size=3), max_size=3))
    builder.op(
        draw(_NAMES), draw(times), draw(times), thread=draw(st.integers(1, 3)), shapes=shapes
    )


def _frame(draw: DrawFn, builder: TraceBuilder, times: SearchStrategy[float]) -> None:
    name = f"train.py({draw(st.integers(1, 9))}): step"
    builder.python(name, draw(times), draw(times), thread=draw(st.integers(1, 3)))


def _work(draw: DrawFn, builder: TraceBuilder, times: SearchStrategy[float]) -> None:
    number = draw(st.integers(1, 20))
    if draw(st.booleans()):
        builder.launch(
            "cudaLaunchKernel", draw(times), 1, correlation=number, thread=draw(st.integers(1, 3))
        )
    stream = draw(st.sampled_from([0, 7, 20]))
    builder.kernel(draw(_NAMES), draw(times), draw(times), stream=stream, correlation=number)


def _copy(draw: DrawFn, builder: TraceBuilder, times: SearchStrategy[float]) -> None:
    kind = draw(
        st.sampled_from(
            ["HtoD (Pageable -> Device)", "DtoH (Device -> Pinned)", "DtoD (Device -> Device)"]
        )
    )
    builder.copy(
        f"Memcpy {kind}",
        draw(times),
        draw(times),
        bytes=draw(st.integers(0, 2**40)),
        correlation=99,
    )


def _allocation(draw: DrawFn, builder: TraceBuilder, times: SearchStrategy[float]) -> None:
    size = draw(st.integers(-(2**40), 2**40))
    builder.allocation(
        draw(times), size, address=draw(st.integers(0, 2**64 - 1)), total_allocated=abs(size)
    )


def _step(draw: DrawFn, builder: TraceBuilder, times: SearchStrategy[float]) -> None:
    builder.step(draw(st.integers(0, 5)), draw(times), draw(times))


def _other(draw: DrawFn, builder: TraceBuilder, times: SearchStrategy[float]) -> None:
    builder.instant("Record Window End", draw(times)).counter("util", draw(times), 0.5).thread_name(
        2, "loader"
    )


_ADDERS = (_op, _op, _op, _frame, _work, _work, _copy, _allocation, _step, _other)

_CALLS = (
    "cudaLaunchKernel",
    "cudaMemcpyAsync",
    "cudaMemcpy",
    "hipMemcpyWithStream",
    "cudaGraphLaunch",
    "cudaEventRecord",
    "cudaStreamWaitEvent",
    "cudaEventSynchronize",
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventQuery",
)
_OPS = (
    "aten::mm",
    "autograd::engine::evaluate_function: MmBackward0",
    "c10d::allreduce_",
    "record_param_comms",
)
_SPANS = ("## backward ##", "gloo:all_reduce", "nccl:all_reduce", "ProfilerStep#3")
_WORK = (
    "gemm",
    "ncclDevKernel_AllReduce_Sum_f32",
    "Memcpy DtoH (Device -> Pageable)",
    "void ep::dispatch<8>()",
)
_SYNCS = ("Context Sync", "Stream Sync", "Event Sync", "Stream Wait Event")


@st.composite
def waiting_builders(draw: DrawFn) -> TraceBuilder:
    """Traces full of what waits and what is waited for, at times that contradict each other."""
    builder = TraceBuilder(generation=draw(st.sampled_from(["2023", "2024", "2026", "rocm"])))
    scale = draw(st.sampled_from([1, 10, 300]))
    times = st.integers(0, 60).map(lambda at: at * scale)
    small = st.integers(1, 12)
    for _ in range(draw(st.integers(5, 40))):
        at, length, thread, number = draw(times), draw(times), draw(st.integers(1, 3)), draw(small)
        stream = draw(st.sampled_from([7, 20, 24]))
        match draw(st.integers(0, 5)):
            case 0:
                name = draw(st.sampled_from(_OPS))
                back: dict[str, Any] = {
                    "sequence": number,
                    "forward_thread": draw(st.integers(0, 1)),
                }
                builder.op(name, at, length, thread=thread, **back)
            case 1:
                builder.annotation(draw(st.sampled_from(_SPANS)), at, length, thread=thread)
            case 2 | 3:
                name, driver = draw(st.sampled_from(_CALLS)), draw(st.booleans())
                builder.launch(name, at, length, correlation=number, thread=thread, driver=driver)
            case 4:
                builder.kernel(
                    draw(st.sampled_from(_WORK)), at, length, stream=stream, correlation=number
                )
            case _:
                known: dict[str, Any] = {
                    "wait_on_stream": 7,
                    "wait_on_cuda_event_record_corr_id": draw(small),
                }
                builder.sync(
                    draw(st.sampled_from(_SYNCS)),
                    at,
                    length,
                    stream=stream,
                    correlation=number,
                    **known,
                )
    return builder
