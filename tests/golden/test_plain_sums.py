"""Public traces against plain counts over the events of their files (plain_sums.py)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from traceloom import load
from traceloom.analyze import gpu_time, kernels
from traceloom.analyze.answer import answer
from traceloom.system.units import format_duration

sys.path.insert(0, str(Path(__file__).parent))
from plain_sums import count

FILES = (
    "a100_ddp_nccl",
    "gh200_kforge",
    "h100_bert_small",
    "kineto2021_resnet50_workers0",
    "mi250_minitoy",
    "mi300_bert_small",
    "rtx3060_runs_ahead_05",
    "rtx3060_runs_ahead_06",
    "v100_ns_resolution",
)


@pytest.mark.parametrize("name", FILES)
def test_step_shares_and_kernels_are_those_of_a_plain_count(shared_data: Path, name: str) -> None:
    path = shared_data / "kineto" / f"{name}.json.gz"
    plain: dict[str, Any] = count(path)
    session = load(path)
    devices = {
        str(row["device"]): {key: row[key] for key in ("window_ns", "busy_ns", "idle_ns")}
        for row in gpu_time(session.traces[0]).devices.to_dicts()
    }
    assert devices == plain["devices"]
    ours = kernels(session.traces[0]).kernels
    by_name = {row["name"]: row["total_ns"] for row in ours.to_dicts() if row["kind"] == "kernel"}
    assert [(kernel, by_name[kernel]) for kernel, _ in plain["kernels"]] == [
        (kernel, total) for kernel, total in plain["kernels"]
    ]
    told = answer(session)
    if plain["step_ns"] is not None:
        assert told.step_ns == pytest.approx(plain["step_ns"], abs=2)
        assert f" of {format_duration(told.step_ns)}" in told.sentence
