"""Jobs of devices, from the files that a scheduler's prolog writes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from traceloom.agent.accelerators.backend import Device
from traceloom.agent.collectors.processes import ProcessFacts
from traceloom.agent.config import Config, Owners
from traceloom.agent.ownership.model import Owner
from traceloom.agent.ownership.resolver import MAX_BYTES, JobMapping, OwnerResolver

GPUS = [
    Device(uuid=f"GPU-{number}", index=str(number), vendor="nvidia", model="H100")
    for number in range(3)
]
PARTITIONS = [
    Device(
        uuid=f"MIG-{slot}",
        index=f"2:{slot}",
        vendor="nvidia",
        model="H100",
        parent="GPU-2",
        partition=f"1g.10gb gi={slot + 7} ci=0",
    )
    for slot in range(2)
]


def _config(directory: Path) -> Config:
    return Config(owners=Owners(job_mapping=str(directory), kubelet=""))


def _process(pid: int, **environment: str) -> ProcessFacts:
    return ProcessFacts(
        key=f"{pid}@1",
        pid=pid,
        start_ticks=1,
        started_ns=1,
        parent_pid=0,
        uid=0,
        name="python",
        environment=environment,
    )


def _owners(
    directory: Path, files: dict[str, str], used: dict[int, list[str]], *more: ProcessFacts
) -> tuple[dict[int, Owner], OwnerResolver]:
    for name, text in files.items():
        (directory / name).write_text(text, encoding="utf-8")
    finder = OwnerResolver(_config(directory))
    finder.job_mapping.collect()
    processes = {pid: _process(pid) for pid in used} | {facts.pid: facts for facts in more}
    by_key = {facts.key: facts for facts in processes.values()}
    owners = finder.owners(
        by_key, [*GPUS, *PARTITIONS], {f"{pid}@1": uuids for pid, uuids in used.items()}
    )
    return {pid: owners[f"{pid}@1"] for pid in processes}, finder


def test_a_job_on_several_devices(tmp_path: Path) -> None:
    owners, finder = _owners(
        tmp_path, {"0": "4242\n", "1": "4242\n"}, {1: ["GPU-0"], 2: ["GPU-0", "GPU-1"], 3: []}
    )
    assert [owner.job for owner in owners.values()] == ["4242", "4242", ""]
    assert owners[1].sources["job"] == "job mapping"
    assert owners[1].devices == ("GPU-0", "GPU-1")  # all of its job
    assert finder.list_problems() == []


def test_several_jobs_on_a_device_are_not_told_apart(tmp_path: Path) -> None:
    used = {
        1: ["GPU-0"],
        2: ["GPU-1"],
        3: ["GPU-0", "GPU-1"],
        4: ["GPU-1", "GPU-0"],
        5: ["GPU-1", "MIG-0"],
    }
    owners, _ = _owners(tmp_path, {"0": "1\n2\n", "1": "1\n", "2": "3\n"}, used)
    assert [owner.job for owner in owners.values()] == ["", "1", "", "", ""]


def test_the_job_of_a_process_is_stronger_and_has_its_devices(tmp_path: Path) -> None:
    """Two jobs share a device; what each of them was given is known from the files."""
    files = {"0": "7\n8\n", "1": "8\n"}
    more = (
        _process(1, SLURM_JOB_ID="7"),
        _process(2, SLURM_JOB_ID="8"),
        _process(3, TRACELOOM_JOB="own"),
    )
    owners, _ = _owners(tmp_path, files, {1: ["GPU-0"], 2: ["GPU-0"], 3: ["GPU-1"]}, *more)
    assert {owner.job: owner.devices for owner in owners.values()} == {
        "slurm-7": ("GPU-0",),
        "slurm-8": ("GPU-0", "GPU-1"),
        "own": (),
    }


def test_what_a_process_was_given_is_closer_than_what_its_job_was(tmp_path: Path) -> None:
    narrow = _process(1, SLURM_JOB_ID="7", CUDA_VISIBLE_DEVICES="GPU-1")
    owners, _ = _owners(tmp_path, {"0": "7", "1": "7"}, {}, narrow)
    assert (owners[1].devices, owners[1].sources["devices"]) == (("GPU-1",), "CUDA_VISIBLE_DEVICES")


def test_a_job_has_one_name_on_a_host(tmp_path: Path) -> None:
    """The files name it as its scheduler does; processes that know the scheduler say more."""
    owners, _ = _owners(tmp_path, {"0": "7"}, {1: ["GPU-0"]}, _process(2, SLURM_JOB_ID="7"))
    assert owners[1].job == owners[2].job == "slurm-7"


def test_partitions(tmp_path: Path) -> None:
    files = {"2:0": "1\n", "MIG-1": "2\n"}
    owners, _ = _owners(tmp_path, files, {1: ["MIG-0"], 2: ["MIG-1"]})
    assert [(owner.job, owner.devices) for owner in owners.values()] == [
        ("1", ("MIG-0",)),
        ("2", ("MIG-1",)),
    ]


def test_a_divided_device_is_all_its_partitions(tmp_path: Path) -> None:
    owners, _ = _owners(tmp_path, {"2": "5\n"}, {1: ["MIG-1"]})
    assert (owners[1].job, owners[1].devices) == ("5", ("MIG-0", "MIG-1"))


def test_files_of_no_device_are_said(tmp_path: Path) -> None:
    _, finder = _owners(tmp_path, {"9": "1", "0": "1", ".0.swp": "1"}, {})
    (sentence,) = finder.list_problems()
    assert sentence.startswith(
        "1 devices that the kubelet or job mapping names are not known here, as `9`"
    )


def test_what_exporters_say_of_devices(tmp_path: Path) -> None:
    """An exporter that is scraped tells whose its devices are; a pod is told only of processes in pods."""
    owner = {"job": "9", "partition": "gpu", "pod": "bert-0", "namespace": "ml"}
    scraped = [Device(uuid="GPU-0", index="0", vendor="nvidia", model="H100", owner=owner)]
    pod = "/kubepods/pod0a1b2c3d-1111-2222-3333-0123456789ab/" + "a" * 64
    in_a_pod = ProcessFacts(
        key="2@1",
        pid=2,
        start_ticks=1,
        started_ns=1,
        parent_pid=0,
        uid=0,
        name="python",
        cgroups={"": pod},
    )
    processes = {"1@1": _process(1), "2@1": in_a_pod, "3@1": _process(3)}
    owners = OwnerResolver(_config(tmp_path)).owners(
        processes, scraped, {"1@1": ["GPU-0"], "2@1": ["GPU-0"]}
    )
    first, second, third = owners.values()
    assert (first.job, first.partition, first.pod, first.sources["job"]) == (
        "9",
        "gpu",
        "",
        "exporter",
    )
    assert (second.pod, second.namespace) == ("bert-0", "ml")
    assert second.job == "pod-0a1b2c3d-1111-2222-3333-0123456789ab"
    assert third.job == ""


def test_damaged_directories(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "1")
    (tmp_path / "2").mkdir()
    (tmp_path / "3").write_bytes(b"x" * (MAX_BYTES + 1))
    (tmp_path / "4").write_bytes(b"\xff\n" + b"y" * 300 + b"\n\n  5  \n5\nbell\x07\n")
    (tmp_path / "5").symlink_to(tmp_path / "absent")
    (tmp_path / "0").write_text("1\n", encoding="ascii")
    mapping = JobMapping(_config(tmp_path))
    mapping.collect()
    assert mapping.jobs == {"0": ("1",), "4": ("\ufffd", "5")}
    assert [sentence.partition(": ")[0] for sentence in mapping.list_problems()] == [
        str(tmp_path / name) for name in ("1", "2", "3", "5")
    ]


def test_a_directory_that_goes_takes_its_jobs_along(tmp_path: Path) -> None:
    directory = tmp_path / "jobs"
    directory.mkdir()
    (directory / "0").write_text("1", encoding="ascii")
    mapping = JobMapping(_config(directory))
    mapping.collect()
    assert mapping.jobs == {"0": ("1",)}
    directory.rename(tmp_path / "gone")
    with pytest.raises(OSError, match="jobs"):
        mapping.collect()
    assert mapping.jobs == {}
