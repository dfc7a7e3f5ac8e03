"""A plan of one rank, run: results, lives of registers, and what becomes of ops that cannot be run as they are."""

from __future__ import annotations

from typing import Any

import pytest

from support.plans import PlanBuilder, groups, small_plan

torch = pytest.importorskip("torch")

from traceloom.errors import CheckError, InputError  # noqa: E402
from traceloom.workload.replay.comparison import compare_replay  # noqa: E402
from traceloom.workload.replay.plan import (  # noqa: E402
    Replayed,
    ReplayPlan,
)
from traceloom.workload.replay.program import (  # noqa: E402
    build_geometries,
    find_cross_lane_dependencies,
    should_stay_on_cpu,
)
from traceloom.workload.replay.running import (  # noqa: E402
    PlanRunner,
    RunOptions,
    choose_device,
    find_async_copied_storages,
    import_custom_ops,
    is_median_precise,
    run_passes,
)

pytestmark = pytest.mark.torch
_COPY = "aten::copy_(Tensor(a!) self, Tensor src, bool non_blocking=False) -> Tensor(a!)"
_ADD = "aten::add.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor"


def execute(build: PlanBuilder, **options: Any) -> PlanRunner:
    plan = build.build()
    plan.check()
    return PlanRunner(plan, torch.device("cpu"), RunOptions(**options))


def keep(
    build: PlanBuilder, tensor: int, *shape: int, dtype: str = "float32", item: int = 4
) -> int:
    """An external tensor that a pass copies another to, which would be gone after it."""
    kept = build.tensor(*shape, dtype=dtype, item=item, external=True, content="zeros")
    build.run(_COPY, [{"tensor": 0}, {"tensor": 1}, False], [kept, tensor], [kept])
    return kept


def test_a_pass_computes_what_the_plan_says() -> None:
    build = PlanBuilder()
    x, w = build.tensor(8, 4, external=True), build.tensor(4, 6, external=True)
    product, result = build.tensor(8, 6), build.tensor(8, 6)
    build.run(
        "aten::mm(Tensor self, Tensor mat2) -> Tensor",
        [{"tensor": 0}, {"tensor": 1}],
        [x, w],
        [product],
    )
    build.run(_ADD, [{"tensor": 0}, {"tensor": 1}, 3], [product, product], [result])
    kept = keep(build, result, 8, 6)
    execution = execute(build)
    execution.run_pass()
    registers = execution.program.registers
    assert torch.equal(registers[kept], 4 * (registers[x] @ registers[w]))


def test_lists_of_tensors_several_results_and_tensors_by_name() -> None:
    build = PlanBuilder()
    x = build.tensor(4, 6, external=True)
    parts = [build.view(0, [4, 2], [6, 1], offset=2 * part) for part in range(3)]
    build.run(
        "aten::chunk(Tensor(a -> *) self, int chunks, int dim=0) -> Tensor(a)[]",
        [{"tensor": 0}, 3, 1],
        [x],
        parts,
    )
    joined = build.tensor(4, 4)
    build.run(
        "aten::cat(Tensor[] tensors, int dim=0) -> Tensor",
        [[{"tensor": 0}, {"tensor": 1}], 1],
        [parts[2], parts[0]],
        [joined],
    )
    rows = build.tensor(3, dtype="int64", item=8, external=True, content="integers", low=0, high=3)
    picked = build.tensor(4, 3)
    build.run(
        "aten::index.Tensor(Tensor self, Tensor?[] indices) -> Tensor",
        [{"tensor": 0}, [None, {"tensor": 1}]],
        [joined, rows],
        [picked],
    )
    out = build.tensor(4, 3, external=True, content="zeros")
    build.run(
        "aten::add.out(Tensor self, Tensor other, *, Scalar alpha=1, Tensor(a!) out) -> Tensor(a!)",
        [{"tensor": 0}, {"tensor": 0}, 2, {"tensor": 1}],
        [picked, out],
        [out],
    )
    execution = execute(build)
    execution.run_pass()
    registers = execution.program.registers
    columns = torch.cat([registers[x][:, 4:], registers[x][:, :2]], 1)
    assert torch.equal(registers[out], 3 * columns[:, registers[rows]])


