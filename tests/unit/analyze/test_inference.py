"""Steps of inference servers, and graph replays joined to the operators of their capture; times in µs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import traceloom
from traceloom.analyze import inference
from traceloom.analyze.inference import FIELD_NAMES
from traceloom.errors import UsageError
from traceloom.testing import TraceBuilder
from traceloom.trace.session import Session


def said(name: str) -> dict[str, Any]:
    """What is read from one annotation; unknown facts left out."""
    rows = inference(TraceBuilder().annotation(name, 0, 10).build()).steps.to_dicts()
    assert len(rows) == 1
    return {
        key: rows[0][key] for key in ("framework", "kind", *FIELD_NAMES) if rows[0][key] is not None
    }


def test_vllm_with_its_detailed_sums() -> None:
    assert said("execute_52_context_2(sq48sk60sqsq1sqsk2)_generation_4(sq4sk900sqsq4sqsk900)") == {
        "framework": "vllm",
        "kind": "mixed",
        "requests": 6,
        "context_requests": 2,
        "context_tokens": 48,
        "context_kv_tokens": 60,
        "generation_requests": 4,
        "generation_tokens": 4,
        "generation_kv_tokens": 900,
    }


@pytest.mark.parametrize(
    ("name", "kind", "facts"),
    [
        ("execute_context_3(120)_generation_0(0)", "prefill", (3, 3, 120, 0, 0)),
        ("execute_context_0(0)_generation_2(50)", "decode", (2, 0, 0, 2, 50)),
        ("execute_context_3(120)_generation_2(2)", "mixed", (5, 3, 120, 2, 2)),
        ("execute_new_1_cached_0", "prefill", (1, 1, None, 0, None)),
        ("execute_new_0_cached_7", "decode", (7, 0, None, 7, None)),
        ("step[DECODE bs=32]", "decode", (32, 0, 0, 32, 32)),
        ("step[DECODE bs=2 g_sqsq=2 g_sqsk=30 g_sk=30]", "decode", (2, 0, 0, 2, 2)),
        ("step[EXTEND bs=2 toks=12 c_sqsq=80 c_sqsk=120 c_sk=20]", "prefill", (2, 2, 12, 0, 0)),
        (
            "step[MIXED bs=2 c=1 g=1 c_sq=5 c_sk=8 c_sqsq=25 g_sq=1 g_sk=12]",
            "mixed",
            (2, 1, 5, 1, 1),
        ),
        ("step[MIXED bs=4]", "mixed", (4, None, None, None, None)),
        ("step[VERIFY bs=4]", "verify", (4, None, None, None, None)),
        ("step[NEW_THING bs=4]", "other", (4, None, None, None, None)),
        ("prefill[bs=2 tok=16384]", "prefill", (2, 2, 16384, 0, 0)),
        ("decode[bs=4 tok=4]", "decode", (4, 0, 0, 4, 4)),
    ],
)
def test_every_form_of_annotation(name: str, kind: str, facts: tuple[int | None, ...]) -> None:
    found = said(name)
    names = (
        "requests",
        "context_requests",
        "context_tokens",
        "generation_requests",
        "generation_tokens",
    )
    assert (found["kind"], tuple(found.get(key) for key in names)) == (kind, facts)


@pytest.mark.parametrize(
    "name",
    [
        "execute",
        "step[",
        "step DECODE",
        "execute_context_x",
        "decode",
        "prefill[x]",
        "ProfilerStep#3",
    ],
)
def test_other_names_are_no_steps(name: str) -> None:
    assert not inference(TraceBuilder().annotation(name, 0, 10).build()).steps.height


def served() -> TraceBuilder:
    """A prefill, two decodes, a mixed step; each launches a kernel of 30 µs that ends 20 µs after the annotation."""
    builder = TraceBuilder()
    names = [
        "execute_context_2(100)_generation_0(0)",
        "execute_context_0(0)_generation_2(2)",
        "execute_context_0(0)_generation_2(2)",
        "execute_context_1(40)_generation_2(2)",
    ]
    for number, (name, start) in enumerate(zip(names, (0, 100, 200, 350), strict=True)):
        builder.annotation(name, start, 80).launch(
            "cudaLaunchKernel", start + 10, 5, correlation=number + 1
        )
        builder.kernel("work", start + 70, 30, correlation=number + 1)
    return builder


def test_steps_have_their_gpu_time_and_the_time_between_tokens() -> None:
    found = inference(served().build())
    rows = found.steps.to_dicts()
    assert [row["kind"] for row in rows] == ["prefill", "decode", "decode", "mixed"]
    assert [row["gpu_ns"] for row in rows] == [30_000] * 4
    assert [row["lag_ns"] for row in rows] == [20_000] * 4
    assert [row["between_ns"] for row in rows] == [None, None, 100_000, 150_000]
    mix = {row["kind"]: row for row in found.mix.to_dicts()}
    assert (mix["decode"]["step_count"], mix["decode"]["between_median_ns"]) == (2, 100_000)
    assert (mix["prefill"]["context_tokens"], mix["decode"]["generation_tokens"]) == (100, 4)
    assert sum(row["gpu_fraction"] for row in mix.values()) == pytest.approx(1)


def test_a_prefill_between_two_decodes_is_time_between_tokens() -> None:
    builder = (
        TraceBuilder()
        .annotation("step[DECODE bs=1]", 0, 10)
        .annotation("step[EXTEND bs=1 toks=9]", 20, 50)
    )
    rows = inference(builder.annotation("step[DECODE bs=1]", 80, 10).build()).steps.to_dicts()
    assert [row["between_ns"] for row in rows] == [None, None, 80_000]


def test_tokens_per_second_are_counted_over_the_work_of_all_steps() -> None:
    rates = {row["what"]: row for row in inference(served().build()).rates.to_dicts()}
    assert (rates["generated tokens"]["count"], rates["generated tokens"]["window_ns"]) == (
        6,
        450_000,
    )
    assert rates["generated tokens"]["per_second"] == pytest.approx(6 / 450e-6)
    assert rates["context tokens"]["count"] == 140


def test_declared_tokens_and_samples_are_per_step_of_the_server_else_of_the_trace() -> None:
    rates = inference(served().build(), tokens_per_step=8, samples_per_step=2).rates.filter(
        evidence="declared"
    )
    assert rates.select("what", "count", "window_ns").rows() == [
        ("tokens", 32, 450_000),
        ("samples", 8, 450_000),
    ]
    trained = TraceBuilder().step(1, 0, 100).step(2, 100, 100).step(3, 200, 100)
    rates = inference(trained.build(), samples_per_step=64).rates
    assert rates.select("what", "count", "window_ns").rows() == [("samples", 192, 300_000)]
    assert inference(trained.build()).rates.height == 0
    with pytest.raises(UsageError, match="positive"):
        inference(trained.build(), tokens_per_step=0)


def test_two_annotations_of_one_step_are_one_step() -> None:
    builder = TraceBuilder().annotation(
        "execute_32_context_0(sq0sk0sqsq0sqsk0)_generation_32(sq32sk99sqsq1sqsk1)", 0, 100
    )
    rows = inference(builder.annotation("step[DECODE bs=32]", 10, 80).build()).steps.to_dicts()
    assert [
        (row["framework"], row["requests"], row["generation_kv_tokens"], row["duration_ns"])
        for row in rows
    ] == [("sglang", 32, 99, 100_000)]


def test_without_the_hosts_annotations_those_of_the_gpu_are_taken_once_for_all_streams() -> None:
    builder = TraceBuilder().gpu_annotation("step[DECODE bs=4]", 0, 50, stream=7)
    builder.gpu_annotation("step[DECODE bs=4]", 10, 60, stream=8).gpu_annotation(
        "step[DECODE bs=4]", 100, 50
    )
    builder.kernel("one", 5, 20).kernel("two", 30, 30, stream=8).kernel("three", 110, 10)
    rows = inference(builder.build()).steps.to_dicts()
    assert [(row["duration_ns"], row["gpu_ns"], row["work_count"]) for row in rows] == [
        (70_000, 50_000, 2),
        (50_000, 10_000, 1),
    ]


NAMES = ["embed", "gemm", "norm", "gemm", "act"]


def replay(names: list[str]) -> TraceBuilder:
    builder = (
        TraceBuilder()
        .annotation("step[DECODE bs=4]", 0, 100)
        .launch("cudaGraphLaunch", 10, 5, correlation=1)
    )
    for place, name in enumerate(names):
        builder.kernel(name, 20 + 10 * place, 10, correlation=1)
    return builder


def eager(names: list[str], *, before: int = 0) -> TraceBuilder:
    """Each kernel launched by an operator of its own, in a module; other work before."""
    builder, at = TraceBuilder().python("nn.Module: Model_0", 0, 2000), 1.0
    for number, name in enumerate(["other"] * before + names):
        builder.op(f"op of {name} {number - before}", at, 8, external_id=number + 1)
        builder.launch(
            "cudaLaunchKernel", at + 2, 3, correlation=number + 1, **{"External id": number + 1}
        )
        builder.kernel(
            name, 3000 + 10 * number, 9, correlation=number + 1, **{"External id": number + 1}
        )
        at += 10
    return builder


def operators(
    replayed: TraceBuilder, captured: TraceBuilder
) -> list[tuple[str | None, str | None]]:
    found = inference(replayed.build(), capture=captured.build())
    return found.nodes.select("op_name", "reason").rows()


def test_a_graph_that_stands_in_the_capture_is_mapped_node_by_node() -> None:
    found = inference(replay(NAMES).build(), capture=eager(NAMES, before=3).build())
    assert found.nodes["op_name"].to_list() == [
        f"op of {name} {at}" for at, name in enumerate(NAMES)
    ]
    assert set(found.nodes["evidence"]) == {"correlated"}
    assert set(found.nodes["module"]) == {"nn.Module: Model_0"}
    assert found.mapped_fraction == 1.0
    assert found.operators["gpu_ns"].sum() == 50_000
    assert found.operators["kernel_count"].sum() == 5


def test_what_the_capture_lacks_or_has_otherwise_is_said() -> None:
    rows = operators(replay(["embed", "gemm", "fused", "gemm", "act"]), eager(NAMES))
    assert [name for name, _ in rows] == [
        "op of embed 0",
        "op of gemm 1",
        None,
        "op of gemm 3",
        "op of act 4",
    ]
    assert rows[2][1] == "no kernel of this name is in the capture"
    found = inference(replay(["embed", "gemm", "fused"]).build(), capture=eager(NAMES).build())
    assert found.mapped_fraction == pytest.approx(2 / 3)
    assert set(found.nodes.drop_nulls("op")["evidence"]) == {"inferred"}


def test_what_is_out_of_order_is_not_mapped() -> None:
    rows = operators(replay(["act", "embed", "gemm", "norm", "gemm"]), eager(NAMES))
    assert [name for name, _ in rows] == [
        None,
        "op of embed 0",
        "op of gemm 1",
        "op of norm 2",
        "op of gemm 3",
    ]
    assert rows[0][1] == "its place in the order is not found in the capture"


def test_a_capture_of_other_work_maps_nothing() -> None:
    rows = operators(replay(["a", "b", "c", "norm", "d"]), eager(NAMES))
    assert [name for name, _ in rows] == [None] * 5
    assert rows[0][1] == "no kernel of this name is in the capture"
    assert str(rows[3][1]).startswith("the capture is of other work")


def test_a_node_missing_at_the_front_does_not_shift_the_others() -> None:
    rows = operators(replay(["gemm", "norm", "gemm", "act"]), eager(["gemm", *NAMES]))
    assert [name for name, _ in rows] == [
        "op of gemm 2",
        "op of norm 3",
        "op of gemm 4",
        "op of act 5",
    ]


def test_launch_calls_that_only_captured_name_their_kernels(tmp_path: Path) -> None:
    builder = TraceBuilder(device_name="AMD Instinct MI300X", generation="rocm")
    for number, name in enumerate(NAMES):
        builder.op(f"op of {name} {number}", 10 * number, 8)
        builder.launch(
            "hipLaunchKernel", 10 * number + 2, 3, correlation=number + 1, kernel=name, flow=False
        )
    captured = traceloom.load(str(builder.write(tmp_path / "warmup.json")))
    found = inference(replay(NAMES).build(), capture=captured)
    assert found.nodes["op_name"].to_list() == [
        f"op of {name} {at}" for at, name in enumerate(NAMES)
    ]


def test_replays_in_the_capture_know_no_operators() -> None:
    found = inference(replay(NAMES).build(), capture=replay(NAMES).build())
    assert found.mapped_fraction == 0.0
    assert set(found.nodes["reason"]) == {"no kernel of this name is in the capture"}


def test_a_session_is_told_rank_by_rank_and_takes_the_capture_of_its_rank() -> None:
    traces = tuple(
        TraceBuilder(rank=rank, world_size=2)
        .annotation(f"step[DECODE bs={rank + 1}]", 0, 9)
        .build()
        for rank in (0, 1)
    )
    found = inference(Session(traces, "made"))
    assert found.steps.select("rank", "requests").rows() == [(0, 1), (1, 2)]
    assert found.mapped_fraction is None


def test_a_training_trace_has_no_steps_of_a_server() -> None:
    found = inference(
        TraceBuilder().step(1, 0, 5).op("aten::mm", 0, 5).build(), capture=eager(NAMES).build()
    )
    assert [
        getattr(found, name).height for name in ("steps", "mix", "rates", "nodes", "operators")
    ] == [0] * 5
