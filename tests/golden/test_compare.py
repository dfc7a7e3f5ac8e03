"""Comparing public traces: vendor twins, the pair of different conditions, and each trace with itself."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import traceloom
from support.public_traces import DATA
from traceloom.analyze import Comparison, compare
from traceloom.errors import UsageError

EVERY = sorted(
    path
    for folder in ("kineto", "critical_path", "diff")
    for path in (DATA / folder).glob("*.json.gz")
)

pytestmark = [
    pytest.mark.data,
    pytest.mark.skipif(
        not DATA.is_dir(), reason="the public traces (../shared/data) are not on this machine"
    ),
]


def compared(base: str, new: str) -> Comparison:
    found = compare(traceloom.load(DATA / base), traceloom.load(DATA / new))
    found.check()
    return found


def events(name: str) -> list[dict[str, Any]]:
    with gzip.open(DATA / name) as handle:
        return [
            e for e in json.load(handle, parse_float=Decimal)["traceEvents"] if e.get("ph") == "X"
        ]


@pytest.mark.sampled(7)
@pytest.mark.parametrize("path", EVERY, ids=lambda path: path.name)
def test_a_trace_against_itself_is_all_zero(path: Path) -> None:
    session = traceloom.load(path)
    try:
        found = compare(session, session)
    except UsageError as error:
        if session.traces[0].end_ns > session.traces[0].start_ns:
            raise AssertionError(f"{path.name} holds time, but: {error}") from error
        return
    found.check()
    assert (found.difference_ns, found.comparable) == (0, True)
    for frame, columns in (
        (found.breakdown, ["difference_ns"]),
        (found.kernels, ["difference_ns"]),
        (found.operators, ["device_difference_ns", "host_difference_ns"]),
    ):
        assert all(set(frame[column]) <= {0} for column in columns)
    for frame in (found.kernels, found.operators):
        assert set(frame["status"].cast(pl.String)) <= {"same"}


@pytest.mark.parametrize("model", ["bert_small", "qwen_0.5b"])
def test_vendor_twins_align_operator_by_operator(model: str) -> None:
    found = compared(f"kineto/h100_{model}.json.gz", f"kineto/mi300_{model}.json.gz")
    stated = {row["condition"]: row for row in found.conditions.to_dicts()}
    assert not found.comparable
    assert "H100" in stated["device"]["base"]
    assert "MI300X" in stated["device"]["new"]
    assert found.sentence.startswith("The conditions differ")
    # Every operator of the H100 has its twin, at the same place and on the same shapes.
    matched, of = stated["operators at the same place"]["base"].split(" of ")
    assert matched == of
    assert stated["shapes of inputs"]["same"]
    assert not found.operators.filter(pl.col("status") == "removed").height
    # Kernels that an operator launched stand for those of its twin, whatever they are called.
    launched = found.kernels.filter(pl.col("operator") == "aten::_flash_attention_forward")
    assert launched.height == 1
    row = launched.row(0, named=True)
    assert row["status"] == "replaced"
    assert "flash_fwd" in row["base_kernel"]
    assert row["new_kernel"] == "attn_fwd"
    assert row["base_count"] == row["new_count"]


def test_twins_differ_by_what_their_files_say() -> None:
    found = compared("kineto/h100_bert_small.json.gz", "kineto/mi300_bert_small.json.gz")
    busy = {}
    for side, name in (("base", "h100"), ("new", "mi300")):
        rows = events(f"kineto/{name}_bert_small.json.gz")
        assert Counter(e["cat"] for e in rows)["kernel"] == 60
        # No two kernels of these traces overlap: the sum is the union.
        busy[side] = sum(int(Decimal(e["dur"]) * 1000) for e in rows if e["cat"] == "kernel")
    row = next(row for row in found.breakdown.to_dicts() if row["part"] == "compute")
    assert row["base_ns"] == pytest.approx(busy["base"], rel=0.01)
    assert row["new_ns"] == pytest.approx(busy["new"], rel=0.01)
    assert row["difference_ns"] == pytest.approx(busy["new"] - busy["base"], rel=0.02)


def test_the_pair_of_different_conditions_is_told_before_any_verdict() -> None:
    found = compared("diff/a100_control.json.gz", "diff/v100_test.json.gz")
    stated = {row["condition"]: row for row in found.conditions.to_dicts()}
    assert (stated["device"]["base"], stated["device"]["new"]) == (
        "NVIDIA A100-PG509-200",
        "Tesla V100-SXM2-16GB",
    )
    assert (stated["ranks of the job"]["base"], stated["ranks of the job"]["new"]) == ("8", "2")
    assert not stated["shapes of inputs"]["same"]
    assert not found.comparable
    assert found.sentence.index("The conditions differ") < found.sentence.index("The step takes")
    # The annotations of the training program are equal on both sides.
    for name in ("## forward ##", "## backward ##", "## sparse_data_dist ##"):
        (row,) = found.operators.filter(pl.col("operator") == name).to_dicts()
        assert row["status"] not in ("added", "removed")
    steps = {
        side: [
            int(Decimal(e["dur"]) * 1000)
            for e in events(name)
            if e["name"].startswith("ProfilerStep#") and e["cat"] == "user_annotation"
        ]
        for side, name in (("base", "diff/a100_control.json.gz"), ("new", "diff/v100_test.json.gz"))
    }
    assert found.base_ns == pytest.approx(sum(steps["base"]) / 6, rel=0.01)
    assert found.new_ns == pytest.approx(sum(steps["new"]) / 6, rel=0.01)


def test_the_same_files_give_the_same_rows_in_the_same_order() -> None:
    sessions = [
        traceloom.load(DATA / f"diff/{name}.json.gz") for name in ("a100_control", "v100_test")
    ]
    first, second = compare(*sessions), compare(*sessions)
    for name in ("breakdown", "kernels", "operators"):
        assert getattr(first, name).equals(getattr(second, name)), name


def test_the_other_way_round_is_the_opposite() -> None:
    one = compared("kineto/h100_qwen_0.5b.json.gz", "kineto/mi300_qwen_0.5b.json.gz")
    other = compared("kineto/mi300_qwen_0.5b.json.gz", "kineto/h100_qwen_0.5b.json.gz")
    assert one.difference_ns == -other.difference_ns
    forth = dict(one.breakdown.select("part", "difference_ns").rows())
    back = dict(other.breakdown.select("part", "difference_ns").rows())
    assert forth == {part: -ns for part, ns in back.items()}
