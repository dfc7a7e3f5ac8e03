"""Processes with whose they are and what they are on: several on a device, several devices of a process."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.devices import ByHand, values
from support.host_tree import HostTree
from traceloom.agent.accelerators.backend import Device, DeviceProcess, Sample, TimeLimitedBackend
from traceloom.agent.accelerators.collector import AcceleratorCollector
from traceloom.agent.metrics import METRICS
from traceloom.agent.ownership.resolver import OwnedProcessCollector, collect_jobs
from traceloom.agent.steps import StepCounter

TORCH = "/opt/venv/lib/python3.12/site-packages/torch/lib/libtorch_cpu.so"


def test_several_processes_on_a_device_and_several_devices_of_one(tmp_path: Path) -> None:
    """A second process on the first device moves nobody's device: each process has its own, whatever their order."""
    tree = HostTree(tmp_path)
    tree.process(2, name="kthreadd", parent=0, flags=0x208040, maps=(), command=())
    for pid, rank, job in ((30, "0", "1"), (31, "0", "2"), (32, "1", "2")):
        environment = {
            "SLURM_JOB_ID": job,
            "SLURM_PROCID": rank,
            "SLURM_LOCALID": rank,
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NUM_TASKS": "2",
            "CUDA_VISIBLE_DEVICES": "GPU-0" if job == "1" else f"GPU-{rank},GPU-2",
        }
        tree.process(pid, environment=environment, maps=(TORCH,))
        tree.process(
            pid + 100, parent=pid, environment=environment, maps=(TORCH,)
        )  # a loader's worker
    back_end = ByHand()
    back_end.sampled = Sample(
        at_ns=1,
        devices=[
            Device(uuid=f"GPU-{number}", index=str(number), vendor="nvidia", model="H")
            for number in range(4)
        ],
        processes=[
            DeviceProcess(device="GPU-0", pid=30, busy_ratio=0.6, memory_bytes=5_000),
            DeviceProcess(device="GPU-0", pid=31, busy_ratio=0.2, memory_bytes=0),
            DeviceProcess(device="GPU-1", pid=32),  # the driver does not say how much
            DeviceProcess(device="GPU-2", pid=32, memory_bytes=90),
            DeviceProcess(
                device="GPU-3", pid=99, memory_bytes=8
            ),  # of another pid namespace, or ended
        ],
    )
    config = tree.config()
    accelerators = AcceleratorCollector(config, [TimeLimitedBackend("by-hand", lambda: back_end)])
    try:
        accelerators.collect()
        owned = OwnedProcessCollector(config, accelerators)
        readings = owned.collect()
    finally:
        accelerators.close()
    processes = {process.pid: process for process in owned.owned.values()}
    assert {
        pid: (p.owner.job, p.owner.rank, p.devices, p.owner.devices) for pid, p in processes.items()
    } == {
        30: ("slurm-1", 0, ("GPU-0",), ("GPU-0",)),
        31: ("slurm-2", 0, ("GPU-0",), ("GPU-0", "GPU-2")),
        32: ("slurm-2", 1, ("GPU-1", "GPU-2"), ("GPU-1", "GPU-2")),
        130: ("slurm-1", None, (), ("GPU-0",)),
        131: ("slurm-2", None, (), ("GPU-0", "GPU-2")),
        132: ("slurm-2", None, (), ("GPU-1", "GPU-2")),
    }
    shares = values(readings, "process_gpu_share_ratio")
    key = {pid: process.key for pid, process in processes.items()}
    assert shares == {
        (key[30], "GPU-0"): 0.75,
        (key[31], "GPU-0"): 0.25,
        (key[32], "GPU-1"): 1.0,
        (key[32], "GPU-2"): 1.0,
        ("99@", "GPU-3"): 1.0,
    }
    assert values(readings, "process_gpu_memory_bytes") == {
        (key[30], "GPU-0"): 5_000,
        (key[31], "GPU-0"): 0,
        (key[32], "GPU-2"): 90,
        ("99@", "GPU-3"): 8,
    }
    names = METRICS["job_info"].labels
    jobs = [dict(zip(names, labels, strict=True)) for labels in values(readings, "job_info")]
    assert sorted(
        (job["job"], job["scheduler"], job["framework"], job["world_size"]) for job in jobs
    ) == [
        ("slurm-1", "slurm", "pytorch", "2"),
        ("slurm-2", "slurm", "pytorch", "2"),
    ]
    assert values(readings, "job_processes") == {("slurm-1",): 2, ("slurm-2",): 4}
    ranks = {labels[0]: labels[3] for labels in values(readings, "process_info")}
    assert sorted(rank for rank in ranks.values() if rank) == ["0", "0", "1"]
    held = {
        job.job: set(job.devices) for job in collect_jobs(processes.values(), StepCounter(), {})
    }
    assert held == {"slurm-1": {"GPU-0"}, "slurm-2": {"GPU-0", "GPU-1", "GPU-2"}}


