"""CPU, memory, disks, network, RDMA, pressure."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from traceloom.agent.collectors.collector import HostCollector, read, read_if_there
from traceloom.agent.metrics import Reading

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_MODES = ("user", "nice", "system", "idle", "iowait", "interrupt", "softirq", "steal")


class Cpu(HostCollector):
    """Reads /proc/stat and /proc/loadavg. Time of guests is in `user` and `nice` already."""

    name = "cpu"

    def collect(self) -> list[Reading]:
        """Time since boot of all processors together."""
        lines = read(self.proc / "stat").split(b"\n")
        ticks = [int(word) for word in lines[0].split()[1:]]
        readings = [
            Reading("host_cpu_seconds_total", (mode,), spent / TICKS_PER_S)
            for mode, spent in zip(_MODES, ticks, strict=False)
        ]
        processors = sum(line.startswith(b"cpu") for line in lines) - 1
        if processors:
            load = float(read(self.proc / "loadavg").split()[0])
            readings.append(Reading("host_load_ratio", (), load / processors))
        return readings

    def trouble(self) -> list[str]:
        """Nothing: every kernel has these."""
        return []


_SECTOR_BYTES = 512  # of /proc/diskstats, whatever the disk's own are
_MOST_MOUNTS = 64
_NO_DISK = re.compile(r"(?:loop|ram|zram|sr|fd|dm-|md)\d*")  # parts of others, or made up
# Of this host: asking a remote one for its space may hang for as long as its server does.
_FILE_SYSTEMS = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "overlay"}


class Disks(HostCollector):
    """Reads /proc/diskstats and the mounted file systems; of remote ones no space is asked for, as it may hang."""

    name = "disks"

    def collect(self) -> list[Reading]:
        """Whole disks, without partitions; each device's file system once."""
        readings = []
        for line in read(self.proc / "diskstats").decode().splitlines():
            words = line.split()
            if len(words) < 14 or _NO_DISK.fullmatch(words[2]) or not (self.sys / "block" / words[2]).exists():
                continue
            disk, numbers = words[2], [int(word) for word in words[3:]]
            readings += [
                Reading("host_disk_bytes_total", (disk, "read"), numbers[2] * _SECTOR_BYTES),
                Reading("host_disk_bytes_total", (disk, "write"), numbers[6] * _SECTOR_BYTES),
                Reading("host_disk_operations_total", (disk, "read"), numbers[0]),
                Reading("host_disk_operations_total", (disk, "write"), numbers[4]),
                Reading("host_disk_busy_seconds_total", (disk,), numbers[9] / 1000),
            ]
        seen: set[str] = set()
        for line in read(self.view / "mounts").decode(errors="replace").splitlines():
            device, mount, kind, *_ = line.split()
            if kind not in _FILE_SYSTEMS or device in seen or len(seen) >= _MOST_MOUNTS:
                continue
            seen.add(device)
            mount = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), mount)
            try:
                space = os.statvfs(f"{self.view}/root{mount}" if self.view.name == "1" else mount)
            except OSError:  # it was unmounted meanwhile, or is another user's
                continue
            block = space.f_frsize
            readings += [
                Reading("host_filesystem_bytes", (mount, "used"), (space.f_blocks - space.f_bfree) * block),
                Reading("host_filesystem_bytes", (mount, "free"), space.f_bavail * block),
                Reading(
                    "host_filesystem_bytes", (mount, "reserved"), (space.f_bfree - space.f_bavail) * space.f_frsize
                ),
            ]
        return readings

    def trouble(self) -> list[str]:
        """Nothing: what is not there has no reading."""
        return []


class HostMemory(HostCollector):
    """Reads /proc/meminfo, and `oom_kill` of /proc/vmstat (since Linux 4.13)."""

    name = "memory"

    def collect(self) -> list[Reading]:
        """States that add up to all memory: `cached` is what the kernel can give back, without `buffers`."""
        pairs = (line.split(b":") for line in read(self.proc / "meminfo").splitlines() if b":" in line)
        sizes = {name.decode(): int(value.split()[0]) * 1024 for name, value in pairs}
        buffers = sizes.get("Buffers", 0)
        # Shared memory is counted as cached by the kernel, and cannot be given back.
        cached = max(sizes.get("Cached", 0) + sizes.get("SReclaimable", 0) - sizes.get("Shmem", 0), 0)
        used = max(sizes["MemTotal"] - sizes["MemFree"] - buffers - cached, 0)
        states = {"used": used, "free": sizes["MemFree"], "cached": cached, "buffers": buffers}
        readings = [Reading("host_memory_bytes", (state,), size) for state, size in states.items()]
        if "SwapTotal" in sizes and "SwapFree" in sizes:
            swapped = sizes["SwapTotal"] - sizes["SwapFree"]
            readings += [
                Reading("host_swap_bytes", ("used",), swapped),
                Reading("host_swap_bytes", ("free",), sizes["SwapFree"]),
            ]
        if (kills := self._kills()) is not None:
            readings.append(Reading("oom_kills_total", ("", ""), kills))
        return readings

    def trouble(self) -> list[str]:
        """Kernels that do not count kills."""
        if self._kills() is not None:
            return []
        return ["kills for want of memory are not counted: no `oom_kill` in /proc/vmstat (Linux 4.13 or later has it)"]

    def _kills(self) -> int | None:
        lines = read_if_there(self.proc / "vmstat").splitlines()  # in some sandboxes it is not there
        return next((int(line.split()[1]) for line in lines if line.startswith(b"oom_kill ")), None)


