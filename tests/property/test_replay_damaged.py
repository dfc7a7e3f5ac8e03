"""Plans of host traces in which anything stands anywhere: a plan that can be run, or a refusal, never a crash."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, strategies as st

from traceloom.errors import InputError
from traceloom.testing.host_trace_builder import HOST_SCHEMAS, HostTraceBuilder
from traceloom.workload.replay.planning import Choice, make_plan

JUNK = [
    None,
    -1,
    0,
    2**63,
    2**70,
    1e308,
    0.5,
    "x",
    "nan",
    "\ud800",
    "<Tensor>",
    "Tensor(",
    "GenericList[",
    "]",
    "(",
    "aten::mm(Tensor self, Tensor mat2) -> Tensor",
    "Tensor(float)",
    [],
    {},
    [[]],
    [1, 2, 3],
    True,
]
MM = "aten::mm(Tensor self, Tensor mat2) -> Tensor"
CAT = "aten::cat(Tensor[] tensors, int dim=0) -> Tensor"


def text(schema: str) -> str:
    made = HostTraceBuilder(schema)
    made.groups(
        [{"pg_name": "0", "pg_desc": "", "backend_config": "", "ranks": [], "group_size": 2}]
    )
    for number in range(4):
        made.op("scope", scope=7)
        a, b = (
            [[storage, storage, 0, 4, 4, "cpu"], [2, 2], "Tensor(float)"]
            for storage in (10, 20 + number)
        )
        made.op("aten::mm", schema=MM, inputs=[a, b], outputs=[b], sequence=number)
        made.op(
            "aten::cat",
            schema=CAT,
            inputs=[
                ([a[0], b[0]], [a[1], b[1]], "GenericList[Tensor(float),Tensor(float)]"),
                (0, [], "Int"),
            ],
            outputs=[([40 + number, 40 + number, 0, 8, 4, "cpu"], [4, 2], "Tensor(float)")],
        )
        made.op(
            "record_param_comms",
            inputs=[
                ([a[0]], [a[1]], "GenericList[Tensor(float)]"),
                (number, [], "Int"),
                (["0", ""], [[], []], "Tuple[String]"),
                (0, [], "Int"),
                ("allreduce", [], "String"),
                ([], [], "GenericList[]"),
                ([], [], "GenericList[]"),
            ],
        )
    return made.text()


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place within a JSON value."""
    parts = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, part in parts:
        yield (*path, key)
        yield from paths(part, (*path, key))


@given(seed=st.integers(0, 10**6), schema=st.sampled_from(HOST_SCHEMAS), times=st.integers(1, 20))
def test_whatever_stands_there(
    seed: int, schema: str, times: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    chance = random.Random(seed)
    document = json.loads(text(schema))
    for _ in range(times):
        *above, last = chance.choice([path for path in paths(document["nodes"]) if path])
        holder = document["nodes"]
        for key in above:
            holder = holder[key]
        if chance.random() < 0.2:
            del holder[last]
        else:
            holder[last] = chance.choice(JUNK)
    path = tmp_path_factory.mktemp("damaged") / "rank0.host.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    try:
        plan = make_plan(path, choice=Choice(level=chance.choice(["outermost", "leaf"])))
    except InputError:
        return
    plan.check()