def test_versions_of_frameworks_are_those_installed_beside_the_library(tmp_path: Path) -> None:
    tree = HostTree(tmp_path)
    site = "/opt/torch/lib/python3.12/site-packages"
    libraries = {
        30: f"{site}/torch/lib/libtorch_cpu.so",
        31: f"{site}/jaxlib/xla_extension.so",
        32: f"{site}/tensorflow/libtensorflow_cc.so.2",
        33: "/usr/lib/libtorch_cpu.so",
    }
    for pid, library in libraries.items():
        tree.process(pid, maps=(library,))
        (tree.proc / str(pid) / "root").symlink_to(tmp_path / "container")
    for name in (
        "torch-2.13.0+cpu",
        "torch_geometric-2.6.1",
        "torchvision-0.28.0",
        "tensorflow_cpu-2.20.0",
        "tensorflow_datasets-4.9",
        "jaxlib-0.8.1",
        "jaxlib-0.8.2",
    ):
        (tmp_path / f"container{site}" / f"{name}.dist-info").mkdir(parents=True)
    accelerators = AcceleratorCollector(tree.config(), [TimeLimitedBackend("by-hand", ByHand)])
    accelerators.close()
    owned = OwnedProcessCollector(tree.config(), accelerators)

    def versions() -> dict[int, tuple[str, str]]:
        for collector in owned.collectors:
            collector.collect()
        owners = {process.pid: process.owner for process in owned.owned.values()}
        return {pid: (owner.framework, owner.framework_version) for pid, owner in owners.items()}

    assert versions()[30] == ("pytorch", "")  # it is known to the next run
    assert versions() == {
        30: ("pytorch", "2.13.0+cpu"),
        31: ("jax", ""),  # which of two it is, is not known
        32: ("tensorflow", "2.20.0"),
        33: ("pytorch", ""),
    }
    tree.process(30, start_ticks=60_000, maps=(libraries[30],))
    (
        tree.proc / "30/root"
    ).unlink()  # another process of the same pid, whose files are not to be seen
    versions()
    assert versions()[30] == ("pytorch", "")


@pytest.mark.parametrize(
    ("types", "sizes", "expected"),
    [
        (("bf16", "bf16"), ("1e6", "1e6"), (True, 1e6)),
        (
            ("bf16", "fp8"),
            ("many", "2e6"),
            (False, 2e6),
        ),  # two types are none; what is no number is left out
        (("", ""), ("-1", "inf"), (False, None)),
    ],
)
def test_what_a_job_declares_of_itself(
    tmp_path: Path,
    types: tuple[str, ...],
    sizes: tuple[str, ...],
    expected: tuple[bool, float | None],
) -> None:
    tree = HostTree(tmp_path)
    for rank, (dtype, size) in enumerate(zip(types, sizes, strict=True)):
        declared = {"TRACELOOM_JOB": "run1", "TRACELOOM_INPUT_BYTES_PER_STEP": size}
        tree.process(
            30 + rank, environment={**declared, **({"TRACELOOM_DTYPE": dtype} if dtype else {})}
        )
    accelerators = AcceleratorCollector(tree.config(), [TimeLimitedBackend("by-hand", ByHand)])
    accelerators.close()
    owned = OwnedProcessCollector(tree.config(), accelerators)
    owned.collect()
    (job,) = collect_jobs(owned.owned.values(), StepCounter(), {})
    assert (job.declared_types is not None, job.input_bytes_per_step) == expected
