"""Whose code a Python frame is, and how much of any host time each frame holds."""

from __future__ import annotations

import polars as pl
import pytest

from traceloom.analyze.host_events import (
    HOST_INTERVALS_SCHEMA,
    fold_stack,
    is_user_frame,
    measure_frame_time,
    parse_frame_places,
)
from traceloom.testing import TraceBuilder

Table = dict[tuple[str, str | None], int]


def table(builder: TraceBuilder, *stretches: tuple[float, float], thread: int = 1) -> Table:
    """What frames hold of stretches (microseconds) of a thread: by frame and what is innermost, in microseconds."""
    trace = builder.build()
    lane = trace.lanes.filter(pl.col("thread") == str(thread))["lane"][0]
    rows = [(lane, round(start * 1000), round(end * 1000)) for start, end in stretches]
    (rows_held,) = measure_frame_time(
        trace, [pl.DataFrame(rows, schema=HOST_INTERVALS_SCHEMA, orient="row")]
    )
    return {(frame, inside): ns // 1000 for frame, inside, ns in rows_held.rows()}


def nested() -> TraceBuilder:
    return (
        TraceBuilder()
        .python("train.py(1): main", 0, 100)
        .python("scipy/ndimage/_interpolation.py(7): zoom", 10, 50)
        .python("own/data.py(5): callback", 20, 20)
        .python("<built-in function zoom_shift>", 25, 10)
        .op("aten::add", 80, 10)
    )


def test_time_is_given_to_the_innermost_frame_of_the_users_own() -> None:
    assert table(nested(), (0, 100)) == {
        ("train.py(1): main", None): 40,
        ("train.py(1): main", "scipy/ndimage/_interpolation.py(7): zoom"): 30,
        ("train.py(1): main", "aten::add"): 10,
        ("own/data.py(5): callback", None): 10,
        ("own/data.py(5): callback", "<built-in function zoom_shift>"): 10,
    }


def test_stretches_are_cut_out_of_frames_and_count_once() -> None:
    assert table(nested(), (28, 30), (29, 33), (95, 200)) == {
        ("own/data.py(5): callback", "<built-in function zoom_shift>"): 5,
        ("train.py(1): main", None): 5,
    }


def test_a_function_that_calls_itself_holds_its_time_once() -> None:
    builder = TraceBuilder()
    for depth in range(5):
        builder.python("tree.py(3): walk", depth, 20 - 2 * depth)
    assert table(builder, (0, 20)) == {("tree.py(3): walk", None): 20}


def test_another_thread_is_none_of_it() -> None:
    builder = nested().python("other.py(1): loop", 0, 100, thread=2)
    assert table(builder, (0, 20)) == table(nested(), (0, 20))
    assert table(builder, (0, 20), thread=2) == {("other.py(1): loop", None): 20}


def test_without_a_frame_of_the_user_it_is_the_innermost_at_all() -> None:
    builder = (
        TraceBuilder()
        .python("torch/nn/linear.py(3): forward", 0, 100)
        .python("threading.py(1): run", 10, 50)
    )
    builder.python("traceloom/capture/recorder.py(7): stop", 20, 10)
    assert table(builder, (0, 100)) == {
        ("torch/nn/linear.py(3): forward", None): 50,
        ("threading.py(1): run", None): 40,
        ("traceloom/capture/recorder.py(7): stop", None): 10,
    }


def test_objects_at_different_addresses_are_one_call() -> None:
    builder = TraceBuilder().python("train.py(1): main", 0, 100)
    for k in range(3):
        builder.python(
            f"<built-in method acquire of _thread.lock object at 0x7f{k}>", 10 + 20 * k, 10
        )
    assert (
        table(builder, (0, 60))["train.py(1): main", "<built-in method acquire of _thread.lock>"]
        == 30
    )


def test_without_frames_nothing_holds_it() -> None:
    assert table(TraceBuilder().op("aten::add", 0, 10), (0, 10)) == {}


@pytest.mark.parametrize(
    ("frame", "own"),
    [
        ("train.py(3): main", True),
        ("/home/ada/lab/train.py(3): main", True),
        ("transformers/trainer.py(9): step", True),
        ("/opt/venv/lib/python3.12/site-packages/mylib/x.py(3): f", False),
        ("/usr/lib/python3/dist-packages/apt/x.py(3): f", False),
        ("torch/nn/modules/module.py(1743): _call_impl", False),
        ("threading.py(655): wait", False),
        ("multiprocessing/connection.py(3): poll", False),
        ("numpy/core/fromnumeric.py(2): mean", False),
        ("PIL/Image.py(9): resize", False),
        ("<built-in function next>", False),
        ("<frozen os>(3): f", False),
        ("nn.Module: Linear_0", False),
    ],
)
def test_whose_code_it_is(frame: str, own: bool) -> None:
    assert is_user_frame(frame) is own


@pytest.mark.parametrize(
    ("stack", "folded"),
    [
        (
            "<built-in method relu of type object> < torch/x.py(1): relu < a/m.py(3): f < train.py(11): <module>",
            "a/m.py(3): f < train.py(11): <module>",
        ),
        (
            "<built-in function linear> < nn.Module: M_0",
            "<built-in function linear> < nn.Module: M_0",
        ),
        ("x/traceloom/capture/in_code.py(3): step < train.py(1): f", "train.py(1): f"),
    ],
)
def test_a_stack_begins_with_the_users_own_code(stack: str, folded: str) -> None:
    assert fold_stack(stack) == folded


def test_places_of_frames() -> None:
    rows = parse_frame_places(
        pl.Series(["a/b.py(12): f", "C:\\x (1)\\b.py(3): g", "aten::add"])
    ).rows()
    assert rows == [("f", "a/b.py", 12), ("g", "C:\\x (1)\\b.py", 3), ("aten::add", None, None)]
