"""What only running shows: ops that fail, a busy machine, op namespaces that an import brings; and scripts that were tried."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from support.plans import PlanBuilder, groups  # noqa: E402
from traceloom.errors import InputError  # noqa: E402
from traceloom.workload.replay.communication import check_agreement  # noqa: E402
from traceloom.workload.replay.plan import ReplayPlan  # noqa: E402
from traceloom.workload.replay.running import (  # noqa: E402
    PlanRunner,
    RunOptions,
    import_custom_ops,
    run_passes,
)
from traceloom.workload.replay.script import write_script  # noqa: E402
from traceloom.workload.replay.trial import write_tried_script  # noqa: E402

pytestmark = pytest.mark.torch

RELU = "aten::relu(Tensor self) -> Tensor"
VIEW = "aten::view(Tensor(a) self, SymInt[] size) -> Tensor(a)"
NONZERO = "aten::nonzero(Tensor self) -> Tensor"
SPARSE = "aten::to_sparse(Tensor self) -> Tensor"
T0: Any = {"tensor": 0}


def runner(build: PlanBuilder) -> PlanRunner:
    return PlanRunner(build.build(), torch.device("cpu"), RunOptions(iterations=3))


def test_a_script_leaves_out_what_fails_and_comes_to_its_table() -> None:
    build = PlanBuilder()
    x = build.tensor(4, external=True)
    viewed, found, done = (
        build.tensor(7),
        build.tensor(2, 1, dtype="int64", item=8),
        build.tensor(7),
    )
    build.run(VIEW, [T0, [7]], [x], [viewed])  # four elements are never seven
    build.run(NONZERO, [T0], [x], [found])  # four of four are not zero, two were recorded
    build.run(RELU, [T0], [viewed], [done])
    text, said = write_tried_script(ReplayPlan({0: build.build()}, groups(1)), RunOptions())
    assert said[0].startswith("left out: 1 × aten::view (RuntimeError: shape '[7]' is invalid")
    assert "aten.view" not in text
    assert "aten.relu.default" in text
    run = subprocess.run(
        [sys.executable, "-", "--runs", "1"], input=text.encode(), capture_output=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert b"step: median of 1" in run.stdout


def test_a_sparse_tensor_between_ops_ends_nothing() -> None:
    build = PlanBuilder()
    x = build.tensor(4, 4, external=True)
    packed = build.tensor(4, 4)
    build.run(SPARSE, [T0], [x], [packed])
    build.run("aten::_nnz(Tensor self) -> int", [T0], [packed], [None])
    replayed = runner(build)
    run_passes(replayed, RunOptions(iterations=2))
    assert not replayed.program.failures
    assert replayed.program.peak_bytes == 64  # a sparse one has no storage to count


def test_random_numbers_are_those_of_the_first_pass_in_every_pass() -> None:
    build = PlanBuilder()
    drawn = build.tensor(4)
    build.run("aten::rand(SymInt[] size) -> Tensor", [[4]], [], [drawn])
    build.run(RELU, [T0], [drawn], [build.tensor(4)])
    replayed = runner(build)
    seen = []

    def look(_op: int, function: Any, *arguments: Any) -> Any:
        result = function(*arguments)
        seen.append(result.tolist())
        return result

    for _ in range(2):
        replayed.run_pass(call_wrapper=look)
    assert seen[0] == seen[2]


@pytest.mark.skipif(not Path("/proc/thread-self/schedstat").exists(), reason="Linux tells it")
def test_a_processor_that_is_shared_is_named() -> None:
    allowed = os.sched_getaffinity(0)
    one = min(allowed)
    spin = f"import os\nos.sched_setaffinity(0, {{{one}}})\nprint(flush=True)\nwhile True: pass"
    build = PlanBuilder()
    x = build.tensor(512, 512, external=True)
    build.run(RELU, [T0], [x], [build.tensor(512, 512)])
    other = subprocess.Popen([sys.executable, "-c", spin], stdout=subprocess.PIPE)
    try:
        assert other.stdout is not None
        other.stdout.readline()
        os.sched_setaffinity(0, {one})
        result = run_passes(runner(build), RunOptions(iterations=300))
    finally:
        os.sched_setaffinity(0, allowed)
        other.kill()
        other.communicate()
    (notice,) = (notice for notice in result.notices if notice.slug == "busy-machine")
    assert "waited for a processor that others used" in notice.message


def test_ops_that_pytorch_brings_with_an_import_of_its_own_run() -> None:
    build = PlanBuilder()
    schema = "quantized_decomposed::quantize_per_tensor(Tensor input, float scale, int zero_point, int quant_min, int quant_max, ScalarType dtype) -> Tensor"
    x = build.tensor(4, external=True)
    build.run(
        schema,
        [T0, 1.0, 0, 0, 255, {"dtype": "uint8"}],
        [x],
        [build.tensor(4, dtype="uint8", item=1)],
    )
    plan = build.build()
    import_custom_ops([], [plan])
    replayed = runner(build)
    assert not replayed.program.failures
    assert not replayed.stand_ins.height
    text = write_script(ReplayPlan({0: plan}, groups(1)))
    assert "\nimport torch.ao.quantization.fx._decomposed\n" in text
    assert "torch.ops.quantized_decomposed.quantize_per_tensor" in text


def test_messages_of_different_tags_may_overtake_each_other() -> None:
    def plan(*received: tuple[int, int]) -> ReplayPlan:
        ranks = {}
        for rank, kind, order in ((0, "send", ((5, 4), (6, 8))), (1, "recv", received)):
            build = PlanBuilder(rank)
            for tag, size in order:
                x = build.tensor(size, external=True)
                sides = ([x], []) if kind == "send" else ([], [x])
                build.collective(kind, *sides, peer=1 - rank, tag=tag, asynchronous=True)
            ranks[rank] = build.build()
        return ReplayPlan(ranks, groups(2), world_size=2)

    overtaking = plan((6, 8), (5, 4))
    check_agreement(overtaking, [0, 1])
    text = write_script(overtaking)
    assert "dist.isend" in text
    assert text.count("tag=5") == text.count("tag=6") == 2
    with pytest.raises(InputError, match="send and receive differently"):
        check_agreement(plan((5, 8), (6, 4)), [0, 1])
