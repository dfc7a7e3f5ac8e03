"""Public traces, simulated on the machine that they were recorded on, and on another one."""

from __future__ import annotations

import polars as pl
import pytest

from support.public_traces import DATA
from traceloom.workload.simulate.native import run

pytestmark = [
    pytest.mark.data,
    pytest.mark.skipif(
        not DATA.is_dir(), reason="the public traces (../shared/data) are not on this machine"
    ),
]


@pytest.mark.parametrize(
    "name",
    ["h100_bert_small", "h100_owlv2", "mi300_qwen_0.5b", "a100_ddp_nccl", "v100_ns_resolution"],
)
def test_public_traces_come_back(name: str) -> None:
    answer = run(DATA / "kineto" / f"{name}.json.gz")
    assert answer.identity_error == pytest.approx(0, abs=0.02)
    assert answer.after_ns == answer.measured_ns


def test_eight_public_ranks_come_back() -> None:
    paths = sorted((DATA / "multirank").glob("dlrm_rank*.kineto.json.gz"))
    answer = run(paths)
    assert answer.identity_error == pytest.approx(0, abs=0.002)
    preset = run(paths, "dgx-a100")
    assert preset.collectives.filter(pl.col("transfer_ns") < pl.col("card_ns")).is_empty()
    assert preset.ranks.height == 8
