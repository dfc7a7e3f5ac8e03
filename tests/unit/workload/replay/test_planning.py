"""Plans of host traces written by hand: which ops are run, on which versions of storages, and who waits for whom."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from traceloom.errors import InputError, UsageError
from traceloom.testing.host_trace_builder import HOST_SCHEMAS, HostTraceBuilder
from traceloom.workload.replay.nodes import read_composite_ops
from traceloom.workload.replay.plan import (
    COLLECTIVE,
    RUN,
    STAND_IN,
    VIEW,
    WAIT,
    RankPlan,
    ReplayPlan,
)
from traceloom.workload.replay.planning import Choice, make_plan

MM = "aten::mm(Tensor self, Tensor mat2) -> Tensor"
RELU = "aten::relu(Tensor self) -> Tensor"
ADD_ = "aten::add_.Tensor(Tensor(a!) self, Tensor other, *, Scalar alpha=1) -> Tensor(a!)"
VIEW_OP = "aten::view(Tensor(a) self, SymInt[] size) -> Tensor(a)"
EMPTY = (
    "aten::empty.memory_format(SymInt[] size, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None, "
    "bool? pin_memory=None, MemoryFormat? memory_format=None) -> Tensor"
)
Value = tuple[Any, Any, str]


def tensor(
    storage: int, *shape: int, offset: int = 0, number: int | None = None, of: str = "float"
) -> Value:
    """A tensor as the observer writes it."""
    elements = 1
    for length in shape:
        elements *= length
    number = storage + 1 if number is None else number
    return ([number, storage, offset, elements, 4, "cpu"], list(shape), f"Tensor({of})")


def plan_of(made: HostTraceBuilder, folder: Path, **choice: Any) -> RankPlan:
    path = folder / "rank0.host.json"
    path.write_text(made.text(), encoding="utf-8")
    plan = make_plan(path, choice=Choice(**choice))
    plan.check()
    return plan.ranks[0]


def versions(plan: RankPlan, op: int, side: str = "inputs") -> list[int]:
    rows = plan.ops[side][op].to_list()
    return [plan.tensors["storage"][row] for row in rows]


@pytest.mark.parametrize("schema", HOST_SCHEMAS)
def test_every_layout_gives_the_same_plan(schema: str, tmp_path: Path) -> None:
    made = HostTraceBuilder(schema)
    made.op(
        "aten::mm",
        schema=MM,
        inputs=[tensor(10, 8, 4), tensor(20, 4, 6)],
        outputs=[tensor(30, 8, 6)],
    )
    made.op("aten::relu", schema=RELU, inputs=[tensor(30, 8, 6)], outputs=[tensor(40, 8, 6)])
    if schema == "1.0.0":  # knows no schemas of ops
        assert plan_of(made, tmp_path).ops.height == 0
        return
    plan = plan_of(made, tmp_path)
    assert plan.ops["action"].to_list() == [RUN, RUN]
    assert plan.storages["external"].to_list() == [True, True, False, False]
    assert plan.storages["bytes"].to_list() == [128, 96, 192, 192]
    assert versions(plan, 1) == versions(plan, 0, "outputs")
    assert json.loads(plan.calls["arguments"][0]) == [{"tensor": 0}, {"tensor": 1}]


def test_a_number_that_is_used_again_is_another_version(tmp_path: Path) -> None:
    made = HostTraceBuilder()
    for _ in range(3):  # the number 30 dies each time and is given to the next
        made.op("aten::relu", schema=RELU, inputs=[tensor(10, 4)], outputs=[tensor(30, 4)])
        made.op("aten::relu", schema=RELU, inputs=[tensor(30, 4)], outputs=[tensor(50, 4)])
    plan = plan_of(made, tmp_path)
    assert [versions(plan, op, "outputs") for op in range(6)] == [[1], [2], [3], [4], [5], [6]]
    assert [versions(plan, op) for op in range(6)] == [[0], [1], [0], [3], [0], [5]]
    assert plan.storages["last_op"].to_list() == [4, 1, 1, 3, 3, 5, 5]


def test_what_nothing_made_may_take_the_number_of_a_smaller_one(tmp_path: Path) -> None:
    made = HostTraceBuilder()
    made.op("aten::relu", schema=RELU, inputs=[tensor(10, 4)], outputs=[tensor(30, 4)])
    made.op("aten::relu", schema=RELU, inputs=[tensor(30, 400)], outputs=[tensor(50, 400)])
    plan = plan_of(made, tmp_path)
    assert versions(plan, 1) != versions(plan, 0, "outputs")
    assert plan.storages.filter("external")["bytes"].to_list() == [16, 1600]


def test_an_op_in_place_and_a_view_stay_on_their_version(tmp_path: Path) -> None:
    made = HostTraceBuilder()
    made.op("aten::relu", schema=RELU, inputs=[tensor(10, 2, 2)], outputs=[tensor(30, 2, 2)])
    made.op(
        "aten::view",
        schema=VIEW_OP,
        inputs=[tensor(30, 2, 2), ([4], [[]], "GenericList[Int]")],
        outputs=[tensor(30, 4, number=99)],
    )
    made.op(
        "aten::add_",
        schema=ADD_,
        inputs=[tensor(30, 4, number=99), tensor(60, 4), (1, [], "Int")],
        outputs=[tensor(30, 4, number=99)],
    )
    plan = plan_of(made, tmp_path)
    made_version = versions(plan, 0, "outputs")
    assert (
        versions(plan, 1) == versions(plan, 1, "outputs") == versions(plan, 2)[:1] == made_version
    )
    assert plan.ops["outputs"][2].to_list() == plan.ops["outputs"][1].to_list()


def test_a_geometry_that_no_op_made_is_a_view_of_what_lives(tmp_path: Path) -> None:
    made = HostTraceBuilder()
    made.op("aten::relu", schema=RELU, inputs=[tensor(10, 4, 2)], outputs=[tensor(30, 4, 2)])
    made.op(
        "aten::relu",
        schema=RELU,
        inputs=[tensor(30, 2, offset=6, number=77)],
        outputs=[tensor(50, 2)],
    )
    plan = plan_of(made, tmp_path)
    assert plan.ops["action"].to_list() == [RUN, VIEW, RUN]
    assert plan.tensors.row(plan.ops["outputs"][1][0], named=True)["offset"] == 6
    assert plan.ops["inputs"][2].to_list() == plan.ops["outputs"][1].to_list()


def test_an_op_whose_inner_result_is_read_outside_is_opened(tmp_path: Path) -> None:
    made = HostTraceBuilder()
    norm = made.op(
        "aten::layer_norm",
        schema="aten::layer_norm(Tensor x) -> Tensor",
        inputs=[tensor(10, 4)],
        outputs=[tensor(30, 4)],
    )
    made.op(
        "aten::native_layer_norm",
        parent=norm,
        schema="aten::native_layer_norm(Tensor x) -> (Tensor, Tensor)",
        inputs=[tensor(10, 4)],
        outputs=[tensor(30, 4), tensor(40, 1)],
    )
    closed = made.op("aten::relu", schema=RELU, inputs=[tensor(30, 4)], outputs=[tensor(50, 4)])
    made.op(
        "aten::inner", parent=closed, schema=RELU, inputs=[tensor(30, 4)], outputs=[tensor(50, 4)]
    )
    made.op(
        "aten::norm_backward",
        schema="aten::norm_backward(Tensor grad, Tensor rstd) -> Tensor",
        inputs=[tensor(50, 4), tensor(40, 1)],
        outputs=[tensor(60, 4)],
    )
    plan = plan_of(made, tmp_path)
    assert plan.ops["name"].to_list() == [
        "aten::native_layer_norm",
        "aten::relu",
        "aten::norm_backward",
    ]
    assert versions(plan, 2)[1] == versions(plan, 0, "outputs")[1]


def test_leaves_are_what_composite_ops_call(tmp_path: Path) -> None:
    made = HostTraceBuilder()
    linear = made.op(
        "aten::linear",
        schema="aten::linear(Tensor x) -> Tensor",
        inputs=[tensor(10, 4)],
        outputs=[tensor(30, 4)],
    )
    product = made.op(
        "aten::addmm",
        parent=linear,
        schema="aten::addmm(Tensor x) -> Tensor",
        inputs=[tensor(10, 4)],
        outputs=[tensor(30, 4)],
    )
    made.op(
        "aten::copy_", parent=product, schema=RELU, inputs=[tensor(10, 4)], outputs=[tensor(30, 4)]
    )
    assert plan_of(made, tmp_path).ops["name"].to_list() == ["aten::linear"]
    assert plan_of(made, tmp_path, level="leaf").ops["name"].to_list() == ["aten::addmm"]


def test_the_list_of_composite_ops_is_that_of_this_pytorch() -> None:
    torch = pytest.importorskip("torch")
    here = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")}
    composite = set(read_composite_ops())
    known = {name for name in composite if name in here}
    assert len(known) > 300
    for name in known:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"), (
            name
        )
    assert "aten::addmm" not in composite


def test_plain_numbers_that_became_tensors_are_numbers_again(tmp_path: Path) -> None:
    made = HostTraceBuilder()
    made.op(
        "aten::add_",
        schema=ADD_,
        inputs=[tensor(10, 4), tensor(20, of="double"), (1, [], "Int")],
        outputs=[tensor(10, 4)],
    )
    made.op("aten::empty", schema="aten::empty() -> Tensor", outputs=[tensor(30, of="double")])
    made.op(
        "aten::add_",
        schema=ADD_,
        inputs=[tensor(10, 4), tensor(30, of="double"), (1, [], "Int")],
        outputs=[tensor(10, 4)],
    )
    plan = plan_of(made, tmp_path)
    arguments = [json.loads(plan.calls["arguments"][call]) for call in plan.ops["call"]]
    assert arguments[0] == [{"tensor": 0}, 1.0, 1]
    assert arguments[2] == [{"tensor": 0}, {"tensor": 1}, 1]
    assert plan.calls["flags"].to_list() == [["guessed-number"], [], []]


def test_undefined_results_keep_their_places(tmp_path: Path) -> None:
    made = HostTraceBuilder()
    nothing = ([7, 0, 0, 0, 0, ""], [], "Tensor(nullptr (uninitialized))")
    made.op(
        "aten::back",
        schema="aten::back(Tensor x) -> (Tensor, Tensor, int)",
        inputs=[tensor(10, 4)],
        outputs=[nothing, tensor(30, 4), (3, [], "Int")],
    )
    plan = plan_of(made, tmp_path)
    assert [output is None for output in plan.ops["outputs"][0]] == [True, False, True]


def test_an_op_of_another_namespace_has_a_stand_in_that_makes_what_it_made(tmp_path: Path) -> None:
    made = HostTraceBuilder()
    made.op(
        "fbgemm::lookup",
        schema="fbgemm::lookup(Tensor x) -> Tensor",
        inputs=[tensor(10, 4)],
        outputs=[tensor(30, 4)],
    )
    made.op("aten::relu", schema=RELU, inputs=[tensor(30, 4)], outputs=[tensor(50, 4)])
    plan = plan_of(made, tmp_path)
    assert plan.ops["action"].to_list() == [STAND_IN, RUN]
    assert plan.ops["reason"][0] == "custom-op"
    assert versions(plan, 1) == versions(plan, 0, "outputs")


def test_an_op_on_symbolic_shapes_is_left_out_with_what_to_do(tmp_path: Path) -> None:
    """PyTorch writes neither lengths nor a storage of such a tensor; a scalar and a tensor without elements have both."""
    made = HostTraceBuilder()
    symbolic: Value = ([7, 0, 0, 0, 0, ""], [], "Tensor(float)")
    made.op("aten::relu", schema=RELU, inputs=[symbolic], outputs=[tensor(30, 4)])
    made.op("aten::relu", schema=RELU, inputs=[tensor(30, 4)], outputs=[symbolic])
    made.op("aten::relu", schema=RELU, inputs=[tensor(40)], outputs=[tensor(50)])
    made.op("aten::relu", schema=RELU, inputs=[tensor(0, 0)], outputs=[tensor(60, 0)])
    plan = plan_of(made, tmp_path)
    assert plan.omitted["reason"].to_list() == ["symbolic-shape"] * 2
    assert plan.omitted["text"].str.contains("record a step that compiles nothing").all()
    assert plan.ops["name"].to_list() == ["aten::relu"] * 2


@pytest.mark.parametrize("text", ["nonsense", "aten::mm(Tensor self", "__import__('os')"])
def test_an_unreadable_schema_is_left_out_and_its_result_comes_from_outside(
    text: str, tmp_path: Path
) -> None:
    made = HostTraceBuilder()
    made.op("aten::odd", schema=text, inputs=[tensor(10, 4)], outputs=[tensor(30, 4)])
    made.op("aten::relu", schema=RELU, inputs=[tensor(30, 4)], outputs=[tensor(50, 4)])
    plan = plan_of(made, tmp_path)
    assert plan.omitted["reason"].to_list() == ["unreadable-schema"]
    assert plan.storages["external"].to_list() == [True, False]


def test_arguments_are_decoded_by_the_type_that_the_schema_declares(tmp_path: Path) -> None:
    made = HostTraceBuilder()
    made.op(
        "aten::empty",
        schema=EMPTY,
        inputs=[
            ([2, 3], [[], []], "GenericList[Int,Int]"),
            (15, [], "Int"),
            (0, [], "Int"),
            ("cuda:1", [], "Device"),
            (False, [], "Bool"),
            (2, [], "Int"),
        ],
        outputs=[tensor(30, 2, 3)],
    )
    made.op(
        "aten::norm",
        schema="aten::norm(Tensor? x, float? p, Scalar q, float eps=1e-05, Generator? generator=None) -> Tensor",
        inputs=[
            ([7, 0, 0, 0, 0, ""], [], "Tensor(nullptr (uninitialized))"),
            ("inf", [], "Double"),
            (3, [], "Int"),
            (0.0, [], "Double"),
            ("<Generator>", [], "Generator"),
        ],
        outputs=[tensor(40, 1)],
    )
    plan = plan_of(made, tmp_path)
    assert json.loads(plan.calls["arguments"][0]) == [
        [2, 3],
        {"dtype": "bfloat16"},
        {"layout": "strided"},
        {"device": "cuda:1"},
        False,
        {"memory_format": "channels_last"},
    ]
    assert json.loads(plan.calls["arguments"][1]) == [
        None,
        {"float": "inf"},
        3,
        1e-05,
        {"generator": None},
    ]
    assert plan.calls["flags"].to_list() == [[], ["rounded-number"]]


def test_a_storage_that_came_from_elsewhere_is_external(tmp_path: Path) -> None:
    made = HostTraceBuilder()
    made.op(
        "aten::set_",
        schema="aten::set_.source_Storage_storage_offset(Tensor(a!) self, Storage source, SymInt storage_offset, "
        "SymInt[] size, SymInt[] stride=[]) -> Tensor(a!)",
        inputs=[
            tensor(10, 0),
            ("<Storage>", [], "Storage"),
            (0, [], "Int"),
            ([4], [[]], "GenericList[Int]"),
            ([1], [[]], "GenericList[Int]"),
        ],
        outputs=[tensor(20, 4, number=11)],
    )
    made.op("aten::relu", schema=RELU, inputs=[tensor(20, 4, number=11)], outputs=[tensor(50, 4)])
    plan = plan_of(made, tmp_path)
    assert json.loads(plan.calls["arguments"][0])[:2] == [{"tensor": 0}, {"storage": 1}]
    assert versions(plan, 0)[1] == versions(plan, 0, "outputs")[0] == versions(plan, 1)[0]
    assert plan.storages["external"].to_list() == [True, True, False]


ALL_REDUCE = (
    "c10d::allreduce_(Tensor[] tensors, __torch__.torch.classes.c10d.ProcessGroup process_group, "
    "__torch__.torch.classes.c10d.ReduceOp reduce_op, Tensor? sparse_indices, bool async_op=True, int timeout=-1) -> "
    "(Tensor[], __torch__.torch.classes.c10d.Work)"
)


def exchange(made: HostTraceBuilder, storage: int, *, asynchronous: bool = True) -> None:
    value = tensor(storage, 4)
    listed = ([value[0]], [value[1]], "GenericList[Tensor(float)]")
    nothing = ("<None>", [], "None")
    thing = ("<Object>", [], "Object")
    made.op(
        "c10d::allreduce_",
        schema=ALL_REDUCE,
        inputs=[listed, thing, thing, nothing, (asynchronous, [], "Bool"), (-1, [], "Int")],
        outputs=[listed, thing],
    )


def test_an_asynchronous_collective_is_waited_for_before_its_tensor_is_used(tmp_path: Path) -> None:
    made = HostTraceBuilder()
    exchange(made, 10)
    exchange(made, 20)
    made.op("aten::relu", schema=RELU, inputs=[tensor(90, 4)], outputs=[tensor(30, 4)])
    made.op("aten::relu", schema=RELU, inputs=[tensor(20, 4)], outputs=[tensor(50, 4)])
    plan = plan_of(made, tmp_path)
    assert plan.ops["action"].to_list() == [COLLECTIVE, COLLECTIVE, RUN, WAIT, RUN, WAIT]
    assert plan.ops["collective"].to_list() == [0, 1, None, 1, None, 0]
    assert plan.collectives["bytes"].to_list() == [16, 16]


def test_a_blocking_collective_has_no_wait(tmp_path: Path) -> None:
    made = HostTraceBuilder()
    exchange(made, 10, asynchronous=False)
    plan = plan_of(made, tmp_path)
    assert plan.ops["action"].to_list() == [COLLECTIVE]


def test_groups_sequence_and_root_are_of_the_record_within(tmp_path: Path) -> None:
    made = HostTraceBuilder()
    made.groups(
        [
            {
                "pg_name": "7",
                "pg_desc": "pair",
                "backend_config": "",
                "ranks": [4, 6],
                "group_size": 2,
            }
        ]
    )
    value = tensor(10, 4)
    listed = ([value[0]], [value[1]], "GenericList[Tensor(float)]")
    thing = ("<Object>", [], "Object")
    schema = (
        "c10d::broadcast_(Tensor[] tensors, __torch__.torch.classes.c10d.ProcessGroup process_group, int root_rank, "
        "int root_tensor, bool asyncOp, int timeout) -> (Tensor[], __torch__.torch.classes.c10d.Work)"
    )
    op = made.op(
        "c10d::broadcast_",
        schema=schema,
        outputs=[listed, thing],
        inputs=[listed, thing, (1, [], "Int"), (0, [], "Int"), (True, [], "Bool"), (-1, [], "Int")],
    )
    empty = ([], [], "GenericList[]")
    made.op(
        "record_param_comms",
        parent=op,
        inputs=[
            listed,
            (33, [], "Int"),
            (["7", "pair"], [[], []], "Tuple[String,String]"),
            (1, [], "Int"),
            ("broadcast", [], "String"),
            empty,
            empty,
        ],
    )
    made.op(
        "record_param_comms",
        inputs=[
            (33, [], "Int"),
            (["", ""], [[], []], "Tuple[String,String]"),
            (0, [], "Int"),
            ("wait", [], "String"),
            empty,
            empty,
        ],
    )
    plan = plan_of(made, tmp_path)
    assert plan.collectives.select("kind", "group", "sequence", "peer").rows() == [
        ("broadcast", "7", 33, 6)
    ]
    assert plan.ops["action"].to_list() == [COLLECTIVE, WAIT]


def message(made: HostTraceBuilder, kind: str, storage: int, tag: int, parent: int | None) -> int:
    """A message of rank 0 to or from rank 1; returns the call's id."""
    value = tensor(storage, 4)
    name, other = ("send", "dst") if kind == "send" else ("recv_", "src")
    schema = (
        f"c10d::{name}(Tensor[] tensors, __torch__.torch.classes.c10d.ProcessGroup process_group, "
        f"int {other}, int tag) -> __torch__.torch.classes.c10d.Work"
    )
    listed = ([value[0]], [value[1]], "GenericList[Tensor(float)]")
    thing = ("<Object>", [], "Object")
    ends = [(1, [], "Int"), (tag, [], "Int")]
    call = made.op(f"c10d::{name}", parent=parent, schema=schema, inputs=[listed, thing, *ends])
    made.op(f"gloo:{kind}", parent=call, scope=7, inputs=[value])
    return call


