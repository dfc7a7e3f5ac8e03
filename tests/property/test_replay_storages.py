"""Versions of storages in a plan against the real allocator: random programs, recorded while it uses memory again.

Each program runs twice. Once it is recorded, and what it drops is freed at once, so that numbers and addresses come
again. Once all of its tensors are kept, so that the address of a storage is a name for it: that is the truth.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings, strategies as st

from traceloom.workload.replay.plan import RUN, RankPlan
from traceloom.workload.replay.planning import make_plan

torch = pytest.importorskip("torch")
SIZE = 6
OUTSIDE = 3
# Name, and how many tensors it reads. Every tensor is square, so that geometries and sizes tell nothing.
OPS = {
    "mm": 2,
    "add": 2,
    "relu_": 1,
    "relu": 1,
    "t": 1,
    "detach": 1,
    "clone": 1,
    "zero_": 1,
    "empty": 0,
    "layer_norm": 1,
}


class Step(NamedTuple):
    """One op of a program: its result is the next register; some registers are dropped after it."""

    name: str
    operands: tuple[int, ...]
    dropped: tuple[int, ...]


def program(seed: int, length: int, *without: str) -> list[Step]:
    chance = random.Random(seed)
    live = list(range(OUTSIDE))
    steps = []
    for number in range(OUTSIDE, OUTSIDE + length):
        name = chance.choice([name for name in OPS if name not in without])
        operands = tuple(chance.choice(live) for _ in range(OPS[name]))
        live.append(number)
        dropped = tuple(
            register for register in live if register >= OUTSIDE and chance.random() < 0.3
        )
        live = [register for register in live if register not in dropped]
        steps.append(Step(name, operands, dropped))
    return steps


def dropping_at_last_use(steps: list[Step]) -> list[Step]:
    """The same program, in which each register is dropped by the last op that uses it."""
    last = {
        register: at for at, step in enumerate(steps) for register in (*step.operands, OUTSIDE + at)
    }
    for at, step in enumerate(steps):
        last |= dict.fromkeys(step.operands, at)
    drops: list[list[int]] = [[] for _ in steps]
    for register, at in last.items():
        if register >= OUTSIDE:
            drops[at].append(register)
    return [
        Step(step.name, step.operands, tuple(dropped))
        for step, dropped in zip(steps, drops, strict=True)
    ]


def call(name: str, operands: list[Any]) -> Any:
    if name == "empty":
        return torch.empty(SIZE, SIZE)
    if name == "layer_norm":
        return torch.nn.functional.layer_norm(*operands, (SIZE,))
    return getattr(operands[0], name)(*operands[1:])


def run(steps: list[Step], *, keep: bool, alive: list[int] | None = None) -> list[list[int]]:
    """Run a program; the addresses of the storages that each op reads and gives; and the bytes alive after each op."""
    registers = {number: torch.rand(SIZE, SIZE) for number in range(OUTSIDE)}
    storages = []
    for number, step in enumerate(steps, OUTSIDE):
        registers[number] = call(step.name, [registers[operand] for operand in step.operands])
        used = [*step.operands, number]
        if keep:
            storages.append([registers[register].untyped_storage().data_ptr() for register in used])
        else:
            for register in step.dropped:
                del registers[register]
        if alive is not None:
            outside = {
                registers[register].untyped_storage().data_ptr() for register in range(OUTSIDE)
            }
            made = {
                t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
                for t in registers.values()
            }
            alive.append(sum(size for address, size in made.items() if address not in outside))
    return storages


def recorded(steps: list[Step], path: Path) -> RankPlan:
    """The plan of a program."""
    observer = torch.profiler.ExecutionTraceObserver().register_callback(str(path))
    observer.start()
    run(steps, keep=False)
    observer.stop()
    observer.unregister_callback()
    return make_plan(path).ranks[0]


def partition(names: list[list[int]]) -> list[list[int]]:
    """Names by the turn of their first use: equal where the same ones are equal."""
    turns: dict[int, int] = {}
    return [[turns.setdefault(name, len(turns)) for name in row] for row in names]


@settings(deadline=None)
@given(seed=st.integers(0, 10**6), length=st.integers(1, 60))
def test_two_tensors_share_a_version_where_they_shared_memory(
    seed: int, length: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("storages") / "rank0.host.json"
    steps = program(seed, length)
    with torch.no_grad():
        truth = run(steps, keep=True)
        plan = recorded(steps, path)
    storage = plan.tensors["storage"]
    ops = plan.ops.filter((plan.ops["action"] == RUN) & (plan.ops["name"] != "aten::rand"))
    assert ops.height == len(steps)
    # a layer norm returns mean and deviation besides; what nothing reads has no register
    used = list(zip(ops["inputs"], ops["outputs"].list.first(), strict=True))
    versions = [
        [storage[row] for row in (*inputs, result) if row is not None] for inputs, result in used
    ]
    seen = [
        names if result is not None else names[:-1]
        for names, (_, result) in zip(truth, used, strict=True)
    ]
    assert partition(versions) == partition(seen)


@settings(deadline=None)
@given(seed=st.integers(0, 10**6), length=st.integers(1, 60))
def test_what_is_not_used_again_is_freed(
    seed: int, length: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    # what an op only allocates, and nothing fills, comes from outside in a replay
    steps = dropping_at_last_use(program(seed, length, "empty"))
    truth: list[int] = []
    with torch.no_grad():
        run(steps, keep=False, alive=truth)
        plan = recorded(steps, tmp_path_factory.mktemp("lives") / "rank0.host.json")
    rows = plan.ops.filter((plan.ops["action"] == RUN) & (plan.ops["name"] != "aten::rand"))["op"]
    made = plan.storages.filter(
        ~plan.storages["external"] & plan.storages["first_op"].is_in(rows.to_list())
    )
    alive = [
        int(made.filter((made["first_op"] <= op) & (made["last_op"] > op))["bytes"].sum())
        for op in rows
    ]
    assert alive == truth
