"""Which process of a job is recorded, and as what."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

import traceloom
from traceloom import graph as linking
from traceloom.errors import UsageError

pytestmark = pytest.mark.torch

JOB = """
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
rank = dist.get_rank()
pair = dist.new_group([0, 1], group_desc="pair")
model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters())
for number in range(11):
    step()
    dist.all_reduce(torch.zeros(100, dtype=torch.float64), group=pair)
    dist.broadcast(torch.zeros(7), src=1)
    if rank == 0: dist.send(torch.zeros(5), dst=1)
    else: dist.recv(torch.zeros(5), src=0)
dist.destroy_process_group()
"""


def rows(table: dict[str, Any]) -> list[tuple[Any, ...]]:
    return [
        (
            table["groups"][table["group"][at]],
            table["kinds"][table["kind"][at]],
            table["types"][table["type"][at]],
            table["bytes_in"][at],
            table["peer"][at],
        )
        for at in range(len(table["start_ns"]))
    ]


def test_each_rank_under_torchrun_writes_its_part_with_its_groups_and_collective_calls(
    recorder: Any,
) -> None:
    run = recorder.record(recorder.torchrun(recorder.script(JOB)))
    assert run.code == 0, run.err
    assert [
        (part["rank"], part["world_size"], part["local_rank"]) for part in run.capture["ranks"]
    ] == [
        (0, 2, 0),
        (1, 2, 1),
    ]
    for rank in (0, 1):
        part = run.rank(rank)
        assert run.marks(rank) == [3, 4, 5, 6, 7, 8]
        assert [(group["ranks"], group["description"]) for group in part["groups"]] == [
            ([0, 1], "default_pg"),
            ([0, 1], "pair"),
        ]
        world, pair = (group["name"] for group in part["groups"])
        calls = rows(part["collectives"])
        # 5 steps: gradients by DDP from C++ (16*32 + 32 + 32*4 + 4 floats), and the script's own calls.
        from_cxx = (
            5 if recorder.has("hasattr(torch._C._distributed_c10d, '_dump_fr_trace_json')") else 0
        )
        assert calls.count((world, "all_reduce", "Float", 4 * 676, None)) == from_cxx
        assert calls.count((pair, "all_reduce", "Double", 800, None)) == 5
        assert calls.count((world, "broadcast", "Float", 28, 1)) == 5
        assert calls.count((world, "send" if rank == 0 else "recv", "Float", 20, 1 - rank)) == 5
        assert len(calls) == 15 + from_cxx
        window = part["window"]
        assert all(
            window["start_ns"] <= start <= window["end_ns"]
            for start in part["collectives"]["start_ns"]
        )
    sequences = [
        [
            sequence
            for sequence, kind in zip(
                part["collectives"]["sequence"], part["collectives"]["kind"], strict=True
            )
            if part["collectives"]["kinds"][kind] == "all_reduce"
        ]
        for part in run.capture["ranks"]
    ]
    assert sequences[0] == sequences[1], "the same call has the same sequence on both ranks"


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.thorough)])
def test_loader_workers_never_write_a_rank(recorder: Any, method: str) -> None:
    run = recorder.python(
        f"""
        from torch.utils.data import DataLoader, Dataset
        class Data(Dataset):
            def __len__(self): return 96
            def __getitem__(self, at):
                with torch.no_grad():
                    return model(torch.randn(16))  # torch work, modules too, within the worker
        if __name__ == "__main__":
            loader = DataLoader(Data(), batch_size=8, num_workers=2, multiprocessing_context="{method}")
            for batch in loader: step()
        """,
        "--graph",
        *(["--memory", "--stacks"] if method == "fork" else []),
    )
    assert run.theirs == ""
    assert run.code == 0, run.err
    assert [part["rank"] for part in run.capture["ranks"]] == [0]
    assert run.files == {
        "capture.json",
        "rank0.capture.json",
        "rank0.kineto.json.gz",
        "rank0.graph.kineto.json.gz",
        "rank0.host.json.gz",
    }
    assert any(name.startswith("enumerate(DataLoader)") for name in run.names())


@pytest.mark.thorough
@pytest.mark.parametrize("method", [pytest.param("fork", marks=pytest.mark.thorough), "spawn"])
def test_ranks_started_by_torch_multiprocessing_write_theirs_and_their_launcher_does_not(
    recorder: Any, method: str
) -> None:
    run = recorder.python(
        f"""
        import os
        import torch.distributed as dist
        import torch.multiprocessing as mp
        def work(rank):
            dist.init_process_group("gloo", init_method="file://" + os.path.abspath("meet"), rank=rank, world_size=2)
            for _ in range(6): step(); dist.barrier()
            dist.destroy_process_group()
        if __name__ == "__main__":
            mp.start_processes(work, nprocs=2, start_method="{method}")
        """
    )
    assert run.code == 0, run.err
    assert [(part["name"], part["rank"], part["world_size"]) for part in run.capture["ranks"]] == [
        ("rank0", 0, 2),
        ("rank1", 1, 2),
    ]
    assert all(part["window"]["step_count"] == 3 for part in run.capture["ranks"])


@pytest.mark.thorough
def test_two_programs_without_ranks_are_two_runs_side_by_side(recorder: Any) -> None:
    worker = recorder.script("for _ in range(6): step()", "worker.py")
    run = recorder.python(
        f"""
        import subprocess, sys
        both = [subprocess.Popen([sys.executable, {worker!r}]) for _ in range(2)]
        sys.exit(sum(one.wait() for one in both))
        """,
        train=False,
    )
    assert run.code == 0
    assert "the first of 2 separate runs" in run.err
    parts = run.capture["ranks"]
    assert [(part["rank"], part["world_size"], part["job"]) for part in parts] == [(0, 1, None)] * 2
    assert all(len(part["steps"]["start_ns"]) == 6 for part in parts)
    sessions = traceloom.load_runs(run.directory)
    assert [session.ranks for session in sessions] == [(0,), (0,)]
    assert [len(session.capture["ranks"]) for session in sessions] == [1, 1]
    with pytest.raises(UsageError, match="holds 2 runs") as refused:
        linking.link(run.directory)
    (file,) = shlex.split(refused.value.hint.partition("traceloom link ")[2])
    linked = linking.link(file)
    assert linked.graph.world_size == 1
    assert traceloom.load(file).capture["ranks"] == [
        part for part in parts if part["window"]["file"] == Path(file).name
    ]


@pytest.mark.thorough
def test_a_program_that_a_rank_starts_is_no_rank_though_it_inherits_its_environment(
    recorder: Any,
) -> None:
    child = recorder.script("for _ in range(4): step()", "child.py")
    job = recorder.script(
        f"""
        import os, subprocess, sys
        import torch.distributed as dist
        if os.environ["RANK"] == "0":
            subprocess.run([sys.executable, {child!r}], check=True)
        dist.init_process_group("gloo")
        for _ in range(6): step(); dist.barrier()
        dist.destroy_process_group()
        """
    )
    run = recorder.record(recorder.torchrun(job))
    assert run.code == 0, run.err
    parts = {part["name"]: part for part in run.capture["ranks"]}
    alone = parts.pop(next(name for name in parts if name.startswith("pid")))
    assert (alone["rank"], alone["world_size"], alone["job"], len(alone["steps"]["start_ns"])) == (
        0,
        1,
        None,
        4,
    )
    assert sorted(parts) == ["rank0", "rank1"]
    assert parts["rank0"]["job"] == parts["rank1"]["job"] is not None
    job_run, other = traceloom.load_runs(run.directory)
    assert (job_run.ranks, job_run.world_size) == ((0, 1), 2)
    assert (other.ranks, other.world_size) == ((0,), 1)


def test_ours_yields_to_the_users_profilers_of_both_kinds_and_does_not_come_back(
    recorder: Any,
) -> None:
    text = """
        import sys
        from torch.autograd import profiler as legacy
        def count(events): return sum(event.key == "aten::linear" or event.name == "aten::linear" for event in events)
        for _ in range(5): step()
        with legacy.profile() as old:  # in the middle of our window
            for _ in range(2): step()
        with torch.profiler.profile() as new:
            for _ in range(2): step()
        for _ in range(8): step()
        print(count(old.function_events), count(new.events()))
        with legacy.profile() as last: step()
        print(count(last.function_events))
        """
    run = recorder.python(text)
    assert (run.code, run.out) == (0, "4 4\n2\n")
    assert sum("[yielded]" in line for line in run.ours) == 1
    # What was recorded until then is the capture: a process has one session.
    window = run.rank()["window"]
    assert (window["kind"], window["first_step"], window["step_count"]) == ("steps", 3, 2)
    assert run.marks() == [3, 4, 5]


@pytest.mark.thorough
def test_what_was_recorded_before_the_users_profiler_is_kept(
    recorder: Any,
) -> None:
    run = recorder.python(
        """
        for _ in range(6): step()
        profiler = torch.profiler.profile()
        profiler.start()
        for _ in range(3): step()
        profiler.stop()
        """
    )
    assert run.code == 0
    assert run.marks()[:4] == [3, 4, 5, 6]
    assert run.rank()["window"]["step_count"] == 3


@pytest.mark.thorough
def test_the_steps_of_the_users_profiler_are_the_steps(recorder: Any) -> None:
    run = recorder.python(
        """
        schedule = torch.profiler.schedule(wait=6, warmup=1, active=1, repeat=1)
        seen = []
        with torch.profiler.profile(schedule=schedule, on_trace_ready=lambda p: seen.append(len(p.events()))) as prof:
            for _ in range(10):
                step(); step()
                prof.step()
        print(seen[0] > 10)
        """,
        "--steps",
        "2..4",
    )
    assert (run.code, run.out) == (0, "True\n")
    assert run.rank()["step_source"] == "profiler"
    assert len(run.rank()["steps"]["start_ns"]) == 10
    assert run.marks() == [2, 3, 4]
    assert run.names().count("Optimizer.step#Plain.step") == 4


def test_the_settings_reach_a_program_through_a_launcher_of_its_own(recorder: Any) -> None:
    inner = recorder.script("for _ in range(6): step()", "inner.py")
    run = recorder.python(
        f"import runpy; runpy.run_path({inner!r}, run_name='__main__')", train=False
    )
    assert run.marks()[:3] == [3, 4, 5]
    assert run.capture["run"]["command"][0] == sys.executable
