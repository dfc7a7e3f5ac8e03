"""CPU, memory, disks, network, RDMA and pressure of the host, and the control groups of the relevant processes with usage, limits and OOM kills.

Version 1, version 2, or both at once as in systemd's hybrid mode: version 1 for resources, version
2 for names and pressure. A group is identified by its path, which is the same in every hierarchy
that has it.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from traceloom.agent.collectors.collector import Collector, HostCollector, read, read_if_there
from traceloom.agent.config import Config
from traceloom.agent.metrics import Reading
from traceloom.agent.ownership.environment import parse_cgroup_paths
from traceloom.agent.ownership.model import Process

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_CPU_MODES = ("user", "nice", "system", "idle", "iowait", "interrupt", "softirq", "steal")


class CpuCollector(HostCollector):
    """Reads /proc/stat and /proc/loadavg. `user` and `nice` already include the time of guests."""

    name = "cpu"

    def collect(self) -> list[Reading]:
        """Returns the time since boot of all processors together."""
        lines = read(self.proc / "stat").split(b"\n")
        ticks = [int(word) for word in lines[0].split()[1:]]
        readings = [
            Reading("host_cpu_seconds_total", (mode,), ticks_in_mode / TICKS_PER_S)
            for mode, ticks_in_mode in zip(_CPU_MODES, ticks, strict=False)
        ]
        cpu_count = sum(line.startswith(b"cpu") for line in lines) - 1
        if cpu_count:
            load = float(read(self.proc / "loadavg").split()[0])
            readings.append(Reading("host_load_ratio", (), load / cpu_count))
        return readings

    def list_problems(self) -> list[str]:
        """Always empty: every kernel has these files."""
        return []


_SECTOR_BYTES = 512  # unit of /proc/diskstats, independent of the disk's sector size
_MAX_MOUNTS = 64
# Partitions of other devices, or virtual ones.
_VIRTUAL_DISK_PATTERN = re.compile(r"(?:loop|ram|zram|sr|fd|dm-|md)\d*")
# Local ones only: statvfs of a remote file system may hang for as long as its server does.
_LOCAL_FILE_SYSTEMS = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "overlay"}


class DiskCollector(HostCollector):
    """Reads /proc/diskstats, and the space of mounted local file systems; for remote ones that may
    hang.
    """

    name = "disks"

    def collect(self) -> list[Reading]:
        """Returns values of whole disks, without partitions; each device's file system once."""
        readings = []
        for line in read(self.proc / "diskstats").decode().splitlines():
            fields = line.split()
            if (
                len(fields) < 14
                or _VIRTUAL_DISK_PATTERN.fullmatch(fields[2])
                or not (self.sys / "block" / fields[2]).exists()
            ):
                continue
            disk, counters = fields[2], [int(word) for word in fields[3:]]
            readings += [
                Reading("host_disk_bytes_total", (disk, "read"), counters[2] * _SECTOR_BYTES),
                Reading("host_disk_bytes_total", (disk, "write"), counters[6] * _SECTOR_BYTES),
                Reading("host_disk_operations_total", (disk, "read"), counters[0]),
                Reading("host_disk_operations_total", (disk, "write"), counters[4]),
                Reading("host_disk_busy_seconds_total", (disk,), counters[9] / 1000),
            ]
        seen_devices: set[str] = set()
        for line in read(self.view / "mounts").decode(errors="replace").splitlines():
            device, mount, kind, *_ = line.split()
            if (
                kind not in _LOCAL_FILE_SYSTEMS
                or device in seen_devices
                or len(seen_devices) >= _MAX_MOUNTS
            ):
                continue
            seen_devices.add(device)
            mount = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), mount)
            try:
                file_system = os.statvfs(
                    f"{self.view}/root{mount}" if self.view.name == "1" else mount
                )
            except OSError:  # it was unmounted meanwhile, or access is denied
                continue
            block_size = file_system.f_frsize
            readings += [
                Reading(
                    "host_filesystem_bytes",
                    (mount, "used"),
                    (file_system.f_blocks - file_system.f_bfree) * block_size,
                ),
                Reading(
                    "host_filesystem_bytes", (mount, "free"), file_system.f_bavail * block_size
                ),
                Reading(
                    "host_filesystem_bytes",
                    (mount, "reserved"),
                    (file_system.f_bfree - file_system.f_bavail) * file_system.f_frsize,
                ),
            ]
        return readings

    def list_problems(self) -> list[str]:
        """Always empty: a missing file system has no reading."""
        return []


