"""A capture made here and now: its host traces join the graph step by ids, and the timed steps by the order of names."""

from __future__ import annotations

import collections
from typing import Any

import polars as pl
import pytest

from traceloom.graph.host_match import (
    BY_RECORD_ID,
    BY_RECORD_ID_RENAMED,
    GROUP_LIST_NODE,
    NO_ID,
    OUTSIDE,
    ROOT,
)
from traceloom.graph.linking import load_ranks

pytestmark = pytest.mark.torch

JOB = """
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
rank = dist.get_rank()
part = dist.new_group([0, 1])
model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters())
for number in range(10):
    step()
    with torch.profiler.record_function('say "hi" \\\\\\\\ there'):
        work = dist.all_reduce(torch.zeros(100), group=part, async_op=True)
        work.wait()
    parts = [torch.zeros(4), torch.zeros(4)]
    dist.all_gather(parts, torch.ones(4))
    if rank == 0: dist.send(torch.zeros(5), dst=1)
    else: dist.recv(torch.zeros(5), src=0)
    dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    "options", [(), pytest.param(("--stacks", "--memory"), marks=pytest.mark.thorough)]
)
def test_every_op_of_the_graph_step_is_joined_by_its_id_on_both_ranks(
    recorder: Any, options: tuple[str, ...]
) -> None:
    run = recorder.record(
        recorder.torchrun(recorder.script(JOB)), "--steps", "4..7", "--graph", *options
    )
    assert run.code == 0, run.err
    graph = load_ranks(run.directory, window="graph", cache=False)
    assert [one.rank for one in graph.ranks] == [0, 1]
    for one in graph.ranks:
        found = one.matching
        assert found is not None
        assert found.exact
        outcomes = collections.Counter(found.outcome.to_list())
        # The observer begins before the profiler, whose own ops it sees; and lists the groups.
        # Of older versions the observer alone sees what gloo's threads do.
        alone = outcomes.pop(NO_ID, 0)
        new = found.host.schema == "1.1.1-chakra.0.0.4"
        assert alone == 0 if new else alone < 0.03 * found.ops
        assert set(outcomes) <= {BY_RECORD_ID, BY_RECORD_ID_RENAMED, OUTSIDE, ROOT, GROUP_LIST_NODE}
        assert outcomes[OUTSIDE] <= 2
        assert found.matched + outcomes[OUTSIDE] + alone == found.ops
        assert found.host.groups["ranks"].to_list() == [[0, 1], [0, 1]]
        events = one.trace.events.with_columns(pl.Series("host_op", found.host_op))
        named = pl.col("name").str.starts_with("Optimizer.step") | pl.col("name").str.starts_with(
            "traceloom."
        )
        assert (
            events.filter((pl.col("category") == "op") & (pl.col("host_op") < 0) & ~named).height
            == 0
        )
        said = [name for name in found.host.ops["name"] if name.startswith("say")]
        # The host trace goes on until the next backward pass begins.
        assert set(said) == {'say "hi" \\ there'}
    timed = load_ranks(run.directory, cache=False)
    for one in timed.ranks:
        found = one.matching
        assert found is not None
        assert not found.exact
        assert found.carried is not None
        given, without = found.carried
        # The annotation of the optimizer's step ends behind the mark that ends the step, and what the threads of
        # gloo do has another order in each step.
        assert without < 0.05 * (given + without)
        assert given > 0.97 * (given + without)
        events = one.trace.events.with_columns(pl.Series("host_op", found.host_op)).filter(
            pl.col("host_op") >= 0
        )
        assert events["step"].unique().sort().to_list() == [4, 5, 6]
        names = dict(found.host.ops.select("id", "name").iter_rows())
        # Kineto spells a backslash in a name as a slash or two.
        spelled = pl.Series([names[op] for op in events["host_op"].to_list()]).str.replace_all(
            r"[\\/]+", "/"
        )
        assert spelled.to_list() == events["name"].str.replace_all("/+", "/").to_list()
