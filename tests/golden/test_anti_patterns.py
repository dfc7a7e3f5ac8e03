"""Anti-patterns of public traces, counted again from the JSON by plain loops."""

from __future__ import annotations

import gzip
import json
import re
from functools import lru_cache
from typing import Any

import pytest

from support.public_traces import DATA
from traceloom.analyze import anti_patterns
from traceloom.analyze.anti_patterns import RULES
from traceloom.formats import load

FILES = sorted(
    f"{folder}/{path.name.removesuffix('.json.gz')}"
    for folder in ("kineto", "critical_path", "diff", "pairs")
    for path in (DATA / folder).glob("*.json.gz")
    if ".host." not in path.name
)

pytestmark = [
    pytest.mark.data,
    pytest.mark.skipif(
        not FILES, reason="the public traces (../shared/data) are not on this machine"
    ),
]


@lru_cache(maxsize=1)
def spans(name: str) -> list[dict[str, Any]]:
    events = json.loads(gzip.decompress((DATA / f"{name}.json.gz").read_bytes()), strict=False)[
        "traceEvents"
    ]
    return [event for event in events if event.get("ph") == "X"]


def counts(name: str) -> dict[str, int | None]:
    return dict(
        anti_patterns(load(DATA / f"{name}.json.gz").traces[0])
        .patterns.select("pattern", "match_count")
        .rows()
    )


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", FILES)
def test_every_pattern_is_counted_or_explained(name: str) -> None:
    found = anti_patterns(load(DATA / f"{name}.json.gz").traces[0])
    assert found.patterns["pattern"].to_list() == list(RULES)
    for row in found.patterns.to_dicts():
        assert (row["reason"] is None) == row["checked"] == (row["match_count"] is not None)
        matches = found.matches.filter(pattern=row["pattern"])
        assert matches.height == (row["match_count"] or 0)
        assert matches["duration_ns"].sum() == (row["host_ns"] or 0)
    assert (found.matches["duration_ns"] >= 0).all()
    assert (found.matches["gpu_ns"] >= 0).all()


@pytest.mark.parametrize("name", FILES)
def test_counts_equal_plain_counts(name: str) -> None:
    found = counts(name)
    _unaligned_half_products(name, found["unaligned_half_matmul"])
    _zeroed_gradients(name, found["gradient_not_set_to_none"])
    _loaders_without_workers(name, found["synchronous_data_loader"])


def _unaligned_half_products(name: str, found: int | None) -> None:
    count, shaped = 0, False
    for event in spans(name):
        args = event.get("args", {})
        shaped = shaped or "Input Dims" in args
        if (
            event.get("name") not in {"aten::mm", "aten::bmm", "aten::addmm"}
            or "Input Dims" not in args
        ):
            continue
        half = args["Input type"][0] in {"c10::Half", "c10::BFloat16"}
        count += half and any(size % 8 for shape in args["Input Dims"] for size in shape[-2:])
    assert found == (count if shaped else None) or (found == 0 and not shaped)


@pytest.mark.parametrize(
    "name", ["kineto/a100_ddp_nccl", "kineto/h100_qwen_0.5b", "kineto/h100_owlv2"]
)
def test_products_in_plain_fp32_equal_a_plain_count(name: str) -> None:
    if name not in FILES:
        pytest.skip("the trace is not on this machine")
    products = {"aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm"}
    ops = {
        e["args"].get("External id")
        for e in spans(name)
        if e.get("cat") == "cpu_op" and e["name"] in products
    }
    slow = [
        e["args"]["External id"]
        for e in spans(name)
        if e.get("cat") == "kernel" and "sgemm" in e["name"]
    ]
    assert counts(name)["fp32_matmul"] == len(ops & set(slow))


def _zeroed_gradients(name: str, found: int | None) -> None:
    calls = [e for e in spans(name) if str(e.get("name")).startswith("Optimizer.zero_grad#")]
    if not calls:
        return
    fills = [e for e in spans(name) if e.get("name") in {"aten::zero_", "aten::_foreach_zero_"}]
    new = [e for e in spans(name) if e.get("name") == "aten::zeros"]

    def inside(one: dict[str, Any], other: dict[str, Any]) -> bool:
        later = other["ts"] <= one["ts"] and one["ts"] + one["dur"] <= other["ts"] + other["dur"]
        return bool(one["tid"] == other["tid"] and later and one is not other)

    with_fills = sum(
        any(
            inside(fill, call)
            and not any(inside(fill, zeros) for zeros in new if inside(zeros, call))
            for fill in fills
        )
        for call in calls
    )
    assert found == with_fills


def _loaders_without_workers(name: str, found: int | None) -> None:
    known = [
        e for e in spans(name) if re.match(r"enumerate\(DataLoader\)#_Single", str(e.get("name")))
    ]
    if known:
        assert found == len(known)


@pytest.mark.skipif("kineto/h100_owlv2" not in FILES, reason="the trace is not on this machine")
def test_what_is_known_of_the_traces() -> None:
    assert counts("kineto/h100_owlv2")["synchronous_data_loader"] == 6
    assert counts("kineto/h100_bert_small")["unaligned_half_matmul"] == 26
    assert counts("kineto/mi300_bert_small")["unaligned_half_matmul"] == 26
    assert counts("diff/a100_control")["single_tensor_optimizer"] == 6
    assert counts("pairs/linear.kineto")["gradient_not_set_to_none"] == 39
    assert counts("critical_path/alexnet")["fp32_matmul"] == 6
    assert counts("kineto/v100_ns_resolution")["fp32_matmul"] is None  # no TF32 on a V100
