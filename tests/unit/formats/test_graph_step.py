"""Which op of the graph step is which op of the timed steps."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from traceloom.formats.alignment import find_timed_ops, is_op, match_ops
from traceloom.testing import TraceBuilder
from traceloom.trace.trace import Trace

Program = list[tuple[str, int]]
"""Names of ops with their threads, in the order in which they run."""
PROGRAM: Program = [("a", 1), ("b", 1), ("x", 2), ("c", 1), ("b", 1), ("y", 2), ("x", 2), ("d", 1)]
LENGTH = 1000


def steps(*programs: Program, shapes: bool = False) -> TraceBuilder:
    """A step for each program, marked as the recorder marks them; with shapes, `[[place in the program]]`."""
    made = TraceBuilder()
    for number, program in enumerate(programs):
        made.mark(number, LENGTH * number)
        for place, (name, thread) in enumerate(program):
            at = LENGTH * number + 10 * (place + 1)
            made.op(name, at, 5, thread=thread, shapes=[[place]] if shapes else None)
    return made.mark(len(programs), LENGTH * len(programs))


def rows(trace: Trace) -> list[dict[str, Any]]:
    return trace.events.select("event", "name", "thread", "start_ns", "step").to_dicts()


def same_names(
    graph: Trace, timed: Trace, recorded: Callable[[str], bool] = bool
) -> list[str | None]:
    """Of each op of the timed steps, in their order, `name@place` of what it is in the graph step."""
    chosen = is_op(graph) & find_timed_ops(graph)
    chosen &= np.array([recorded(name) for name in graph.events["name"].to_list()])
    same = match_ops(timed, graph, chosen)
    seen = rows(graph)
    places = {row["event"]: f"{row['name']}@{round(row['start_ns'] / 10_000) - 1}" for row in seen}
    return [
        places[int(same[row["event"]])] if same[row["event"]] >= 0 else None
        for row in rows(timed)
        if not row["name"].startswith("traceloom.")
    ]


def test_the_same_program_again_and_again_is_the_same_op_by_op() -> None:
    graph, timed = steps(PROGRAM).build(), steps(PROGRAM, PROGRAM, PROGRAM).build()
    assert (
        same_names(graph, timed)
        == [f"{name}@{place}" for place, (name, _) in enumerate(PROGRAM)] * 3
    )


def test_what_the_graph_step_lacks_is_nothing_and_the_rest_is_as_before() -> None:
    longer = [*PROGRAM[:3], ("new", 1), *PROGRAM[3:], ("last", 2)]
    graph, timed = steps(PROGRAM).build(), steps(longer, PROGRAM).build()
    whole = [f"{name}@{place}" for place, (name, _) in enumerate(PROGRAM)]
    assert same_names(graph, timed) == [*whole[:3], None, *whole[3:], None, *whole]


def test_ops_that_may_not_be_named_are_not() -> None:
    graph, timed = steps(PROGRAM).build(), steps(PROGRAM, PROGRAM).build()
    names = same_names(graph, timed, recorded=lambda name: name in {"a", "d", "x"})
    once = ["a@0", None, "x@2", None, None, None, "x@6", "d@7"]
    assert names == once * 2
    assert same_names(graph, timed, recorded=lambda _: False) == [None] * 16


def test_an_op_that_runs_on_another_thread_is_found_by_its_turn() -> None:
    moved = [(name, 3 if name == "y" else thread) for name, thread in PROGRAM]
    graph, timed = steps(PROGRAM).build(), steps(moved).build()
    assert same_names(graph, timed) == [
        f"{name}@{place}" for place, (name, _) in enumerate(PROGRAM)
    ]


def test_turns_count_only_where_both_have_as_many_of_the_name() -> None:
    pool: Program = [("w", thread) for thread in (5, 6, 5)]
    graph = steps([("a", 1), *pool]).build()
    as_many: Program = [("a", 1), *(("w", thread) for thread in (7, 8, 9))]
    assert same_names(graph, steps(as_many).build()) == ["a@0", "w@1", "w@2", "w@3"]
    assert same_names(graph, steps(as_many[:3]).build()) == ["a@0", None, None]


def test_what_runs_outside_of_all_steps_is_nothing() -> None:
    timed = steps(PROGRAM).op("a", 5 * LENGTH, 5).op("d", 6 * LENGTH, 5).build()
    assert same_names(steps(PROGRAM).build(), timed)[len(PROGRAM) :] == [None, None]


def test_kernels_and_calls_are_no_ops_and_the_recorders_own_annotations_are_none_of_the_program() -> (
    None
):
    made = (
        steps(PROGRAM)
        .annotation("traceloom.scope:x", 500, 5)
        .annotation("traceloom is good", 510, 5)
    )
    made.launch("cudaLaunchKernel", 520, 2, correlation=1).kernel("a", 530, 5, correlation=1)
    timed = made.build()
    names = timed.events["name"].filter(find_timed_ops(timed)).to_list()
    assert sorted(names) == sorted([*(name for name, _ in PROGRAM), "traceloom is good"])
    empty = TraceBuilder().build()
    assert find_timed_ops(empty).size == 0
    assert match_ops(empty, timed, is_op(timed)).size == 0
    assert (match_ops(timed, empty, is_op(empty)) == -1).all()


@pytest.mark.parametrize("seed", range(6))
def test_whatever_changes_names_agree_and_no_op_is_taken_twice_in_a_step(seed: int) -> None:
    chance = random.Random(seed)
    program: Program = [(chance.choice("abcdef"), chance.choice([1, 1, 1, 2])) for _ in range(40)]
    timed_programs = []
    for _ in range(3):
        changed = [op for op in program if chance.random() > 0.1]
        for _ in range(3):
            changed.insert(chance.randrange(len(changed)), (chance.choice("abcxyz"), 1))
        timed_programs.append(changed)
    graph, timed = steps(program).build(), steps(*timed_programs).build()
    same = match_ops(timed, graph, find_timed_ops(graph))
    names, taken = graph.events["name"].to_list(), set()
    for row in rows(timed):
        target = int(same[row["event"]])
        if target >= 0:
            assert names[target] == row["name"]
            assert (row["step"], target) not in taken
            taken.add((row["step"], target))
    assert len(taken) > 60  # of about 108: nine in ten of 40, three times
