"""Frequent sequences of public traces: what is known of the models, and a plain count of every reported sequence."""

from __future__ import annotations

import gzip
import json
from decimal import Decimal

import pytest

from support.public_traces import DATA, GPU_WORK
from traceloom.analyze import patterns
from traceloom.formats import load

KINETO = DATA / "kineto"
FILES = sorted(path.name.removesuffix(".json.gz") for path in KINETO.glob("*.json.gz"))

pytestmark = [
    pytest.mark.data,
    pytest.mark.skipif(
        not FILES, reason="the public traces (../shared/data) are not on this machine"
    ),
]


def streams(name: str) -> list[list[str]]:
    """Names of the GPU work of every stream in the order of starts, straight from the file."""
    events = json.loads(
        gzip.decompress((KINETO / f"{name}.json.gz").read_bytes()), parse_float=Decimal
    )["traceEvents"]
    work = [e for e in events if e.get("ph") == "X" and e.get("cat") in GPU_WORK]
    lanes: dict[tuple[object, object], list[tuple[Decimal, str]]] = {}
    for event in work:
        key = event["args"].get("device"), event["args"].get("stream")
        lanes.setdefault(key, []).append((Decimal(str(event["ts"])), event["name"]))
    return [[name for _, name in sorted(lane, key=lambda one: one[0])] for lane in lanes.values()]


def times_without_overlap(lane: list[str], wanted: list[str]) -> int:
    count = at = 0
    while at + len(wanted) <= len(lane):
        if lane[at : at + len(wanted)] == wanted:
            count, at = count + 1, at + len(wanted)
        else:
            at += 1
    return count


# times of the one are rounded, work of the other has no plain category
@pytest.mark.parametrize(
    "name", [name for name in FILES if name not in ("v100_ns_resolution", "mtia_inference")]
)
def test_every_sequence_occurs_as_often_as_a_plain_search_finds_it(name: str) -> None:
    found = patterns(load(KINETO / f"{name}.json.gz").traces[0])
    lanes = streams(name)
    for row in found.sequences.to_dicts():
        often = sum(times_without_overlap(lane, row["names"]) for lane in lanes)
        assert row["count"] == often
        assert row["length"] == len(row["names"])
    assert found.work_count == sum(map(len, lanes))
    assert found.occurrences.height == found.sequences["count"].sum()
    assert found.occurrences["span_ns"].sum() == found.sequences["span_ns"].sum()


@pytest.mark.parametrize(
    ("name", "count", "length", "fraction"),
    [
        ("mi300_sglang_decode_graphs", 36, 15, 0.944),  # Qwen3-8B has 36 layers
        (
            "mi300_vllm_piecewise_graphs",
            23,
            17,
            0.955,
        ),  # 24 layers, the last of which ends otherwise
        ("h100_owlv2", 120, 27, 0.959),  # 24 layers of the image encoder, 5 images
    ],
)
def test_the_layers_of_the_models_are_found(
    name: str, count: int, length: int, fraction: float
) -> None:
    if name not in FILES:
        pytest.skip("the trace is not on this machine")
    row = patterns(load(KINETO / f"{name}.json.gz").traces[0]).sequences.to_dicts()[0]
    assert (row["count"], row["length"]) == (count, length)
    assert row["fraction"] == pytest.approx(fraction, abs=1e-3)
    if name == "h100_owlv2":  # 12 layers of the text encoder, 5 times
        second = patterns(load(KINETO / f"{name}.json.gz").traces[0]).sequences.to_dicts()[1]
        assert (second["count"], second["length"]) == (60, 24)
