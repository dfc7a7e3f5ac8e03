"""Which GPU work is communication, memory or compute, and which rule says so."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import polars as pl
import pytest

from traceloom.analyze import Rule, gpu_time, kernels, read_rules
from traceloom.analyze.kernel_rules import assign_categories, load_built_in_category_rules
from traceloom.errors import InputError, UsageError
from traceloom.testing import TraceBuilder

TABLE = json.loads(
    files("traceloom.analyze").joinpath("kernel_rules.json").read_text(encoding="utf-8")
)


def told(name: str, kind: str = "kernel", rules: tuple[Rule, ...] = ()) -> tuple[str, str]:
    row = assign_categories(pl.DataFrame({"name": [name], "kind": [kind]}), rules).to_dicts()[0]
    return row["category"], row["rule"]


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row["rule"])
def test_each_rule_decides_its_example(row: dict[str, str]) -> None:
    assert told(row["example"]) == (row["category"], row["rule"])


def test_rules_have_unique_names_and_reasons() -> None:
    names = [row["rule"] for row in TABLE]
    assert len(set(names)) == len(names)
    assert all(row["why"] for row in TABLE)
    assert [rule.name for rule in load_built_in_category_rules()] == names


@pytest.mark.parametrize(
    "name",
    [
        "void deep_ep::internode::combine<false, 8>(int4*)",
        "void deep_ep::intranode::dispatch<8, 768>(int4*)",
        "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*)",
        "void ncclSymDevKernel_AllReduce(ncclSymDevArgs)",
        "RCCLDevKernel",
        "void two_shot_all_reduce_kernel<8>()",
        "void c10d::symmetric_memory::one_shot_all_reduce_kernel<float>()",
        "nvshmem_barrier_all",
    ],
)
def test_communication_is_more_than_nccl(name: str) -> None:
    assert told(name)[0] == "communication"


@pytest.mark.parametrize(
    "name",
    [
        "void step::kernel()",  # ep:: only as a word of its own
        "hipblasLtKernel",
        "void at::native::reduce_kernel<512>()",
        "blockAllReduceSoftmax",
        "Cijk_Ailk_Bljk_HHS_BH_MT128x128",
        "",
    ],
)
def test_compute_is_what_no_rule_claims(name: str) -> None:
    assert told(name) == ("compute", "none")


def test_copies_and_fills_are_memory_whatever_they_are_called() -> None:
    assert told("ncclMemcpy", "copy") == ("memory", "category")
    assert told("Memset (Device)", "fill") == ("memory", "category")


def test_the_users_rules_come_first() -> None:
    mine = Rule("mine", "compute", "nccl.*reduce")
    assert told("ncclDevKernel_AllReduce", rules=(mine,)) == ("compute", "mine")
    assert told("ncclDevKernel_Broadcast", rules=(mine,)) == ("communication", "nccl")


def test_the_users_rules_reach_the_analyses() -> None:
    trace = TraceBuilder().kernel("my_ring_exchange", 0, 5).build()
    mine = [Rule("mine", "communication", "ring_exchange")]
    assert gpu_time(trace, mine).devices["communication_ns"].to_list() == [5000]
    assert kernels(trace, mine).kernels["rule"].to_list() == ["mine"]
    assert gpu_time(trace).devices["communication_ns"].to_list() == [0]


def test_a_kernel_that_copies_is_memory_but_still_a_kernel() -> None:
    trace = TraceBuilder(generation="rocm").kernel("__amd_rocclr_copyBuffer.kd", 0, 5).build()
    row = kernels(trace).kernels.to_dicts()[0]
    assert (row["category"], row["rule"], row["kind"]) == ("memory", "rocm-copy", "kernel")
    assert gpu_time(trace).devices.select("kernel_count", "memory_ns").row(0) == (1, 5000)


@pytest.mark.parametrize("pattern", ["(", "(?=look)", r"\1"])
def test_a_pattern_that_is_none_is_refused(pattern: str) -> None:
    with pytest.raises(UsageError) as caught:
        Rule("bad", "compute", pattern)
    assert caught.value.slug == "bad-kernel-rule"


def test_a_category_that_is_none_is_refused() -> None:
    with pytest.raises(UsageError, match="fun"):
        Rule("bad", "fun", "x")  # type: ignore[arg-type]


def test_a_table_of_the_user_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rules.json"
    path.write_text(
        json.dumps([{"rule": "mine", "category": "memory", "pattern": "stash", "why": "ours"}])
    )
    assert read_rules(path) == (Rule("mine", "memory", "stash"),)


@pytest.mark.parametrize(
    "text",
    ["{}", "[1]", '[{"rule": "a"}]', "not json", '[{"rule": 1, "category": "a", "pattern": ""}]'],
)
def test_a_file_that_is_no_table_is_refused_with_its_place(tmp_path: Path, text: str) -> None:
    path = tmp_path / "rules.json"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        read_rules(path)
    assert caught.value.slug == "kernel-rules-unreadable"
    assert "rules.json" in caught.value.where


def test_a_missing_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError):
        read_rules(tmp_path / "none.json")


def test_every_rule_stands_in_the_documentation() -> None:
    page = (
        Path(__file__).resolve().parents[3] / "docs" / "concepts" / "kernel-categories.md"
    ).read_text(encoding="utf-8")
    assert [
        rule.name for rule in load_built_in_category_rules() if f"`{rule.name}`" not in page
    ] == []