_MOST_INTERFACES = 64
_COLUMNS = {  # of /proc/net/dev: metric -> columns of what was received and sent
    "host_network_bytes_total": (0, 8),
    "host_network_packets_total": (1, 9),
    "host_network_errors_total": (2, 10),
    "host_network_dropped_total": (3, 11),
}
# File below `counters` -> what it counts. Data are counted in words of four bytes.
_WORD_BYTES = 4
_DATA = {"port_rcv_data": "receive", "port_xmit_data": "transmit"}
_PACKETS = {"port_rcv_packets": "receive", "port_xmit_packets": "transmit"}
_ERRORS = ("port_rcv_errors", "port_xmit_discards", "symbol_error", "link_downed", "port_xmit_wait")
_CONGESTION = ("np_cnp_sent", "rp_cnp_handled", "np_ecn_marked_roce_packets", "out_of_sequence", "packet_seq_err")


class Network(HostCollector):
    """Reads /proc/net/dev of the host: interfaces of hardware, and bonds; not those that containers hang on."""

    name = "network"

    def collect(self) -> list[Reading]:
        """Bytes, packets, errors and drops by interface and direction."""
        readings: list[Reading] = []
        lines = read(self.view / "net" / "dev").decode(errors="replace").splitlines()[2:]
        interfaces = [
            (name.strip(), rest.split()) for name, colon, rest in (line.partition(":") for line in lines) if colon
        ]
        # What leaves the host, and is not counted by another one too; in a container the only interfaces are virtual.
        net = self.sys / "class" / "net"
        all_count = not any((entry / "device").exists() for entry in net.glob("*"))
        chosen = [
            row
            for row in interfaces
            if row[0] != "lo"
            and (all_count or (net / row[0] / "device").exists() or (net / row[0] / "bonding").exists())
        ]
        for name, numbers in chosen[:_MOST_INTERFACES]:
            for metric, (received, sent) in _COLUMNS.items():
                readings += [
                    Reading(metric, (name, "receive"), int(numbers[received])),
                    Reading(metric, (name, "transmit"), int(numbers[sent])),
                ]
        return readings

    def trouble(self) -> list[str]:
        """Nothing: what is not there has no reading."""
        return []


class Rdma(HostCollector):
    """Reads /sys/class/infiniband: InfiniBand and RoCE."""

    name = "rdma"

    def collect(self) -> list[Reading]:
        """Every port of every device."""
        readings: list[Reading] = []
        for port in sorted((self.sys / "class" / "infiniband").glob("*/ports/*")):
            of = (port.parent.parent.name, port.name)
            state = read_if_there(port / "state").strip()
            if state:
                readings.append(Reading("rdma_port_up", of, float(b"ACTIVE" in state)))
            for directory in ("counters", "hw_counters"):
                for file in sorted((port / directory).glob("*")):
                    number = read_if_there(file).strip()  # counters of some ports say nothing
                    if not number.isdigit():
                        continue
                    if file.name in _DATA:
                        readings.append(Reading("rdma_bytes_total", (*of, _DATA[file.name]), int(number) * _WORD_BYTES))
                    elif file.name in _PACKETS:
                        readings.append(Reading("rdma_packets_total", (*of, _PACKETS[file.name]), int(number)))
                    elif file.name in (*_ERRORS, *_CONGESTION):
                        readings.append(Reading("rdma_errors_total", (*of, file.name), int(number)))
        return readings

    def trouble(self) -> list[str]:
        """Nothing: most hosts have none."""
        return []


_RESOURCES = ("cpu", "io", "memory")
_LINE = re.compile(rb"^(some|full) .*total=(\d+)", re.MULTILINE)


class Pressure(HostCollector):
    """Reads /proc/pressure, in microseconds since boot; since Linux 4.20, where it is switched on."""

    name = "pressure"

    def collect(self) -> list[Reading]:
        """Of each resource the time in which some, and in which all tasks waited."""
        readings = []
        for resource in _RESOURCES:
            try:
                text = read(self.proc / "pressure" / resource)
            except OSError:  # said by `trouble`; EOPNOTSUPP where it is switched off
                continue
            readings += [
                Reading("host_pressure_seconds_total", (resource, share), waited) for share, waited in stalls(text)
            ]
        return readings

    def trouble(self) -> list[str]:
        """Kernels without it."""
        try:
            read(self.proc / "pressure" / "cpu")
        except OSError:
            return ["pressure (PSI) is not given: start the kernel (4.20 or later, CONFIG_PSI) with psi=1"]
        return []


def stalls(text: bytes) -> Iterator[tuple[str, float]]:
    """`some` and `full` of a file of pressure, in seconds."""
    for share, waited in _LINE.findall(text):
        yield share.decode(), int(waited) / 1e6
