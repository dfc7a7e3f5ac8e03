"""Hypothesis strategies for random traces; needs the package `hypothesis`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

from traceloom.testing.builder import TraceBuilder

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn, SearchStrategy

GENERATIONS = ("2021", "2022", "2023", "2024", "2026", "cuspy", "rocm")
_NAMES = st.one_of(
    st.sampled_from(["aten::mm", "aten::add", "ncclDevKernel_AllReduce", 'say "hi"', "back\\slash", "}, {", "日本語"]),
    st.text(max_size=12),
)


@st.composite
def builders(draw: DrawFn, most_events: int = 12, generation: str | None = None) -> TraceBuilder:
    """Builders of random traces: crossing spans, orphans, equal times, several threads and streams.

    Args:
        draw: Given by hypothesis.
        most_events: In all.
        generation: Fixed generation; random where None.
    """
    chosen = generation or draw(st.sampled_from(GENERATIONS))
    builder = TraceBuilder(rank=draw(st.one_of(st.none(), st.integers(0, 3))), world_size=4, generation=chosen)
    whole = chosen in ("2021", "2022", "2023")
    times = st.integers(0, 200).map(float) if whole else st.integers(0, 200_000).map(lambda ns: ns / 1000)
    for _ in range(draw(st.integers(0, most_events))):
        draw(st.sampled_from(_ADDERS))(draw, builder, times)
    return builder


def _op(draw: DrawFn, builder: TraceBuilder, times: SearchStrategy[float]) -> None:
    shapes: Any = draw(st.none() | st.lists(st.lists(st.integers(0, 64), max_size=3), max_size=3))
    builder.op(draw(_NAMES), draw(times), draw(times), thread=draw(st.integers(1, 3)), shapes=shapes)


def _frame(draw: DrawFn, builder: TraceBuilder, times: SearchStrategy[float]) -> None:
    name = f"train.py({draw(st.integers(1, 9))}): step"
    builder.python(name, draw(times), draw(times), thread=draw(st.integers(1, 3)))


def _work(draw: DrawFn, builder: TraceBuilder, times: SearchStrategy[float]) -> None:
    number = draw(st.integers(1, 20))
    if draw(st.booleans()):
        builder.launch("cudaLaunchKernel", draw(times), 1, correlation=number, thread=draw(st.integers(1, 3)))
    stream = draw(st.sampled_from([0, 7, 20]))
    builder.kernel(draw(_NAMES), draw(times), draw(times), stream=stream, correlation=number)


def _copy(draw: DrawFn, builder: TraceBuilder, times: SearchStrategy[float]) -> None:
    kind = draw(st.sampled_from(["HtoD (Pageable -> Device)", "DtoH (Device -> Pinned)", "DtoD (Device -> Device)"]))
    builder.copy(f"Memcpy {kind}", draw(times), draw(times), bytes=draw(st.integers(0, 2**40)), correlation=99)


def _allocation(draw: DrawFn, builder: TraceBuilder, times: SearchStrategy[float]) -> None:
    size = draw(st.integers(-(2**40), 2**40))
    builder.allocation(draw(times), size, address=draw(st.integers(0, 2**64 - 1)), total_allocated=abs(size))


def _step(draw: DrawFn, builder: TraceBuilder, times: SearchStrategy[float]) -> None:
    builder.step(draw(st.integers(0, 5)), draw(times), draw(times))


def _other(draw: DrawFn, builder: TraceBuilder, times: SearchStrategy[float]) -> None:
    builder.instant("Record Window End", draw(times)).counter("util", draw(times), 0.5).thread_name(2, "loader")


_ADDERS = (_op, _op, _op, _frame, _work, _work, _copy, _allocation, _step, _other)