def test_nested_results_are_flattened() -> None:
    build = PlanBuilder()
    values = [build.tensor(3, external=True) for _ in range(2)]
    grads = [build.tensor(3, external=True) for _ in range(2)]
    sums = [build.tensor(3) for _ in range(2)]
    build.run(
        "aten::_foreach_add.List(Tensor[] self, Tensor[] other, *, Scalar alpha=1) -> Tensor[]",
        [[{"tensor": 0}, {"tensor": 1}], [{"tensor": 2}, {"tensor": 3}], 1],
        [*values, *grads],
        sums,
    )
    kept = keep(build, sums[1], 3)
    execution = execute(build)
    execution.run_pass()
    registers = execution.program.registers
    assert torch.equal(registers[kept], registers[values[1]] + registers[grads[1]])


def test_registers_are_empty_after_their_last_use() -> None:
    build = PlanBuilder()
    last = build.tensor(1000, external=True)
    for _ in range(10):
        this = build.tensor(1000)
        build.run("aten::neg(Tensor self) -> Tensor", [{"tensor": 0}], [last], [this])
        last = this
    keep(build, last, 1000)
    execution = execute(build)
    external = 2 * 4000
    assert execution.plan.peak_bytes() == external + 2 * 4000, (
        "two intermediates live at once, not ten"
    )
    assert execution.program.peak_bytes == external + 2 * 4000
    assert [register is None for register in execution.program.registers[1:11]] == [True] * 10


def test_a_view_keeps_its_storage_and_may_be_of_another_type() -> None:
    build = PlanBuilder()
    x = build.tensor(4, 4, external=True)
    made = build.tensor(4, 4)
    build.run("aten::neg(Tensor self) -> Tensor", [{"tensor": 0}], [x], [made])
    storage = build.rows["tensors"][made]["storage"]
    column, bits = (
        build.view(storage, [4], [4], offset=1),
        build.view(storage, [4, 4], [4, 1], dtype="int32"),
    )
    build.add("view", [made], [column], action="view")
    build.add("view", [made], [bits], action="view")
    kept, kept_bits = keep(build, column, 4), keep(build, bits, 4, 4, dtype="int32")
    execution = execute(build)
    execution.run_pass()
    registers = execution.program.registers
    assert torch.equal(registers[kept], -registers[x][:, 1])
    assert torch.equal(registers[kept_bits].view(torch.float32), -registers[x])


def test_an_op_that_fails_is_replaced_each_time_and_counted() -> None:
    build = PlanBuilder()
    x, w = build.tensor(8, 4, external=True), build.tensor(5, 6, external=True)
    for _ in range(2):
        product, result = build.tensor(8, 6), build.tensor(8, 6)
        build.run(
            "aten::mm(Tensor self, Tensor mat2) -> Tensor",
            [{"tensor": 0}, {"tensor": 1}],
            [x, w],
            [product],
        )
        build.run("aten::relu(Tensor self) -> Tensor", [{"tensor": 0}], [product], [result])
    execution = execute(build)
    replayed = run_passes(execution, RunOptions(iterations=1))
    assert replayed.failures.select("op", "node", "name").rows() == [
        (0, 100, "aten::mm"),
        (2, 102, "aten::mm"),
    ]
    assert replayed.failures["text"].str.contains("cannot be multiplied").all()
    plan = ReplayPlan({0: execution.plan}, groups(1), source="made by hand")
    comparison = compare_replay(plan, Replayed("made by hand", "cpu", "fast", 0, {}, {0: replayed}))
    assert dict(comparison.coverage.select("outcome", "count").iter_rows()) == {
        "run": 2,
        "failed": 2,
    }
    assert comparison.not_run.select("name", "count").rows() == [("aten::mm", 2)]
    with pytest.raises(
        CheckError, match=r"^aten::mm: .*cannot be multiplied.* \(arguments \["
    ) as caught:
        execute(build, strict=True)
    assert (caught.value.slug, caught.value.where) == ("op-failed", "node 100")