def test_what_is_called_while_a_message_is_on_its_way_is_no_part_of_it(tmp_path: Path) -> None:
    made = HostTraceBuilder()
    send = message(made, "send", 10, 5, None)
    receive = message(made, "recv", 20, 6, send)
    relu = made.op(
        "aten::relu", parent=receive, schema=RELU, inputs=[tensor(30, 4)], outputs=[tensor(40, 4)]
    )
    made.op("aten::clamp_min", parent=relu, inputs=[tensor(30, 4)], outputs=[tensor(40, 4)])
    plan = plan_of(made, tmp_path)
    assert plan.ops["name"].to_list()[:3] == ["c10d::send", "c10d::recv_", "aten::relu"]
    assert plan.ops["action"].to_list() == [COLLECTIVE, COLLECTIVE, RUN, WAIT, WAIT]
    assert plan.collectives.select("kind", "peer", "tag").rows() == [("send", 1, 5), ("recv", 1, 6)]


def recorded_call(made: HostTraceBuilder, *span: int, group: Value) -> None:
    """An all_reduce as old versions record it, with what the group's ranks are."""
    value = tensor(10, 4)
    listed = ([value[0]], [value[1]], "GenericList[Tensor(float)]")
    empty = ([], [], "GenericList[]")
    numbers = [(number, [], "Int") for number in span]
    about = [(33, [], "Int"), group, (0, [], "Int"), ("allreduce", [], "String"), empty, empty]
    made.op("record_param_comms", inputs=[listed, *about, *numbers], outputs=[listed])


