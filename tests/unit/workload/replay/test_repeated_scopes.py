"""Plans whose scopes run several times, and programs with planted repeats: each against a plain list of what runs."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import groupby
from typing import Any

import polars as pl
import pytest

from support.plans import PlanBuilder, groups
from traceloom.errors import UsageError
from traceloom.workload.replay.folding import FoldedProgram, ProgramLine, find_repeats, rename
from traceloom.workload.replay.plan import ReplayPlan
from traceloom.workload.replay.resize import repeat_scope

RELU = "aten::relu(Tensor self) -> Tensor"
SCOPES = ("", "a", "a/b", "b", "layer.0", "layer.0.attention", "layer.01", "b/a")


def scoped_plan(seed: int) -> ReplayPlan:
    chance = random.Random(seed)
    build = PlanBuilder()
    live = [build.tensor(4, external=True)]
    for _ in range(12):
        made = build.tensor(4)
        scope = chance.choice(SCOPES)
        build.run(RELU, [{"tensor": 0}], [chance.choice(live)], [made], scope=scope)
        live.append(made)
        if chance.random() < 0.2:
            build.collective("all_reduce", [made], [made])
    return ReplayPlan({0: build.build()}, groups(1))


def is_inside(scope: str, wanted: str) -> bool:
    return wanted in scope.split("/") or scope.startswith(f"{wanted}.")


@pytest.mark.parametrize("wanted", ["a", "b", "layer.0"])
@pytest.mark.parametrize("seed", range(12))
def test_each_stretch_of_a_scope_runs_as_often_as_asked(seed: int, wanted: str) -> None:
    plan = scoped_plan(seed)
    times = 1 + seed % 3
    before = plan.ranks[0].ops.to_dicts()
    expected: list[dict[str, Any]] = []
    for inside, stretch in groupby(before, key=lambda op: is_inside(op["scope"], wanted)):
        expected += list(stretch) * (times if inside else 1)
    nobody = not any(is_inside(op["scope"], wanted) for op in before)
    if nobody and times > 1:
        with pytest.raises(UsageError) as refused:
            repeat_scope(plan, wanted, times)
        assert refused.value.slug == "no-such-scope"
        return
    after = repeat_scope(plan, wanted, times).ranks[0]
    assert after.ops["op"].to_list() == list(range(len(expected)))
    assert after.ops.drop("op").to_dicts() == [
        {key: op[key] for key in op if key != "op"} for op in expected
    ]
    for row in after.collectives.to_dicts():
        assert after.ops["collective"][row["op"]] == row["collective"]
    for row in after.storages.to_dicts():
        users = [
            at
            for at, op in enumerate(expected)
            if row["storage"] in {*op["inputs"], *op["outputs"]}
        ]
        assert (row["first_op"], row["last_op"]) == (min(users, default=0), max(users, default=0))


def test_a_scope_with_collectives_is_not_repeated() -> None:
    plan = scoped_plan(0)
    rank = plan.ranks[0]
    inside = rank.ops.with_columns(scope=pl.lit("all"))
    plan = replace(plan, ranks={0: replace(rank, ops=inside)})
    assert rank.collectives.height
    with pytest.raises(UsageError, match="other ranks would have to repeat too"):
        repeat_scope(plan, "all", 2)


# -- repeats of a program -----------------------------------------------------------------------------------------


def planted(seed: int) -> tuple[list[ProgramLine], int]:
    """A program with some blocks that stand several times, on other registers; and how many lines there are."""
    chance = random.Random(seed)
    blocks = [
        [
            (10 * number + chance.randrange(8), chance.randint(1, 2))
            for _ in range(chance.randint(5, 14))
        ]
        for number in range(1, 3)
    ]
    lines: list[ProgramLine] = []
    live, new = [0, 1, 2], 3
    for _ in range(chance.randint(3, 7)):
        body = chance.choice(blocks) if chance.random() < 0.8 else [(500 + chance.randrange(5), 1)]
        for at, (what, count) in enumerate(body):
            chain = live[-1] if at else chance.choice(live[-3:])
            reads = (chain, *[live[-2]] * (count - 1))
            lines.append(ProgramLine(what, reads, (new,), len(lines)))
            live.append(new)
            new += 1
    return lines, len(lines)


def run(folded: FoldedProgram, outside: list[int]) -> list[tuple[Any, ...]]:
    """What is done with which values: a value is what made it, so that equal lists are equal programs."""
    out: list[tuple[Any, ...]] = []

    def go(body: int, values: dict[int, Any]) -> None:
        for line in folded.bodies[body]:
            read = [values[register] for register in line.reads]
            if line.what >= 0:
                out.append((line.what, *read))
                values.update((register, len(out)) for register in line.writes)
                continue
            inner = dict(enumerate(read))
            go(-1 - line.what, inner)
            first = folded.parameters[-1 - line.what]
            assert len(read) == first
            values.update((register, inner[first + at]) for at, register in enumerate(line.writes))

    go(0, {register: ("outside", register) for register in outside})
    return out


@pytest.mark.parametrize("seed", range(60))
def test_a_folded_program_does_the_same_in_no_more_lines(seed: int) -> None:
    lines, count = planted(seed)
    folded = find_repeats(lines)
    outside = [0, 1, 2]
    assert run(folded, outside) == run(FoldedProgram([lines], [0]), outside)
    assert sum(map(len, folded.bodies)) <= count
    assert len(folded.parameters) == len(folded.bodies)
    # how often each body runs, counted while it does
    counts = [0] * len(folded.bodies)

    def visit(body: int) -> None:
        counts[body] += 1
        for line in folded.bodies[body]:
            if line.what < 0:
                visit(-1 - line.what)

    visit(0)
    assert folded.calls() == counts
    order = folded.outermost_first()
    assert order[0] == 0
    called = {
        (body, -1 - line.what) for body in order for line in folded.bodies[body] if line.what < 0
    }
    assert all(order.index(outer) < order.index(inner) for outer, inner in called)


@pytest.mark.parametrize("seed", range(30))
def test_stretches_are_the_same_exactly_where_a_renaming_makes_them_so(seed: int) -> None:
    chance = random.Random(seed)
    stretch = [
        ProgramLine(
            chance.randrange(3),
            tuple(chance.randrange(6) for _ in range(chance.randint(0, 2))),
            tuple(chance.sample(range(6, 12), chance.randint(0, 2))),
            at,
        )
        for at in range(8)
    ]
    other = chance.sample(range(100), 12)
    moved = [
        ProgramLine(
            line.what, tuple(other[r] for r in line.reads), tuple(other[r] for r in line.writes), 99
        )
        for line in stretch
    ]
    first, second = rename(stretch), rename(moved)
    assert first.form == second.form
    assert [other[register] for register in first.parameters] == list(second.parameters)
    assert [other[register] for register in first.made] == list(second.made)
    read = [register for line in stretch for register in line.reads]
    if len(set(read)) > 1:  # two registers become one: another form
        one, two = sorted(set(read))[:2]
        merged = [
            line._replace(reads=tuple(one if r == two else r for r in line.reads))
            for line in stretch
        ]
        assert rename(merged).form != first.form
