"""Analyses of traces on disk say what they say of the same traces in memory."""

from __future__ import annotations

import pytest

from support.public_traces import NAMES
from traceloom.formats import read_kineto
from traceloom.report import ReportOptions, build
from traceloom.trace import mapped_arrays
from traceloom.trace.session import Session

# Steps and stacks, allocations and communication, graphs, no host.
USUAL = (
    "cpu_only_gloo_rank34",
    "h100_bert_small",
    "mi210_gpu_only",
    "mi300_sglang_decode_graphs",
)


@pytest.mark.sampled(2)
@pytest.mark.data
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in USUAL else pytest.mark.thorough) for n in NAMES]
)
def test_the_report_of_a_real_trace_on_disk_is_that_in_memory(
    name, shared_data, tmp_path, monkeypatch
):
    path = shared_data / "kineto" / f"{name}.json.gz"
    expected = build(Session((read_kineto(path),), name), ReportOptions())
    monkeypatch.setenv("TRACELOOM_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(mapped_arrays, "MIN_SPILL_BYTES", 0)
    monkeypatch.setattr(mapped_arrays, "MIN_MAPPED_BYTES", 1)
    monkeypatch.setattr(mapped_arrays, "SLICE_ELEMENTS", 10_000)
    monkeypatch.setattr(mapped_arrays, "MAX_SORTED_ELEMENTS", 20_000)
    assert build(Session((read_kineto(path),), name), ReportOptions()) == expected
    mapped_arrays.BLOCK_POOL.clear()
    assert list((tmp_path / "spill").iterdir()) == []
