"""Processes: those that matter are kept, as who they are; the rest costs next to nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from support.host_tree import TICKS_PER_S, HostTree
from support.users import BERT, lend_shared_directory, needs_users
from support.waiting import until
from traceloom.agent.attach.injection import inject_order
from traceloom.agent.collectors import processes as module
from traceloom.agent.collectors.processes import Processes, ProcessFacts, select_main_cgroup
from traceloom.agent.config import Config, Owners
from traceloom.agent.ownership.model import Process
from traceloom.agent.profilers.base import ProfilerError
from traceloom.agent.profilers.py_spy import PySpy

TORCH = "/opt/venv/lib/python3.12/site-packages/torch/lib/libtorch_cpu.so"
RANK = {"RANK": "3", "LOCAL_RANK": "1", "SECRET_TOKEN": "hunter2"}


@pytest.fixture
def tree(tmp_path: Path) -> HostTree:
    tree = HostTree(tmp_path)
    tree.process(2, name="kthreadd", parent=0, flags=0x208040, maps=(), command=())
    return tree


def test_a_long_variable_is_cut(tree: HostTree) -> None:
    tree.process(77, environment={**RANK, "RANK": "7" * (module.MAX_CHARS + 1)})
    processes = Processes(tree.config(), listed={"RANK"})
    processes.collect()
    assert _facts(processes).environment["RANK"] == "7" * module.MAX_CHARS


def _facts(processes: Processes) -> ProcessFacts:
    (facts,) = processes.processes.values()
    return facts


def test_a_process_of_a_job(tree: HostTree) -> None:
    tree.process(
        77,
        start_ticks=5 * TICKS_PER_S,
        environment=RANK,
        user_ticks=250,
        system_ticks=50,
        threads=9,
        io=(4096, 512),
        resident_pages=10,
        cgroup="0::/system.slice/slurmstepd.scope/job_42/step_0\n",
        uid=1234,
        name="pt (main)",
    )
    processes = Processes(tree.config(), listed={"RANK"})
    readings = processes.collect()
    facts = _facts(processes)
    assert (facts.key, facts.pid, facts.uid, facts.parent_pid) == (
        f"77@{5 * TICKS_PER_S}",
        77,
        1234,
        1,
    )
    assert (facts.name, facts.command, facts.state, facts.threads) == (
        "pt (main)",
        ("python3", "train.py"),
        "S",
        9,
    )
    assert facts.environment == {"RANK": "3", "LOCAL_RANK": "1"}  # listed ones alone
    assert facts.cgroup == "/system.slice/slurmstepd.scope/job_42/step_0"
    assert facts.started_ns == pytest.approx(time.time_ns() - 995e9, abs=60e9)
    values = {(reading.metric, reading.labels[1:]): reading.value for reading in readings}
    assert all(reading.labels[0] == facts.key for reading in readings)
    assert values == {
        ("process_cpu_seconds_total", ("user",)): 250 / TICKS_PER_S,
        ("process_cpu_seconds_total", ("system",)): 50 / TICKS_PER_S,
        ("process_memory_bytes", ()): 10 * os.sysconf("SC_PAGE_SIZE"),
        ("process_threads", ()): 9,
        ("process_disk_bytes_total", ("read",)): 4096,
        ("process_disk_bytes_total", ("write",)): 512,
    }


@pytest.mark.parametrize(
    "variable",
    [
        "SLURM_JOB_ID",
        "TORCHELASTIC_RUN_ID",
        "LOCAL_RANK",
        "OMPI_COMM_WORLD_RANK",
        "PMI_RANK",
        "PMIX_RANK",
        "RAY_JOB_ID",
        "LSB_JOBID",
        "PBS_JOBID",
        "FLUX_JOB_ID",
        "JOB_COMPLETION_INDEX",
        "TRACELOOM_JOB",
    ],
)
def test_a_variable_that_only_a_job_has_makes_a_process_matter(
    tree: HostTree, variable: str
) -> None:
    tree.process(77, environment={variable: "1"})
    tree.process(78, environment={variable.lower(): "1", "WORLD_SIZE": "1"})
    processes = Processes(tree.config())
    processes.collect()
    assert (_facts(processes).pid, _facts(processes).environment) == (77, {variable: "1"})


@pytest.mark.parametrize(
    ("library", "framework"),
    [
        (TORCH, "pytorch"),
        ("/x/torch/lib/libc10.so", "pytorch"),
        ("/x/jaxlib/xla_extension.so", "jax"),
        ("/x/jaxlib/libjax_common.so", "jax"),
        ("/x/tensorflow/libtensorflow_cc.so.2", "tensorflow"),
        ("/x/lib/libtorture.so", None),
    ],
)
def test_frameworks_are_known_by_their_libraries(
    tree: HostTree, library: str, framework: str | None
) -> None:
    tree.process(77, maps=("/usr/bin/python3.12", library))
    processes = Processes(tree.config())
    processes.collect()
    assert [facts.frameworks for facts in processes.processes.values()] == (
        [{framework: library}] if framework else []
    )


def test_who_does_not_matter_is_not_kept_and_who_uses_a_device_is(tree: HostTree) -> None:
    tree.process(77)
    processes = Processes(tree.config())
    assert processes.collect() == []
    processes.device_pids = frozenset({77})
    assert len(processes.collect()) == 6
    processes.device_pids = frozenset()
    assert processes.collect() == []


def test_a_variable_that_the_configuration_calls_the_job(tree: HostTree) -> None:
    tree.process(77, environment={"OUR_JOB": "a", "OUR_TEAM": "b"})
    config = Config(
        collect=tree.config().collect,
        owners=Owners(variables={"OUR_JOB": "job", "OUR_TEAM": "account"}),
    )
    processes = Processes(config)
    processes.collect()
    assert _facts(processes).environment == {"OUR_JOB": "a", "OUR_TEAM": "b"}


def test_a_framework_that_is_loaded_later(tree: HostTree) -> None:
    processes = Processes(tree.config())
    tree.process(77, start_ticks=999 * TICKS_PER_S, user_ticks=1)
    processes.collect()
    assert not processes.processes
    tree.process(77, start_ticks=999 * TICKS_PER_S, user_ticks=90, maps=(TORCH,))
    processes.collect()
    assert _facts(processes).frameworks == {"pytorch": TORCH}


def test_an_old_process_is_looked_at_again_in_its_turn(
    tree: HostTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RESCAN_PERIOD_S", 0.0)
    processes = Processes(tree.config())
    tree.process(77, start_ticks=0)
    processes.collect()
    tree.process(77, start_ticks=0, user_ticks=3 * TICKS_PER_S, maps=(TORCH,))
    for _ in range(module.RESCAN_GROUPS):
        processes.collect()
    assert _facts(processes).frameworks == {"pytorch": TORCH}


def test_another_process_of_the_same_pid(tree: HostTree) -> None:
    processes = Processes(tree.config())
    tree.process(77, start_ticks=100, environment=RANK)
    processes.collect()
    tree.process(77, start_ticks=300, environment={"LOCAL_RANK": "7"})
    processes.collect()
    assert _facts(processes).key == "77@300"
    assert _facts(processes).environment == {"LOCAL_RANK": "7"}
    tree.process(77, start_ticks=500)
    processes.collect()
    assert not processes.processes


def test_another_process_of_the_pid_of_one_that_did_not_matter(tree: HostTree) -> None:
    processes = Processes(tree.config())
    tree.process(77, start_ticks=100)
    processes.collect()
    (tree.proc / "77").rename(tree.proc.parent / "gone")  # its inode stays taken
    tree.process(77, start_ticks=300, environment=RANK)
    processes.collect()
    assert _facts(processes).key == "77@300"


def test_a_process_that_runs_another_program(tree: HostTree) -> None:
    processes = Processes(tree.config())
    tree.process(77, name="bash", command=("bash", "run.sh"), environment={"LOCAL_RANK": "0"})
    processes.collect()
    tree.process(77, name="python3", environment={"LOCAL_RANK": "5"})
    processes.collect()
    assert (_facts(processes).command, _facts(processes).environment) == (
        ("python3", "train.py"),
        {"LOCAL_RANK": "5"},
    )


def test_a_process_whose_program_was_being_loaded_when_it_was_looked_at(tree: HostTree) -> None:
    """The kernel gives it the name of its program before its environment; `sleep` then takes no time any more."""
    processes = Processes(tree.config())
    tree.process(77, name="sleep", start_ticks=999 * TICKS_PER_S)
    tree.write("proc/77/environ", b"")
    processes.collect()
    assert not processes.processes
    tree.process(
        77, name="sleep", start_ticks=999 * TICKS_PER_S, environment={"TRACELOOM_JOB": "theirs"}
    )
    processes.collect()
    assert _facts(processes).environment == {"TRACELOOM_JOB": "theirs"}


def test_a_process_that_vanishes_while_it_is_read(tree: HostTree) -> None:
    (tree.process(77, environment=RANK) / "cgroup").unlink()
    (tree.process(78, environment=RANK) / "stat").unlink()
    tree.process(79, environment=RANK)
    processes = Processes(tree.config())
    processes.collect()
    assert [facts.pid for facts in processes.processes.values()] == [79]


def test_a_process_that_ends_is_gone_and_one_that_is_no_more_than_its_entry_stays(
    tree: HostTree,
) -> None:
    tree.process(77, start_ticks=999 * TICKS_PER_S, environment=RANK)
    processes = Processes(tree.config())
    processes.collect()
    tree.process(
        77,
        start_ticks=999 * TICKS_PER_S,
        state="Z",
        resident_pages=0,
        user_ticks=100,
        command=(),
        maps=(),
    )
    (tree.proc / "77" / "environ").write_bytes(b"")
    processes.collect()
    assert (_facts(processes).state, _facts(processes).environment["LOCAL_RANK"]) == ("Z", "1")
    (tree.proc / "77").rename(tree.proc.parent / "gone")
    processes.collect()
    assert not processes.processes


def test_odd_bytes_and_a_long_command(tree: HostTree) -> None:
    tree.process(
        77, command=("python3", b"\xff\xfe", "x" * (1 << 20)), environment={"LOCAL_RANK": b"\xe9"}
    )
    processes = Processes(tree.config())
    processes.collect()
    command = _facts(processes).command
    assert command[:2] == ("python3", "\ufffd\ufffd")
    assert sum(map(len, command)) <= module.MAX_COMMAND_BYTES
    assert _facts(processes).environment == {"LOCAL_RANK": "\ufffd"}


def test_a_process_that_waits_in_the_kernel_is_not_read_yet(tree: HostTree) -> None:
    tree.process(77, state="D", environment=RANK)
    tree.process(78, state="D", environment=RANK)
    processes = Processes(tree.config())
    processes.device_pids = frozenset({78})
    processes.collect()
    facts = _facts(processes)
    assert (facts.pid, facts.environment, facts.command) == (78, {}, ())
    assert (
        facts.unreadable
        == "environment: it waits in the kernel; libraries: it waits in the kernel; command: it waits in the kernel"
    )
    tree.process(77, state="R", environment=RANK)
    tree.process(78, state="R", environment=RANK)
    processes.collect()
    assert {facts.pid: facts.unreadable for facts in processes.processes.values()} == {
        77: "",
        78: "",
    }


def test_more_than_can_be_kept(tree: HostTree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PROCESSES", 2)
    for pid in (10, 11, 12):
        tree.process(pid, environment=RANK)
    tree.process(13, maps=(TORCH,))
    tree.process(14)
    processes = Processes(tree.config())
    processes.device_pids = frozenset({14})
    processes.collect()
    assert [facts.pid for facts in processes.processes.values()] == [14, 13]
    assert any(
        last_error.startswith("3 processes that matter are left out")
        for last_error in processes.list_problems()
    )


def test_new_processes_that_there_is_no_time_for_wait(tree: HostTree) -> None:
    for pid in range(10, 30):
        tree.process(pid, environment=RANK)
    processes = Processes(tree.config(timeout=0.0))
    processes.device_pids = frozenset({12})
    processes.collect()
    assert [facts.pid for facts in processes.processes.values()] == [12]
    assert any(
        last_error.startswith("20 processes are not looked at yet")
        for last_error in processes.list_problems()
    )
    processes.timeout_s = 60.0
    processes.collect()
    assert len(processes.processes) == 20
    assert processes.waiting == 0


@pytest.mark.thorough
def test_twenty_thousand_processes(tree: HostTree) -> None:
    for pid in range(1000, 20_800):
        at = tree.proc / str(pid)
        at.mkdir()
        (at / "stat").write_text(
            f"{pid} (x) S 1 1 1 0 -1 2097152 0 0 0 0 0 0 0 0 20 0 1 0 5 0 0 0 0\n"
        )
    for pid in range(30_000, 30_200):
        tree.process(pid, start_ticks=5, environment=RANK)
    processes = Processes(tree.config(timeout=600.0))
    processes.collect()
    assert len(processes.processes) == 200
    opened = 0

    def count(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal opened
        opened += counting and event == "open" and str(arguments[0]).startswith(str(tree.proc))

    counting = True
    sys.addaudithook(count)
    processes.collect()
    counting = False
    assert (
        opened < 200 * 2 + module.MAX_RESCANS_PER_TURN * 2
    )  # what matters, and some whose turn it is


@pytest.mark.parametrize(
    ("lines", "path"),
    [
        ({"": "/a"}, "/a"),
        (
            {
                "memory": "/slurm/uid_1/job_2",
                "name=systemd": "/system.slice/slurmd.service",
                "": "/",
            },
            "/slurm/uid_1/job_2",
        ),
        (
            {
                "": "/system.slice/containerd.service",
                "memory": "/docker/1",
                "name=systemd": "/system.slice/x.service",
            },
            "/docker/1",
        ),
        ({"memory": "/", "cpu": "/", "name=systemd": "/user.slice", "": "/"}, "/user.slice"),
        ({"": "/"}, "/"),
        ({}, ""),
    ],
)
def test_the_main_cgroup(lines: dict[str, str], path: str) -> None:
    assert select_main_cgroup(lines) == path


def test_cgroups_of_version_1(tree: HostTree) -> None:
    tree.process(
        77,
        environment=RANK,
        cgroup="5:cpu,cpuacct:/job_1\n4:memory:/a:b (deleted)\n1:name=systemd:/\n0::/\n",
    )
    processes = Processes(tree.config())
    processes.collect()
    assert _facts(processes).cgroup == "/a:b"
    assert _facts(processes).cgroups == {
        "cpu": "/job_1",
        "cpuacct": "/job_1",
        "memory": "/a:b",
        "name=systemd": "/",
        "": "/",
    }


def test_a_process_that_is_moved_while_it_waits_is_seen_in_its_new_group(tree: HostTree) -> None:
    processes = Processes(tree.config())
    for group in ("/user.slice", "/job_1"):
        tree.process(77, environment=RANK, cgroup=f"0::{group}\n")
        processes.collect()
        assert _facts(processes).cgroup == group
    tree.process(77, environment=RANK, cgroup="0::/\n", resident_pages=0)  # it has ended
    processes.collect()
    assert _facts(processes).cgroup == "/job_1"


def test_troubles_of_a_container(tree: HostTree) -> None:
    processes = Processes(tree.config())
    processes.collect()
    assert processes.list_problems() == []
    tree.process(2, name="sh")
    assert "only the processes of this container are seen" in " ".join(processes.list_problems())


def test_troubles_of_hidden_processes(tree: HostTree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    tree.write(
        "proc/self/mounts",
        f"sysfs /sys sysfs rw 0 0\nproc {tree.proc} proc rw,relatime,hidepid=2,gid=7 0 0\n",
    )
    assert "mounted with hidepid" in " ".join(Processes(tree.config()).list_problems())
    tree.write("proc/self/mounts", f"proc {tree.proc} proc rw,hidepid=invisible 0 0\n")
    assert "mounted with hidepid" in " ".join(Processes(tree.config()).list_problems())
    tree.write("proc/self/mounts", f"proc {tree.proc} proc rw,hidepid=off 0 0\n")
    assert Processes(tree.config()).list_problems() == []


# The real /proc


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"], env={**os.environ, **RANK}) as process:
        _wait_until_loaded(process)
        yield process
        process.kill()


def _wait_until_loaded(process: subprocess.Popen[bytes]) -> None:
    """Until the kernel has loaded the program: `Popen` returns a moment before it has an environment."""
    deadline = time.monotonic() + 30
    while not Path(f"/proc/{process.pid}/environ").read_bytes():
        assert time.monotonic() < deadline
        time.sleep(0.001)
    while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "S":
        assert time.monotonic() < deadline
        time.sleep(0.001)


def _named(processes: Processes, pid: int) -> ProcessFacts | None:
    return next((facts for facts in processes.processes.values() if facts.pid == pid), None)


def test_a_real_process(sleeper: subprocess.Popen[bytes]) -> None:
    processes = Processes(Config())
    processes.collect()
    facts = _named(processes, sleeper.pid)
    assert facts is not None
    assert (facts.command, facts.parent_pid, facts.uid) == (
        ("sleep", "600"),
        os.getpid(),
        os.getuid(),
    )
    assert abs(facts.started_ns - time.time_ns()) < 60e9
    assert facts.environment["LOCAL_RANK"] == "1"
    assert facts.resident_bytes > 0
    assert Path(facts.exe).name in {"sleep", "coreutils"}


def test_a_real_stopped_process(sleeper: subprocess.Popen[bytes]) -> None:
    sleeper.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, sleeper.pid, os.WSTOPPED | os.WNOWAIT)
    processes = Processes(Config())
    processes.collect()
    facts = _named(processes, sleeper.pid)
    assert facts is not None
    assert (facts.state, facts.environment["LOCAL_RANK"], facts.unreadable) == ("T", "1", "")


def test_a_real_process_that_ended_and_was_not_waited_for(sleeper: subprocess.Popen[bytes]) -> None:
    processes = Processes(Config())
    processes.collect()
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    processes.collect()
    facts = _named(processes, sleeper.pid)
    assert facts is not None
    assert (facts.state, facts.environment["LOCAL_RANK"]) == ("Z", "1")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_a_user_that_may_not_read_the_processes_of_others(sleeper: subprocess.Popen[bytes]) -> None:
    code = (
        "import sys\n"
        "from traceloom.agent.collectors.processes import Processes\n"
        "from traceloom.agent.config import Config\n"
        f"processes = Processes(Config()); processes.device_pids = frozenset({{{sleeper.pid}}})\n"
        "import os; os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "processes.collect()\n"
        f"facts, = (facts for facts in processes.processes.values() if facts.pid == {sleeper.pid})\n"
        "print(facts.unreadable, facts.command, facts.uid, facts.exe == '', facts.read_bytes)\n"
        "print(processes.list_problems()[0])\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    first, second = ran.stdout.splitlines()
    assert (
        first
        == "environment: permission denied; libraries: permission denied ('sleep', '600') 0 True None"
    )
    assert "cannot be read" in second
    assert second.endswith("needs root")


@pytest.mark.skipif(
    not os.access("/proc/sys/kernel/ns_last_pid", os.W_OK),
    reason="the next pid cannot be chosen here",
)
def test_a_real_pid_that_is_given_again() -> None:
    processes = Processes(Config())
    last = Path("/proc/sys/kernel/ns_last_pid")
    with subprocess.Popen(["sleep", "600"]) as first:
        processes.collect()
        first.kill()
    for _ in range(100):
        last.write_text(str(first.pid - 1))
        with subprocess.Popen(["sleep", "600"], env={**os.environ, **RANK}) as second:
            if second.pid == first.pid:
                _wait_until_loaded(second)
                processes.collect()
                facts = _named(processes, second.pid)
            second.kill()
        if second.pid == first.pid:
            assert facts is not None
            assert facts.environment["LOCAL_RANK"] == "1"
            return
    pytest.skip("others took the pid each time")


def test_whoever_has_many_processes_takes_the_place_of_nobody_else(
    tree: HostTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_PROCESSES", 4)
    for pid in range(10, 20):
        tree.process(pid, maps=(TORCH,), uid=1001)  # what loads a framework comes first
    for pid in (30, 31, 32):
        tree.process(pid, environment=RANK, uid=1002)
    processes = Processes(tree.config())
    processes.collect()
    assert [facts.pid for facts in processes.processes.values()] == [10, 30, 11, 31]


@needs_users
@pytest.mark.parametrize("rights", ["--euid=0", "--egid=0"])
def test_a_program_with_more_rights_than_its_user_is_roots(rights: str) -> None:
    """As a setuid or setgid program is: the kernel lets its user not look into it, nor does the agent."""
    who = [f"--ruid={BERT}", f"--rgid={BERT}", "--clear-groups"]
    rest = f"--egid={BERT}" if "euid" in rights else f"--euid={BERT}"
    with subprocess.Popen(["setpriv", *who, rest, rights, "sleep", "600"]) as child:
        try:
            until(lambda: Path(f"/proc/{child.pid}/comm").read_text(encoding="ascii") == "sleep\n")
            assert module.read_user(f"/proc/{child.pid}") == 0
            ticks = int(Path(f"/proc/{child.pid}/stat").read_text(encoding="ascii").split()[21])
            known = Process(  # as of before it began that program
                key=f"{child.pid}@{ticks}",
                pid=child.pid,
                start_ticks=ticks,
                started_ns=0,
                parent_pid=1,
                uid=BERT,
                command="",
            )
            with pytest.raises(ProfilerError, match="more rights than its user"):
                PySpy(known).check()
            PySpy(msgspec.structs.replace(known, uid=0)).check()
            with lend_shared_directory() as folder:
                os.chown(folder, BERT, BERT)
                order = {"folder": str(folder)}
                fault = inject_order(pid=child.pid, start_ticks=ticks, order=order)
                assert fault["detail"] == "it has more rights than its user"
        finally:
            child.kill()
