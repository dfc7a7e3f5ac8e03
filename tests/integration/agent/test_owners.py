"""Whose processes are, as real launchers and schedulers start them, seen by a real agent."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support import kubelet, slurm
from support.host_tree import HostTree
from support.running_agent import running_agent
from support.waiting import until
from traceloom.agent.accelerators.backend import Device
from traceloom.agent.ownership.devices import HostDevices, find_assigned_devices
from traceloom.server.client import AgentClient

RANK = """
import multiprocessing, os, sys, time, torch
child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,), daemon=True)  # as a loader's worker
child.start()
open(sys.argv[1] + os.environ["RANK"], "w").write(f"{os.getpid()} {child.pid}")
time.sleep(600)
"""
TASK = """
import os, sys, time
open(sys.argv[1] + os.environ["SLURM_PROCID"], "w").write(str(os.getpid()))
time.sleep(600)
"""
NO_JOB_OF_OURS = ("SLURM_", "TRACELOOM_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_")


def _environment(**more: str) -> dict[str, str]:
    return {
        name: value for name, value in os.environ.items() if not name.startswith(NO_JOB_OF_OURS)
    } | more


def _owners(client: AgentClient, pids: dict[int, Any]) -> dict[int, dict[str, Any]]:
    rows = client.get("processes")["processes"]
    return {row["pid"]: row["owner"] for row in rows if row["pid"] in pids}


def _pids(marks: Path, ranks: int) -> dict[int, list[int]]:
    """Rank -> pids that it wrote down, once all did."""
    files = [marks.with_name(f"{marks.name}{rank}") for rank in range(ranks)]
    texts = until(
        lambda: (t := [f.read_text() if f.exists() else "" for f in files]) and all(t) and t, 120
    )
    return {rank: [int(word) for word in text.split()] for rank, text in enumerate(texts)}


@pytest.mark.torch
def test_ranks_of_torchrun_and_not_their_workers(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(RANK, encoding="utf-8")
    marks = tmp_path / "rank"
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--rdzv-backend=c10d",
    ]
    command += [
        "--rdzv-endpoint=localhost:0",
        "--rdzv-id=exp7",
        str(tmp_path / "train.py"),
        str(marks),
    ]
    with running_agent(tmp_path / "agent") as client:
        job = subprocess.Popen(
            command, env=_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            pids = _pids(marks, 2)
            both = {pid: rank for rank, (pid, _) in pids.items()}
            workers = {pid: rank for rank, (_, pid) in pids.items()}

            def seen() -> bool:
                owners = _owners(client, both | workers)
                return len(owners) == 4 and all(owner["framework"] for owner in owners.values())

            until(seen)
            owners = _owners(client, both | workers)
            for pid, rank in both.items():
                fields = ("job", "scheduler", "rank", "local_rank", "world_size", "framework")
                expected = ("torchelastic-exp7", "torchrun", rank, rank, 2, "pytorch")
                assert tuple(owners[pid][field] for field in fields) == expected
            for pid in workers:
                assert (owners[pid]["job"], owners[pid]["rank"], owners[pid]["local_rank"]) == (
                    "torchelastic-exp7",
                    None,
                    None,
                )
            (row,) = (
                row for row in client.get("jobs")["jobs"] if row["job"] == "torchelastic-exp7"
            )
            assert row["ranks"] == [0, 1]
        finally:
            job.terminate()
            job.wait(60)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Any:
    if why := slurm.missing(tmp_path_factory.mktemp("devices")):
        pytest.skip(why)
    with slurm.cluster(tmp_path_factory.mktemp("slurm")) as environment:
        yield environment


def test_tasks_of_slurm(cluster: dict[str, str], tmp_path: Path) -> None:
    marks = tmp_path / "task"
    command = [
        "srun",
        "-n2",
        "--overcommit",
        "-A",
        "physics",
        "-J",
        "llm",
        sys.executable,
        "-c",
        TASK,
        str(marks),
    ]
    with running_agent(tmp_path / "agent") as client:
        job = subprocess.Popen(command, env=_environment(SLURM_CONF=cluster["SLURM_CONF"]))
        try:
            both = {pid: rank for rank, (pid,) in _pids(marks, 2).items()}
            until(lambda: len(_owners(client, both)) == 2)
            owners = _owners(client, both)
            number = subprocess.run(
                ["squeue", "-h", "-o", "%A"],
                env=cluster,
                capture_output=True,
                text=True,
                check=True,
            ).stdout.strip()
            for pid, rank in both.items():
                fields = (
                    "job",
                    "name",
                    "scheduler",
                    "account",
                    "partition",
                    "user",
                    "rank",
                    "local_rank",
                    "world_size",
                )
                expected = (
                    f"slurm-{number}",
                    "llm",
                    "slurm",
                    "physics",
                    "small",
                    "root",
                    rank,
                    rank,
                    2,
                )
                assert tuple(owners[pid][field] for field in fields) == expected
        finally:
            job.terminate()
            job.wait(60)


def test_devices_that_slurm_gives(cluster: dict[str, str], tmp_path: Path) -> None:
    """What Slurm really sets, on a host whose device files are numbered otherwise than CUDA counts."""
    for minor, pci in ((1, "0000:10:00.0"), (0, "0000:20:00.0")):
        file = tmp_path / "proc/driver/nvidia/gpus" / pci / "information"
        file.parent.mkdir(parents=True)
        file.write_text(f"Model: \t H100\nDevice Minor: \t {minor}\n", encoding="ascii")
    devices = [
        Device(
            uuid=f"GPU-{pci}",
            index=str(index),
            vendor="nvidia",
            model="H100",
            pci=f"00000000:{pci}:00.0",
        )
        for index, pci in enumerate(("10", "20"))
    ]
    host = HostDevices(devices, tmp_path / "proc", tmp_path / "sys")

    def tasks(*options: str) -> dict[str, Any]:
        """What each task was given, by its rank."""
        command = [
            "srun",
            *options,
            "--overcommit",
            "sh",
            "-c",
            'echo $(env | grep -E "^(SLURM|CUDA)_")',
        ]
        environment = _environment(SLURM_CONF=cluster["SLURM_CONF"])
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        matches = [dict(re.findall(r"(\w+)=(\S*)", line)) for line in run.stdout.splitlines()]
        return {
            of_task["SLURM_PROCID"]: find_assigned_devices(of_task, host) for of_task in matches
        }

    assert tasks("-n1", "--gpus=2") == {"0": (("GPU-10", "GPU-20"), "CUDA_VISIBLE_DEVICES")}
    each = tasks("-n2", "--gpus-per-task=1")
    assert {rank: uuids for rank, (uuids, _) in each.items()} == {
        "0": ("GPU-20",),
        "1": ("GPU-10",),
    }


POD_UID = "0a1b2c3d-1111-2222-3333-0123456789ab"


def test_pods_and_mapped_jobs_through_a_running_agent(tmp_path: Path) -> None:
    """The kubelet hangs first: everything else goes on, and the doctor says it. Then it answers."""
    pytest.importorskip("grpc", reason="gRPC is not installed: the extra `kubernetes`")
    tree = HostTree(tmp_path)
    tree.process(2, name="kthreadd", parent=0, flags=0x208040, maps=(), command=())
    socket, jobs = tmp_path / "kubelet.sock", tmp_path / "jobs"
    jobs.mkdir()
    (jobs / "1").write_text("4242\n", encoding="ascii")
    settings = (
        f'[owners]\nkubelet = "{socket}"\njob_mapping = "{jobs}"\n'
        '[collect]\nperiod = 0.2\ntimeout = 20.0\noff = ["cpu", "memory", "pressure", "disks", "network", "rdma"]\n'
        f'proc = "{tree.proc}"\nsys = "{tree.sys}"\n'
    )
    with (
        kubelet.served(socket) as service,
        running_agent(tmp_path / "agent", settings, simulated=2) as client,
    ):
        service.answer = service.hang
        devices = {device["index"]: device["uuid"] for device in client.get("devices")["devices"]}
        tree.process(
            77,
            environment={
                "NVIDIA_VISIBLE_DEVICES": devices["0"],
                "RANK": "0",
                "WORLD_SIZE": "1",
                "LOCAL_RANK": "0",
            },
            cgroup=f"0::/kubepods/pod{POD_UID}/{'a' * 64}\n",
        )
        tree.process(78, environment={"SLURM_JOB_ID": "4242"})

        def owner(pid: int) -> dict[str, Any]:
            return _owners(client, {pid: None}).get(pid, {})

        assert until(lambda: owner(78))["devices"] == [devices["1"]]
        assert (owner(77)["job"], owner(77)["pod"]) == (f"pod-{POD_UID}", "")

        def list_problems() -> str:
            states = {state["name"]: state for state in client.get("status")["collectors"]}
            assert not states["processes"]["last_error"]
            assert not states["job-mapping"]["last_error"]
            return str(states["kubelet"]["last_error"])

        assert "deadline_exceeded" in until(list_problems)
        (check,) = (check for check in client.get("doctor")["checks"] if check["name"] == "kubelet")
        assert (check["works"], "did not answer" in check["why"]) == ("no", True)
        until(
            lambda: client.get(
                "query", metric="collector_failures_total", where="collector=kubelet"
            )["series"]
        )
        service.answer = kubelet.containers({("ml", "bert-0"): {"train": [devices["0"]]}})
        service.ended.set()
        tree.process(
            79,
            environment={"TRACELOOM_JOB": "new"},
            cgroup=f"0::/kubepods/pod{POD_UID}/{'b' * 64}\n",
        )
        until(lambda: owner(77)["pod"])
        names = ("namespace", "pod", "container", "devices", "rank")
        assert [owner(77)[name] for name in names] == ["ml", "bert-0", "train", [devices["0"]], 0]
        assert not list_problems()
