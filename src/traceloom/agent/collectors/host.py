"""CPU, memory, disks, network, RDMA and pressure of the host."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from traceloom.agent.collectors.collector import Collector, HostCollector, read, read_if_there
from traceloom.agent.config import Config
from traceloom.agent.metrics import Reading

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
