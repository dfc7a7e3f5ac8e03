"""Small plans of a replay, made by hand."""

from __future__ import annotations

import json
from typing import Any

import polars as pl

from traceloom.replay.plan import PLAN_SCHEMAS, Plan, RankPlan


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
            about |= {"content": "floats" if dtype.startswith(("float", "bfloat")) else "integers", "evidence": "guess"}
        storages = self.rows["storages"]
        storages.append({"storage": len(storages), "bytes": elements * item, **about})
        return self.view(len(storages) - 1, list(shape), strides, dtype=dtype)

    def view(
        self, storage: int, shape: list[int], strides: list[int], *, offset: int = 0, dtype: str = "float32"
    ) -> int:
        """A further geometry of a storage."""
        tensors = self.rows["tensors"]
        tensors.append(
            {"tensor": len(tensors), "storage": storage, "offset": offset, "shape": shape, "strides": strides,
             "dtype": dtype}
        )  # fmt: skip
        return len(tensors) - 1

    def run(self, schema: str, arguments: list[Any], inputs: list[int], outputs: list[int | None], **about: Any) -> int:
        """An op of a schema with its arguments; tensors are `{"tensor": k}`, the k-th of the inputs."""
        calls = self.rows["calls"]
        text = json.dumps(arguments)
        call = next((c["call"] for c in calls if (c["schema"], c["arguments"]) == (schema, text)), len(calls))
        if call == len(calls):
            calls.append({"call": call, "schema": schema, "arguments": text, "flags": []})
        return self.add(schema.partition("(")[0].rpartition(".")[0] or schema.partition("(")[0], inputs, outputs,
                        action="run", call=call, **about)  # fmt: skip

    def add(self, name: str, inputs: list[int], outputs: list[int | None], *, action: str, **about: Any) -> int:
        """An instruction of any kind."""
        ops = self.rows["ops"]
        ops.append(
            {"op": len(ops), "node": None if action == "view" else 100 + len(ops), "name": name, "action": action,
             "inputs": inputs, "outputs": outputs, "thread": 1, "scope": "", "durations_ns": []} | about
        )  # fmt: skip
        return len(ops) - 1

    def collective(
        self, kind: str, inputs: list[int], outputs: list[int | None], group: str = "0", **about: Any
    ) -> int:
        """A collective; returns its number, for `wait`."""
        number = len(self.rows["collectives"])
        op = self.add(f"c10d::{kind}", inputs, outputs, action="collective", collective=number)
        self.rows["collectives"].append(
            {"collective": number, "op": op, "kind": kind, "group": group, "splits_in": [], "splits_out": [],
             "asynchronous": False} | about
        )  # fmt: skip
        return number

    def wait(self, collective: int) -> int:
        """A wait for a collective."""
        return self.add("wait", [], [], action="wait", collective=collective)

    def build(self) -> RankPlan:
        """The plan, with the lives of its storages."""
        for storage in self.rows["storages"]:
            geometries = {t["tensor"] for t in self.rows["tensors"] if t["storage"] == storage["storage"]}
            users = [op["op"] for op in self.rows["ops"] if geometries & {*op["inputs"], *op["outputs"]}]
            storage["first_op"], storage["last_op"] = min(users, default=0), max(users, default=0)
        frames = {
            name: pl.DataFrame([{"rank": self.rank, **row} for row in self.rows[name]], schema=columns)
            for name, columns in PLAN_SCHEMAS.items()
            if "rank" in columns
        }
        return RankPlan(self.rank, **frames)


def groups(world: int, **others: list[int]) -> pl.DataFrame:
    """The group `0` of all ranks, and others by name."""
    members = {"0": list(range(world)), **others}
    rows = [{"name": name, "description": "", "backend": "gloo", "ranks": ranks} for name, ranks in members.items()]
    return pl.DataFrame(rows, schema=PLAN_SCHEMAS["groups"])


def small_plan() -> Plan:
    """y = relu(x @ w), where x and w come from outside."""
    build = PlanBuilder()
    x, w = build.tensor(8, 4, external=True), build.tensor(4, 6, external=True)
    product, result = build.tensor(8, 6), build.tensor(8, 6)
    build.run("aten::mm(Tensor self, Tensor mat2) -> Tensor", [{"tensor": 0}, {"tensor": 1}], [x, w], [product])
    build.run("aten::relu(Tensor self) -> Tensor", [{"tensor": 0}], [product], [result])
    return Plan({0: build.build()}, groups(1), source="made by hand", torch="2.13.0")
