"""Several ranks over gloo: every kind of collective, groups cut to those that run, and ranks that fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from support.plans import PlanBuilder, groups

pytest.importorskip("torch")

from traceloom.errors import InputError, PartialError, UsageError
from traceloom.workload.replay.plan import ReplayPlan
from traceloom.workload.replay.planning import make_plan
from traceloom.workload.replay.ranks import replay
from traceloom.workload.replay.running import RunOptions

pytestmark = pytest.mark.torch
ONCE = RunOptions(iterations=1)


class Exchange(PlanBuilder):
    """A plan that says which values its tensors must have; where one has another, the plan has a failure."""

    def filled(self, value: float, *shape: int) -> int:
        tensor = self.tensor(*shape)
        self.run(
            "aten::full(SymInt[] size, Scalar fill_value, *, ScalarType? dtype=None, Layout? layout=None, "
            "Device? device=None, bool? pin_memory=None) -> Tensor",
            [list(shape), value, {"dtype": "float32"}, None, None, None],
            [],
            [tensor],
        )
        return tensor

    def expect(self, tensor: int, value: float, *shape: int) -> None:
        """The number of other values is an index into a table of one row."""
        other, count = self.tensor(*shape, dtype="bool", item=1), self.tensor(dtype="int64", item=8)
        self.run(
            "aten::ne.Scalar(Tensor self, Scalar other) -> Tensor",
            [{"tensor": 0}, value],
            [tensor],
            [other],
        )
        self.run(
            "aten::count_nonzero(Tensor self, int? dim=None) -> Tensor",
            [{"tensor": 0}, None],
            [other],
            [count],
        )
        self.run(
            "aten::index_select(Tensor self, int dim, Tensor index) -> Tensor",
            [{"tensor": 0}, 0, {"tensor": 1}],
            [self.filled(0, 1), count],
            [None],
        )


def all_kinds(rank: int, world: int, running: tuple[int, ...]) -> Exchange:
    """Each kind once; `running` are the ranks whose parts arrive."""
    build = Exchange(rank)
    own = rank + 1.0
    total = sum(other + 1.0 for other in running)
    first = running[0]

    reduced = build.filled(own, 3)
    number = build.collective("all_reduce", [reduced], [reduced], bytes=12, asynchronous=True)
    build.wait(number)
    build.expect(reduced, total, 3)
    several = [build.filled(own, 2), build.filled(2 * own, 2)]
    build.collective("all_reduce", several, several, bytes=16)
    build.expect(several[1], 2 * total, 2)
    sent = build.filled(own, 3)
    build.collective("broadcast", [sent], [sent], peer=first, bytes=12)
    build.expect(sent, first + 1.0, 3)
    one = build.filled(own, 3)
    build.collective("reduce", [one], [one], peer=first, bytes=12)
    if rank == first:
        build.expect(one, total, 3)

    mine, whole = build.filled(own, 3), build.tensor(world, 3)
    build.collective("all_gather", [mine], [whole], bytes=12)
    row = build.view(
        build.rows["tensors"][whole]["storage"], [3], [1], offset=3 * running.index(rank)
    )
    build.add("view", [whole], [row], action="view")
    build.expect(row, own, 3)
    parts = [build.tensor(3) for _ in range(world)]
    build.collective("all_gather", [mine], parts, bytes=12)
    build.expect(parts[running[-1]], running[-1] + 1.0, 3)

    scattered, whole = build.tensor(3), build.filled(own, world, 3)
    build.collective("reduce_scatter", [whole], [scattered], bytes=12 * world)
    build.expect(scattered, total, 3)
    scattered = build.tensor(3)
    build.collective(
        "reduce_scatter",
        [build.filled(own + other, 3) for other in range(world)],
        [scattered],
        bytes=12 * world,
    )
    build.expect(scattered, total + rank * len(running), 3)

    given, received = build.filled(own, world, 2), build.filled(own, world, 2)
    build.collective("all_to_all", [given], [received], bytes=8 * world)
    place = build.rows["tensors"][received]["storage"]
    row = build.view(place, [2], [1], offset=2 * (len(running) - 1))
    build.add("view", [received], [row], action="view")
    build.expect(row, running[-1] + 1.0, 2)
    # Rank r sends r + 1 rows to each rank, so the o-th receives o + 1 rows of each o.
    given = build.filled(own, (rank + 1) * world, 2)
    received = build.tensor(sum(range(1, world + 1)), 2)
    build.collective(
        "all_to_all",
        [given],
        [received],
        bytes=8,
        splits_in=[rank + 1] * world,
        splits_out=list(range(1, world + 1)),
    )
    row = build.view(
        build.rows["tensors"][received]["storage"],
        [2],
        [1],
        offset=2 * sum(o + 1 for o in running[:-1]),
    )
    build.add("view", [received], [row], action="view")
    build.expect(row, running[-1] + 1.0, 2)
    lists = (
        [build.filled(own, 2) for _ in range(world)],
        [build.filled(own, 2) for _ in range(world)],
    )
    build.collective("all_to_all", *lists, bytes=8 * world)
    build.expect(lists[1][running[-1]], running[-1] + 1.0, 2)

    gathered = [build.filled(0, 2) for _ in range(world)] if rank == first else []
    build.collective("gather", [build.filled(own, 2)], gathered, peer=first, bytes=8)
    if gathered:
        build.expect(gathered[running[-1]], running[-1] + 1.0, 2)
    handed = build.filled(0, 2)
    given_out = [build.filled(5.0 + other, 2) for other in range(world)] if rank == first else []
    build.collective("scatter", given_out, [handed], peer=first, bytes=8)
    build.expect(handed, 5.0 + rank, 2)

    after, before = (rank + 1) % world, (rank - 1) % world
    message, arrived = build.filled(own, 4), build.filled(0, 4)
    sending = build.collective("send", [message], [], peer=after, bytes=16, asynchronous=True)
    arriving = build.collective("recv", [], [arrived], peer=before, bytes=16, asynchronous=True)
    build.wait(sending)
    build.wait(arriving)
    if before in running:
        build.expect(arrived, before + 1.0, 4)

    small = build.tensor(world, 3, dtype="float8_e4m3fn", item=1, external=True, content="zeros")
    build.collective(
        "all_to_all",
        [small],
        [small],
        bytes=3 * world,
        splits_in=[1] * world,
        splits_out=[1] * world,
    )

    if rank in {0, 1}:  # a group of some, and one that nobody waits for
        inner = build.filled(own, 2)
        build.collective("all_reduce", [inner], [inner], group="pair", bytes=8, asynchronous=True)
    build.collective("barrier", [], [], bytes=0)
    return build


def plan_of(world: int, running: tuple[int, ...] | None = None) -> ReplayPlan:
    running = running or tuple(range(world))
    plans = {rank: all_kinds(rank, world, running).build() for rank in running}
    plan = ReplayPlan(plans, groups(world, pair=[0, 1]), world_size=world, threads=1)
    plan.check()
    return plan


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_all_kinds_of_collectives_give_what_they_should(world: int) -> None:
    replayed = replay(plan_of(world), ONCE)
    assert replayed is not None
    assert list(replayed.ranks) == list(range(world))
    for one in replayed.ranks.values():
        assert one.failures.to_dicts() == []
        assert one.replaced.to_dicts() == []
        assert one.stand_ins.to_dicts() == []


@pytest.mark.thorough
def test_groups_are_cut_to_the_ranks_that_run() -> None:
    replayed = replay(plan_of(4, running=(0, 2)), RunOptions(iterations=1, ranks=(0, 2)))
    assert replayed is not None
    assert (list(replayed.ranks), replayed.missing) == ([0, 2], (1, 3))
    assert [notice.slug for notice in replayed.notices] == ["ranks-missing"]
    for one in replayed.ranks.values():
        assert one.failures.to_dicts() == []
        assert set(one.stand_ins["name"]) == {"c10d::send", "c10d::recv", "wait"}, (
            "their peers do not run"
        )


@pytest.mark.thorough
def test_one_process_alone_leaves_communication_out_or_takes_its_time() -> None:
    replayed = replay(plan_of(2, running=(1,)), ONCE)
    assert replayed is not None
    assert set(replayed.ranks[1].stand_ins["reason"]) == {"no-peers"}


def all_reduces(rank: int, sizes: list[int], **first: Any) -> Any:
    build = Exchange(rank)
    for size in sizes:
        tensor = build.filled(1.0, size)
        build.collective("all_reduce", [tensor], [tensor], bytes=4 * size, **first)
    return build.build()


def test_ranks_that_issue_different_collectives_are_refused_before_anything_runs() -> None:
    plan = ReplayPlan(
        {0: all_reduces(0, [4, 8]), 1: all_reduces(1, [4, 6])}, groups(2), world_size=2
    )
    with pytest.raises(InputError) as caught:
        replay(plan, ONCE)
    assert caught.value.slug == "different-collectives"
    assert caught.value.message == (
        "ranks 0 and 1 issue different collectives: number 2 is all_reduce (32 bytes) on rank 0, "
        "all_reduce (24 bytes) on rank 1"
    )
    shorter = ReplayPlan(
        {0: all_reduces(0, [4, 8]), 1: all_reduces(1, [4])}, groups(2), world_size=2
    )
    with pytest.raises(InputError, match=r"number 2 is all_reduce .* on rank 0, nothing on rank 1"):
        replay(shorter, ONCE)


def test_a_rank_that_dies_ends_all_with_its_name_and_its_last_lines(
    tmp_path: Path, monkeypatch: Any
) -> None:
    (tmp_path / "replay_dying.py").write_text(
        "import os, signal, sys, torch\nlibrary = torch.library.Library('replay_dying', 'DEF')\n"
        "library.define('now(Tensor x) -> Tensor')\n"
        "def now(x):\n    print('the last word', file=sys.stderr, flush=True)\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        "library.impl('now', now, 'CPU')\n"
    )
    monkeypatch.chdir(tmp_path)
    plans = {}
    for rank in range(2):
        build = Exchange(rank)
        tensor = build.filled(1.0, 4)
        if rank == 1:
            build.run("replay_dying::now(Tensor x) -> Tensor", [{"tensor": 0}], [tensor], [])
        build.collective("all_reduce", [tensor], [tensor], bytes=16)
        plans[rank] = build.build()
    with pytest.raises(PartialError) as caught:
        replay(
            ReplayPlan(plans, groups(2), world_size=2),
            RunOptions(iterations=1, imports=("replay_dying",)),
        )
    assert caught.value.slug == "rank-failed"
    assert (
        caught.value.message
        == "rank 1 ended with SIGKILL, and the others were ended: the last word"
    )


@pytest.mark.thorough
def test_a_collective_that_nobody_joins_ends_after_the_timeout() -> None:
    plans = {}
    for rank in range(2):
        build = Exchange(rank)
        if rank == 0:
            build.run("nobody::knows() -> ()", [], [], [], durations_ns=[8_000_000_000])
        tensor = build.filled(1.0, 4)
        build.collective("all_reduce", [tensor], [tensor], bytes=16)
        plans[rank] = build.build()
    options = RunOptions(iterations=1, stand_ins=True, timeout_s=1.5)
    with pytest.raises(
        PartialError, match=r"rank 1 failed, and the others were ended: .*[Tt]imed out"
    ):
        replay(ReplayPlan(plans, groups(2), world_size=2), options)


def test_ranks_that_the_plan_does_not_have_are_refused() -> None:
    with pytest.raises(UsageError, match="the plan has no rank 7") as caught:
        replay(plan_of(2), RunOptions(ranks=(0, 7)))
    assert caught.value.hint == "it has 2 ranks: 0, 1"


@pytest.mark.thorough
def test_a_replay_can_be_recorded_and_replayed_again(tmp_path: Path) -> None:
    plan = ReplayPlan(
        {rank: all_reduces(rank, [4, 8]) for rank in range(2)}, groups(2), world_size=2, threads=1
    )
    replay(plan, RunOptions(iterations=1, record=str(tmp_path / "again")))
    again = make_plan(tmp_path / "again")
    assert list(again.ranks) == [0, 1]
    names = again.ranks[0].ops.filter(pl.col("action") != "wait")["name"].to_list()
    assert [name for name in names if name.startswith(("aten::full", "c10d::allreduce"))] == [
        "aten::full",
        "c10d::allreduce_",
        "aten::full",
        "c10d::allreduce_",
    ]


@pytest.mark.thorough
def test_errors_of_a_rank_are_those_of_the_whole() -> None:
    with pytest.raises(UsageError, match="--import no_such_module"):
        replay(plan_of(2), RunOptions(imports=("no_such_module",)))
    with pytest.raises(InputError) as caught:
        replay(plan_of(2), RunOptions(memory_limit=10, ranks=(0,)))
    assert caught.value.slug == "too-little-memory"


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved plan in which two ranks exchange something."""
    path = tmp_path_factory.mktemp("plans") / "run.plan"
    ReplayPlan(
        {rank: all_reduces(rank, [4]) for rank in range(2)}, groups(2), world_size=2, threads=1
    ).save(path)
    return path


def under_torchrun(plan: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "traceloom",
        "replay",
        str(plan),
    ]
    return subprocess.run(
        [sys.executable, "-m", *command, "--iterations", "1", *options],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=300,
    )


def test_processes_of_torchrun_take_a_rank_each_and_the_first_answers(two_ranks: Path) -> None:
    done = under_torchrun(two_ranks, "--json")
    assert done.returncode == 0, done.stderr[-2000:]
    answer = json.loads(done.stdout)
    assert [row["rank"] for row in answer["whole"]] == [0, 1]
    assert {(row["outcome"], row["count"]) for row in answer["coverage"]} == {("run", 2)}


def test_torchrun_with_another_number_of_processes_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (("TORCHELASTIC_RUN_ID", "none"), ("RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)  # as torchrun does for each of two processes
    with pytest.raises(InputError, match="torchrun started 2 processes for 1 rank") as caught:
        replay(plan_of(2), RunOptions(iterations=1, ranks=(0,)))
    assert caught.value.slug == "wrong-world-size"