def test_a_shape_that_depends_on_data_is_replaced_by_the_recorded_one() -> None:
    build = PlanBuilder()
    x = build.tensor(10, external=True)
    where = build.tensor(3, 1, dtype="int64", item=8)
    build.run("aten::nonzero(Tensor self) -> Tensor", [{"tensor": 0}], [x], [where])
    kept = keep(build, where, 3, 1, dtype="int64", item=8)
    execution = execute(build)
    replayed = run_passes(execution, RunOptions(iterations=1))
    assert replayed.replaced["text"].to_list() == [
        'gave int64 [10, 1], recorded int64 [3, 1] (arguments [{"tensor": 0}])'
    ]
    assert execution.program.registers[kept].tolist() == [[0], [0], [0]]


def test_an_op_that_is_unknown_here_has_a_stand_in_that_can_take_its_time() -> None:
    build = PlanBuilder()
    x, made, result = build.tensor(4, external=True), build.tensor(4), build.tensor(4)
    build.run(
        "nobody::knows(Tensor self) -> Tensor",
        [{"tensor": 0}],
        [x],
        [made],
        durations_ns=[20_000_000],
    )
    build.run("aten::relu(Tensor self) -> Tensor", [{"tensor": 0}], [made], [result])
    replayed = run_passes(execute(build), RunOptions(iterations=1))
    assert replayed.stand_ins.select("op", "name", "reason").rows() == [
        (0, "nobody::knows", "custom-op")
    ]
    waits = run_passes(execute(build, stand_ins=True), RunOptions(iterations=1))
    assert waits.iteration_ns[0] >= 20_000_000


def test_integers_that_a_pass_changes_are_as_before_in_the_next() -> None:
    build = PlanBuilder()
    counter = build.tensor(
        2, dtype="int64", item=8, external=True, content="integers", low=5, high=5
    )
    build.run(
        "aten::add_.Scalar(Tensor(a!) self, Scalar other, Scalar alpha=1) -> Tensor(a!)",
        [{"tensor": 0}, 1, 1],
        [counter],
        [counter],
    )
    execution = execute(build)
    for _ in range(3):
        execution.run_pass()
    assert execution.program.registers[counter].tolist() == [6, 6]


def test_what_comes_from_outside_is_no_view() -> None:
    build = PlanBuilder()
    x = build.tensor(2, external=True)
    build.run("aten::detach_(Tensor(a!) self) -> Tensor(a!)", [{"tensor": 0}], [x], [x])
    assert execute(build, strict=True).program.failures == {}


def test_floats_that_grow_over_passes_are_made_anew() -> None:
    build = PlanBuilder()
    x = build.tensor(2, external=True)
    build.run(
        "aten::mul_.Scalar(Tensor(a!) self, Scalar other) -> Tensor(a!)",
        [{"tensor": 0}, 1e30],
        [x],
        [x],
    )
    execution = execute(build)
    for _ in range(5):
        execution.run_pass()
    assert float(execution.program.registers[x].abs().max()) < 1e31


def test_recorded_gaps_are_kept_and_threads_hand_over() -> None:
    build = PlanBuilder()
    last = build.tensor(8, external=True)
    for nth in range(6):
        this = build.tensor(8)
        build.run(
            _ADD,
            [{"tensor": 0}, {"tensor": 0}, 1],
            [last, last],
            [this],
            thread=1 + nth % 2,
            gap_ns=2_000_000,
        )
        last = this
    kept = keep(build, last, 8)
    execution = execute(build, pace="recorded", threads="recorded")
    for timed in (False, True):
        wall_ns, _ = execution.run_pass(with_timer=timed)
        assert wall_ns >= 3 * 2_000_000, (
            "each thread does what it did between its three ops, beside the other"
        )
        registers = execution.program.registers
        assert torch.allclose(registers[kept], 64 * registers[0])


def test_ops_begin_once_earlier_ops_on_their_storages_are_done() -> None:
    lanes = [1, 1, 2, 2, 1, None, 3]
    touched = [["a"], ["b"], ["b"], ["a"], ["a", "b"], ["a"], ["c"]]
    assert find_cross_lane_dependencies(lanes, touched) == [(1, 2), (3, 4)], (
        "what follows from another hand-over is left out"
    )


