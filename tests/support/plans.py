"""Small plans of a replay, made by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import polars as pl

from traceloom.workload.replay.plan import (
    FAILURES,
    OPS,
    PLAN_SCHEMAS,
    STAND_INS,
    RankPlan,
    RankReplayResult,
    Replayed,
    ReplayPlan,
)

_MS = 1_000_000
_MM = "aten::mm(Tensor self, Tensor mat2) -> Tensor"
_RELU = "aten::relu(Tensor self) -> Tensor"
_T0, _T1 = {"tensor": 0}, {"tensor": 1}


class PlanBuilder:
    """Builds the plan of one rank, op by op: `tensor` for a register, `run` for an op."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.rows: dict[str, list[dict[str, Any]]] = {name: [] for name in PLAN_SCHEMAS}
        self.external: set[int] = set()

    def tensor(self, *shape: int, dtype: str = "float32", item: int = 4, **external: Any) -> int:
        """A contiguous tensor with a storage of its own; `external=True` and `content=...` where no op makes it."""
        elements = 1
        strides: list[int] = []
        for length in reversed(shape):
            strides.insert(0, elements)
            elements *= length
        about = {"external": False, "content": None, "recorded": 0, "device": "cpu"} | external
        if about["external"] and about["content"] is None:
            about |= {
                "content": "floats" if dtype.startswith(("float", "bfloat")) else "integers",
                "evidence": "guess",
            }
        storages = self.rows["storages"]
        storages.append({"storage": len(storages), "bytes": elements * item, **about})
        return self.view(len(storages) - 1, list(shape), strides, dtype=dtype)

    def view(
        self,
        storage: int,
        shape: list[int],
        strides: list[int],
        *,
        offset: int = 0,
        dtype: str = "float32",
    ) -> int:
        """A further geometry of a storage."""
        tensors = self.rows["tensors"]
        tensors.append(
            {
                "tensor": len(tensors),
                "storage": storage,
                "offset": offset,
                "shape": shape,
                "strides": strides,
                "dtype": dtype,
            }
        )
        return len(tensors) - 1

    def run(
        self,
        schema: str,
        arguments: list[Any],
        inputs: list[int],
        outputs: list[int | None],
        **about: Any,
    ) -> int:
        """An op of a schema with its arguments; tensors are `{"tensor": k}`, the k-th of the inputs."""
        calls = self.rows["calls"]
        text = json.dumps(arguments)
        call = next(
            (c["call"] for c in calls if (c["schema"], c["arguments"]) == (schema, text)),
            len(calls),
        )
        if call == len(calls):
            calls.append({"call": call, "schema": schema, "arguments": text, "flags": []})
        return self.add(
            schema.partition("(")[0].rpartition(".")[0] or schema.partition("(")[0],
            inputs,
            outputs,
            action="run",
            call=call,
            **about,
        )

    def add(
        self, name: str, inputs: list[int], outputs: list[int | None], *, action: str, **about: Any
    ) -> int:
        """An instruction of any kind."""
        ops = self.rows["ops"]
        ops.append(
            {
                "op": len(ops),
                "node": None if action == "view" else 100 + len(ops),
                "name": name,
                "action": action,
                "inputs": inputs,
                "outputs": outputs,
                "thread": 1,
                "scope": "",
                "durations_ns": [],
            }
            | about
        )
        return len(ops) - 1

    def collective(
        self,
        kind: str,
        inputs: list[int],
        outputs: list[int | None],
        group: str = "0",
        **about: Any,
    ) -> int:
        """A collective; returns its number, for `wait`."""
        number = len(self.rows["collectives"])
        op = self.add(f"c10d::{kind}", inputs, outputs, action="collective", collective=number)
        self.rows["collectives"].append(
            {
                "collective": number,
                "op": op,
                "kind": kind,
                "group": group,
                "splits_in": [],
                "splits_out": [],
                "asynchronous": False,
            }
            | about
        )
        return number

    def wait(self, collective: int) -> int:
        """A wait for a collective."""
        return self.add("wait", [], [], action="wait", collective=collective)

    def build(self) -> RankPlan:
        """The plan, with the lives of its storages."""
        for storage in self.rows["storages"]:
            geometries = {
                t["tensor"] for t in self.rows["tensors"] if t["storage"] == storage["storage"]
            }
            users = [
                op["op"] for op in self.rows["ops"] if geometries & {*op["inputs"], *op["outputs"]}
            ]
            storage["first_op"], storage["last_op"] = min(users, default=0), max(users, default=0)
        frames = {
            name: pl.DataFrame(
                [{"rank": self.rank, **row} for row in self.rows[name]], schema=columns
            )
            for name, columns in PLAN_SCHEMAS.items()
            if "rank" in columns
        }
        return RankPlan(self.rank, **frames)


