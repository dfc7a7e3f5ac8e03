"""Invariants, lives and memory of random plans, against what plain loops over their rows say."""

from __future__ import annotations

import random
from dataclasses import replace
from math import prod
from typing import Any

import polars as pl
import pytest

from support.plans import PlanBuilder
from traceloom.errors import InvariantError
from traceloom.workload.replay.plan import PLAN_SCHEMAS, RankPlan, build_frame

RELU = "aten::relu(Tensor self) -> Tensor"
ITEM = {"float32": 4, "int64": 8, "uint8": 1}


def random_plan(seed: int, ops: int = 8) -> RankPlan:
    """Ops that read one or two tensors that exist, some of them views, and make another one."""
    chance = random.Random(seed)
    build = PlanBuilder()
    live = [
        build.tensor(chance.randint(1, 4), chance.randint(0, 3), external=True) for _ in range(2)
    ]
    for _ in range(ops):
        read = chance.sample(live, chance.randint(1, 2))
        kind = chance.choice(["run", "run", "view", "stand-in", "collective"])
        if kind == "view":
            source = build.rows["tensors"][read[0]]
            geometry = list(source["shape"]), list(source["strides"])
            made = build.view(source["storage"], *geometry, dtype=source["dtype"])
            build.add("view", read[:1], [made], action="view")
            live.append(made)
        elif kind == "collective":
            build.collective("all_reduce", read[:1], read[:1])
        else:
            dtype = chance.choice(list(ITEM))
            made = build.tensor(
                *[chance.randint(0, 4)] * chance.randint(0, 3), dtype=dtype, item=ITEM[dtype]
            )
            build.run(
                RELU, [{"tensor": 0}], read, [made, *([None] if chance.random() < 0.2 else [])]
            )
            build.rows["ops"][-1]["action"] = kind
            live.append(made)
    return build.build()


def rows_of(plan: RankPlan) -> dict[str, list[dict[str, Any]]]:
    return {
        name: getattr(plan, name).to_dicts()
        for name, columns in PLAN_SCHEMAS.items()
        if "rank" in columns
    }


def can_run(rows: dict[str, list[dict[str, Any]]]) -> bool:
    """What `RankPlan.check` documents, row by row."""
    ops, calls, tensors, storages = rows["ops"], rows["calls"], rows["tensors"], rows["storages"]
    for name, number in (
        ("ops", "op"),
        ("calls", "call"),
        ("tensors", "tensor"),
        ("storages", "storage"),
        ("collectives", "collective"),
    ):
        if [row[number] for row in rows[name]] != list(range(len(rows[name]))):
            return False
    for op in ops:
        if any(at is not None and at >= len(tensors) for at in (*op["inputs"], *op["outputs"])):
            return False
        if op["call"] is not None and (
            op["call"] >= len(calls) or op["action"] not in {"run", "stand-in"}
        ):
            return False
        if op["action"] == "run" and op["call"] is None:
            return False
        if op["collective"] is not None and op["collective"] >= len(rows["collectives"]):
            return False
    if any(row["op"] >= len(ops) for row in rows["collectives"]):
        return False
    if any(max(row["first_op"], row["last_op"]) >= len(ops) for row in storages):
        return False
    for tensor in tensors:
        if (
            tensor["storage"] >= len(storages)
            or tensor["dtype"] not in ITEM
            or tensor["offset"] < 0
        ):
            return False
        last = sum(
            (length - 1) * step
            for length, step in zip(tensor["shape"], tensor["strides"], strict=True)
        )
        end = (tensor["offset"] + last + 1) * ITEM[tensor["dtype"]]
        if 0 not in tensor["shape"] and end > storages[tensor["storage"]]["bytes"]:
            return False
    made: set[int] = set()
    for op in ops:
        for at in op["inputs"]:
            if at not in made and not storages[tensors[at]["storage"]]["external"]:
                return False
        made.update(at for at in op["outputs"] if at is not None)
        for at in (*op["inputs"], *op["outputs"]):
            storage = storages[tensors[at]["storage"]] if at is not None else None
            if storage and not storage["first_op"] <= op["op"] <= storage["last_op"]:
                return False
    return True


def changed(rows: dict[str, list[dict[str, Any]]], chance: random.Random) -> tuple[str, str]:
    """Put another value into one cell; which one."""
    cells = {
        "ops": {
            "op": (0, 9),
            "call": (None, 0, 5),
            "collective": (None, 0, 9),
            "action": ("run", "view", "stand-in"),
            "inputs": ([], [0], [3], [99]),
            "outputs": ([], [None], [1], [99]),
        },
        "calls": {"call": (0, 7)},
        "tensors": {
            "tensor": (0, 4),
            "storage": (0, 1, 2, 99),
            "offset": (-1, 0, 1),
            "dtype": ("uint8", "int64"),
            "shape": ([0, 5], [2, 2], [7, 1]),
            "strides": ([1, 1], [9, 9]),
        },
        "storages": {
            "storage": (0, 3),
            "bytes": (0, 1, 10**6),
            "external": (True, False),
            "first_op": (0, 5, 99),
            "last_op": (0, 5, 99),
        },
        "collectives": {"collective": (0, 3), "op": (0, 99)},
    }
    name = chance.choice([name for name in cells if rows[name]])
    column = chance.choice(list(cells[name]))
    row = chance.choice(rows[name])
    row[column] = chance.choice(cells[name][column])
    if column in {"shape", "strides"}:  # of one length
        other = "strides" if column == "shape" else "shape"
        row[other] = [1] * len(row[column])
    return name, column