@pytest.mark.parametrize(
    ("span", "ranks"),
    [((0, 1, 2), [0, 1]), ((0, 4, 3), [0, 4, 8]), ((0, 1, 1), [0]), ((), [0, 1])],
)
@pytest.mark.parametrize(
    "group",
    [
        (["0", "default_pg"], [[], []], "Tuple[String,String]"),
        (94_000_000_123_456, [], "Int"),
    ],
)
def test_the_record_of_a_call_tells_the_ranks_of_its_group(
    tmp_path: Path, span: tuple[int, ...], ranks: list[int], group: Value
) -> None:
    made = HostTraceBuilder(HOST_SCHEMAS[2])
    recorded_call(made, *span, group=group)
    path = tmp_path / "rank0.host.json"
    path.write_text(made.text(), encoding="utf-8")
    plan = make_plan(path)
    assert plan.groups["ranks"].to_list() == [ranks]
    assert plan.world_size == len(ranks)


def sparse(number: int, *shape: int) -> Value:
    """A sparse tensor, which has no storage."""
    return [number, 0, 0, 0, 0, ""], list(shape), "Tensor(float)"


def test_ops_on_sparse_tensors_run_where_an_op_that_runs_made_them(tmp_path: Path) -> None:
    made = HostTraceBuilder()
    dense, unsafe = "aten::to_dense(Tensor self) -> Tensor", "aten::_sparse_coo_tensor_unsafe"
    made.op(
        "aten::to_sparse",
        schema="aten::to_sparse(Tensor self) -> Tensor",
        inputs=[tensor(10, 4, 4)],
        outputs=[sparse(3, 4, 4)],
    )
    made.op("aten::to_dense", schema=dense, inputs=[sparse(3, 4, 4)], outputs=[tensor(20, 4, 4)])
    made.op(
        unsafe,
        schema=f"{unsafe}(Tensor indices, Tensor values, SymInt[] size) -> Tensor",
        inputs=[tensor(30, 2, 1), tensor(40, 1), ([4, 4], [], "GenericList[Int,Int]")],
        outputs=[sparse(3, 4, 4)],
    )
    made.op("aten::to_dense", schema=dense, inputs=[sparse(3, 4, 4)], outputs=[tensor(50, 4, 4)])
    plan = plan_of(made, tmp_path)
    assert plan.ops["action"].to_list() == [RUN, RUN, STAND_IN]
    assert plan.omitted.select("name", "reason").rows() == [("aten::to_dense", "sparse-tensor")]


