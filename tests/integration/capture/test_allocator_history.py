"""The history of the GPU's allocator: a device that plays the part of one, where there is none."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from traceloom.formats.memory_files import read_snapshot
from traceloom.report.memory import build_document
from traceloom.report.memory_sources import read_memory_sources

pytestmark = pytest.mark.torch

# PyTorch's own functions, as a program with a GPU would find them; `use()` is the first use of the device.
DEVICE = """
import pickle, sys, types, traceloom
calls, state = [], {"used": False, "history": HISTORY}
class Played:
    name, total_memory, multi_processor_count = "Played", 1 << 30, 8
def record_history(enabled="all", context="all", stacks="all", max_entries=sys.maxsize, clear_history=False):
    assert context in ("alloc", "all")
    if REFUSES: raise RuntimeError("this allocator has no history")
    calls.append((enabled, max_entries)); state["history"] = enabled is not None
def dump(path):
    frames = [{"filename": "/u/model.py", "line": 7, "name": "forward"}]
    entry = {"action": "alloc", "addr": 512, "size": 1000, "stream": 0, "time_us": 5, "frames": frames}
    with open(path, "wb") as file: pickle.dump({"segments": [], "device_traces": [[entry] if state["history"] else []]}, file)
def use():
    for call, _ in list(torch.cuda._queued_calls)[known:]: call()
    state["used"] = True
known = len(torch.cuda._queued_calls)
torch.backends.cuda.is_built = lambda: True
torch.cuda.is_available, torch.cuda.is_initialized = (lambda: True), (lambda: state["used"])
torch.cuda.device_count, torch.cuda.current_device = (lambda: 1), (lambda: 0)
torch.cuda.get_device_properties = lambda index: Played
torch.cuda.memory_stats = lambda index: {"allocated_bytes.all.current": 1000, "reserved_bytes.all.current": 2000}
torch.cuda.mem_get_info = lambda index: (100, 1 << 30)
torch.cuda.memory._record_memory_history, torch.cuda.memory._dump_snapshot = record_history, dump
torch._C._cuda_isHistoryEnabled = lambda: state["history"]
"""
BLOCK = """
with traceloom.record("run", memory=True):
    step()
    before = list(calls)
    use()
    step()
print(before, calls, state["history"])
"""


def _played(recorder: Any, block: str, *, history: bool = False, refuses: bool = False) -> Any:
    device = DEVICE.replace("HISTORY", str(history)).replace("REFUSES", str(refuses))
    return recorder.plain([sys.executable, recorder.script(device + block)])


def test_the_history_begins_with_the_device_and_ends_with_the_recording(recorder: Any) -> None:
    run = _played(recorder, BLOCK)
    assert run.code == 0, run.err
    assert run.out.splitlines() == ["[] [('all', 100000), (None, 9223372036854775807)] False"]
    snapshot = read_snapshot(run.directory / "rank0.memory.pickle")
    assert snapshot.entries["bytes"].to_list() == [1000]
    assert not [name for name in run.files if name.startswith(".rank")]
    found = build_document(read_memory_sources([str(run.directory)]))
    assert {memory["device_type"] for entry in found["ranks"] for memory in entry["memories"]} == {
        "cpu",
        "cuda",
    }


@pytest.mark.thorough
def test_a_program_keeps_the_history_that_it_has_begun_itself(recorder: Any) -> None:
    run = _played(recorder, BLOCK, history=True)
    assert run.out.splitlines() == ["[] [] True"]
    assert read_snapshot(run.directory / "rank0.memory.pickle").entries.height == 1


def test_an_allocator_without_a_history_leaves_a_notice(recorder: Any) -> None:
    run = _played(recorder, BLOCK, refuses=True)
    assert run.code == 0, run.err
    assert [notice["slug"] for notice in run.rank()["notices"]] == ["no-memory-history"]
    assert any(line.endswith("[no-memory-history]") for line in run.ours)


@pytest.mark.thorough
def test_running_out_of_memory_in_a_block_leaves_a_report_and_a_snapshot(recorder: Any) -> None:
    fails = """
with traceloom.record("run", memory=True):
    use()
    step()
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
"""
    run = _played(recorder, fails)
    assert run.code == 1
    report = json.loads(Path(run.directory / "rank0.oom.json").read_text())
    assert (report["asked_bytes"], report["devices"][0]["reserved_bytes"]) == (2 << 30, 2000)
    assert read_snapshot(run.directory / "rank0.memory.pickle").entries.height == 1
