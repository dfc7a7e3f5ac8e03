"""Paths of control groups as schedulers and container engines make them."""

from __future__ import annotations

import pytest

from traceloom.agent.collectors.processes import ProcessFacts
from traceloom.agent.config import Config
from traceloom.agent.ownership.environment import parse_cgroup_paths
from traceloom.agent.ownership.model import JobNames
from traceloom.agent.ownership.resolver import OwnerResolver

ID = "3f" * 32
POD = "0a1b2c3d-1111-2222-3333-0123456789ab"
DASHED, JOINED = POD, POD.replace("-", "_")


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/slurm/uid_1000/job_4242/step_0/task_1", {"job": "slurm-4242", "scheduler": "slurm"}),
        (
            "/system.slice/slurmstepd.scope/job_4242/step_batch/user/task_0",
            {"job": "slurm-4242", "scheduler": "slurm"},
        ),
        (
            f"/kubepods/burstable/pod{DASHED}/{ID}",
            {"job": f"pod-{POD}", "scheduler": "kubernetes", "container": ID[:12]},
        ),
        (
            f"/kubepods/pod{DASHED}/{ID}",
            {"job": f"pod-{POD}", "scheduler": "kubernetes", "container": ID[:12]},
        ),
        (
            f"/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{JOINED}.slice/cri-containerd-{ID}.scope",
            {"job": f"pod-{POD}", "scheduler": "kubernetes", "container": ID[:12]},
        ),
        (
            f"/kubepods.slice/kubepods-pod{JOINED}.slice/crio-{ID}.scope",
            {"job": f"pod-{POD}", "scheduler": "kubernetes", "container": ID[:12]},
        ),
        (  # seen from another pod's namespace of control groups
            f"/../../../burstable/pod{DASHED}/{ID}",
            {"job": f"pod-{POD}", "scheduler": "kubernetes", "container": ID[:12]},
        ),
        (
            f"/../../kubepods-pod{JOINED}.slice/cri-containerd-{ID}.scope",
            {"job": f"pod-{POD}", "scheduler": "kubernetes", "container": ID[:12]},
        ),
        (f"/docker/{ID}", {"container": ID[:12]}),
        (f"/system.slice/docker-{ID}.scope", {"container": ID[:12]}),
        (f"/machine.slice/libpod-{ID}.scope/container", {"container": ID[:12]}),
        ("/user.slice/user-1000.slice/session-3.scope", {}),
        ("/system.slice/my_job_12.service", {}),
        ("/", {}),
    ],
)
def test_paths(path: str, expected: dict[str, str]) -> None:
    assert parse_cgroup_paths([path]) == expected


def _facts(pid: int, parent: int, *, cgroup: str = "/", **environment: str) -> ProcessFacts:
    return ProcessFacts(
        key=f"{pid}@1",
        pid=pid,
        start_ticks=1,
        started_ns=1,
        parent_pid=parent,
        uid=0,
        name="python",
        environment=environment,
        cgroup=cgroup,
        cgroups={"": cgroup},
    )


def test_the_environment_is_stronger_than_the_path() -> None:
    processes = {"1@1": _facts(1, 0, cgroup="/slurm/uid_1/job_7/step_0", TRACELOOM_JOB="mine")}
    owner = OwnerResolver(Config()).owners(processes)["1@1"]
    assert (owner.job, owner.sources["job"]) == ("mine", "TRACELOOM_JOB")
    bare = OwnerResolver(Config()).owners(
        {"1@1": _facts(1, 0, cgroup="/slurm/uid_1/job_7/step_0")}
    )["1@1"]
    assert (bare.job, bare.sources["job"]) == ("slurm-7", "cgroup")


def test_a_child_has_the_job_of_its_nearest_ancestor_and_no_rank() -> None:
    processes = {
        "1@1": _facts(1, 0, SLURM_JOB_ID="1"),
        "2@1": _facts(2, 1, TRACELOOM_JOB="inner", RANK="3", WORLD_SIZE="4"),
        "3@1": _facts(3, 2),  # a worker whose environment was rewritten
        "4@1": _facts(4, 3),
        "5@1": _facts(5, 99),  # of nobody
    }
    owners = OwnerResolver(Config()).owners(processes)
    assert [owners[f"{pid}@1"].job for pid in range(1, 6)] == [
        "slurm-1",
        "inner",
        "inner",
        "inner",
        "",
    ]
    assert owners["2@1"].rank == 3
    assert owners["3@1"].rank is None
    assert owners["4@1"].sources["job"] == "process 2"


def test_ancestors_in_a_circle_end() -> None:
    """A pid that was given again may stand as the parent of its own ancestor."""
    owners = OwnerResolver(Config()).owners({"1@1": _facts(1, 2), "2@1": _facts(2, 1)})
    assert [owner.job for owner in owners.values()] == ["", ""]


@pytest.mark.parametrize(
    "path",
    [
        "/user.slice/user-1001.slice/user@1001.service/app.slice/slurmstepd.scope/job_4242/step_0",
        "/user.slice/user-1001.slice/user@1001.service/slurm/uid_1000/job_4242",
        "/user.slice/user-1001.slice/user@1001.service/kubepods/pod12345678-1234-1234-1234-123456789abc",
        "/system.slice/notebook.service/slurmstepd.scope/job_4242",
        "/anything/job_4242",
    ],
)
def test_a_group_that_a_user_named_like_a_schedulers_is_none(path: str) -> None:
    assert "job" not in parse_cgroup_paths([path])


def test_who_is_first_keeps_the_name_of_a_job_and_a_scheduler_goes_before() -> None:
    names = JobNames(4)
    assert names.claim("run", 1, is_scheduled=False) == "run"
    assert names.claim("run", 2, "bert", is_scheduled=False) == "run@bert"
    assert names.claim("run", 1, is_scheduled=False) == "run"
    assert names.claim("run", 3, "cleo", is_scheduled=True) == "run", "by a group of processes"
    assert names.claim("run", 4, is_scheduled=True) == "run", "whoever is in it"
    assert names.claim("run", 1, "anna", is_scheduled=False) == "run@anna"
    assert names.claim("run@bert", 5, is_scheduled=False) == "run@bert@5", (
        "nobody takes that either"
    )
    for number in range(10):
        names.claim(f"other{number}", 9, is_scheduled=False)
    assert names.claim("run", 6, is_scheduled=False) == "run", (
        "names are forgotten, not without end"
    )


def test_who_makes_up_many_names_loses_the_own_ones_and_takes_nobody_elses() -> None:
    names = JobNames(4)
    assert names.claim("run", 1, is_scheduled=False) == "run"
    for number in range(10):
        names.claim(f"other{number}", 9, is_scheduled=False)
    assert names.claim("run", 9, "eve", is_scheduled=False) == "run@eve"