def test_one_side_alone(tmp_path: Path) -> None:
    made = HostTraceBuilder()
    made.op("aten::relu", schema=RELU, inputs=[tensor(90, 4)], outputs=[tensor(10, 4)])
    exchange(made, 10)
    assert plan_of(made, tmp_path, only="compute").ops["action"].to_list() == [RUN]
    assert plan_of(made, tmp_path, only="communication").ops["action"].to_list() == [
        COLLECTIVE,
        WAIT,
    ]


def test_scopes_and_steps_choose_and_backward_ops_have_the_scopes_of_their_forward_ops(
    tmp_path: Path,
) -> None:
    made = HostTraceBuilder()
    for step in (3, 4):
        made.op(f"ProfilerStep#{step}", scope=7)
        layer = made.op("traceloom.module:net.layer", scope=7)
        made.op(
            "aten::relu",
            parent=layer,
            schema=RELU,
            sequence=5 + step,
            inputs=[tensor(90, 4)],
            outputs=[tensor(10, 4)],
        )
        engine = made.op("autograd::engine::evaluate_function: ReluBackward0", thread=2)
        node = made.op("ReluBackward0", thread=2, parent=engine, sequence=5 + step, scope=1)
        made.op(
            "aten::mul",
            thread=2,
            parent=node,
            schema=MM,
            inputs=[tensor(10, 4), tensor(10, 4)],
            outputs=[tensor(20, 4)],
        )
        optimizer = made.op("Optimizer.step#SGD.step", scope=7)
        made.op(
            "aten::add_",
            parent=optimizer,
            schema=ADD_,
            inputs=[tensor(90, 4), tensor(20, 4), (1, [], "Int")],
            outputs=[tensor(90, 4)],
        )
    plan = plan_of(made, tmp_path)
    assert plan.ops["phase"].to_list() == ["forward", "backward", "optimizer"] * 2
    assert plan.ops["step"].to_list() == [3, 3, 3, 4, 4, 4]
    assert plan.ops["thread"].to_list() == [1, 2, 1] * 2
    assert plan.ops["scope"].to_list() == ["net.layer", "net.layer", "Optimizer.step#SGD.step"] * 2
    assert plan_of(made, tmp_path, scope="net.layer").ops.height == 4
    assert plan_of(made, tmp_path, steps=(4,)).ops["step"].to_list() == [4, 4, 4]
    with pytest.raises(UsageError, match="step 9"):
        plan_of(made, tmp_path, steps=(9,))
    with pytest.raises(UsageError, match="no op is in a scope"):
        plan_of(made, tmp_path, scope="nobody")


