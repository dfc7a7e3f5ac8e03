"""Control groups of the relevant processes: usage and limits of a job or container, and OOM kills.

Version 1, version 2, or both at once as in systemd's hybrid mode: version 1 for resources, version
2 for names and pressure. A group is identified by its path, which is the same in every hierarchy
that has it.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from traceloom.agent.collectors.collector import HostCollector, read, read_if_there
from traceloom.agent.collectors.host import TICKS_PER_S, parse_pressure
from traceloom.agent.config import Config
from traceloom.agent.metrics import Reading
from traceloom.agent.ownership.environment import parse_cgroup_paths
from traceloom.agent.ownership.model import Process

MAX_GROUPS = 64  # about 1,400 series
_MAX_MEMBERS = 4096  # processes of a group whose users are looked at
MAX_KILLS = 1000
# A group is read for so long after its last process ended: it may have been OOM-killed.
GROUP_RETENTION_S = 60.0
_UNLIMITED = 1 << 62  # version 1 writes no limit as a number near 2**63
_PERIOD_COUNTERS = {  # CPU quota: all periods, and those in which it was exhausted
    ("cgroup_periods_total",): "nr_periods",
    ("cgroup_throttled_periods_total",): "nr_throttled",
}
_PRESSURE_RESOURCES = ("cpu", "io", "memory")


class OomKill(msgspec.Struct, frozen=True, kw_only=True):
    """OOM kills in a control group, within the period before `at_ns`.

    `job`: the job of the group, "" if it has none or several. `uid`: the user of its processes,
    None if several. `limit_bytes`: the group's memory limit; None without one: then the host was
    out of memory.
    """

    at_ns: int
    cgroup: str
    job: str
    uid: int | None
    kills: int
    limit_bytes: int | None = None


class Hierarchy(NamedTuple):
    """A mounted tree of groups.

    `controllers` is empty for version 2; `root`: the group that is mounted.
    """

    controllers: frozenset[str]
    directory: Path
    root: str

    def of(self, group: str) -> Path | None:
        """Returns the directory of a group; None if it is outside, or is the root group: the host
        has metrics of its own.
        """
        root = self.root.rstrip("/")
        if f"{group}/".startswith(f"{root}/") and ".." not in group.split("/"):
            directory = self.directory / group[len(root) :].strip("/")
            # The root group lacks this file; a container's root looks the same, but can be limited.
            mark = directory / ("release_agent" if self.controllers else "cgroup.type")
            return None if mark.exists() == bool(self.controllers) else directory
        return None


class _Group(msgspec.Struct):
    """The job and user of a group, and when a process was last seen in it (monotonic clock,
    seconds).
    """

    job: str
    uid: int | None
    processes: int
    seen_s: float


class Cgroups(HostCollector):
    """Reads the groups of processes; `kills` has their OOM kills, oldest first.

    Args:
        config: The agent's.
        processes: Returns the relevant processes, with their owners, by key.
    """

    name = "cgroups"

    def __init__(self, config: Config, processes: Callable[[], Mapping[str, Process]]) -> None:
        super().__init__(config)
        self.kills: deque[OomKill] = deque(maxlen=MAX_KILLS)
        self.omitted = 0  # groups beyond MAX_GROUPS
        self._processes = processes
        self._hierarchies: list[Hierarchy] = []
        self._groups: dict[str, _Group] = {}
        self._counted: dict[str, int] = {}  # group -> its kills at the last read

    def collect(self) -> list[Reading]:
        """Read every group that has a relevant process, or had one within the last minute.

        Raises:
            OSError: The mounts cannot be read.
        """
        if not self._hierarchies:
            self._hierarchies = self._mounted()
        now = time.monotonic()
        members: dict[str, list[Process]] = {}
        for process in self._processes().values():
            if process.cgroup:
                members.setdefault(process.cgroup, []).append(process)
        groups: dict[str, _Group] = {}
        for path, processes in members.items():
            jobs, uids = (
                {process.owner.job for process in processes},
                {process.uid for process in processes},
            )
            groups[path] = _Group(
                jobs.pop() if len(jobs) == 1 else "",
                uids.pop() if len(uids) == 1 else None,
                len(processes),
                now,
            )
        for path, group in self._groups.items():
            if now - group.seen_s < GROUP_RETENTION_S:
                groups.setdefault(path, group)
        # If there are too many: those with processes first, of these those of jobs, then the
        # largest.
        ordered = sorted(
            groups,
            key=lambda path: (-groups[path].seen_s, not groups[path].job, -groups[path].processes),
        )
        self.omitted = max(len(ordered) - MAX_GROUPS, 0)
        self._groups = {path: groups[path] for path in ordered[:MAX_GROUPS]}
        readings = []
        counted = {}
        for path, group in self._groups.items():
            # (metric, labels after `cgroup` and `job`) -> value
            values: dict[tuple[str, ...], float] = {}
            for hierarchy in self._hierarchies:
                directory = hierarchy.of(path)
                if directory is None or not directory.is_dir():
                    continue
                if self._has_others(directory, path, group.uid):
                    group.job, group.uid = "", None
                if not hierarchy.controllers:
                    values = {**_read_version_2(directory, hierarchy.directory), **values}
                else:  # the hierarchy with the controller takes precedence over version 2
                    values |= _read_version_1(directory, hierarchy.controllers)
            kills = values.get(("oom_kills_total",))
            if kills is not None:
                counted[path] = int(kills)
                # Note the kills since the last read. Those before the first read are ignored, as
                # their time is unknown.
                kills = int(kills)
                limit = values.get(("cgroup_memory_limit_bytes",))
                before = self._counted.get(path, kills)
                if before > kills:  # the group was replaced by another one of the same name
                    before = 0
                if kills > before:
                    self.kills.append(
                        OomKill(
                            at_ns=time.time_ns(),
                            cgroup=path,
                            job=group.job,
                            uid=group.uid,
                            kills=kills - before,
                            limit_bytes=None if limit is None else int(limit),
                        )
                    )
            readings += [
                Reading(metric, (path, group.job, *extra_labels), value)
                for (metric, *extra_labels), value in values.items()
            ]
        self._counted = counted
        return readings

    def _has_others(self, directory: Path, path: str, uid: int | None) -> bool:
        """Whether processes of another user share a group, also such as do not matter: its memory is
        not that of one job then. A group of a scheduler or a container is one whole.
        """
        if parse_cgroup_paths([path]):
            return False
        for pid in read_if_there(directory / "cgroup.procs").split()[:_MAX_MEMBERS]:
            with contextlib.suppress(OSError):  # it has ended
                if (self.proc / pid.decode()).stat().st_uid != uid:
                    return True
        return False

    def _mounted(self) -> list[Hierarchy]:
        hierarchies: dict[frozenset[str], Hierarchy] = {}
        for line in read(self.view / "mountinfo").decode(errors="replace").splitlines():
            before, _, after = line.partition(" - ")
            kind, _, options = after.split(" ", 2)
            if kind not in {"cgroup", "cgroup2"}:
                continue
            root, mount = (
                re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), word)
                for word in before.split()[3:5]
            )
            if mount.startswith("/sys/"):
                directory = self.sys / mount.removeprefix("/sys/")
            else:
                directory = Path(f"{self.view}/root{mount}" if self.view.name == "1" else mount)
            controllers = (
                frozenset(options.split(",")) - {"rw", "ro"}
                if kind == "cgroup"
                else frozenset[str]()
            )
            hierarchies.setdefault(controllers, Hierarchy(controllers, directory, root))
        return list(hierarchies.values())

    def list_problems(self) -> list[str]:
        """Returns what cannot be read of groups on this host."""
        try:
            hierarchies = self._mounted()
        except OSError:
            hierarchies = []
        if not hierarchies:
            return [
                "control groups are not seen: mount /sys/fs/cgroup into the container of the agent"
            ]
        problems = []
        memory = any(
            "memory" in hierarchy.controllers
            or b"memory" in read_if_there(hierarchy.directory / "cgroup.controllers")
            for hierarchy in hierarchies
        )
        if not memory:
            problems.append(
                "memory and kills of control groups are not counted: start the kernel with cgroup_enable=memory"
            )
        if self.omitted:
            problems.append(
                f"{self.omitted} control groups are left out, beyond {MAX_GROUPS}; those of jobs come first"
            )
        return problems


def _read_version_2(directory: Path, top: Path) -> dict[tuple[str, ...], float]:
    values: dict[tuple[str, ...], float] = {}
    cpu = _read_pairs(directory / "cpu.stat")
    for name, metric in (
        ("user_usec", ("cgroup_cpu_seconds_total", "user")),
        ("system_usec", ("cgroup_cpu_seconds_total", "system")),
        ("throttled_usec", ("cgroup_throttled_seconds_total",)),
    ):
        if name in cpu:
            values[metric] = cpu[name] / 1e6
    values |= _drop_unknown({metric: cpu.get(name) for metric, name in _PERIOD_COUNTERS.items()})
    memory = _read_pairs(directory / "memory.stat")
    values |= _build_memory_values(
        _read_number(directory / "memory.current"),
        memory.get("inactive_file"),
        {
            "anonymous": memory.get("anon"),
            "file": _subtract_part(memory.get("file"), memory.get("shmem")),
            "shared": memory.get("shmem"),
            "kernel": memory.get("kernel"),
        },
    )
    limits = [
        limit
        for level in (directory, *directory.parents)
        if level.is_relative_to(top) and (limit := _read_number(level / "memory.max")) is not None
    ]
    values |= _drop_unknown(
        {
            ("cgroup_memory_limit_bytes",): min(limits, default=None),
            ("cgroup_memory_peak_bytes",): _read_number(directory / "memory.peak"),
            ("cgroup_swap_bytes",): _read_number(directory / "memory.swap.current"),
            ("oom_kills_total",): _read_pairs(directory / "memory.events").get("oom_kill"),
        }
    )
    moved = re.findall(rb" ([rw])bytes=(\d+)", read_if_there(directory / "io.stat"))
    if (directory / "io.stat").exists():
        for letter, direction in ((b"r", "read"), (b"w", "write")):
            values["cgroup_disk_bytes_total", direction] = sum(
                int(size) for kind, size in moved if kind == letter
            )
    for resource in _PRESSURE_RESOURCES:
        for share, waited in parse_pressure(read_if_there(directory / f"{resource}.pressure")):
            values["cgroup_pressure_seconds_total", resource, share] = waited
    return values


def _read_version_1(directory: Path, controllers: frozenset[str]) -> dict[tuple[str, ...], float]:
    values: dict[tuple[str, ...], float] = {}
    if "cpuacct" in controllers:
        ticks = _read_pairs(directory / "cpuacct.stat")
        for mode in ("user", "system"):
            if mode in ticks:
                values["cgroup_cpu_seconds_total", mode] = ticks[mode] / TICKS_PER_S
    if "cpu" in controllers:
        cpu = _read_pairs(directory / "cpu.stat")
        if "throttled_time" in cpu:
            values["cgroup_throttled_seconds_total",] = cpu["throttled_time"] / 1e9
        values |= _drop_unknown(
            {metric: cpu.get(name) for metric, name in _PERIOD_COUNTERS.items()}
        )
    if "memory" in controllers:
        memory = _read_pairs(directory / "memory.stat")
        values |= _build_memory_values(
            _read_number(directory / "memory.usage_in_bytes"),
            memory.get("total_inactive_file"),
            {
                "anonymous": memory.get("total_rss"),
                "file": _subtract_part(memory.get("total_cache"), memory.get("total_shmem")),
                "shared": memory.get("total_shmem"),
                "kernel": _read_number(directory / "memory.kmem.usage_in_bytes"),
            },
        )
        limit = memory.get("hierarchical_memory_limit", _UNLIMITED)
        values |= _drop_unknown(
            {
                ("cgroup_memory_limit_bytes",): limit if limit < _UNLIMITED else None,
                ("cgroup_memory_peak_bytes",): _read_number(
                    directory / "memory.max_usage_in_bytes"
                ),
                ("cgroup_swap_bytes",): memory.get("total_swap"),
                ("oom_kills_total",): _read_pairs(directory / "memory.oom_control").get("oom_kill"),
            }
        )
    if "blkio" in controllers:
        text = read_if_there(directory / "blkio.throttle.io_service_bytes_recursive")
        for word, direction in ((b"Read", "read"), (b"Write", "write")):
            if text:
                sizes = re.findall(rb"^\S+ %b (\d+)" % word, text, re.MULTILINE)
                values["cgroup_disk_bytes_total", direction] = sum(map(int, sizes))
    return values


def _build_memory_values(
    used: int | None, inactive_file: int | None, states: dict[str, int | None]
) -> dict[tuple[str, ...], float]:
    return _drop_unknown(
        {
            ("cgroup_memory_bytes",): used,
            ("cgroup_memory_working_set_bytes",): _subtract_part(used, inactive_file),
            **{("cgroup_memory_state_bytes", state): size for state, size in states.items()},
        }
    )


def _subtract_part(total: int | None, part: int | None) -> int | None:
    """Returns the rest, at least 0: memory counters are not updated together."""
    return None if total is None or part is None else max(total - part, 0)


def _drop_unknown(values: dict[tuple[str, ...], int | None]) -> dict[tuple[str, ...], float]:
    return {metric: value for metric, value in values.items() if value is not None}


def _read_pairs(path: Path) -> dict[str, int]:
    return {
        name.decode(): int(number)
        for name, number in re.findall(rb"^(\S+) (\d+)$", read_if_there(path), re.MULTILINE)
    }


def _read_number(path: Path) -> int | None:
    text = read_if_there(path).strip()
    return int(text) if text.isdigit() else None
