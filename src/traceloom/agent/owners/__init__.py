"""Whose a process is: job, rank, user, pod; and whose the time of a device that several share."""

from __future__ import annotations

import msgspec


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """Whose a process is. "" or None: not known. `sources`: field -> where it was read."""

    job: str = ""  # the same on all its hosts: `slurm-4242`, `torchelastic-<run id>`, `pod-<uid>` ...
    name: str = ""
    scheduler: str = ""  # slurm, kubernetes, torchrun, mpi, ray, lsf, pbs, flux, or ""
    rank: int | None = None
    local_rank: int | None = None
    world_size: int | None = None
    user: str = ""
    account: str = ""
    partition: str = ""
    namespace: str = ""
    pod: str = ""
    container: str = ""
    framework: str = ""  # pytorch, jax, tensorflow or ""
    framework_version: str = ""
    devices: tuple[str, ...] = ()  # uuids that it was given, whether it uses them or not
    labels: dict[str, str] = {}
    sources: dict[str, str] = {}


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """A process that matters: it uses a device, runs a framework, or belongs to a job.

    Its identity is (boot id of the host, pid, start time); `key` is `PID@START`, where START is in clock ticks since
    boot. `command` has its secrets masked; `declared` holds the listed variables of its environment alone.
    """

    key: str
    pid: int
    start_ticks: int
    started_ns: int
    parent_pid: int
    uid: int
    command: str
    cgroup: str = ""
    declared: dict[str, str] = {}
    owner: Owner = Owner()
    state: str = ""  # R, S, D, T, Z as in /proc
    unreadable: str = ""  # what could not be read of it, and why
    devices: tuple[str, ...] = ()  # uuids that it is on
    steps_per_second: float | None = None
