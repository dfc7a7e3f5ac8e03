"""What the kernel says of the host, in made trees and on this host."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support.host_tree import TICKS_PER_S, HostTree
from traceloom.agent.collectors.collector import Collector
from traceloom.agent.collectors.host import (
    CpuCollector,
    DiskCollector,
    MemoryCollector,
    NetworkCollector,
    PressureCollector,
    RdmaCollector,
    create_host_collectors,
)
from traceloom.agent.config import Config
from traceloom.agent.snapshot import Snapshot

MEMINFO = """\
MemTotal:       1000 kB
MemFree:         300 kB
MemAvailable:    600 kB
Buffers:          50 kB
Cached:          250 kB
SwapCached:        0 kB
Shmem:            40 kB
SReclaimable:     30 kB
SwapTotal:       500 kB
SwapFree:        120 kB
HugePages_Total:    0
"""


def _values(collector: Collector) -> dict[tuple[str, ...], float]:
    host_snapshot = Snapshot()
    host_snapshot.put(collector.name, collector.collect(), 1)  # which refuses what is not declared
    return {(name, *labels): value for (name, labels), value, _ in host_snapshot.values()}


def test_processor_time_is_in_seconds_and_guests_count_once(tmp_path: Path) -> None:
    tree = HostTree(tmp_path)
    ticks = [number * TICKS_PER_S for number in (10, 2, 3, 100, 5, 1, 4, 6, 7, 8)]
    tree.write("proc/stat", f"cpu  {' '.join(map(str, ticks))}\ncpu0 1 1 1\ncpu1 1 1 1\nctxt 5\n")
    tree.write("proc/loadavg", "3.00 2.0 1.0 1/100 999\n")
    values = _values(CpuCollector(tree.config()))
    modes = {
        "user": 10,
        "nice": 2,
        "system": 3,
        "idle": 100,
        "iowait": 5,
        "interrupt": 1,
        "softirq": 4,
        "steal": 6,
    }
    assert values == {
        **{("host_cpu_seconds_total", mode): float(spent) for mode, spent in modes.items()},
        ("host_load_ratio",): 1.5,
    }


def test_states_of_memory_add_up(tmp_path: Path) -> None:
    tree = HostTree(tmp_path)
    tree.write("proc/meminfo", MEMINFO)
    tree.write("proc/vmstat", "nr_free_pages 7\noom_kill 3\n")
    values = _values(MemoryCollector(tree.config()))
    memory = {
        state: values["host_memory_bytes", state] for state in ("used", "free", "cached", "buffers")
    }
    assert memory == {
        "used": 410 * 1024,
        "free": 300 * 1024,
        "cached": 240 * 1024,
        "buffers": 50 * 1024,
    }
    assert sum(memory.values()) == 1000 * 1024
    assert (values["host_swap_bytes", "used"], values["host_swap_bytes", "free"]) == (
        380 * 1024,
        120 * 1024,
    )
    assert values["oom_kills_total", "", ""] == 3
    assert MemoryCollector(tree.config()).list_problems() == []


def test_a_kernel_that_counts_no_kills_has_none(tmp_path: Path) -> None:
    tree = HostTree(tmp_path)
    tree.write("proc/meminfo", MEMINFO)
    tree.write("proc/vmstat", "nr_free_pages 7\n")
    assert ("oom_kills_total", "", "") not in _values(MemoryCollector(tree.config()))
    assert "4.13" in MemoryCollector(tree.config()).list_problems()[0]
    (tree.proc / "vmstat").unlink()  # as in some sandboxes
    assert _values(MemoryCollector(tree.config()))["host_memory_bytes", "free"] == 300 * 1024
    assert "4.13" in MemoryCollector(tree.config()).list_problems()[0]


def test_pressure_is_in_seconds(tmp_path: Path) -> None:
    tree = HostTree(tmp_path)
    for resource, waited in (("cpu", 1_500_000), ("io", 2_000_000), ("memory", 0)):
        tree.write(
            f"proc/pressure/{resource}",
            f"some avg10=0.00 avg60=0.00 avg300=0.00 total={waited}\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=250000\n",
        )
    values = _values(PressureCollector(tree.config()))
    assert values["host_pressure_seconds_total", "cpu", "some"] == 1.5
    assert values["host_pressure_seconds_total", "io", "full"] == 0.25
    assert len(values) == 6
    assert PressureCollector(tree.config()).list_problems() == []


def test_a_kernel_without_pressure_says_what_would_help(tmp_path: Path) -> None:
    tree = HostTree(tmp_path)
    assert _values(PressureCollector(tree.config())) == {}
    assert "psi=1" in PressureCollector(tree.config()).list_problems()[0]


def test_whole_disks_in_bytes(tmp_path: Path) -> None:
    tree = HostTree(tmp_path)
    tree.write(
        "proc/diskstats",
        " 259 0 nvme0n1 100 5 2048 40 200 6 4096 80 0 1500 120 0 0 0 0 0 0\n"
        " 259 1 nvme0n1p1 90 5 2000 40 190 6 4000 80 0 1400 120 0 0 0 0 0 0\n"
        "   7 0 loop0 9 0 9 0 0 0 0 0 0 9 9 0 0 0 0 0 0\n",
    )
    for disk in ("nvme0n1", "loop0"):
        tree.write(f"sys/block/{disk}/size", "1\n")
    mount = tmp_path / "a disk"
    mount.mkdir()
    spelled = str(mount).replace(" ", "\\040")
    tree.write(
        "proc/1/mounts",
        f"/dev/nvme0n1p1 / ext4 rw 0 0\nserver:/x /nfs nfs4 rw 0 0\n/dev/sdb {spelled} xfs rw 0 0\ntmpfs /t tmpfs rw 0 0\n",
    )
    (tree.proc / "1" / "root").symlink_to("/")
    values = _values(DiskCollector(tree.config()))
    assert {key[1] for key in values if key[0].startswith("host_disk")} == {"nvme0n1"}
    assert values["host_disk_operations_total", "nvme0n1", "read"] == 100
    assert values["host_disk_operations_total", "nvme0n1", "write"] == 200
    assert values["host_disk_busy_seconds_total", "nvme0n1"] == 1.5
    assert values["host_disk_bytes_total", "nvme0n1", "read"] == 2048 * 512
    assert values["host_disk_bytes_total", "nvme0n1", "write"] == 4096 * 512
    mounts = {key[1] for key in values if key[0] == "host_filesystem_bytes"}
    assert mounts == {"/", str(mount)}
    assert values["host_filesystem_bytes", "/", "used"] > 0


NET = """\
Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo: 9 9 9 9 0 0 0 0 9 9 9 9 0 0 0 0
  eth0:1000 10 1 2 0 0 0 0 2000 20 3 4 0 0 0 0
 veth1: 7 7 7 7 0 0 0 0 7 7 7 7 0 0 0 0
