"""Frames that are made when somebody asks: once, only then, and before a trace leaves the process."""

from __future__ import annotations

import pickle
from dataclasses import replace

import polars as pl
import pytest

from support.odd_traces import odd_trace
from traceloom.trace import storage
from traceloom.trace.trace import DeferredFrame, Trace


class Maker:
    """Counts how often it made a frame."""

    def __init__(self, frame: pl.DataFrame) -> None:
        self.frame, self.times = frame, 0

    def make(self, *kept: object) -> pl.DataFrame:
        assert kept == (1, "b")
        self.times += 1
        return self.frame


def deferred(name: str) -> tuple[Trace, Maker]:
    """A trace of which one frame is made later."""
    whole = odd_trace(1)
    maker = Maker(getattr(whole, name))
    return replace(whole, **{name: DeferredFrame(maker.make, 1, "b")}), maker


@pytest.mark.parametrize("name", ["tensors", "flows", "kernels"])
def test_a_frame_is_made_once_and_only_when_it_is_asked_for(name: str) -> None:
    trace, maker = deferred(name)
    assert (trace.rank, trace.events.height, maker.times) == (0, odd_trace(1).events.height, 0)
    assert getattr(trace, name).equals(getattr(odd_trace(1), name))
    assert getattr(trace, name) is getattr(trace, name)
    assert maker.times == 1
    trace.check()
    assert maker.times == 1


def test_a_trace_and_its_copies_share_what_is_made() -> None:
    trace, maker = deferred("tensors")
    other = replace(trace, notices=())  # a copy has all frames
    assert other.tensors.equals(trace.tensors)
    assert maker.times == 1
    again = replace(trace, flows=DeferredFrame(lambda: trace.flows))
    assert again.tensors is trace.tensors
    assert again.flows is trace.flows


def test_two_traces_that_wait_for_one_frame_make_it_once() -> None:
    whole, maker = odd_trace(1), Maker(odd_trace(1).tensors)
    frame = DeferredFrame(maker.make, 1, "b")
    traces = [replace(whole, tensors=frame) for _ in range(3)]
    assert [trace.tensors.height for trace in traces] == [whole.tensors.height] * 3
    assert maker.times == 1


def test_a_frame_that_cannot_be_made_is_asked_for_again() -> None:
    def never() -> pl.DataFrame:
        raise OSError("the file is gone")

    trace = replace(odd_trace(1), tensors=DeferredFrame(never))
    for _ in range(2):
        with pytest.raises(OSError, match="the file is gone"):
            _ = trace.tensors
    assert trace.events.height == odd_trace(1).events.height
    with pytest.raises(AttributeError, match="a trace has no `colour`"):
        _ = trace.colour


def test_what_leaves_the_process_is_whole(tmp_path) -> None:
    trace, maker = deferred("tensors")
    back = pickle.loads(pickle.dumps(trace))
    assert maker.times == 1
    assert [
        name
        for name, frame in back.frames().items()
        if not frame.equals(odd_trace(1).frames()[name])
    ] == []
    trace, maker = deferred("tensors")
    storage.save(trace, tmp_path)
    assert maker.times == 1
    again = storage.load_trace(tmp_path)
    assert again.meta == trace.meta
    assert again.notices == trace.notices
    assert [
        name
        for name, frame in again.frames().items()
        if not frame.equals(odd_trace(1).frames()[name])
    ] == []


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "passed on"])
def test_a_stored_trace_that_is_not_whole_is_refused(kept: bool, tmp_path) -> None:
    storage.save(odd_trace(2), tmp_path, permanent=kept)
    head = tmp_path / "trace.json"
    whole = head.read_bytes()
    changes = [
        whole[:-1],
        whole.replace(b'"version": ', b'"version": 1'),
        b"",
        whole[len(whole) // 2 :],
    ]
    for changed in changes:
        head.write_bytes(changed)
        with pytest.raises(Exception, match=r"the head is not as it was written|format \d+ is not"):
            storage.load_trace(tmp_path, permanent=kept)
    head.write_bytes(whole)
    assert storage.load_trace(tmp_path, permanent=kept).events.equals(odd_trace(2).events)
    (tmp_path / "events.arrow").write_bytes((tmp_path / "lanes.arrow").read_bytes())
    with pytest.raises(Exception, match=r"frame events is not as"):
        storage.load_trace(tmp_path, permanent=kept)
    (tmp_path / "events.arrow").unlink()
    with pytest.raises(OSError, match=r"events\.arrow"):
        storage.load_trace(tmp_path, permanent=kept)
