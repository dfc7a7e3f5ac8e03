"""Waits of the training loop for its data."""

from __future__ import annotations

from traceloom.analyze import data_loading
from traceloom.testing import TraceBuilder

NEXT = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"


def test_waits_are_counted_per_step_and_cut_at_its_bounds() -> None:
    trace = TraceBuilder().mark(1, 0).annotation(NEXT, 8, 6).mark(2, 10).mark(3, 20).build()
    result = data_loading(trace)
    assert result.total_ns == 6000
    assert result.steps.rows() == [(1, 2000, 0.2), (2, 4000, 0.4)]
    assert result.waits.select("name", "duration_ns", "step").rows() == [(NEXT, 6000, 1)]


def test_nested_loaders_count_once() -> None:
    trace = TraceBuilder().step(1, 0, 20).annotation(NEXT, 0, 10).annotation(NEXT, 2, 5).build()
    assert data_loading(trace).total_ns == 10_000


def test_python_frames_serve_where_there_is_no_annotation() -> None:
    trace = TraceBuilder().step(1, 0, 20).python("torch/utils/data/dataloader.py(733): __next__", 3, 4).build()
    result = data_loading(trace)
    assert (result.evidence, result.total_ns) == ("python-frames", 4000)


def test_a_trace_without_loader_calls_says_unknown_not_zero() -> None:
    result = data_loading(TraceBuilder().step(1, 0, 20).op("aten::mm", 0, 5).build())
    assert (result.evidence, result.total_ns, result.steps.rows()) == ("none", None, [(1, None, None)])