def test_a_device_trace_alone_is_refused(tmp_path: Path) -> None:
    from traceloom.testing import TraceBuilder

    made = TraceBuilder()
    made.op("aten::mm", 0, 10)
    path = made.write(tmp_path / "rank0.json")
    with pytest.raises(InputError) as error:
        make_plan(path)
    assert error.value.slug == "no-host-trace"


def test_recorded_times_are_those_of_the_device_trace(tmp_path: Path) -> None:
    made = HostTraceBuilder()
    made.op("aten::relu", schema=RELU, inputs=[tensor(10, 4)], outputs=[tensor(30, 4)], record_id=1)
    made.op("aten::relu", schema=RELU, inputs=[tensor(30, 4)], outputs=[tensor(50, 4)], record_id=2)
    (tmp_path / "rank0.host.json").write_text(made.text(), encoding="utf-8")
    from traceloom.testing import TraceBuilder

    device = TraceBuilder(rank=0)
    device.op("aten::relu", 100, 20, record_function_id=1)
    device.op("aten::relu", 150, 30, record_function_id=2)
    path = device.write(tmp_path / "rank0.kineto.json")
    plan: ReplayPlan = make_plan(path, tmp_path / "rank0.host.json")
    assert plan.ranks[0].ops["durations_ns"].to_list() == [[20_000], [30_000]]
    assert plan.ranks[0].ops["gap_ns"].to_list() == [None, 30_000]


