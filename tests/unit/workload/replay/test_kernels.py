"""Kernels of compiled graphs: planned with their sources, run only by those who trust them, and where they can run.

The kernels here are plain Python with the interface of Triton's: `run(*arguments, stream=..., grid=...)`.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from support.plans import PlanBuilder
from traceloom.cli import main
from traceloom.errors import InputError
from traceloom.testing.host_trace_builder import HostTraceBuilder
from traceloom.workload.replay.dry_run import dry_run
from traceloom.workload.replay.kernels import KernelLoader, find_missing_hardware
from traceloom.workload.replay.plan import STAND_IN, RankPlan, ReplayPlan
from traceloom.workload.replay.planning import Choice, make_plan
from traceloom.workload.replay.resize import scale_plan

torch = pytest.importorskip("torch")

from traceloom.workload.replay.running import PlanRunner, RunOptions  # noqa: E402
from traceloom.workload.replay.script import write_script  # noqa: E402

pytestmark = pytest.mark.torch
FILE = "cdoubles0.py"
SOURCE = """
calls = []


class Doubles:
    def run(self, source, target, count, *, stream, **options):
        calls.append((stream, options))
        target[:count].copy_(source[:count] * 2)


triton_poi_fused_mul_0 = Doubles()
"""
RELU = "aten::relu(Tensor self) -> Tensor"


def tensor(storage: int, *shape: int) -> tuple[Any, list[int], str]:
    return [storage + 1, storage, 0, shape[0], 4, "cuda:0"], [*shape], "Tensor(float)"


def recorded(
    folder: Path,
    *,
    source: str | None = SOURCE,
    file: str = FILE,
    grid: str | None = None,
    name: str = "triton_poi_fused_mul_0",
) -> ReplayPlan:
    """A kernel of four elements between an op that nobody needs and one that reads what it wrote."""
    made = HostTraceBuilder("1.1.0-chakra.0.0.4" if grid else "1.1.1-chakra.0.0.4")
    made.op("aten::relu", schema=RELU, inputs=[tensor(10, 4)], outputs=[tensor(20, 4)])
    behind = [(140382148398488, [], "Int")]
    made.op(
        name,
        inputs=[
            tensor(20, 4),
            tensor(30, 4),
            (4, [], "Int"),
            *([(grid, [], "String")] if grid else []),
            *behind,
        ],
        attributes=[("kernel_backend", "triton"), ("kernel_file", file)],
    )
    made.op("aten::relu", schema=RELU, inputs=[tensor(30, 4)], outputs=[tensor(40, 4)])
    trace = folder / "rank0.json"
    trace.write_text(made.text(), encoding="utf-8")
    if source is not None:
        (folder / "rank0_resources").mkdir(exist_ok=True)
        (folder / "rank0_resources" / FILE).write_text(source, encoding="utf-8")
    plan = make_plan(trace)
    plan.check()
    return plan


def executed(plan: RankPlan, directory: Path | None, **about: Any) -> PlanRunner:
    device = torch.device("cpu")
    return PlanRunner(
        plan, device, RunOptions(), kernels=KernelLoader(plan, device, directory, **about)
    )


def anywhere(folder: Path) -> dict[str, Any]:
    """As if the machine had all that a kernel needs."""
    return {"directory": folder, "lacks": lambda _: None, "stream": lambda _: 7}


def reasons(execution: PlanRunner) -> list[str]:
    return execution.stand_ins["reason"].to_list()


def test_a_plan_holds_sources_and_runs_none(tmp_path: Path) -> None:
    plan = recorded(tmp_path)
    (of_rank,) = plan
    sha256 = hashlib.sha256(SOURCE.encode()).hexdigest()
    assert of_rank.kernels.rows() == [(0, 1, "triton_poi_fused_mul_0", FILE, sha256, SOURCE, None)]
    assert of_rank.ops.select("action", "reason").rows()[1] == (STAND_IN, "not-trusted")
    assert of_rank.calls["arguments"][1] == '[{"tensor":0},{"tensor":1},4]'
    assert [notice.severity for notice in plan.notices if notice.slug == "compiled-kernels"] == [
        "info"
    ]
    plan.save(tmp_path / "run.plan")
    assert ReplayPlan.load(tmp_path / "run.plan").ranks[0].kernels.equals(of_rank.kernels)
    (left,) = dry_run(plan)[0].left
    assert (left.name, left.reason) == ("triton_poi_fused_mul_0", "not-trusted")
    compile(write_script(plan), "replay.py", "exec")
    from fractions import Fraction

    assert scale_plan(plan, {4: Fraction(2)}).ranks[0].kernels.height == 0
    trace = tmp_path / "rank0.json"
    assert make_plan(trace, choice=Choice(only="communication")).ranks[0].kernels.height == 0


@pytest.mark.parametrize(
    ("about", "reason"),
    [
        ({"source": None}, "no-sources"),
        ({"file": "../cdoubles0.py"}, "no-sources"),
        ({"file": ""}, "no-sources"),
        ({"source": "x" * (1 << 20) + "x"}, "no-sources"),
        ({}, "not-trusted"),
    ],
)
def test_what_is_not_there_or_not_trusted_is_a_stand_in(
    about: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    assert reasons(executed(recorded(tmp_path, **about).ranks[0], None)) == [reason]


def test_a_link_is_no_source(tmp_path: Path) -> None:
    (tmp_path / "rank0_resources").mkdir()
    (tmp_path / "elsewhere.py").write_text(SOURCE, encoding="utf-8")
    (tmp_path / "rank0_resources" / FILE).symlink_to(tmp_path / "elsewhere.py")
    assert recorded(tmp_path, source=None).ranks[0].kernels["source"].to_list() == [None]


def test_a_trusted_kernel_needs_a_gpu_and_triton(tmp_path: Path) -> None:
    of_rank = recorded(tmp_path, source="raise SystemExit").ranks[0]  # it is not even imported
    assert reasons(executed(of_rank, tmp_path)) == ["no-gpu"]
    try:
        import triton  # noqa: F401
    except ImportError:
        assert find_missing_hardware(torch.device("cuda")) == (
            "no-triton",
            "the package triton, which compiles it, is not installed",
        )


def test_a_trusted_kernel_runs(tmp_path: Path) -> None:
    execution = executed(recorded(tmp_path).ranks[0], **anywhere(tmp_path))
    assert reasons(execution) == []
    source, target = (execution.program.registers[row] for row in (0, 2))
    target.zero_()
    execution.run_pass()
    assert target.equal(2 * torch.relu(source))
    assert not execution.program.failures


@pytest.mark.parametrize("grid", ["(4, 1, 1)", "(4,)"])
def test_a_recorded_grid_is_handed_over(grid: str, tmp_path: Path) -> None:
    of_rank = recorded(tmp_path, grid=grid).ranks[0]
    assert of_rank.kernels["grid"].to_list() == [grid]
    loader = KernelLoader(of_rank, torch.device("cpu"), **anywhere(tmp_path))
    bound = loader.bind(1, of_rank.calls["arguments"][1])
    bound([torch.ones(4), torch.zeros(4)])
    module = next(iter(loader._modules.values()))
    assert module.calls == [
        (7, {"grid": tuple(int(part) for part in grid.strip("(),").split(","))})
    ]


@pytest.mark.parametrize(
    ("about", "text"),
    [
        ({"source": "1 / 0"}, "cdoubles0.py: ZeroDivisionError: division by zero"),
        ({"name": "triton_poi_other"}, "cdoubles0.py has no kernel 'triton_poi_other'"),
        (
            {"grid": "grid_combo_kernels(4,)"},
            "its grid is grid_combo_kernels(4,), and this PyTorch has no such function",
        ),
    ],
)
def test_a_source_that_is_of_no_use_is_said(
    about: dict[str, Any], text: str, tmp_path: Path
) -> None:
    execution = executed(recorded(tmp_path, **about).ranks[0], **anywhere(tmp_path))
    assert execution.stand_ins.select("reason", "text").rows() == [("other-kernel", text)]


def test_a_kernel_without_a_name_of_its_own(tmp_path: Path) -> None:
    source = SOURCE.replace("triton_poi_fused_mul_0", "triton_")
    assert reasons(executed(recorded(tmp_path, source=source).ranks[0], **anywhere(tmp_path))) == []


@pytest.mark.parametrize("changed", [{"source": "import os"}, {"file": "../outside.py"}])
def test_a_plan_with_another_source_is_refused(changed: dict[str, str], tmp_path: Path) -> None:
    plan = recorded(tmp_path)
    kernels = plan.ranks[0].kernels.with_columns(
        pl.lit(value).alias(name) for name, value in changed.items()
    )
    replace(plan, ranks={0: replace(plan.ranks[0], kernels=kernels)}).save(tmp_path / "run.plan")
    with pytest.raises(InputError, match="the source of a kernel") as refused:
        ReplayPlan.load(tmp_path / "run.plan")
    assert refused.value.slug == "plan-damaged"


def test_what_is_trusted_is_named_before_it_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded(tmp_path)
    sha256 = hashlib.sha256(SOURCE.encode()).hexdigest()
    options = ["--trust", "--device", "cpu", "--iterations", "1", "--quiet"]
    assert main(["replay", str(tmp_path / "rank0.json"), *options]) == 0
    assert f"trusted: {FILE} (sha256 {sha256}), 1 call\n" in capsys.readouterr().err


def test_what_only_stand_ins_use_takes_no_memory() -> None:
    build = PlanBuilder()
    table, used = build.tensor(1000, 1000, external=True), build.tensor(8, external=True)
    row, view = build.tensor(8), build.view(0, [10], [1])
    build.run("fbgemm::lookup(Tensor weights) -> Tensor", [{"tensor": 0}], [table], [row])
    build.add("view", [table], [view], action="view")
    build.run(
        "fbgemm::update(Tensor row, Tensor view) -> ()",
        [{"tensor": 0}, {"tensor": 1}],
        [row, view],
        [],
    )
    build.run(RELU, [{"tensor": 0}], [used], [build.tensor(8)])
    execution = PlanRunner(build.build(), torch.device("cpu"), RunOptions(memory_limit=1000))
    assert reasons(execution) == ["custom-op"] * 2
    assert execution.peak_bytes() == 64
    execution.run_pass()


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
def test_on_a_gpu(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="there is no Triton")
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    model = torch.compile(lambda x: torch.relu(x) * 2 + 1)
    data = torch.randn(1 << 12, device="cuda")
    model(data)
    observer = torch.profiler.ExecutionTraceObserver().register_callback(str(tmp_path / "a.json"))
    observer.set_extra_resource_collection(val=True)
    observer.start()
    with torch.profiler.profile():
        model(data)
    observer.stop()
    observer.unregister_callback()
    (of_rank,) = make_plan(tmp_path / "a.json")
    assert of_rank.kernels["source"].null_count() == 0
    device = torch.device("cuda", 0)
    folder = tmp_path / "sources"
    folder.mkdir()
    execution = PlanRunner(
        of_rank, device, RunOptions(), kernels=KernelLoader(of_rank, device, folder)
    )
    assert reasons(execution) == []
    assert not execution.program.failures