"""


def test_a_remote_file_system_is_not_asked_for_its_space(tmp_path: Path) -> None:
    """Its server may be gone, and then the question has no end."""
    tree, lines = HostTree(tmp_path), []
    for kind in (
        "nfs",
        "nfs4",
        "lustre",
        "ceph",
        "gpfs",
        "beegfs",
        "fuse.sshfs",
        "cifs",
        "9p",
        "xfs",
        "ext4",
    ):
        (tmp_path / kind).mkdir()
        lines.append(f"dev-{kind} {tmp_path / kind} {kind} rw,relatime 0 0\n")
    odd = tmp_path / "a\nline\t\\"
    odd.mkdir()
    lines.append(f"dev-odd {odd.parent!s}/a\\012line\\011\\134 btrfs rw 0 0\n")
    lines.append(f"dev-gone {tmp_path}/gone zfs rw 0 0\n")
    tree.write("proc/diskstats", "")
    tree.write("proc/1/mounts", "".join(lines))
    (tree.proc / "1" / "root").symlink_to("/")
    values = _values(DiskCollector(tree.config()))
    assert {key[1] for key in values} == {str(tmp_path / "xfs"), str(tmp_path / "ext4"), str(odd)}
    for mount in (str(tmp_path / "xfs"), str(odd)):
        space = {
            state: values["host_filesystem_bytes", mount, state]
            for state in ("used", "free", "reserved")
        }
        status = os.statvfs(mount)
        assert sum(space.values()) == pytest.approx(status.f_blocks * status.f_frsize)
        assert min(space.values()) >= 0


def test_interfaces_of_hardware(tmp_path: Path) -> None:
    tree = HostTree(tmp_path)
    tree.write("proc/1/net/dev", NET)
    tree.write("sys/class/net/eth0/device/vendor", "0x8086\n")
    tree.write("sys/class/net/veth1/mtu", "1500\n")
    values = _values(NetworkCollector(tree.config()))
    assert values == {
        ("host_network_bytes_total", "eth0", "receive"): 1000,
        ("host_network_bytes_total", "eth0", "transmit"): 2000,
        ("host_network_packets_total", "eth0", "receive"): 10,
        ("host_network_packets_total", "eth0", "transmit"): 20,
        ("host_network_errors_total", "eth0", "receive"): 1,
        ("host_network_errors_total", "eth0", "transmit"): 3,
        ("host_network_dropped_total", "eth0", "receive"): 2,
        ("host_network_dropped_total", "eth0", "transmit"): 4,
    }


def test_a_card_may_have_any_name(tmp_path: Path) -> None:
    """The kernel takes all bytes but white space, `/` and `:`."""
    tree = HostTree(tmp_path)
    tree.write(
        "proc/1/net/dev",
        b"Inter-|\n face |\n caf\xe9\xff: 7 1 0 0 0 0 0 0 9 2 0 0 0 0 0 0\n  lo: 5 5 0 0 0 0 0 0 5 5 0 0 0 0 0 0\n",
    )
    values = _values(NetworkCollector(tree.config()))
    assert {key[1] for key in values} == {"caf\ufffd\ufffd"}
    assert values["host_network_bytes_total", "caf\ufffd\ufffd", "transmit"] == 9


def test_a_container_has_virtual_interfaces_alone(tmp_path: Path) -> None:
    tree = HostTree(tmp_path)
    tree.write("proc/1/net/dev", NET)
    assert {key[1] for key in _values(NetworkCollector(tree.config()))} == {"eth0", "veth1"}


def test_rdma_counts_words_of_four_bytes(tmp_path: Path) -> None:
    tree = HostTree(tmp_path)
    port = "sys/class/infiniband/mlx5_0/ports/1"
    tree.write(f"{port}/state", "4: ACTIVE\n")
    for name, number in (
        ("port_rcv_data", 100),
        ("port_xmit_data", 200),
        ("port_rcv_packets", 3),
        ("port_xmit_packets", 4),
        ("port_rcv_errors", 5),
    ):
        tree.write(f"{port}/counters/{name}", f"{number}\n")
    tree.write(f"{port}/counters/VL15_dropped", "N/A (no PMA)\n")
    tree.write(f"{port}/hw_counters/np_cnp_sent", "6\n")
    tree.write("sys/class/infiniband/mlx5_1/ports/1/state", "1: DOWN\n")
    assert _values(RdmaCollector(tree.config())) == {
        ("rdma_port_up", "mlx5_0", "1"): 1,
        ("rdma_port_up", "mlx5_1", "1"): 0,
        ("rdma_bytes_total", "mlx5_0", "1", "receive"): 400,
        ("rdma_bytes_total", "mlx5_0", "1", "transmit"): 800,
        ("rdma_packets_total", "mlx5_0", "1", "receive"): 3,
        ("rdma_packets_total", "mlx5_0", "1", "transmit"): 4,
        ("rdma_errors_total", "mlx5_0", "1", "port_rcv_errors"): 5,
        ("rdma_errors_total", "mlx5_0", "1", "np_cnp_sent"): 6,
    }


@pytest.mark.parametrize("name", [collector.name for collector in create_host_collectors(Config())])
def test_on_this_host(name: str) -> None:
    collector = next(one for one in create_host_collectors(Config()) if one.name == name)
    values = _values(collector)
    assert all(value >= 0 for value in values.values())
    if name in {"cpu", "memory"}:
        assert values
    assert all(sentence for sentence in collector.list_problems())
