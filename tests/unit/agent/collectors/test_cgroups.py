"""Control groups of version 1, version 2 and both at once, in made trees; kills in them are events."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from support.host_tree import TICKS_PER_S, HostTree
from traceloom.agent.collectors import host as module
from traceloom.agent.collectors.host import Cgroups
from traceloom.agent.ownership.model import Owner, Process
from traceloom.agent.snapshot import Snapshot

MIB = 1 << 20
UNIFIED = {"": ""}
SEPARATE = {
    "cpu_cpuacct": "cpu,cpuacct",
    "memory": "memory",
    "blkio": "blkio",
    "systemd": "xattr,name=systemd",
}


def _process(pid: int, cgroup: str, job: str = "", uid: int = 1000) -> Process:
    return Process(
        key=f"{pid}@1",
        pid=pid,
        start_ticks=1,
        started_ns=1,
        parent_pid=1,
        uid=uid,
        command="python",
        cgroup=cgroup,
        owner=Owner(job=job),
    )


def _owned(processes: list[Process]) -> Callable[[], dict[str, Process]]:
    """The processes as they are when asked for."""
    return lambda: {process.key: process for process in processes}


def _values(collector: Cgroups) -> dict[tuple[str, ...], float]:
    host_snapshot = Snapshot()
    host_snapshot.put("cgroups", collector.collect(), 1)  # which refuses what is not declared
    return {(name, *labels): value for (name, labels), value, _ in host_snapshot.values()}


def _unified(tree: HostTree, group: str, oom_kills: int = 0) -> None:
    tree.cgroup(
        group,
        cgroup_type="domain\n",
        cpu_stat="usage_usec 5000000\nuser_usec 3000000\nsystem_usec 2000000\nnr_periods 40\nnr_throttled 4\nthrottled_usec 250000\n",
        memory_current=f"{100 * MIB}\n",
        memory_peak=f"{120 * MIB}\n",
        memory_max="max\n",
        memory_stat=f"anon {60 * MIB}\nfile {30 * MIB}\nkernel {10 * MIB}\nshmem {8 * MIB}\ninactive_file {20 * MIB}\n",
        memory_events=f"low 0\nhigh 0\nmax 9\noom 1\noom_kill {oom_kills}\noom_group_kill 0\n",
        io_stat="8:0 rbytes=1000 wbytes=2000 rios=1 wios=2 dbytes=9 dios=9\n259:0 rbytes=10 wbytes=20 rios=1 wios=1 dbytes=0 dios=0\n",
        cpu_pressure="some avg10=0.00 avg60=0.00 avg300=0.00 total=1500000\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n",
    )
    tree.cgroup(group, **{"memory_swap.current": f"{3 * MIB}\n"})


def test_version_2(tmp_path: Path) -> None:
    tree = HostTree(tmp_path)
    tree.cgroups(**UNIFIED)
    _unified(tree, "kubepods/pod1/main")
    tree.cgroup("kubepods/pod1", memory_max=f"{512 * MIB}\n")
    tree.cgroup("kubepods", memory_max=f"{900 * MIB}\n")
    tree.write("sys/fs/cgroup/cgroup.controllers", "cpu io memory pids\n")
    path = "/kubepods/pod1/main"
    collector = Cgroups(
        tree.config(), _owned([_process(1, path, "pod-1"), _process(2, path, "pod-1")])
    )
    of = (path, "pod-1")
    assert _values(collector) == {
        ("cgroup_cpu_seconds_total", *of, "user"): 3.0,
        ("cgroup_cpu_seconds_total", *of, "system"): 2.0,
        ("cgroup_periods_total", *of): 40,
        ("cgroup_throttled_periods_total", *of): 4,
        ("cgroup_throttled_seconds_total", *of): 0.25,
        ("cgroup_memory_bytes", *of): 100 * MIB,
        ("cgroup_memory_working_set_bytes", *of): 80 * MIB,
        ("cgroup_memory_state_bytes", *of, "anonymous"): 60 * MIB,
        ("cgroup_memory_state_bytes", *of, "file"): 22 * MIB,
        ("cgroup_memory_state_bytes", *of, "shared"): 8 * MIB,
        ("cgroup_memory_state_bytes", *of, "kernel"): 10 * MIB,
        ("cgroup_memory_peak_bytes", *of): 120 * MIB,
        ("cgroup_memory_limit_bytes", *of): 512 * MIB,
        ("cgroup_swap_bytes", *of): 3 * MIB,
        ("oom_kills_total", *of): 0,
        ("cgroup_disk_bytes_total", *of, "read"): 1010,
        ("cgroup_disk_bytes_total", *of, "write"): 2020,
        ("cgroup_pressure_seconds_total", *of, "cpu", "some"): 1.5,
        ("cgroup_pressure_seconds_total", *of, "cpu", "full"): 0.0,
    }
    assert collector.list_problems() == []


def _separate(
    tree: HostTree, group: str, oom_kills: int = 0, limit: int = 9223372036854771712
) -> None:
    tree.cgroup(
        f"cpu,cpuacct/{group}",
        cpuacct_stat=f"user {3 * TICKS_PER_S}\nsystem {TICKS_PER_S}\n",
        cpu_stat="nr_periods 40\nnr_throttled 4\nthrottled_time 250000000\n",
    )
    tree.cgroup(
        f"memory/{group}",
        memory_usage_in_bytes=f"{100 * MIB}\n",
        memory_max_usage_in_bytes=f"{120 * MIB}\n",
        memory_stat=f"cache 1\nrss 1\nhierarchical_memory_limit {limit}\ntotal_cache {30 * MIB}\ntotal_rss {60 * MIB}\n"
        f"total_shmem {8 * MIB}\ntotal_swap 0\ntotal_inactive_file {20 * MIB}\n",
        memory_oom_control=f"oom_kill_disable 0\nunder_oom 0\noom_kill {oom_kills}\n",
    )
    tree.write(f"sys/fs/cgroup/memory/{group}/memory.kmem.usage_in_bytes", f"{2 * MIB}\n")
    tree.write(
        f"sys/fs/cgroup/blkio/{group}/blkio.throttle.io_service_bytes_recursive",
        "8:0 Read 1000\n8:0 Write 2000\n8:0 Sync 5\n8:0 Total 3000\n8:16 Read 10\n8:16 Write 20\nTotal 3030\n",
    )


def test_version_1(tmp_path: Path) -> None:
    tree = HostTree(tmp_path)
    tree.cgroups(**SEPARATE)
    path = "/slurm/uid_1000/job_7/step_0"
    _separate(tree, path[1:], limit=256 * MIB)
    collector = Cgroups(tree.config(), _owned([_process(1, path, "slurm-7")]))
    of = (path, "slurm-7")
    values = _values(collector)
    assert values == {
        ("cgroup_cpu_seconds_total", *of, "user"): 3.0,
        ("cgroup_cpu_seconds_total", *of, "system"): 1.0,
        ("cgroup_periods_total", *of): 40,
        ("cgroup_throttled_periods_total", *of): 4,
        ("cgroup_throttled_seconds_total", *of): 0.25,
        ("cgroup_memory_bytes", *of): 100 * MIB,
        ("cgroup_memory_working_set_bytes", *of): 80 * MIB,
        ("cgroup_memory_state_bytes", *of, "anonymous"): 60 * MIB,
        ("cgroup_memory_state_bytes", *of, "file"): 22 * MIB,
        ("cgroup_memory_state_bytes", *of, "shared"): 8 * MIB,
        ("cgroup_memory_state_bytes", *of, "kernel"): 2 * MIB,
        ("cgroup_memory_peak_bytes", *of): 120 * MIB,
        ("cgroup_memory_limit_bytes", *of): 256 * MIB,
        ("cgroup_swap_bytes", *of): 0,
        ("oom_kills_total", *of): 0,
        ("cgroup_disk_bytes_total", *of, "read"): 1010,
        ("cgroup_disk_bytes_total", *of, "write"): 2020,
    }
    _separate(tree, path[1:])
    assert ("cgroup_memory_limit_bytes", *of) not in _values(collector)


def test_both_at_once_resources_are_those_of_version_1(tmp_path: Path) -> None:
    tree = HostTree(tmp_path)
    tree.cgroups(**SEPARATE, unified="")
    path = "/user.slice/session-3.scope"
    tree.cgroup(
        f"unified{path}",
        cgroup_type="domain\n",
        cpu_stat="usage_usec 9\nuser_usec 9\nsystem_usec 9\n",
    )
    tree.write(f"sys/fs/cgroup/unified{path}/io.pressure", "some avg10=0.00 total=2000000\n")
    _separate(tree, path[1:])
    values = _values(Cgroups(tree.config(), _owned([_process(1, path)])))
    assert values["cgroup_cpu_seconds_total", path, "", "user"] == 3.0
    assert values["cgroup_pressure_seconds_total", path, "", "io", "some"] == 2.0
    assert values["cgroup_memory_bytes", path, ""] == 100 * MIB


def test_what_a_kernel_does_not_say_is_absent(tmp_path: Path) -> None:
    tree = HostTree(tmp_path)
    tree.cgroups(**UNIFIED)
    tree.cgroup(
        "a",
        cgroup_type="domain\n",
        cpu_stat="usage_usec 1\n",
        memory_current="max\n",
        memory_stat="anon\nfile x\n",
    )
    collector = Cgroups(tree.config(), _owned([_process(1, "/a")]))
    assert _values(collector) == {}
    assert "cgroup_enable=memory" in collector.list_problems()[0]


def test_the_whole_host_is_no_group_but_a_container_is(tmp_path: Path) -> None:
    for mounts, top, sign in ((UNIFIED, "", "cgroup_type"), (SEPARATE, "memory/", "release_agent")):
        tree = HostTree(tmp_path / (sign + "-tree"))
        tree.cgroups(**mounts)
        write = _unified if mounts is UNIFIED else _separate
        write(tree, "")
        collector = Cgroups(tree.config(), _owned([_process(1, "/")]))
        assert ("cgroup_memory_bytes", "/", "") in _values(collector)
        if mounts is UNIFIED:
            (tree.sys / "fs/cgroup/cgroup.type").unlink()
        else:
            tree.write(f"sys/fs/cgroup/{top}release_agent", "\n")
        assert ("cgroup_memory_bytes", "/", "") not in _values(collector)


def test_groups_of_a_container_whose_own_group_is_mounted(tmp_path: Path) -> None:
    tree = HostTree(tmp_path)
    tree.write(
        "proc/1/mountinfo",
        "40 30 0:32 /docker/ab\\040c /sys/fs/cgroup/memory ro,relatime master:18 - cgroup cgroup rw,memory\n",
    )
    _separate(tree, "inner")
    _separate(tree, "")
    inside = Cgroups(tree.config(), _owned([_process(1, "/docker/ab c/inner")]))
    assert ("cgroup_memory_bytes", "/docker/ab c/inner", "") in _values(inside)
    outside = Cgroups(
        tree.config(), _owned([_process(1, "/docker/other"), _process(2, "/docker/ab cd")])
    )
    assert _values(outside) == {}


def test_no_path_leads_out_of_the_tree(tmp_path: Path) -> None:
    tree = HostTree(tmp_path)
    tree.cgroups(**UNIFIED)
    _unified(tree, "../outside")
    _unified(tree, "inside")
    assert (
        _values(
            Cgroups(
                tree.config(),
                _owned([_process(1, "/../outside"), _process(2, "/inside/../../outside")]),
            )
        )
        == {}
    )


def test_a_group_of_two_jobs_is_neither_s(tmp_path: Path) -> None:
    tree = HostTree(tmp_path)
    tree.cgroups(**UNIFIED)
    _unified(tree, "a")
    collector = Cgroups(
        tree.config(), _owned([_process(1, "/a", "x", 1), _process(2, "/a", "y", 2)])
    )
    assert {labels[1:3] for labels in _values(collector)} == {("/a", "")}
    _unified(tree, "a", oom_kills=1)
    collector.collect()
    assert [(kill.job, kill.uid) for kill in collector.kills] == [("", None)]


@pytest.mark.parametrize(("mounts", "write"), [(UNIFIED, _unified), (SEPARATE, _separate)])
def test_kills_are_events_also_after_the_last_process(
    tmp_path: Path, mounts: dict[str, str], write: object
) -> None:
    tree = HostTree(tmp_path)
    tree.cgroups(**mounts)
    processes = [_process(1, "/a", "train")]
    collector = Cgroups(tree.config(), _owned(processes))
    assert callable(write)
    write(tree, "a", oom_kills=3)
    collector.collect()
    assert not collector.kills, "nobody knows when those were"
    processes.clear()
    write(tree, "a", oom_kills=5)
    assert _values(collector)["oom_kills_total", "/a", "train"] == 5
    collector.collect()
    write(tree, "a", oom_kills=1)  # another group of the same name
    collector.collect()
    assert [(kill.cgroup, kill.job, kill.uid, kill.kills) for kill in collector.kills] == [
        ("/a", "train", 1000, 2),
        ("/a", "train", 1000, 1),
    ]


def test_a_group_is_forgotten_a_while_after_its_last_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = HostTree(tmp_path)
    tree.cgroups(**UNIFIED)
    _unified(tree, "a")
    processes = [_process(1, "/a")]
    collector = Cgroups(tree.config(), _owned(processes))
    collector.collect()
    processes.clear()
    assert collector.collect()
    monkeypatch.setattr(module, "GROUP_RETENTION_S", 0.0)
    assert not collector.collect()


def test_a_group_that_vanishes_has_no_series(tmp_path: Path) -> None:
    tree = HostTree(tmp_path)
    tree.cgroups(**UNIFIED)
    _unified(tree, "a")
    collector = Cgroups(tree.config(), _owned([_process(1, "/a")]))
    assert collector.collect()
    (tree.sys / "fs/cgroup/a").rename(tree.sys / "gone")
    assert not collector.collect()


def test_of_too_many_groups_those_of_jobs_stay(tmp_path: Path) -> None:
    tree = HostTree(tmp_path)
    tree.cgroups(**UNIFIED)
    tree.write("sys/fs/cgroup/cgroup.controllers", "memory\n")
    processes = [
        _process(number, f"/g{number}", "job" if number >= 90 else "") for number in range(100)
    ]
    for process in processes:
        _unified(tree, process.cgroup[1:])
    collector = Cgroups(tree.config(), _owned(processes))
    groups = {labels[1] for labels in _values(collector)}
    assert len(groups) == module.MAX_GROUPS
    assert groups >= {f"/g{number}" for number in range(90, 100)}
    assert "36 control groups are left out" in collector.list_problems()[0]


def test_a_host_without_groups_says_what_would_help(tmp_path: Path) -> None:
    tree = HostTree(tmp_path)
    tree.cgroups()
    collector = Cgroups(tree.config(), _owned([_process(1, "/a")]))
    assert _values(collector) == {}
    assert "mount /sys/fs/cgroup" in collector.list_problems()[0]
