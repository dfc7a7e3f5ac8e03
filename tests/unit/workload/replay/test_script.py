"""Scripts that stand alone: they compile, hold nothing of a trace but escaped text, and do what the plan says."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from support.plans import PlanBuilder, groups, small_plan
from traceloom.errors import UsageError
from traceloom.workload.replay.contents import generate_content
from traceloom.workload.replay.plan import ITEM_BYTES, RankPlan, ReplayPlan
from traceloom.workload.replay.script import write_script, write_worst

MM = "aten::mm(Tensor self, Tensor mat2) -> Tensor"
RELU = "aten::relu(Tensor self) -> Tensor"
ADD = "aten::add_.Tensor(Tensor(a!) self, Tensor other, *, Scalar alpha=1) -> Tensor(a!)"
CHUNK = "aten::chunk(Tensor(a -> *) self, int chunks, int dim=0) -> Tensor(a)[]"
NORM = (
    "aten::native_layer_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight, Tensor? bias, float eps) "
    "-> (Tensor, Tensor, Tensor)"
)
T0, T1 = {"tensor": 0}, {"tensor": 1}
HOSTILE = "a\"\"\"b'''\n\rimport os\x00\x0c\u2028\u202e#\\"


def layered(layers: int = 3, batches: int = 2) -> RankPlan:
    """x = relu(norm(x @ w)) some times, the halves of the last one added to a result."""
    build = PlanBuilder()
    x0, out = build.tensor(8, 4, external=True), build.tensor(4, 4, external=True)
    weights = [build.tensor(4, 4, external=True) for _ in range(layers)]
    for _ in range(batches):
        x = x0
        for layer, w in enumerate(weights):
            about: dict[str, Any] = {
                "scope": f"layers.{layer}",
                "phase": "forward",
                "durations_ns": [9000, 8000, 7000],
            }
            product, normed, y = build.tensor(8, 4), build.tensor(8, 4), build.tensor(8, 4)
            build.run(MM, [T0, T1], [x, w], [product], **about)
            build.run(NORM, [T0, [4], None, None, 1e-5], [product], [normed, None, None], **about)
            build.run(RELU, [T0], [normed], [y], **about)
            build.run(ADD, [T0, T1, 1], [y, normed], [y], **about)
            build.run(ADD, [T0, T1, 0.5], [y, x], [y], **about)
            x = y
        storage = build.rows["tensors"][x]["storage"]
        first, second = (build.view(storage, [4, 4], [4, 1], offset=offset) for offset in (0, 16))
        build.run(CHUNK, [T0, 2, 0], [x], [first, second])
        build.run(ADD, [T0, T1, 1], [out, first], [out])
        build.run(ADD, [T0, T1, 1], [out, second], [out])
    return build.build()


def plan_of(rank: RankPlan) -> ReplayPlan:
    return ReplayPlan({0: rank}, groups(1), source="made by hand", torch="2.13.0")


def run_by_hand(plan: RankPlan, seed: int = 0) -> dict[int, Any]:
    """What the registers on external storages hold after one pass, every op called as the plan says."""
    import torch

    tensors = plan.tensors.to_dicts()
    registers: dict[int, Any] = {}
    for row in tensors:
        storage = plan.storages.row(row["storage"], named=True)
        if storage["external"]:
            dtype = getattr(torch, row["dtype"])
            elements = storage["bytes"] // ITEM_BYTES[row["dtype"]]
            whole = generate_content(
                elements, dtype, storage["content"], seed=seed + row["storage"]
            )
            registers[row["tensor"]] = whole.as_strided(row["shape"], row["strides"], row["offset"])
    for op in plan.ops.to_dicts():
        schema, text = plan.calls.row(op["call"])[2:4]
        packet, _, overload = schema.partition("(")[0].partition("::")[2].partition(".")
        values = [
            registers[op["inputs"][value["tensor"]]] if isinstance(value, dict) else value
            for value in json.loads(text)
        ]
        named = {"alpha": values.pop()} if "alpha" in schema else {}
        result = getattr(getattr(torch.ops.aten, packet), overload or "default")(*values, **named)
        results = result if isinstance(result, (list, tuple)) else [result]
        registers.update(
            (r, t) for r, t in zip(op["outputs"], results, strict=True) if r is not None
        )
    return {row: registers[row] for row in (1,)}


def namespace(text: str) -> dict[str, Any]:
    found: dict[str, Any] = {"__name__": "script"}
    exec(compile(text, "script.py", "exec"), found)
    return found


def test_a_script_is_the_same_every_time_and_compiles() -> None:
    text = write_script(plan_of(layered()))
    assert text == write_script(plan_of(layered()))
    ast.parse(text)
    assert "traceloom" not in "\n".join(line for line in text.splitlines() if "import" in line)


def test_layers_are_called_as_functions() -> None:
    text = write_script(plan_of(layered(layers=4)))
    functions = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    blocks = [f for f in functions if f.name.startswith("block_")]
    assert any("Called 8 times" in (ast.get_docstring(block) or "") for block in blocks)
    assert text.count("aten.native_layer_norm.default(") == 1
    assert "# forward: layers.0" in text


def test_what_all_calls_share_is_not_passed() -> None:
    text = write_script(plan_of(layered(layers=1, batches=5)))
    (block,) = (
        f
        for f in ast.parse(text).body
        if isinstance(f, ast.FunctionDef) and f.name.startswith("block_")
    )
    assert [argument.arg for argument in block.args.args] == ["w"]
    assert text.count("    block_1(w)\n") == 5


@pytest.mark.torch
@pytest.mark.parametrize(("layers", "batches"), [(1, 1), (2, 1), (3, 2), (5, 4)])
def test_a_script_does_what_the_plan_says(layers: int, batches: int) -> None:
    torch = pytest.importorskip("torch")
    plan = layered(layers, batches)
    script = namespace(write_script(plan_of(plan), seed=5))
    w = script["outside"]()
    before = [tensor.clone() for tensor in w.values()]
    with torch.no_grad():
        script["step"](w)
        (expected,) = run_by_hand(plan, seed=5).values()
    changed = [
        tensor
        for tensor, old in zip(w.values(), before, strict=True)
        if not torch.equal(tensor, old)
    ]
    assert len(changed) == 1
    assert torch.equal(changed[0], expected)


@pytest.mark.torch
def test_a_script_runs_where_there_is_torch_alone(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    path = tmp_path / "replay.py"
    path.write_text(write_script(plan_of(layered())), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-I", str(path), "--runs", "2"],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert "step: median of 2" in done.stdout
    assert "aten::native_layer_norm" in done.stdout
    path.write_text(write_worst(plan_of(layered()), "aten::mm", 2), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-I", str(path), "--runs", "2"],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert "aten::mm: 6 calls, recorded: 8.00 µs each" in done.stdout.replace("us", "µs").replace(
        "\u202f", " "
    )


@pytest.mark.parametrize("where", ["scope", "phase", "name", "source", "group"])
def test_hostile_names_stand_only_in_texts(where: str) -> None:
    rank = layered()
    plan = plan_of(rank)
    if where == "source":
        plan = replace(plan, source=HOSTILE)
    elif where == "group":
        both = {}
        for number in (0, 1):
            build = PlanBuilder(number)
            x = build.tensor(4, external=True)
            build.wait(build.collective("all_reduce", [x], [x], group=HOSTILE, asynchronous=True))
            both[number] = build.build()
        plan = ReplayPlan(both, groups(2, **{HOSTILE: [0, 1]}), world_size=2)
    else:
        ops = rank.ops.with_columns(pl.lit(HOSTILE).alias(where))
        plan = plan_of(replace(rank, ops=ops))
    text = write_script(plan)
    tree = ast.parse(text)
    assert text.isascii()
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    imports = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    assert imports == {"argparse", "os", "statistics", "time", "torch", "torch.distributed"}
    assert not names & {"b", "system", "a"}
    hidden = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and node.value == HOSTILE
    ]
    assert bool(hidden) == (where in {"name", "group"})


@pytest.mark.parametrize(
    "schema",
    [
        "aten::from_file(str filename, bool? shared=None, int? size=0) -> Tensor",
        "os::system(Tensor self) -> Tensor",
        "aten::mm;import os(Tensor self, Tensor mat2) -> Tensor",
        "aten::mm(Tensor self",
    ],
)
def test_what_may_not_run_is_stood_in_for(schema: str) -> None:
    build = PlanBuilder()
    x, y = build.tensor(2, 2, external=True), build.tensor(2, 2)
    build.run(schema, [T0, T0], [x], [y], durations_ns=[1000])
    text = write_script(plan_of(build.build()))
    ast.parse(text)
    assert "stand_in(1000" in text
    called = [node.attr for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)]
    assert not {"from_file", "mm", "system"} & {*called}


def test_arguments_are_literals() -> None:
    build = PlanBuilder()
    x = build.tensor(2, 3, external=True)
    y = build.tensor(2, 3)
    schema = (
        "aten::full_like(Tensor self, Scalar fill_value, *, ScalarType? dtype=None, Layout? layout=None, "
        "Device? device=None, bool? pin_memory=None, MemoryFormat? memory_format=None) -> Tensor"
    )
    arguments = [
        T0,
        {"float": "-inf"},
        {"dtype": "float64"},
        None,
        {"device": "cuda:3"},
        True,
        None,
    ]
    build.run(schema, arguments, [x], [y])
    build.run(
        "aten::random_.from(Tensor(a!) self, int from, int? to, *, Generator? generator=None) -> Tensor(a!)",
        [T0, 0, 5, {"generator": None}],
        [y],
        [y],
    )
    text = write_script(plan_of(build.build()))
    assert "aten.full_like.default(w[0], float('-inf'), dtype=torch.float64, device=DEVICE)" in text
    assert "getattr(aten.random_, 'from')(t0, 0, 5, generator=None)" in text


@pytest.mark.torch
def test_beside_a_gpu_the_host_keeps_its_tensors() -> None:
    """A batch from the host, a counter of steps that is looked at there, and a custom op that makes one of each."""
    torch = pytest.importorskip("torch")
    to_copy = (
        "aten::_to_copy(Tensor self, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None, "
        "bool? pin_memory=None, bool non_blocking=False, MemoryFormat? memory_format=None) -> Tensor"
    )
    build = PlanBuilder()
    batch, count = build.tensor(2, 3, external=True), build.tensor(1, external=True)
    weight, result = (build.tensor(2, 3, external=True, device="cuda:0") for _ in range(2))
    there, new = build.tensor(2, 3, device="cuda:0"), build.tensor(2, 3)
    zeros = (
        "aten::zeros(SymInt[] size, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None, "
        "bool? pin_memory=None) -> Tensor"
    )
    build.run(to_copy, [T0, None, None, {"device": "cuda:0"}, None, True, None], [batch], [there])
    build.run(ADD, [T0, T1, 1], [result, there], [result])
    build.run(ADD, [T0, T1, 1], [result, weight], [result])
    build.run(zeros, [[2, 3], None, None, {"device": "cpu"}, True], [], [new])
    build.run(ADD, [T0, T1, 1], [batch, new], [batch])
    build.run("aten::item(Tensor self) -> Scalar", [T0], [count], [None])
    made, made_there = build.tensor(2, 3), build.tensor(2, 3, device="cuda:0")
    build.add("mine::both", [weight], [made, made_there], action="stand-in", durations_ns=[1000])
    build.run(ADD, [T0, T1, 1], [batch, made], [batch])
    build.run(ADD, [T0, T1, 1], [result, made_there], [result])
    plan = build.build()
    text = write_script(plan_of(plan))
    assert 'DEVICE = "cuda"' in text.replace("'", '"')
    script = namespace(text)
    for device in (
        "meta",
        "cpu",
    ):  # tensors of both do not go together, and a meta tensor has no item
        script["DEVICE"] = device
        w = script["outside"]()
        assert sorted(tensor.device.type for tensor in w.values()) == sorted(
            ["cpu", "cpu", device, device]
        )
        with torch.no_grad():
            script["step"](w)
    moved = namespace(
        write_script(
            plan_of(replace(plan, storages=plan.storages.with_columns(device=pl.lit("cpu"))))
        )
    )
    moved["DEVICE"] = "meta"
    assert {tensor.device.type for tensor in moved["outside"]().values()} == {"meta"}, (
        "recorded on processors alone"
    )


def test_collectives_of_all_ranks_stand_in_one_file() -> None:
    ranks = {}
    for rank in (0, 1):
        build = PlanBuilder(rank)
        x, parts = build.tensor(4, external=True), build.tensor(8, external=True)
        number = build.collective("all_reduce", [x], [x], asynchronous=True)
        build.collective("all_gather", [x], [parts])
        build.wait(number)
        ranks[rank] = build.build()
    plan = ReplayPlan(ranks, groups(2), world_size=2, source="two")
    text = write_script(plan)
    assert text.count("def step(") == 1
    assert "h0 = dist.all_reduce(w[0], group=group['0'], async_op=True)" in text
    assert "dist.all_gather_into_tensor(w[1], w[0], group=group['0'])" in text
    assert "h0.wait()" in text
    build = PlanBuilder()
    x = build.tensor(4, external=True)
    build.collective("all_reduce", [x], [x], asynchronous=True)
    both = {0: build.build(), 1: replace(ranks[1], ops=ranks[1].ops.head(1))}
    assert write_script(replace(plan, ranks=both)).count("h0.wait()") == 1, (
        "what nobody waits for ends with the step"
    )
    assert "torchrun --nproc-per-node 2" in text
    alone = write_script(replace(plan, ranks={0: ranks[0]}))
    assert "dist." not in alone.replace("import torch.distributed as dist", "")


def test_ranks_that_differ_have_functions_of_their_own() -> None:
    ranks = {}
    for rank in (0, 1):
        build = PlanBuilder(rank)
        x = build.tensor(4, external=True)
        build.collective(
            "send" if rank == 0 else "recv",
            [x] if rank == 0 else [],
            [] if rank == 0 else [x],
            peer=1 - rank,
        )
        ranks[rank] = build.build()
    text = write_script(ReplayPlan(ranks, groups(2), world_size=2))
    assert "    0: (outside_of_0, step_of_0)," in text
    assert "dist.send(w[0], 1, group=group['0'])" in text
    assert "dist.recv(w[0], 0, group=group['0'])" in text
    ast.parse(text)


def test_ops_that_are_not_there_are_named() -> None:
    with pytest.raises(UsageError, match="no op of the plan") as caught:
        write_worst(small_plan(), "aten::nm", 3)
    assert caught.value.slug == "no-such-op"
    assert "aten::mm" in caught.value.hint
