"""Processes with whose they are and what they are on: several on a device, several devices of a process."""

from __future__ import annotations

from pathlib import Path

from support.devices import ByHand, values
from support.host_tree import HostTree
from traceloom.agent.accelerators import Device, DeviceProcess, Sample
from traceloom.agent.accelerators.collecting import AcceleratorCollector
from traceloom.agent.accelerators.watched import Watched
from traceloom.agent.metrics import METRICS
from traceloom.agent.processes import OwnedProcesses, jobs_now
from traceloom.agent.steps import Steps

TORCH = "/opt/venv/lib/python3.12/site-packages/torch/lib/libtorch_cpu.so"


def test_several_processes_on_a_device_and_several_devices_of_one(tmp_path: Path) -> None:
    """A second process on the first device moves nobody's device: each process has its own, whatever their order."""
    tree = HostTree(tmp_path)
    tree.process(2, name="kthreadd", parent=0, flags=0x208040, maps=(), command=())
    for pid, rank, job in ((30, "0", "1"), (31, "0", "2"), (32, "1", "2")):
        environment = {
            "SLURM_JOB_ID": job, "SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_STEP_ID": "0",
            "SLURM_STEP_NUM_TASKS": "2", "CUDA_VISIBLE_DEVICES": "GPU-0" if job == "1" else f"GPU-{rank},GPU-2",
        }  # fmt: skip
        tree.process(pid, environment=environment, maps=(TORCH,))
        tree.process(pid + 100, parent=pid, environment=environment, maps=(TORCH,))  # a loader's worker
    back_end = ByHand()
    back_end.sampled = Sample(
        at_ns=1,
        devices=[Device(uuid=f"GPU-{number}", index=str(number), vendor="nvidia", model="H") for number in range(4)],
        processes=[
            DeviceProcess(device="GPU-0", pid=30, busy_ratio=0.6, memory_bytes=5_000),
            DeviceProcess(device="GPU-0", pid=31, busy_ratio=0.2, memory_bytes=0),
            DeviceProcess(device="GPU-1", pid=32),  # the driver does not say how much
            DeviceProcess(device="GPU-2", pid=32, memory_bytes=90),
            DeviceProcess(device="GPU-3", pid=99, memory_bytes=8),  # of another pid namespace, or ended
        ],
    )
    config = tree.config()
    accelerators = AcceleratorCollector(config, [Watched("by-hand", lambda: back_end)])
    try:
        accelerators.collect()
        owned = OwnedProcesses(config, accelerators)
        readings = owned.collect()
    finally:
        accelerators.close()
    processes = {process.pid: process for process in owned.owned.values()}
    assert {pid: (p.owner.job, p.owner.rank, p.devices, p.owner.devices) for pid, p in processes.items()} == {
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
        (key[30], "GPU-0"): 0.75, (key[31], "GPU-0"): 0.25, (key[32], "GPU-1"): 1.0, (key[32], "GPU-2"): 1.0,
        ("99@", "GPU-3"): 1.0,
    }  # fmt: skip
    assert values(readings, "process_gpu_memory_bytes") == {
        (key[30], "GPU-0"): 5_000, (key[31], "GPU-0"): 0, (key[32], "GPU-2"): 90, ("99@", "GPU-3"): 8,
    }  # fmt: skip
    names = METRICS["job_info"].labels
    jobs = [dict(zip(names, labels, strict=True)) for labels in values(readings, "job_info")]
    assert sorted((job["job"], job["scheduler"], job["framework"], job["world_size"]) for job in jobs) == [
        ("slurm-1", "slurm", "pytorch", "2"), ("slurm-2", "slurm", "pytorch", "2"),
    ]  # fmt: skip
    assert values(readings, "job_processes") == {("slurm-1",): 2, ("slurm-2",): 4}
    ranks = {labels[0]: labels[3] for labels in values(readings, "process_info")}
    assert sorted(rank for rank in ranks.values() if rank) == ["0", "0", "1"]
    held = {job.job: set(job.devices) for job in jobs_now(processes.values(), Steps(), {})}
    assert held == {"slurm-1": {"GPU-0"}, "slurm-2": {"GPU-0", "GPU-1", "GPU-2"}}