@pytest.mark.sampled(11)
@pytest.mark.parametrize("seed", range(30))
def test_a_plan_is_refused_where_a_row_says_that_it_cannot_run(seed: int) -> None:
    plan = random_plan(seed)
    assert can_run(rows_of(plan))
    plan.check()
    chance = random.Random(1000 + seed)
    seen = set()
    for _ in range(30):
        rows = rows_of(plan)
        where = [changed(rows, chance) for _ in range(chance.randint(1, 2))]
        other = RankPlan(
            plan.rank,
            **{name: pl.DataFrame(of, schema=PLAN_SCHEMAS[name]) for name, of in rows.items()},
        )
        try:
            other.check()
        except InvariantError:
            accepted = False
        else:
            accepted = True
        assert accepted == can_run(rows), where
        seen.add(accepted)
    assert seen == {True, False}


@pytest.mark.parametrize("seed", range(20))
def test_storages_live_from_their_first_use_to_their_last(seed: int) -> None:
    plan = random_plan(seed, ops=12)
    storages = plan.storages.with_columns(
        pl.lit(7, pl.UInt32).alias("first_op"), pl.lit(7, pl.UInt32).alias("last_op")
    )
    rows = rows_of(plan)
    for storage in replace(plan, storages=storages).with_computed_lifetimes().storages.to_dicts():
        of = {row["tensor"] for row in rows["tensors"] if row["storage"] == storage["storage"]}
        users = [op["op"] for op in rows["ops"] if of & {*op["inputs"], *op["outputs"]}]
        assert (storage["first_op"], storage["last_op"]) == (
            min(users, default=0),
            max(users, default=0),
        )


@pytest.mark.parametrize("seed", range(20))
def test_the_most_memory_is_that_of_the_fullest_moment(seed: int) -> None:
    plan = random_plan(seed, ops=12)
    storages = plan.storages.to_dicts()
    at_each = [
        sum(
            row["bytes"]
            for row in storages
            if row["external"] or row["first_op"] <= op <= row["last_op"]
        )
        for op in range(plan.ops.height)
    ]
    assert plan.peak_bytes() == max(at_each)
    chosen = plan.storages.filter(pl.col("storage") % 2 == 0)
    half = [
        sum(
            row["bytes"]
            for row in storages[::2]
            if row["external"] or row["first_op"] <= op <= row["last_op"]
        )
        for op in range(plan.ops.height)
    ]
    assert plan.peak_bytes(chosen) == max(half)


@pytest.mark.parametrize("seed", range(20))
def test_uses_are_what_ops_take_and_give(seed: int) -> None:
    plan = random_plan(seed)
    storage = plan.tensors["storage"].to_list()
    expected = sorted(
        (op["op"], at, storage[at], side == "outputs")
        for op in plan.ops.to_dicts()
        for side in ("inputs", "outputs")
        for at in op[side]
        if at is not None
    )
    assert sorted(plan.uses().select("op", "tensor", "storage", "made").rows()) == expected


@pytest.mark.parametrize("seed", range(20))
def test_frames_hold_the_values_that_they_are_made_of(seed: int) -> None:
    chance = random.Random(seed)
    count = chance.choice([0, 1, 2, 50])

    def numbers(most: int, *others: Any) -> list[Any]:
        return [
            chance.choice([chance.randrange(most), *others]) for _ in range(chance.randint(0, 3))
        ]

    columns: dict[str, Any] = {
        "rank": [3] * count,
        "tensor": range(count),
        "storage": [chance.randrange(9) for _ in range(count)],
        "offset": [chance.randrange(2**50) for _ in range(count)],
        "shape": [tuple(numbers(2**50)) for _ in range(count)],
        "strides": [numbers(5, 0) for _ in range(count)],
        "dtype": [chance.choice(["float32", "int64"]) for _ in range(count)],
    }
    made = build_frame("tensors", columns)
    assert made.schema == PLAN_SCHEMAS["tensors"]
    assert made.rows() == [
        tuple(list(value) if isinstance(value, tuple) else value for value in row)
        for row in zip(*(columns[name] for name in PLAN_SCHEMAS["tensors"]), strict=True)
    ]
    outputs = [
        [chance.choice([None, 1, 2**32 - 1]) for _ in range(chance.randint(0, 3))]
        for _ in range(count)
    ]
    flags = [
        [chance.choice(["cut-list", "é", 'a"b\\']) for _ in range(chance.randint(0, 2))]
        for _ in range(count)
    ]
    nothing = dict.fromkeys(PLAN_SCHEMAS["ops"], [None] * count)
    ops = build_frame(
        "ops", {**nothing, "inputs": [()] * count, "outputs": outputs, "durations_ns": [[]] * count}
    )
    assert ops["outputs"].to_list() == outputs
    assert ops["inputs"].to_list() == ops["durations_ns"].to_list() == [[]] * count
    calls = build_frame(
        "calls", {**dict.fromkeys(PLAN_SCHEMAS["calls"], [None] * count), "flags": flags}
    )
    assert calls["flags"].to_list() == flags


def test_a_tensor_needs_all_of_its_memory() -> None:
    build = PlanBuilder()
    tensor = build.tensor(3, 5, external=True)
    build.run(RELU, [{"tensor": 0}], [tensor], [build.tensor(3, 5)])
    plan = build.build()
    assert plan.storages["bytes"].to_list() == [prod((3, 5)) * 4] * 2
    for missing, refused in ((0, False), (1, True)):
        shorter = plan.storages.with_columns(pl.col("bytes") - missing)
        if refused:
            with pytest.raises(InvariantError, match="2 tensors do not lie within their storages"):
                replace(plan, storages=shorter).check()
        else:
            replace(plan, storages=shorter).check()
