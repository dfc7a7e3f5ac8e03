"""Whose code a Python frame is, and how much of any host time each frame holds."""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl
import pytest

from traceloom.analyze.host_events import (
    HOST_INTERVALS_SCHEMA,
    find_user_frame,
    fold_stack,
    is_user_frame,
    measure_frame_time,
    measure_sampled_frame_time,
    parse_frame_places,
)
from traceloom.testing import TraceBuilder
from traceloom.trace.session import SAMPLES_SCHEMA

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


def seen_table(
    builder: TraceBuilder,
    looks: Sequence[tuple[float, float, list[str]]],
    *stretches: tuple[float, float],
) -> Table:
    """As `table`, estimated from looks (when and for how long, in microseconds, and the stack)."""
    trace = builder.build()
    samples = pl.DataFrame(
        [
            (0, 1, 1, "", round(at * 1000), round(period * 1000), stack)
            for at, period, stack in looks
        ],
        schema=SAMPLES_SCHEMA,
        orient="row",
    )
    rows = [(0, round(start * 1000), round(end * 1000)) for start, end in stretches]
    (held,) = measure_sampled_frame_time(
        trace, samples, [pl.DataFrame(rows, schema=HOST_INTERVALS_SCHEMA, orient="row")]
    )
    return {(frame, inside): ns // 1000 for frame, inside, ns in held.rows()}


SLOW = ["/u/train.py(1): <module>", "/u/train.py(8): slow"]
LOADS = [*SLOW, "/opt/lib/python3.11/site-packages/PIL/Image.py(3): resize"]


def test_looks_into_stretches_share_their_time() -> None:
    builder = TraceBuilder().op("aten::add", 0, 100)
    looks = [(10, 10, SLOW), (20, 10, LOADS), (30, 10, SLOW), (40, 10, SLOW), (90, 10, LOADS[:1])]
    # Two stretches of 20 us together, with four looks; what was seen elsewhere does not count.
    assert seen_table(builder, looks, (5, 15), (18, 32), (40, 42)) == {
        ("/u/train.py(8): slow", None): 19,  # three of four looks into 26 us
        ("/u/train.py(8): slow", LOADS[-1]): 6,
    }
    assert seen_table(builder, looks[:2], (0, 100)) == {}  # too few
    assert seen_table(builder, [], (0, 100)) == {}
    assert seen_table(builder, looks) == {}


def test_a_stack_that_stays_counts_look_after_look() -> None:
    builder = TraceBuilder().op("aten::add", 0, 100_000)
    looks = [(0, 30_000, SLOW), (30_000, 10_000, LOADS[:1])]
    assert seen_table(builder, looks, (0, 100_000)) == {
        ("/u/train.py(8): slow", None): 75_000,
        ("/u/train.py(1): <module>", None): 25_000,
    }


def test_looks_into_other_steps_count_where_they_were_in_these() -> None:
    builder = TraceBuilder()
    for step, (start, wide) in enumerate([(0, 1), (100, 2), (300, 1)]):
        builder.step(step, start, 100 * wide)
        builder.op("aten::mm", start + 10 * wide, 10 * wide)
        builder.op("aten::add", start + 60 * wide, 10 * wide)
    # Between the two operators of each step, 40 us behind the first one, and once before them.
    looks = [(50, 1, SLOW), (180, 1, SLOW), (345, 1, SLOW), (305, 1, LOADS)]
    assert seen_table(builder, looks, (20, 60)) == {("/u/train.py(8): slow", None): 40}
    # A step with other events says nothing of this one.
    builder.op("aten::sum", 380, 5)
    assert seen_table(builder, looks, (20, 60)) == {}


@pytest.mark.parametrize(
    ("stack", "where"),
    [
        (LOADS, "/u/train.py(8): slow"),
        ([*SLOW, "/u/traceloom/capture/recorder.py(9): called"], "/u/train.py(8): slow"),
        (LOADS[2:], LOADS[2]),
        ([], None),
    ],
)
def test_the_users_line_is_the_innermost_of_their_own(stack: list[str], where: str | None) -> None:
    assert find_user_frame(stack) == where
