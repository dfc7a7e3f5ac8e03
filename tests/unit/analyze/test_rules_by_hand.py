"""Rules of users against Python's own regular expressions; tables and peaks that cannot be right are refused."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from support.odd_traces import above, gpu_rows_of, odd_trace, rows_of
from traceloom.analyze import KindRule, Rule, kernel_kinds, load_rules, read_kind_rules, read_rules
from traceloom.analyze.kernel_kinds import classify_kinds
from traceloom.analyze.kernel_rules import WORK_KINDS, assign_categories, select_gpu_work
from traceloom.analyze.placed_calls import Peak, find, find_peaks, list_known_devices, parse_peak
from traceloom.errors import InputError, TraceloomError, UsageError
from traceloom.testing import TraceBuilder

PATTERNS = ("gemm", "^soft", "e", "add>$", "nccl.*sum", "Memcpy|memset", "[日本]", "GEMM$", "z")
OPS = ("^aten::", "mm$", "copy_", "c10d", "region")


@pytest.mark.parametrize("seed", range(6))
def test_the_first_rule_that_holds_decides(seed: int) -> None:
    chance, trace = random.Random(seed), odd_trace(seed)
    rules = []
    for number in range(8):
        pattern, op, under = (chance.choice([*choices, "", ""]) for choices in (PATTERNS, OPS, OPS))
        rules.append(
            KindRule(
                f"rule {number}",
                chance.choice(WORK_KINDS),
                pattern or ("" if op or under else "e"),
                op,
                under,
            )
        )
    rules.append(KindRule("all", "other", "."))
    events = rows_of(trace)
    found = (
        classify_kinds(trace, rules).select("event", pl.col("kind").cast(pl.String), "rule").rows()
    )
    wanted = []
    for work in gpu_rows_of(trace):
        own = None if work["op"] is None else events[work["op"]]
        launch = work["launch"] if work["launch"] is not None else work["op"]
        chain = [] if launch is None else [events[launch], *above(events, events[launch])]
        around = [row["name"] for row in chain if row["category"] in {"op", "annotation"}]
        around += [own["name"]] if own else []
        for rule in rules:
            if (
                re.search(rule.pattern, work["name"], re.IGNORECASE)
                and (
                    not rule.op
                    or (own is not None and re.search(rule.op, own["name"], re.IGNORECASE))
                )
                and (
                    not rule.under
                    or any(re.search(rule.under, name, re.IGNORECASE) for name in around)
                )
            ):
                wanted.append((work["event"], rule.kind, rule.name))
                break
    assert found == wanted
    account = kernel_kinds(trace, rules)
    account.check()
    assert dict(account.rules.group_by("rule").agg(pl.col("count").sum()).rows()) == {
        rule.name: sum(name == rule.name for *_, name in wanted)
        for rule in rules
        if any(name == rule.name for *_, name in wanted)
    }


@pytest.mark.parametrize("seed", range(4))
def test_categories_follow_the_first_rule_and_rules_are_about_kernels_alone(seed: int) -> None:
    chance, trace = random.Random(seed), odd_trace(seed)
    rules = [
        Rule(
            f"r{n}", chance.choice(["compute", "communication", "memory"]), chance.choice(PATTERNS)
        )
        for n in range(5)
    ]
    work = select_gpu_work(trace, [*rules, Rule("all", "compute", ".")])
    for row in work.to_dicts():
        holds = [
            rule
            for rule in [*rules, Rule("all", "compute", ".")]
            if re.search(rule.pattern, row["name"], re.IGNORECASE)
        ]
        wanted = (
            ("memory", "category")
            if row["kind"] != "kernel"
            else (holds[0].category, holds[0].name)
        )
        assert (row["category"], row["rule"]) == wanted


def test_a_name_is_classified_the_same_alone_and_among_others() -> None:
    names = ["gemm", "ncclDevKernel_AllReduce", "", "日本", "Memcpy", "x" * 3000, "a\nnccl"]
    frame = pl.DataFrame({"name": names, "kind": ["kernel"] * len(names)})
    together = assign_categories(frame).select("category", "rule").rows()
    alone = [
        assign_categories(frame[at : at + 1]).select("category", "rule").row(0)
        for at in range(len(names))
    ]
    assert together == alone
    assert assign_categories(frame[:0]).height == 0


# -- tables of the user's -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{}",
        "5",
        '"x"',
        "[5]",
        "[{}]",
        '[{"rule": "x"}]',
        '[{"rule": 5, "kind": "gemm", "pattern": "x"}]',
        '[{"rule": "x", "kind": "gemm"}]',
        '[{"rule": "x", "kind": "gemm", "pattern": null}]',
        "[" * 100_000,
        '[{"rule": "x", "kind": "gemm", "pattern": ""}]',
        "\udcff",
    ],
)
def test_tables_that_are_none_are_refused_with_their_place(content: str, tmp_path: Path) -> None:
    path = tmp_path / "rules.json"
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    for reading in (read_kind_rules, read_rules):
        with pytest.raises(InputError) as error:
            reading(path)
        assert error.value.slug == "kernel-rules-unreadable"
        assert "rules.json" in str(error.value)


@pytest.mark.parametrize("pattern", ["(", "a(?=b)", r"(a)\1", "[", "*", "a{5000}{5000}"])
def test_patterns_that_are_none_are_refused_by_the_name_of_their_rule(
    pattern: str, tmp_path: Path
) -> None:
    path = tmp_path / "rules.json"
    row: dict[str, Any] = {
        "rule": "mine",
        "kind": "gemm",
        "category": "compute",
        "pattern": pattern,
    }
    path.write_text(json.dumps([row]))
    for reading in (read_kind_rules, read_rules):
        with pytest.raises(UsageError, match="mine") as error:
            reading(path)
        assert error.value.slug == "bad-kernel-rule"


@pytest.mark.parametrize("row", [{"kind": "matmul"}, {"kind": ""}, {"kind": "GEMM"}])
def test_kinds_that_there_are_not_are_refused_with_those_that_there_are(
    row: dict[str, str], tmp_path: Path
) -> None:
    path = tmp_path / "rules.json"
    path.write_text(json.dumps([{"rule": "mine", "pattern": "x"} | row]))
    with pytest.raises(UsageError) as error:
        load_rules([path])
    assert "gemm" in str(error.value.hint)


def test_more_patterns_of_operators_than_there_is_room_for_are_refused() -> None:
    rules = [KindRule(f"r{number}", "gemm", "", f"op{number}") for number in range(65)]
    with pytest.raises(UsageError, match="at most 64"):
        kernel_kinds(odd_trace(1), rules)


def test_tables_are_read_in_their_order_and_a_missing_one_is_told(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / f"{name}.json").write_text(
            json.dumps([{"rule": name, "kind": "gemm", "pattern": "x"}])
        )
    assert [rule.name for rule in load_rules([tmp_path / "b.json", tmp_path / "a.json"])] == [
        "b",
        "a",
    ]
    with pytest.raises(TraceloomError, match="gone"):
        load_rules([tmp_path / "gone.json"])


# -- peaks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list_known_devices())
def test_every_known_device_is_found_in_any_capitals_and_blanks(name: str) -> None:
    for spelled in (name, name.upper(), f"  {name.lower()} ", name.replace(" ", "   ")):
        peak = find(spelled)
        assert isinstance(peak, Peak)
        assert peak.name == name
    assert isinstance(find(f"{name} X"), str)
    assert isinstance(find(name, 1), (str, Peak))


@pytest.mark.parametrize(
    "given",
    [
        {"bf16": 10**400},
        {"bf16": "1e12"},
        {"bf16": None},
        {"bf16": float("nan")},
        {"memory": 0},
        {"flops": 1.0},
        {"bf16": -1},
        "bf16=",
        "=5",
        "bf16=1e12,",
        "bf16=1e400",
        "bf16=1 memory=2",
        "bf16==1",
    ],
)
def test_peaks_that_are_none_are_refused_in_words(given: Any) -> None:
    with pytest.raises(UsageError) as error:
        parse_peak(given)
    assert error.value.slug == "bad-peak"


def test_numbers_as_text_and_as_a_mapping_are_the_same_peaks() -> None:
    text, mapping = (
        parse_peak("bf16=1e15, memory = 2e12,fp32=5e13"),
        parse_peak({"bf16": 1e15, "memory": 2e12, "fp32": 5e13}),
    )
    assert (text.flops, text.memory) == (mapping.flops, mapping.memory)
    assert parse_peak(text) is text
    assert text.rate("bf16", matrix=True) == 1e15
    assert text.rate("bf16", matrix=False) == text.rate("int32", matrix=False) == 5e13
    assert text.rate("fp8", matrix=True) is None
    assert text.rate("fp64", matrix=False) is None


def test_a_peak_that_the_user_gives_is_that_of_every_device() -> None:
    trace = (
        TraceBuilder(devices=2, device_name="Unknown 9000")
        .kernel("k", 0, 5)
        .kernel("k", 0, 5, device=1)
        .build()
    )
    assert set(find_peaks(trace)) == {0, 1}
    assert all(
        isinstance(reason, str) and "Unknown 9000" in reason
        for reason in find_peaks(trace).values()
    )
    chosen = parse_peak("bf16=1e15")
    assert find_peaks(trace, chosen) == {0: chosen, 1: chosen}