class MemoryCollector(HostCollector):
    """Reads /proc/meminfo, and `oom_kill` of /proc/vmstat (since Linux 4.13)."""

    name = "memory"

    def collect(self) -> list[Reading]:
        """Returns states that add up to all memory: `cached` is what the kernel can reclaim,
        without `buffers`.
        """
        pairs = (
            line.split(b":") for line in read(self.proc / "meminfo").splitlines() if b":" in line
        )
        sizes = {name.decode(): int(value.split()[0]) * 1024 for name, value in pairs}
        buffers = sizes.get("Buffers", 0)
        # The kernel counts shared memory as cached although it cannot be reclaimed.
        cached = max(
            sizes.get("Cached", 0) + sizes.get("SReclaimable", 0) - sizes.get("Shmem", 0), 0
        )
        used = max(sizes["MemTotal"] - sizes["MemFree"] - buffers - cached, 0)
        states = {"used": used, "free": sizes["MemFree"], "cached": cached, "buffers": buffers}
        readings = [Reading("host_memory_bytes", (state,), size) for state, size in states.items()]
        if "SwapTotal" in sizes and "SwapFree" in sizes:
            readings += [
                Reading("host_swap_bytes", ("used",), sizes["SwapTotal"] - sizes["SwapFree"]),
                Reading("host_swap_bytes", ("free",), sizes["SwapFree"]),
            ]
        if (kills := self._read_oom_kills()) is not None:
            readings.append(Reading("oom_kills_total", ("", ""), kills))
        return readings

    def list_problems(self) -> list[str]:
        """Reports kernels that do not count OOM kills."""
        if self._read_oom_kills() is not None:
            return []
        return [
            "kills for want of memory are not counted: no `oom_kill` in /proc/vmstat (Linux 4.13 or later has it)"
        ]

    def _read_oom_kills(self) -> int | None:
        lines = read_if_there(self.proc / "vmstat").splitlines()  # missing in some sandboxes
        return next((int(line.split()[1]) for line in lines if line.startswith(b"oom_kill ")), None)


_MAX_INTERFACES = 64
_NETWORK_COLUMNS = {  # of /proc/net/dev: metric -> columns of received and sent
    "host_network_bytes_total": (0, 8),
    "host_network_packets_total": (1, 9),
    "host_network_errors_total": (2, 10),
    "host_network_dropped_total": (3, 11),
}
# File below `counters` -> what it counts. Data are counted in words of four bytes.
_RDMA_WORD_BYTES = 4
_RDMA_BYTE_COUNTERS = {"port_rcv_data": "receive", "port_xmit_data": "transmit"}
_RDMA_PACKET_COUNTERS = {"port_rcv_packets": "receive", "port_xmit_packets": "transmit"}
_RDMA_ERROR_COUNTERS = (
    "port_rcv_errors",
    "port_xmit_discards",
    "symbol_error",
    "link_downed",
    "port_xmit_wait",
)
_RDMA_CONGESTION_COUNTERS = (
    "np_cnp_sent",
    "rp_cnp_handled",
    "np_ecn_marked_roce_packets",
    "out_of_sequence",
    "packet_seq_err",
)


class NetworkCollector(HostCollector):
    """Reads /proc/net/dev of the host: hardware interfaces and bonds; not those of containers."""

    name = "network"

    def collect(self) -> list[Reading]:
        """Returns bytes, packets, errors and drops by interface and direction."""
        readings: list[Reading] = []
        lines = read(self.view / "net" / "dev").decode(errors="replace").splitlines()[2:]
        interfaces = [
            (name.strip(), columns.split())
            for name, colon, columns in (line.partition(":") for line in lines)
            if colon
        ]
        # Interfaces whose traffic leaves the host and is not counted twice; in a container the only
        # interfaces are virtual.
        net = self.sys / "class" / "net"
        counts_all_interfaces = not any((entry / "device").exists() for entry in net.glob("*"))
        counted_interfaces = [
            row
            for row in interfaces
            if row[0] != "lo"
            and (
                counts_all_interfaces
                or (net / row[0] / "device").exists()
                or (net / row[0] / "bonding").exists()
            )
        ]
        for name, counters in counted_interfaces[:_MAX_INTERFACES]:
            for metric, (received, sent) in _NETWORK_COLUMNS.items():
                readings += [
                    Reading(metric, (name, "receive"), int(counters[received])),
                    Reading(metric, (name, "transmit"), int(counters[sent])),
                ]
        return readings

    def list_problems(self) -> list[str]:
        """Always empty: a missing interface has no reading."""
        return []


