from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import polars as pl
import pytest

from support.plans import PlanBuilder, small_plan

torch = pytest.importorskip("torch")

from traceloom.cli import main  # noqa: E402
from traceloom.workload.replay.dry_run import dry_run, dry_run_rank  # noqa: E402
from traceloom.workload.replay.plan import PLAN_SCHEMAS  # noqa: E402

pytestmark = pytest.mark.torch
MM = "aten::mm(Tensor self, Tensor mat2) -> Tensor"
RELU = "aten::relu(Tensor self) -> Tensor"
T = [{"tensor": number} for number in range(3)]


def test_a_plan_that_is_as_recorded() -> None:
    (result,) = dry_run(small_plan()).values()
    assert (result.ops, result.covered, result.looked_at, result.left, result.wrong) == (
        2,
        2,
        2,
        (),
        (),
    )
    assert result.fits
    assert (result.duration_ns, result.covered_ns) == (None, None)  # nothing is known of times
    # x, w, their product and its relu all live at the end
    assert result.peak_bytes == {"cpu": 4 * (8 * 4 + 4 * 6 + 8 * 6 + 8 * 6)}
    assert msgspec.json.decode(msgspec.json.encode(result))["ops"] == 2


def test_what_an_op_gives_otherwise_is_said_once_with_how_often() -> None:
    build = PlanBuilder()
    x, w = build.tensor(8, 4, external=True), build.tensor(4, 6, external=True)
    for _ in range(3):
        build.run(MM, T[:2], [x, w], [build.tensor(8, 5)])
        build.run(MM, T[:2], [x, w], [build.tensor(8, 6, dtype="float64", item=8)])
        columns = build.rows["tensors"][build.tensor(8, 4)]["storage"]
        build.run(RELU, T[:1], [x], [build.view(columns, [8, 4], [1, 8])])
    result = dry_run_rank(build.build())
    assert [(wrong.name, wrong.recorded, wrong.here, wrong.count) for wrong in result.wrong] == [
        ("aten::mm", "float32[8, 5] by [5, 1]", "float32[8, 6] by [6, 1]", 3),
        ("aten::mm", "float64[8, 6] by [6, 1]", "float32[8, 6] by [6, 1]", 3),
        ("aten::relu", "float32[8, 4] by [1, 8]", "float32[8, 4] by [4, 1]", 3),
    ]
    assert not result.fits
    assert (
        len(dry_run_rank(build.build(), strides=False).wrong) == 2
    )  # where strides are not recorded
    assert result.covered == result.ops == 9


@pytest.mark.parametrize(
    ("schema", "arguments", "reason", "covered"),
    [
        ("aten::nonzero(Tensor self) -> Tensor", T[:1], "data-dependent", 1),
        (
            "aten::masked_select(Tensor self, Tensor mask) -> Tensor",
            [T[0], T[0]],
            "data-dependent",
            1,
        ),
        ("aten::item(Tensor self) -> Scalar", T[:1], "data-dependent", 1),
        ("aten::argwhere(Tensor self) -> Tensor", T[:1], "data-dependent", 1),
        (
            "aten::bincount(Tensor self, Tensor? weights=None, SymInt minlength=0) -> Tensor",
            [T[0], None, 0],
            "data-dependent",
            1,
        ),
        (
            "aten::cudnn_grid_sampler(Tensor self, Tensor grid) -> Tensor output",
            [T[0], T[0]],
            "no-meta-kernel",
            1,
        ),
        (MM, [T[0], T[0]], "fails", 1),
        ("fbgemm::dense(Tensor self) -> Tensor", T[:1], "custom-op", 0),
        ("aten::no_such_op(Tensor self) -> Tensor", T[:1], "unknown-op", 0),
    ],
)
def test_why_an_op_was_not_looked_at(
    schema: str, arguments: list[Any], reason: str, covered: int
) -> None:
    build = PlanBuilder()
    x = build.tensor(8, 4, external=True)
    build.run(schema, arguments, [x], [None], durations_ns=[30, 10, 11])
    result = dry_run_rank(build.build())
    (left,) = result.left
    assert (left.reason, left.count, left.duration_ns) == (reason, 1, 11)
    assert (result.covered, result.looked_at) == (covered, 0)
    assert (result.duration_ns, result.covered_ns) == (11, 11 * covered)


