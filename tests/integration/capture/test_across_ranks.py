"""Two real processes with gloo, one of them late on purpose: who was last, and why."""

from __future__ import annotations

from typing import Any

import polars as pl
import pytest

from traceloom import analyze, load

pytestmark = pytest.mark.torch

JOB = """
import time
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters())
for number in range(11):
    if rank == 1:
        with torch.profiler.record_function("enumerate(DataLoader)#slow.__next__"):
            time.sleep(0.2)
    step()
    dist.all_reduce(torch.zeros(100, dtype=torch.float64))
    if rank == 0: dist.send(torch.zeros(5), dst=1)
    else: dist.recv(torch.zeros(5), src=0)
dist.destroy_process_group()
"""


@pytest.mark.thorough
def test_the_rank_that_loads_slowly_is_found_in_a_run_without_devices(recorder: Any) -> None:
    run = recorder.record(recorder.torchrun(recorder.script(JOB)))
    assert run.code == 0, run.err
    session = load(run.directory, cache=False)
    calls = analyze.collect_session_calls(session)
    assert set(calls["where"]) == {"host"}
    assert set(calls["backend"]) == {"gloo"}
    assert calls["size_bytes"].null_count() == 0
    assert set(calls.filter(pl.col("kind") == "all_reduce")["size_bytes"]) == {4 * 676, 800}
    found = analyze.across_ranks(session)
    assert found.collectives.height >= 10
    assert set(found.collectives["evidence"]) <= {"measured", "inferred"}
    late = found.collectives.filter(
        (pl.col("kind") == "all_reduce") & (pl.col("size_bytes") == 4 * 676)
    )
    by_loading = late.filter(
        (pl.col("root_rank") == 1) & (pl.col("root_cause") == "host_data_loading")
    )
    assert by_loading.height >= 3, found.collectives
    # the sleep is at least that long; how much longer is up to the machine
    assert min(by_loading["cause_ns"].to_list()) > 100_000_000
    top = found.reasons.row(0, named=True)
    assert (top["rank"], top["cause"]) == (1, "host_data_loading")
    # messages go one way, and are the only recorded cells
    cells = analyze.matrix(calls)
    assert cells.filter(pl.col("exact_bytes") > 0).select("source", "target").rows() == [(0, 1)]
