"""Integers that PyTorch itself dumps beside a host trace: they are what the replay's tensors hold."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.nn import functional  # noqa: E402
from torch.profiler import ExecutionTraceObserver  # noqa: E402

from traceloom.workload.replay.planning import make_plan  # noqa: E402
from traceloom.workload.replay.resize import scale_plan  # noqa: E402
from traceloom.workload.replay.running import PlanRunner, RunOptions  # noqa: E402
from traceloom.workload.replay.script import write_script  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("ranges", [False, True])
def test_recorded_integers_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, ranges: bool
) -> None:
    names = "aten::embedding,aten::gather,aten::nll_loss_forward"
    monkeypatch.setenv("ENABLE_PYTORCH_EXECUTION_TRACE_SAVE_INTEGRAL_TENSOR_DATA", names)
    if ranges:
        monkeypatch.setenv("ENABLE_PYTORCH_EXECUTION_TRACE_SAVE_INTEGRAL_TENSOR_RANGE", "1")
    table, scores = torch.randn(10, 4), torch.randn(3, 10)
    tokens, classes = torch.tensor([[7, 0, 3], [9, 1, 1]]), torch.tensor([9, -100, 2])
    columns = torch.tensor([[2, 0], [1, 3], [0, 0]]).t()
    observer = ExecutionTraceObserver().register_callback(str(tmp_path / "a.json"))
    observer.set_extra_resource_collection(val=True)
    observer.start()
    functional.embedding(tokens, table)
    torch.gather(table[:2], 1, columns)
    functional.cross_entropy(scores, classes)
    functional.embedding(tokens[1], table)  # at an offset: PyTorch dumps other memory
    observer.stop()
    observer.unregister_callback()
    plan = make_plan(tmp_path / "a.json")
    assert [notice.count for notice in plan.notices if notice.slug == "unfit-dumps"] == [1]
    (of_rank,) = plan
    registers = of_rank.data["tensor"].to_list()
    evidence = of_rank.storages["evidence"].gather(of_rank.tensors["storage"].gather(registers))
    assert evidence.to_list() == ["data"] * 3
    program = PlanRunner(of_rank, torch.device("cpu"), RunOptions()).program
    assert not program.failures
    for register, expected in zip(registers, (tokens, columns, classes), strict=True):
        assert program.registers[register].equal(expected)
        assert program.registers[register].stride() == expected.stride()
    script: dict[str, Any] = {"__name__": "script"}
    exec(compile(write_script(plan), "replay.py", "exec"), script)
    outside = script["outside"]().values()
    assert all(
        any(tensor.dtype == torch.int64 and tensor.equal(expected) for tensor in outside)
        for expected in (tokens, columns, classes)
    )
    larger = scale_plan(plan, {2: Fraction(2)}).ranks[0]
    contents = {
        larger.storages["content"][storage]
        for storage in larger.tensors["storage"].gather(registers)
    }
    assert contents == {"integers", "data"}
    assert larger.data["tensor"].to_list() == registers[2:]