def test_an_op_whose_twin_on_the_cpu_takes_other_arguments_ends_nothing() -> None:
    """Its schema names arguments otherwise, which is of no matter here, but its twin's are found by those names."""
    build = PlanBuilder()
    x, weight = build.tensor(2, 3, 4, external=True), build.tensor(3, external=True)
    schema = (
        "aten::cudnn_batch_norm(Tensor input, Tensor weight, Tensor? bias, Tensor? running_mean, Tensor? running_var, "
        "bool training, float factor, float epsilon) -> (Tensor, Tensor, Tensor, Tensor)"
    )
    build.run(
        schema, [T[0], T[1], None, None, None, True, 0.1, 0.1], [x, weight], [build.tensor(2, 3, 5)]
    )
    result = dry_run_rank(build.build())
    assert [(wrong.name, wrong.here) for wrong in result.wrong] == [
        ("aten::cudnn_batch_norm", "float32[2, 3, 4] by [12, 4, 1]")
    ]


def test_what_keeps_memory_for_a_stream_runs_and_gives_nothing() -> None:
    build = PlanBuilder()
    x = build.tensor(4, external=True, device="cuda:0")
    keep = "aten::record_stream(Tensor(a!) self, Stream s) -> ()"
    build.run(keep, [T[0], {"object": "Stream"}], [x], [])
    build.rows["ops"][-1] |= {"action": "stand-in", "reason": "refused-op"}  # as it is planned
    result = dry_run_rank(build.build())
    assert (result.ops, result.covered, result.looked_at, result.left) == (1, 1, 0, ())


def test_an_op_that_an_import_brings_is_looked_at() -> None:
    library = torch.library.Library("dry_run_test", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: 2 * x, "Meta")
    build = PlanBuilder()
    x = build.tensor(4, external=True)
    build.run("dry_run_test::twice(Tensor x) -> Tensor", T[:1], [x], [build.tensor(4)])
    build.rows["ops"][-1] |= {"action": "stand-in", "reason": "custom-op"}
    plan = build.build()
    assert [left.reason for left in dry_run_rank(plan).left] == ["custom-op"]
    result = dry_run_rank(plan, extra_namespaces=frozenset({"dry_run_test"}))
    assert (result.covered, result.looked_at, result.left) == (1, 1, ())


def test_coverage_counts_what_the_plan_leaves_out_and_what_is_exchanged() -> None:
    build = PlanBuilder()
    x, y = build.tensor(4, external=True), build.tensor(4)
    build.run(RELU, T[:1], [x], [y], durations_ns=[100])
    build.wait(build.collective("all_reduce", [y], [y]))
    build.add(
        "triton_kernel",
        [y],
        [build.tensor(4)],
        action="stand-in",
        reason="triton",
        durations_ns=[50],
    )
    build.add("view", [y], [build.view(1, [2, 2], [2, 1])], action="view")
    plan = build.build()
    omitted = pl.DataFrame(
        [
            {
                "rank": 0,
                "node": 7,
                "name": "lost",
                "reason": "no-schema",
                "text": "it has no schema",
                "duration_ns": 25,
            }
        ],
        schema=PLAN_SCHEMAS["omitted"],
    )
    result = dry_run_rank(replace(plan, omitted=omitted))
    assert (result.ops, result.covered, result.looked_at) == (5, 3, 1)
    assert (result.duration_ns, result.covered_ns) == (175, 100)
    assert [(left.name, left.reason) for left in result.left] == [
        ("triton_kernel", "triton"),
        ("lost", "no-schema"),
    ]


def test_the_peak_is_of_what_lives_together() -> None:
    build = PlanBuilder()
    x = build.tensor(10, external=True)
    for _ in range(5):
        y = build.tensor(10)
        build.run(RELU, T[:1], [x], [y])
        build.run(RELU, T[:1], [y], [build.tensor(10)])
    assert build.build().peak_bytes() == 3 * 40
    assert dry_run_rank(build.build()).peak_bytes == {"cpu": 3 * 40}


