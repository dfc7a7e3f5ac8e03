"""A cluster of Slurm on this host: one node, no authentication, everything in a directory."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.waiting import until


def missing(directory: Path) -> str:
    """What keeps Slurm from running here; "" where nothing does. It tries to make a file of a device."""
    if not (shutil.which("slurmctld") and shutil.which("slurmd") and shutil.which("srun")):
        return "Slurm is not installed: apt-get install slurm-wlm"
    if os.geteuid() != 0:
        return "Slurm's node daemon needs root"
    try:
        _device_file(directory / "nvidia0")
    except PermissionError as error:
        return f"files that stand for devices cannot be made here: {error}"
    return ""


def _device_file(path: Path) -> None:
    os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 3))  # which is /dev/null


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


@contextmanager
def cluster(directory: Path) -> Iterator[dict[str, str]]:
    """Start it; the environment in which `srun` finds it."""
    host = socket.gethostname().partition(".")[0]
    controller, node = _free_ports(2)
    for name in ("state", "spool"):
        (directory / name).mkdir(parents=True)
    (directory / "slurm.conf").write_text(
        f"""ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={node}
SlurmUser=root
AuthType=auth/none
CredType=cred/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
ReturnToService=2
GresTypes=gpu
MpiDefault=none
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.pid
NodeName={host} NodeAddr=127.0.0.1 CPUs={os.cpu_count()} RealMemory=512 Gres=gpu:2 State=UNKNOWN
PartitionName=small Nodes={host} Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES:4
""",
        encoding="utf-8",
    )
    (directory / "cgroup.conf").write_text("CgroupAutomount=no\n", encoding="utf-8")
    (directory / "gres.conf").write_text(
        f"Name=gpu File={directory}/nvidia[0-1]\n", encoding="utf-8"
    )
    for number in range(2):
        _device_file(directory / f"nvidia{number}")
    environment = {**os.environ, "SLURM_CONF": str(directory / "slurm.conf")}
    daemons = []
    try:
        for name in ("slurmctld", "slurmd"):
            with (directory / f"{name}.log").open("wb") as log:
                daemons.append(
                    subprocess.Popen([name, "-D"], env=environment, stdout=log, stderr=log)
                )

        def ready() -> bool:
            state = subprocess.run(
                ["sinfo", "-h", "-o", "%T"],
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            for daemon, name in zip(daemons, ("slurmctld", "slurmd"), strict=True):
                assert daemon.poll() is None, (directory / f"{name}.log").read_text(
                    encoding="utf-8"
                )
            return state.stdout.strip() == "idle"

        until(ready)
        yield environment
    finally:
        for daemon in daemons:
            daemon.kill()  # asked to end, they may wait for a minute; there is nothing to be kept
            daemon.wait(60)