def test_empty_frames_keep_their_columns(tmp_path: Path) -> None:
    made = HostTraceBuilder()
    made.op("forward", scope=7)
    plan = plan_of(made, tmp_path)
    assert plan.ops.is_empty()
    assert plan.ops.schema["inputs"] == pl.List(pl.UInt32)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema": HOST_SCHEMAS[3]}, "schema"),
        ({"members": [0, 2]}, "group '0' has other members"),
        ({"time": "2026-03-02 03:04:05"}, "2026-03-02"),
    ],
)
def test_host_traces_of_different_runs_are_refused(
    change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    for rank, different in enumerate(({}, change)):
        made = HostTraceBuilder(different.get("schema", HOST_SCHEMAS[-1]))
        members = different.get("members", [0, 1])
        made.groups(
            [
                {
                    "pg_name": "0",
                    "pg_desc": "",
                    "backend_config": "",
                    "ranks": members,
                    "group_size": 2,
                }
            ]
        )
        made.op("aten::relu", schema=RELU, inputs=[tensor(10, 4)], outputs=[tensor(30, 4)])
        text = made.text().replace(
            "2026-01-02 03:04:05", different.get("time", "2026-01-02 03:04:09")
        )
        (tmp_path / f"rank{rank}.host.json").write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=words) as error:
        make_plan(tmp_path / "rank0.host.json", tmp_path / "rank1.host.json")
    assert error.value.slug == "several-runs"
    assert list(make_plan(tmp_path / "rank0.host.json").ranks) == [0]
