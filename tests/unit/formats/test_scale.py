"""Large and hostile traces: work stays linear, columns on disk give the same trace."""

from __future__ import annotations

import json

import numpy as np

from support.bigfile import write_big
from traceloom.formats import read_kineto
from traceloom.trace import mapped_arrays
from traceloom.trace.arrays import build_nesting


def test_a_chain_of_crossing_spans_is_linear_work():
    count = 200_000
    start = np.arange(count, dtype=np.int64) * 2
    found = build_nesting(np.zeros(count, np.int64), start, start + 3, np.ones(count, np.bool_))
    assert len(found.clipped) == count - 1
    assert not found.depth.any()


def test_very_deep_nesting_is_kept_whole(tmp_path):
    event = '{"ph":"X","cat":"cpu_op","name":"a","pid":1,"tid":1,"ts":%d,"dur":%d}'
    path = tmp_path / "deep.json"
    path.write_text(
        '{"traceEvents":[' + ",".join(event % (i, 9000 - 2 * i) for i in range(3000)) + "]}"
    )
    trace = read_kineto(path)
    trace.check()
    assert trace.events["depth"].max() == 2999


def test_a_big_file_is_its_source_again_and_again(tmp_path):
    path = tmp_path / "big.json"
    entries = write_big(path, 3_000_000)
    assert len(json.loads(path.read_text())["traceEvents"]) == entries
    trace = read_kineto(path)
    trace.check()
    assert trace.meta.event_count == entries
    assert trace.gpu_work()["launch"].null_count() == 0
    assert not [notice for notice in trace.notices if notice.severity != "info"]


def test_columns_on_disk_give_the_same_trace_and_leave_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACELOOM_CACHE_DIR", str(tmp_path / "cache"))
    path = tmp_path / "big.json"
    write_big(path, 40_000_000)
    inside = read_kineto(path)
    monkeypatch.setattr(mapped_arrays, "MIN_SPILL_BYTES", 1_000_000)
    spilled = read_kineto(path)
    for name, frame in inside.frames().items():
        assert spilled.frames()[name].equals(frame), name
    assert list((tmp_path / "cache" / "spill").iterdir()) == []
