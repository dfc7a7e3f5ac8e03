"""Ranks that are looked at together have the report of ranks that are looked at one by one, whatever they hold."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.odd_traces import SEEDS, odd_trace
from support.public_traces import DATA, TRACES
from traceloom.formats import load
from traceloom.report import ReportOptions, build
from traceloom.testing import TraceBuilder
from traceloom.trace import batch
from traceloom.trace.session import Session
from traceloom.trace.trace import Trace

# of several vendors, with and without a GPU, steps, shapes, graphs, counters and collectives; no and equal ranks
PUBLIC = (
    "multirank/dlrm_rank0.kineto.json.gz",
    "damaged_metadata/no_rank.json.gz",
    "kineto/cpu_only_gloo_rank34.json.gz",
    "multirank/dlrm_rank1.kineto.json.gz",
    "kineto/triton_example.json.gz",
    "kineto/a100_cupti_counters.json.gz",
    "kineto/mi300_sglang_decode_graphs.json.gz",
    "critical_path/simple_add.json.gz",
    "multirank/dlrm_rank0.kineto.json.gz",
    "kineto/h800_deepseek_train.json.gz",
    "damaged_metadata/no_distributed_info.json.gz",
    "critical_path/event_sync_multi_stream.json.gz",
    "kineto/mi250_minitoy.json.gz",
    "kineto/mi300_bert_small.json.gz",
)


def assert_alike(
    traces: tuple[Trace, ...], options: ReportOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report of several traces in one pass is that of each trace in a pass of its own."""
    shared = build(Session(traces, "made"), options)
    monkeypatch.setattr(batch, "MAX_BATCH_EVENTS", 0)
    # other objects, so that nothing is remembered of them
    alone = build(Session(tuple(replace(trace) for trace in traces), "made"), options)
    assert shared.keys() == alone.keys()
    for key in alone:
        assert shared[key] == alone[key], key


def made() -> tuple[Trace, ...]:
    """Odd traces between traces in which nothing, next to nothing, or one kind of event is recorded."""
    on_gpu = TraceBuilder().kernel("k", 5, 3, correlation=1).build()
    stepped = TraceBuilder().step(0, 0, 10).step(1, 10, 10).op("aten::mm", 2, 5).build()
    odd = [odd_trace(seed) for seed in SEEDS]
    return (
        TraceBuilder().build(),
        *odd[:4],
        on_gpu,
        *odd[4:],
        stepped,
        odd[0],
        TraceBuilder().build(),
    )


@pytest.mark.thorough
@pytest.mark.parametrize(
    "steps",
    [pytest.param(None, marks=pytest.mark.thorough), (1, 2)],
    ids=["whole", "steps"],
)
def test_odd_ranks_have_the_report_of_each_alone(
    steps: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_alike(made(), ReportOptions(steps=steps, by_shape=steps is not None), monkeypatch)


@pytest.mark.data
@pytest.mark.thorough
@pytest.mark.skipif(not TRACES, reason="needs the public traces")
def test_ranks_of_all_sorts_have_the_report_of_each_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    traces = tuple(load(DATA / path).traces[0] for path in PUBLIC)
    assert_alike(traces, ReportOptions(), monkeypatch)
