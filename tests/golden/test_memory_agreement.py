"""The two ways to follow memory, by sums and by blocks, say the same of every real trace."""

from __future__ import annotations

from pathlib import Path

import pytest

import traceloom
from support.public_traces import DATA
from traceloom.analyze.memory import memory
from traceloom.analyze.memory_answers import explain_allocations

KINETO = DATA / "kineto"
FILES = sorted(KINETO.glob("*.json.gz"))


@pytest.mark.skipif(not FILES, reason="the public traces are not at hand")
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name.removesuffix(".json.gz"))
def test_peak_and_end_agree(path: Path) -> None:
    for trace in traceloom.load(path).traces:
        summed = memory(trace).devices.select("device_type", "device", "peak_bytes", "end_bytes")
        paired = explain_allocations(trace).pools.select(
            "device_type", "device", "peak_bytes", "end_bytes"
        )
        assert sorted(paired.rows()) == sorted(summed.rows())
