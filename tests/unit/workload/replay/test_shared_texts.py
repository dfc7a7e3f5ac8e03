"""Nodes that share texts of types, shapes and values, and nodes whose texts are damaged: each has its own truth."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from traceloom.testing.host_trace_builder import HostTraceBuilder
from traceloom.workload.replay.nodes import Nodes
from traceloom.workload.replay.plan import RankPlan
from traceloom.workload.replay.planning import make_plan

FILL = "aten::full_like(Tensor self, Scalar fill_value, *, int[]? dims=None) -> Tensor"
CAT = "aten::cat(Tensor[] tensors, int dim=0) -> Tensor"
RELU = "aten::relu(Tensor self) -> Tensor"


def tensor(
    storage: int, *shape: int, number: int | None = None, elements: int | None = None
) -> Any:
    count = 1
    for length in shape:
        count *= length
    value = [
        storage + 1 if number is None else number,
        storage,
        0,
        count if elements is None else elements,
        4,
        "cpu",
    ]
    return value, list(shape), "Tensor(float)"


def plan_of(made: HostTraceBuilder, folder: Path) -> RankPlan:
    path = folder / "rank0.host.json"
    path.write_text(made.text(), encoding="utf-8")
    return make_plan(path).ranks[0]


def test_numbers_of_equal_value_and_another_type_are_other_calls(tmp_path: Path) -> None:
    values = [
        (0, "Int"),
        (0.5, "Double"),
        (1, "Int"),
        (1.0, "Double"),
        (True, "Bool"),
        (1, "Int"),
        ("<None>", "None"),
    ]
    made = HostTraceBuilder()
    for at, (value, of) in enumerate(values):
        inputs = [
            tensor(10, 4),
            (value, [], of),
            ([value] * 2, [[], []], f"GenericList[{of},{of}]"),
        ]
        made.op("aten::full_like", schema=FILL, inputs=inputs, outputs=[tensor(100 + at, 4)])
    plan = plan_of(made, tmp_path)
    arguments = [plan.calls["arguments"][call] for call in plan.ops["call"]]
    assert arguments == [
        json.dumps(
            [{"tensor": 0}, plain, [1 if type(plain) is float and plain == 1 else plain] * 2],
            separators=(",", ":"),
        )
        for plain in (None if value == "<None>" else value for value, _ in values)
    ]
    assert plan.ops["call"][2] == plan.ops["call"][5]
    assert plan.calls.height == len(values) - 1


def test_a_list_that_was_cut_is_not_the_same_call_as_a_whole_one(tmp_path: Path) -> None:
    made = HostTraceBuilder()
    for count in (4096, 4097):
        dims = (list(range(count)), [[]] * count, f"GenericList[{','.join(['Int'] * count)}]")
        made.op(
            "aten::full_like",
            schema=FILL,
            inputs=[tensor(10, 4), (1, [], "Int"), dims],
            outputs=[tensor(30, 4)],
        )
    plan = plan_of(made, tmp_path)
    assert plan.calls["flags"].to_list() == [[], ["cut-list"]]


@pytest.mark.parametrize("seed", range(20))
def test_lists_of_tensors_have_the_geometry_of_each(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    made = HostTraceBuilder(
        chance.choice(["1.1.0-chakra.0.0.4", "1.1.1-chakra.0.0.4"])
    )  # strides are written since
    expected = []
    for row in range(12):
        rows = [chance.choice([0, 1, 2, 3]) for _ in range(chance.randint(1, 3))]
        parts = [tensor(100 + 10 * row + at, length, 2) for at, length in enumerate(rows)]
        listed = (
            [part[0] for part in parts],
            [part[1] for part in parts],
            f"GenericList[{','.join(part[2] for part in parts)}]",
        )
        made.op(
            "aten::cat",
            schema=CAT,
            inputs=[listed, (0, [], "Int")],
            outputs=[tensor(1000 + row, sum(rows), 2)],
        )
        expected.append([[length, 2] for length in rows])
    plan = plan_of(made, tmp_path)
    shapes, strides_of = plan.tensors["shape"].to_list(), plan.tensors["strides"].to_list()
    assert [[shapes[at] for at in inputs] for inputs in plan.ops["inputs"].to_list()] == expected
    assert all(steps == [2, 1] for steps in strides_of)
    sizes = plan.storages["bytes"].to_list()
    assert sorted(sizes) == sorted(
        [8 * length for rows in expected for length, _ in rows]
        + [8 * sum(r for r, _ in rows) for rows in expected]
    )


def test_a_symbolic_shape_has_as_many_elements_as_it_says_beside_a_scalar_of_the_same_texts(
    tmp_path: Path,
) -> None:
    made = HostTraceBuilder()
    made.op("aten::relu", schema=RELU, inputs=[tensor(10)], outputs=[tensor(20)])
    made.op(
        "aten::relu", schema=RELU, inputs=[tensor(30, elements=6)], outputs=[tensor(40, elements=6)]
    )
    made.op(
        "aten::relu", schema=RELU, inputs=[tensor(50, elements=9)], outputs=[tensor(60, elements=9)]
    )
    plan = plan_of(made, tmp_path)
    assert plan.tensors["shape"].to_list() == [[], [], [6], [6], [9], [9]]
    assert plan.storages["bytes"].to_list() == [4, 4, 24, 24, 36, 36]


@pytest.mark.parametrize(
    ("column", "texts"),
    [
        ("inputs", ("[[1", "2]]")),  # JSON only together
        ("inputs", ("[],[]", "[]")),  # of more values than rows
        ("inputs", ("no JSON", "")),
        ("input_shapes", ("[[4", "[[-1]]")),
        ("input_shapes", ("[[4.5]]", '[["4"]]')),
        ("inputs", ('[[1,2,0,4,4,"cpu",7]]', "[[1,2,0]]")),
        ("inputs", ('[["1",2,0,4,4,"cpu"]]', '[[1,2,-1,4,4,"cpu"]]')),
    ],
)
def test_damaged_nodes_are_left_out_and_their_neighbours_are_not(
    column: str, texts: tuple[str, str]
) -> None:
    made = HostTraceBuilder()
    for at in range(5):
        made.op(
            "aten::relu", schema=RELU, inputs=[tensor(10 + at, 4)], outputs=[tensor(20 + at, 4)]
        )
    host = made.build()
    rows = (host.ops["name"] == "aten::relu").arg_true().to_list()
    spoiled = dict(zip(rows[1:4:2], texts, strict=True))
    column_texts = [spoiled.get(row, text) for row, text in enumerate(host.ops[column].to_list())]
    nodes = Nodes.of(
        replace(host, ops=host.ops.with_columns(pl.Series(column, column_texts, dtype=pl.String)))
    )
    assert [[one.storage for one in nodes.read[row]] for row in rows] == [[10], [], [12], [], [14]]
    assert sorted(nodes.unreadable) == sorted(spoiled)
    assert all(nodes.unreadable.values())
    acts = [row for row in rows if row not in spoiled]
    at, storages = nodes.read.storages(acts)
    assert list(zip(at.tolist(), storages.tolist(), strict=True)) == list(
        zip(acts, [10, 12, 14], strict=True)
    )


def test_a_trace_of_no_op_has_an_empty_plan(tmp_path: Path) -> None:
    plan = plan_of(HostTraceBuilder(), tmp_path)
    assert (plan.ops.height, plan.tensors.height, plan.storages.height, plan.calls.height) == (
        0,
        0,
        0,
        0,
    )
    plan.check()


def test_strides_of_other_nodes_are_not_taken_over() -> None:
    recorded = (
        [2, 1],
        [1, 3],
        [2, 1],
        [1],
        None,
    )  # the last but one are of another number of dimensions
    made = HostTraceBuilder()
    for at in range(len(recorded)):
        made.op(
            "aten::relu",
            schema=RELU,
            inputs=[tensor(10 + at, 3, 2)],
            outputs=[tensor(20 + at, 3, 2)],
        )
    host = made.build()
    rows = (host.ops["name"] == "aten::relu").arg_true().to_list()
    texts = host.ops["attributes"].to_list()
    for row, steps in zip(rows, recorded, strict=True):
        texts[row] = json.dumps(
            {"output_strides": [[2, 1]]} | ({} if steps is None else {"input_strides": [steps]})
        )
    nodes = Nodes.of(
        replace(host, ops=host.ops.with_columns(pl.Series("attributes", texts, dtype=pl.String)))
    )
    geometries = [nodes.read[row][0].geometry for row in rows]
    assert [geometry.strides for geometry in geometries] == [(2, 1), (1, 3), (2, 1), None, None]
    assert [geometry.span for geometry in geometries] == [6, 1 * 2 + 3 * 1 + 1, 6, 6, 6]
    assert [nodes.returned[row][0].geometry.strides for row in rows] == [(2, 1)] * len(recorded)