def test_too_little_memory_is_said_before_anything_is_allocated() -> None:
    plan = small_plan().ranks[0]
    with pytest.raises(
        InputError, match=r"take 608 B, and 600 B is what --memory-limit allows"
    ) as caught:
        PlanRunner(plan, torch.device("cpu"), RunOptions(memory_limit=600))
    assert caught.value.slug == "too-little-memory"
    build = PlanBuilder()
    huge = build.tensor(10**15, external=True)
    build.run("aten::neg_(Tensor(a!) self) -> Tensor(a!)", [{"tensor": 0}], [huge], [huge])
    with pytest.raises(InputError, match="this machine has free"):
        execute(build)


def test_the_median_is_known_once_enough_values_lie_close() -> None:
    assert not is_median_precise([100] * 5)
    assert is_median_precise([100] * 6)
    assert not is_median_precise([100, 200, 150, 120, 180, 160])
    assert is_median_precise([100, 101, 99, 100, 500, 100, 100, 101, 100, 99, 100, 100]), (
        "one outlier does not matter"
    )


def test_namespaces_of_imported_modules_are_told(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "replay_test_ops.py").write_text(
        "import torch\nlibrary = torch.library.Library('replay_test', 'DEF')\n"
        "library.define('twice(Tensor x) -> Tensor')\nlibrary.impl('twice', lambda x: 2 * x, 'CPU')\n"
    )
    monkeypatch.chdir(tmp_path)
    assert import_custom_ops(["replay_test_ops"]) == {"replay_test"}


def test_a_device_that_is_not_here_is_refused_and_another_is_said() -> None:
    build = PlanBuilder()
    x = build.tensor(4, external=True, device="cuda:0")
    build.run(
        "aten::relu(Tensor self) -> Tensor",
        [{"tensor": 0}],
        [x],
        [build.tensor(4, device="cuda:0")],
    )
    of_gpu = ReplayPlan({0: build.build()}, groups(1))
    device, notices = choose_device(of_gpu, RunOptions(device="cpu"), 0)
    assert (device.type, [notice.slug for notice in notices]) == ("cpu", ["other-device"])
    assert "recorded on cuda, replayed on cpu" in notices[0].message
    assert choose_device(small_plan(), RunOptions(), 0) == (torch.device("cpu"), ())
    with pytest.raises(InputError, match="has no device of the kind hpu here") as caught:
        choose_device(of_gpu, RunOptions(device="hpu"), 0)
    assert caught.value.slug == "no-device"


def test_of_a_recording_with_a_gpu_the_host_keeps_its_tensors() -> None:
    """A batch from the loader, copied without waiting, and the weights; recorded on processors alone, all moves."""
    build = PlanBuilder()
    batch = build.tensor(8, 4, external=True)
    on_gpu = build.tensor(8, 4, device="cuda:0")
    weights = build.tensor(4, 4, external=True, device="cuda:0")
    copy = (
        "aten::_to_copy(Tensor self, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None, "
        "bool? pin_memory=None, bool non_blocking=False, MemoryFormat? memory_format=None) -> Tensor"
    )
    build.run(
        copy, [{"tensor": 0}, None, None, {"device": "cuda:0"}, None, True, None], [batch], [on_gpu]
    )
    plan = build.build()
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert [geometry.on_host for geometry in build_geometries(plan, gpu)] == [True, False, False]
    assert [geometry.on_host for geometry in build_geometries(plan, cpu)] == [False] * 3
    assert [geometry.new("meta").device.type for geometry in build_geometries(plan, gpu)] == [
        "cpu",
        "meta",
        "meta",
    ]
    assert find_async_copied_storages(plan) == {plan.tensors["storage"][batch]}
    assert weights not in find_async_copied_storages(plan)
    only_host = PlanBuilder()
    only_host.tensor(8, external=True)
    only_host.run("aten::relu(Tensor self) -> Tensor", [{"tensor": 0}], [0], [only_host.tensor(8)])
    assert not should_stay_on_cpu(only_host.build(), gpu), "it runs on the GPU as a whole"
