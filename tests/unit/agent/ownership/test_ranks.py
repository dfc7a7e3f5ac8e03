"""A rank is one process: not its workers, not its wrapper, not the launcher of others."""

from __future__ import annotations

from typing import Any

from traceloom.agent.collectors.processes import ProcessFacts
from traceloom.agent.config import Config, Owners
from traceloom.agent.ownership.model import Owner
from traceloom.agent.ownership.resolver import OwnerResolver

PYTORCH = {"pytorch": "/usr/lib/libtorch_cpu.so"}


def torchrun(rank: int, **more: str) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "n1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "exp",
        **more,
    }


def slurm(rank: int, **more: str) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "42",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        **more,
    }


def _process(
    pid: int, parent: int = 0, *, framework: bool = False, cgroup: str = "/", **environment: str
) -> ProcessFacts:
    return ProcessFacts(
        key=f"{pid}@1",
        pid=pid,
        start_ticks=pid,
        started_ns=1,
        parent_pid=parent,
        uid=0,
        name="python",
        environment=environment,
        frameworks=PYTORCH if framework else {},
        cgroups={"": cgroup},
    )


def _owners(
    *processes: ProcessFacts, used: tuple[int, ...] = (), **settings: Any
) -> dict[int, Owner]:
    finder = OwnerResolver(Config(host="node7", owners=Owners(kubelet="", **settings)))
    owners = finder.owners(
        {p.key: p for p in processes}, (), {f"{pid}@1": ["GPU-0"] for pid in used}
    )
    return {p.pid: owners[p.key] for p in processes}


def _ranks(owners: dict[int, Owner]) -> dict[int, int | None]:
    return {pid: owner.rank for pid, owner in owners.items()}


def test_workers_of_a_loader() -> None:
    """They inherit the variables, and load the framework as their rank does."""
    processes = [
        _process(10 * r + w, 10 * r if w else 1, framework=True, **torchrun(r))
        for r in (1, 2)
        for w in range(4)
    ]
    owners = _owners(*processes)
    assert {pid: rank for pid, rank in _ranks(owners).items() if rank is not None} == {10: 1, 20: 2}
    assert (owners[11].local_rank, owners[11].world_size, "rank" in owners[11].sources) == (
        None,
        None,
        False,
    )
    assert owners[11].job == "torchelastic-exp"


def test_a_worker_that_outlives_its_parent_is_no_second_rank() -> None:
    assert _ranks(_owners(_process(10, 1, **torchrun(0)), _process(11, 1, **torchrun(0)))) == {
        10: 0,
        11: None,
    }


def test_the_process_behind_a_shell_is_the_rank() -> None:
    shell, program, worker = (
        _process(5, 1, **slurm(1)),
        _process(6, 5, **slurm(1)),
        _process(7, 6, **slurm(1)),
    )
    assert _ranks(_owners(shell, program, worker)) == {
        5: 1,
        6: None,
        7: None,
    }  # nothing tells them apart
    loaded = [
        _process(p.pid, p.parent_pid, framework=p.pid > 5, **p.environment)
        for p in (shell, program, worker)
    ]
    assert _ranks(_owners(*loaded)) == {5: None, 6: 1, 7: None}
    assert _ranks(_owners(*loaded, used=(7,))) == {5: None, 6: None, 7: 1}  # whoever computes


def test_torchrun_inside_slurm_is_no_rank() -> None:
    """srun starts one torchrun per host, each a task of Slurm, and has a helper beside it."""
    inner = [_process(10 + r, 6, framework=True, **slurm(1, **torchrun(r))) for r in range(2)]
    owners = _owners(
        _process(5, 1, **slurm(1)),
        _process(6, 5, framework=True, **slurm(1)),
        _process(8, 5, **slurm(1)),
        *inner,
    )
    assert _ranks(owners) == {5: None, 6: None, 8: None, 10: 0, 11: 1}
    assert {owner.job for owner in owners.values()} == {"slurm-42"}


def test_launches_of_one_job_side_by_side() -> None:
    steps = _owners(_process(5, **slurm(0)), _process(6, **slurm(0, SLURM_STEP_ID="1")))
    ports = _owners(
        _process(5, **slurm(0, **torchrun(0))),
        _process(6, **slurm(0, **torchrun(0, MASTER_PORT="29501"))),
    )
    assert _ranks(steps) == _ranks(ports) == {5: 0, 6: 0}


def test_launches_of_nobody_look_alike() -> None:
    """MPICH names no job: two of them on a host are told apart by who started whom."""
    mpi = {"PMI_RANK": "0", "PMI_SIZE": "1"}
    owners = _owners(
        _process(5, 1, **mpi), _process(6, 5, **mpi), _process(7, 1, **mpi), _process(8, 7, **mpi)
    )
    assert _ranks(owners) == {5: 0, 6: None, 7: 0, 8: None}


def test_containers_do_not_share_a_rank() -> None:
    paths = [f"/docker/{letter * 64}" for letter in "ab"]
    owners = _owners(*(_process(5 + n, cgroup=path, **torchrun(0)) for n, path in enumerate(paths)))
    assert _ranks(owners) == {5: 0, 6: 0}


def test_a_rank_that_the_configuration_names() -> None:
    environment = {"SITE_RANK": "3", "TRACELOOM_JOB": "j"}
    owners = _owners(
        _process(5, **environment), _process(6, 5, **environment), variables={"SITE_RANK": "rank"}
    )
    assert _ranks(owners) == {5: 3, 6: None}


def test_a_job_at_a_loopback_address_is_of_one_host() -> None:
    """torchrun says 127.0.0.1:29500 of every job that it starts on one host."""
    local = torchrun(0, MASTER_ADDR="127.0.0.1", TORCHELASTIC_RUN_ID="none")
    container, pod = (
        "/docker/" + "a" * 64,
        "/kubepods/pod0a1b2c3d-1111-2222-3333-0123456789ab/" + "b" * 64,
    )
    owners = _owners(
        _process(5, **local),
        _process(6, cgroup=container, **local),
        _process(7, cgroup=pod, **local),
    )
    assert [owner.job for owner in owners.values()] == [
        "torchrun-node7:29500",
        f"torchrun-{'a' * 12}:29500",
        "pod-0a1b2c3d-1111-2222-3333-0123456789ab",
    ]
    assert [owner.rank for owner in owners.values()] == [0, 0, 0]


def test_what_is_inherited_is_that_of_the_job() -> None:
    """A worker whose environment was rewritten has the job's account, and neither rank nor devices of its parent."""
    rank = slurm(1, SLURM_JOB_ACCOUNT="nlp", SLURM_JOB_PARTITION="gpu", SLURM_JOB_NAME="llm")
    worker = _owners(_process(5, **rank), _process(6, 5, framework=True))[6]
    assert (worker.job, worker.name, worker.scheduler, worker.account, worker.partition) == (
        "slurm-42",
        "llm",
        "slurm",
        "nlp",
        "gpu",
    )
    assert (worker.rank, worker.sources["account"]) == (None, "process 5")