class RdmaCollector(HostCollector):
    """Reads /sys/class/infiniband: InfiniBand and RoCE."""

    name = "rdma"

    def collect(self) -> list[Reading]:
        """Returns the counters of every port of every device."""
        readings: list[Reading] = []
        for port in sorted((self.sys / "class" / "infiniband").glob("*/ports/*")):
            port_labels = (port.parent.parent.name, port.name)
            state = read_if_there(port / "state").strip()
            if state:
                readings.append(Reading("rdma_port_up", port_labels, float(b"ACTIVE" in state)))
            for directory in ("counters", "hw_counters"):
                for file in sorted((port / directory).glob("*")):
                    value = read_if_there(
                        file
                    ).strip()  # some counters of some ports are unreadable
                    if not value.isdigit():
                        continue
                    if file.name in _RDMA_BYTE_COUNTERS:
                        readings.append(
                            Reading(
                                "rdma_bytes_total",
                                (*port_labels, _RDMA_BYTE_COUNTERS[file.name]),
                                int(value) * _RDMA_WORD_BYTES,
                            )
                        )
                    elif file.name in _RDMA_PACKET_COUNTERS:
                        readings.append(
                            Reading(
                                "rdma_packets_total",
                                (*port_labels, _RDMA_PACKET_COUNTERS[file.name]),
                                int(value),
                            )
                        )
                    elif file.name in (*_RDMA_ERROR_COUNTERS, *_RDMA_CONGESTION_COUNTERS):
                        readings.append(
                            Reading("rdma_errors_total", (*port_labels, file.name), int(value))
                        )
        return readings

    def list_problems(self) -> list[str]:
        """Always empty: most hosts have no such device."""
        return []


_PRESSURE_RESOURCES = ("cpu", "io", "memory")
_PRESSURE_LINE_PATTERN = re.compile(rb"^(some|full) .*total=(\d+)", re.MULTILINE)


class PressureCollector(HostCollector):
    """Reads /proc/pressure, in microseconds since boot; since Linux 4.20, if enabled."""

    name = "pressure"

    def collect(self) -> list[Reading]:
        """Returns for each resource the time in which some tasks, and in which all tasks waited."""
        readings = []
        for resource in _PRESSURE_RESOURCES:
            try:
                text = read(self.proc / "pressure" / resource)
            except OSError:  # reported by `last_error`; EOPNOTSUPP if disabled
                continue
            readings += [
                Reading("host_pressure_seconds_total", (resource, share), stalled_seconds)
                for share, stalled_seconds in parse_pressure(text)
            ]
        return readings

    def list_problems(self) -> list[str]:
        """Reports kernels without pressure information."""
        try:
            read(self.proc / "pressure" / "cpu")
        except OSError:
            return [
                "pressure (PSI) is not given: start the kernel (4.20 or later, CONFIG_PSI) with psi=1"
            ]
        return []


def parse_pressure(text: bytes) -> Iterator[tuple[str, float]]:
    """Yields `some` and `full` of a pressure file, in seconds."""
    for share, stalled_us in _PRESSURE_LINE_PATTERN.findall(text):
        yield share.decode(), int(stalled_us) / 1e6


def create_host_collectors(config: Config) -> list[Collector]:
    """Returns the collectors of the host itself, without that of processes."""
    return [
        CpuCollector(config),
        MemoryCollector(config),
        PressureCollector(config),
        DiskCollector(config),
        NetworkCollector(config),
        RdmaCollector(config),
    ]


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