def groups(world: int, **others: list[int]) -> pl.DataFrame:
    """The group `0` of all ranks, and others by name."""
    members = {"0": list(range(world)), **others}
    rows = [
        {"name": name, "description": "", "backend": "gloo", "ranks": ranks}
        for name, ranks in members.items()
    ]
    return pl.DataFrame(rows, schema=PLAN_SCHEMAS["groups"])


def small_plan() -> ReplayPlan:
    """y = relu(x @ w), where x and w come from outside."""
    build = PlanBuilder()
    x, w = build.tensor(8, 4, external=True), build.tensor(4, 6, external=True)
    product, result = build.tensor(8, 6), build.tensor(8, 6)
    build.run(
        "aten::mm(Tensor self, Tensor mat2) -> Tensor",
        [{"tensor": 0}, {"tensor": 1}],
        [x, w],
        [product],
    )
    build.run("aten::relu(Tensor self) -> Tensor", [{"tensor": 0}], [product], [result])
    return ReplayPlan({0: build.build()}, groups(1), source="made by hand", torch="2.13.0")


def timed_plan(name: str = "made by hand", scope: str = "layer") -> ReplayPlan:
    """Two products of 4 and 2 ms, a relu of 1 ms that fails, a custom op of 2 ms, and an all_reduce of 1 ms."""
    build = PlanBuilder()
    x, w = (
        build.tensor(8, 4, external=True),
        build.tensor(4, 4, external=True, content="floats", evidence="consumer"),
    )
    y, z, r = build.tensor(8, 4), build.tensor(8, 4), build.tensor(8, 4)
    about: dict[str, Any] = {"scope": scope, "phase": "forward"}
    build.run(_MM, [_T0, _T1], [x, w], [y], durations_ns=[3 * _MS, 4 * _MS, 5 * _MS], **about)
    build.run(_MM, [_T0, _T1], [y, w], [z], durations_ns=[2 * _MS], gap_ns=_MS, **about)
    build.run(_RELU, [_T0], [z], [r], durations_ns=[_MS], **about)
    build.add(
        "mine::op", [z], [r], action="stand-in", durations_ns=[2 * _MS], reason="custom-op", **about
    )
    build.collective("all_reduce", [r], [r], bytes=128)
    build.rows["ops"][-1]["durations_ns"] = [_MS]
    rank = build.build()
    out = [
        {
            "rank": 0,
            "node": 9,
            "name": "aten::save",
            "reason": "refused-op",
            "text": "it writes",
            "duration_ns": None,
        }
    ]
    steps = pl.DataFrame(
        {
            "rank": [0] * 3,
            "step": [3, 4, 5],
            "duration_ns": [19 * _MS, 20 * _MS, 30 * _MS],
            "cpu_ns": [None, 10 * _MS, 12 * _MS],
        },
        schema=PLAN_SCHEMAS["steps"],
    )
    rank = replace(rank, omitted=pl.DataFrame(out, schema=PLAN_SCHEMAS["omitted"]), steps=steps)
    return ReplayPlan({0: rank}, groups(2), source=name, torch="2.12.0", world_size=2)


def ran(**changes: Any) -> Replayed:
    """What running `timed_plan` gave: its relu failed."""
    ops = pl.DataFrame(
        {
            "op": [0, 1, 2, 3, 4],
            "durations_ns": [[2 * _MS], [3 * _MS], [_MS], [0], [2 * _MS, 4 * _MS]],
            "cpu_ns": [[1]] * 5,
            "gpu_ns": [None] * 5,
        },
        schema=OPS,
    )
    failures = [{"op": 2, "node": 102, "name": "aten::relu", "text": "no"}]
    stand_ins = [
        {"op": 3, "node": 103, "name": "mine::op", "reason": "custom-op", "text": "unknown here"}
    ]
    about: dict[str, Any] = {
        "rank": 0,
        "iteration_ns": (12 * _MS, 10 * _MS),
        "iteration_cpu_ns": (11 * _MS,) * 2,
        "ops": ops,
        "peak_bytes": 1000,
        "resident_bytes": 2000,
        "failures": pl.DataFrame(failures, schema=FAILURES),
        "stand_ins": pl.DataFrame(stand_ins, schema=STAND_INS),
    }
    return Replayed(
        "made by hand",
        "cpu",
        "fast",
        0,
        {"torch": "2.13.0"},
        {0: RankReplayResult(**{**about, **changes})},
    )