def test_factories_views_and_what_an_op_does_to_its_tensor() -> None:
    build = PlanBuilder()
    x = build.tensor(4, 4, external=True)
    build.run(
        "aten::zeros(SymInt[] size, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None, bool? pin_memory=None) -> Tensor",
        [[2, 3], {"dtype": "int64"}, None, None, None],
        [],
        [build.tensor(2, 3, dtype="int64", item=8)],
    )
    build.run("aten::t(Tensor(a) self) -> Tensor(a)", T[:1], [x], [build.view(0, [4, 4], [1, 4])])
    build.run("aten::squeeze_(Tensor(a!) self) -> Tensor(a!)", T[:1], [x], [x])
    build.run(
        "aten::split.Tensor(Tensor(a -> *) self, SymInt n, int dim=0) -> Tensor(a)[]",
        [T[0], 3, 0],
        [x],
        [build.view(0, [3, 4], [4, 1]), build.view(0, [1, 4], [9, 1], offset=12)],
    )
    result = dry_run_rank(build.build())
    assert result.wrong == ()
    assert result.left == ()


def test_the_verb_says_what_of_a_plan_runs_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build = PlanBuilder()
    x = build.tensor(8, 4, external=True)
    build.run(RELU, T[:1], [x], [build.tensor(8, 5)], durations_ns=[30])
    build.run("fbgemm::dense(Tensor self) -> Tensor", T[:1], [x], [None], durations_ns=[10])
    path = tmp_path / "run.plan"
    replace(small_plan(), ranks={0: build.build()}).save(path)
    assert main(["replay", str(path), "--dry-run"]) == 0
    first, wrong, left, *_ = capsys.readouterr().out.splitlines()
    assert first == (
        "rank 0: 1 of 2 ops run here (75.0 % of their recorded time); 1 compared, 1 difference; tensors of at most 288 B on cpu"
    )
    assert (
        wrong
        == "  1 × aten::relu, output 0: recorded float32[8, 5] by [5, 1], here float32[8, 4] by [4, 1]"
    )
    assert left.startswith(
        "  1 × fbgemm::dense (custom-op): ops of the namespace 'fbgemm' run only with --import"
    )
    assert main(["replay", str(path), "--dry-run", "--json"]) == 0
    assert msgspec.json.decode(capsys.readouterr().out)["ranks"][0]["covered_ns"] == 30


def test_where_the_cpu_gives_another_answer_than_meta_kernels_it_is_right() -> None:
    build = PlanBuilder()
    x, _ = build.tensor(2, 3, 8, 8, external=True), build.tensor(4, 3, 3, 3, external=True)
    last = build.view(0, [2, 3, 8, 8], [192, 1, 24, 3]), build.view(1, [4, 3, 3, 3], [27, 1, 9, 3])
    y = build.tensor(2, 4, 6, 6)
    channels_last = build.view(build.rows["tensors"][y]["storage"], [2, 4, 6, 6], [144, 1, 24, 4])
    build.run(
        "aten::conv2d(Tensor input, Tensor weight) -> Tensor", T[:2], list(last), [channels_last]
    )
    quantised = build.tensor(2, 3, 8, 8, dtype="quint8", item=1)
    build.run(
        "aten::quantize_per_tensor(Tensor self, float scale, int zero_point, ScalarType dtype) -> Tensor",
        [T[0], 0.1, 0, {"dtype": "quint8"}],
        [x],
        [quantised],
    )
    lengths, packed = build.tensor(2, dtype="int64", item=8, external=True), build.tensor(9, 8, 8)
    build.run(
        "aten::_pack_padded_sequence(Tensor input, Tensor lengths, bool batch_first) -> (Tensor, Tensor)",
        [T[0], T[1], True],
        [x, lengths],
        [packed, None],
    )
    result = dry_run_rank(build.build())
    assert result.wrong == ()
    assert [left.reason for left in result.left] == ["data-dependent"]


def test_what_fails_is_reported_and_prints_no_traceback(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = logging.getLogger("torch._subclasses.fake_tensor")  # passes nothing on to others
    monkeypatch.setattr(log, "handlers", [caplog.handler])
    build = PlanBuilder()
    x, w = build.tensor(8, 4, external=True), build.tensor(5, 6, external=True)
    build.run(MM, T[:2], [x, w], [build.tensor(8, 6)])
    result = dry_run_rank(build.build())
    assert [left.count for left in result.left] == [1]
    assert caplog.records == []
