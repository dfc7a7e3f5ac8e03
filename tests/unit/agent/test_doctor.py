"""The doctor: what it says of jobs whose profiler asks where nobody listens."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from support.agent_server import SmallAgent, ask, listening, locations_in
from support.host_tree import HostTree
from traceloom.agent.accelerators.collector import AcceleratorCollector
from traceloom.agent.api import Check
from traceloom.agent.collectors.host import MemoryCollector
from traceloom.agent.config import Config, Owners
from traceloom.agent.doctor import examine_parts, examine_without_agent
from traceloom.agent.metrics import Reading
from traceloom.agent.ownership.resolver import OwnedProcessCollector
from traceloom.agent.steps import ProbedStepClock
from traceloom.server.settings import Tcp

TORCH = "/opt/venv/lib/python3.12/site-packages/torch/lib/libtorch_cpu.so"
HEADER = "Num       RefCount Protocol Flags    Type St Inode Path\n"
OTHERS = "0000000019f3790d: 00000003 00000000 00000000 0001 03  1057\n"
POLLS = {"KINETO_USE_DAEMON": "0"}
PREPARED = {**POLLS, "KINETO_IPC_SOCKET_DIR": "/run/traceloom/kineto/1000"}


def listed(*names: str) -> str:
    """The kernel's list of open unix sockets."""
    lines = (
        f"00000000fa13e224: 00000002 00000000 00000000 0002 01 632871 {name}\n" for name in names
    )
    return HEADER + OTHERS + "".join(lines)


def of_jobs(tree: HostTree, directory: Path) -> list[Check]:
    return [
        check
        for check in examine_without_agent(tree.config(), locations_in(directory))
        if check.area == "jobs"
    ]


@pytest.fixture
def tree(tmp_path: Path) -> HostTree:
    tree = HostTree(tmp_path)
    tree.write("proc/net/unix", listed())
    return tree


@pytest.mark.parametrize(
    ("environment", "here", "there", "unheard"),
    [
        ({}, (), (), ""),
        ({"KINETO_IPC_SOCKET_DIR": "/tmp/a"}, (), (), ""),  # without the other it does not poll
        (POLLS, (), (), "8 s later"),
        (POLLS, (), ("@dynolog@",), ""),
        (
            POLLS,
            ("@dynolog@",),
            (),
            "8 s later",
        ),  # another network namespace has other abstract names
        (POLLS, (), ("@dynolog",), "8 s later"),
        (PREPARED, (), (), "no agent listens in /run/traceloom/kineto/1000"),
        (PREPARED, ("/run/traceloom/kineto/1000/dynolog",), (), ""),
        (PREPARED, (), ("/run/traceloom/kineto/1000/dynolog",), ""),
        (PREPARED, ("/run/traceloom/kineto/1001/dynolog",), ("@dynolog@",), "no agent listens in"),
    ],
)
def test_a_process_that_polls_where_nobody_listens(
    tree: HostTree,
    tmp_path: Path,
    environment: Mapping[str, str],
    here: tuple[str, ...],
    there: tuple[str, ...],
    unheard: str,
) -> None:
    tree.process(77, environment=environment, maps=(TORCH,))
    tree.write("proc/net/unix", listed(*here))
    tree.write("proc/77/net/unix", listed(*there))
    checks = of_jobs(tree, tmp_path)
    assert [(check.name, unheard in check.why) for check in checks] == (
        [("process 77", True)] if unheard else []
    )


def test_processes_of_a_directory_are_one_check(tree: HostTree, tmp_path: Path) -> None:
    for pid in (77, 78, 79):
        tree.process(pid, environment=PREPARED if pid < 79 else POLLS, maps=(TORCH,))
        tree.write(f"proc/{pid}/net/unix", listed())
    assert [check.name for check in of_jobs(tree, tmp_path)] == [
        "process 77 and 1 more",
        "process 79",
    ]


def test_a_process_whose_sockets_cannot_be_seen_is_not_judged(
    tree: HostTree, tmp_path: Path
) -> None:
    tree.process(77, environment=POLLS, maps=(TORCH,))
    assert of_jobs(tree, tmp_path) == []


def test_a_real_socket_is_listed_as_the_doctor_reads_it(tree: HostTree, tmp_path: Path) -> None:
    """The list is this kernel's own; when the socket is closed its file is left behind, as by an agent that died."""
    tree.process(77, environment={**POLLS, "KINETO_IPC_SOCKET_DIR": str(tmp_path)}, maps=(TORCH,))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "dynolog"))
        tree.write("proc/77/net/unix", Path("/proc/net/unix").read_bytes())
        assert of_jobs(tree, tmp_path) == []
    tree.write("proc/77/net/unix", Path("/proc/net/unix").read_bytes())
    assert (tmp_path / "dynolog").exists()
    (check,) = of_jobs(tree, tmp_path)
    assert (check.works, "cannot be traced" in check.why) == ("no", True)


class WithJobs(SmallAgent):
    async def doctor(self) -> list[Check]:
        return [*await super().doctor(), Check(area="jobs", name="process 77", works="no")]


def test_who_does_not_see_all_hears_of_no_processes(tmp_path: Path) -> None:
    with listening(WithJobs(Config(tcp=Tcp(address="127.0.0.1:0"))), tmp_path) as listeners:
        assert listeners.tcp_address is not None
        asked: tuple[Path | tuple[str, int], ...] = (listeners.socket_path, listeners.tcp_address)
        areas = [
            [check["area"] for check in ask(where, "/api/v1/doctor").json()["checks"]]
            for where in asked
        ]
    assert areas == [["devices", "jobs"], ["devices"]]


class RefusedClock(ProbedStepClock):
    """Probes that a process of somebody's did not get."""

    def collect(self) -> list[Reading]:
        return [Reading("agent_probed_libraries", (), 0.0)]

    def list_problems(self) -> list[str]:
        return ["no probes in /home/bert/secret/libtorch_cpu.so: permission denied"]


def test_where_libraries_of_processes_lie_is_said_as_what_is_of_processes(
    tree: HostTree, tmp_path: Path
) -> None:
    config = tree.config()
    accelerators = AcceleratorCollector(config)
    owned = OwnedProcessCollector(config, accelerators)
    clock, host = RefusedClock(config, list), MemoryCollector(config)
    checks = examine_parts(
        config, locations_in(tmp_path), [clock, host], owned, errors={}, empty=(), unwritten={}
    )
    accelerators.close()
    assert [check.area for check in checks if "/home/bert" in check.why] == ["jobs"]
    # What is said of the host stays for everybody.
    assert [check.area for check in checks if "oom_kill" in check.why] == ["collect"]


def as_another(what: Callable[[], object]) -> list[dict[str, Any]]:
    """What something gives, asked as a user who is nobody, in a process of its own."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        try:
            answer = msgspec.json.encode(what())
        except BaseException as error:  # noqa: BLE001  (told to the test)
            answer = msgspec.json.encode([{"raised": repr(error)}])
        os.write(writing, answer)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        content = pipe.read()
    os.waitpid(child, 0)
    rows: list[dict[str, Any]] = msgspec.json.decode(content)
    return rows


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_directories_that_may_not_be_entered_are_no_defect() -> None:
    """Of a user on a host whose kubelet, and whose directories of traceloom, are root's alone."""
    with tempfile.TemporaryDirectory(prefix="tl") as name:
        Path(name).chmod(0o755)
        closed, tree = Path(name, "closed"), HostTree(Path(name, "host"))
        tree.write("proc/net/unix", listed())
        closed.mkdir(mode=0o700)
        config = msgspec.structs.replace(
            tree.config(), owners=Owners(kubelet=str(closed / "pods" / "kubelet.sock"))
        )
        checks = as_another(lambda: examine_without_agent(config, locations_in(closed / "deeper")))
    files = [
        (check["name"], check["works"], check["why"])
        for check in checks
        if check["area"] == "files"
    ]
    assert files == [
        (name, "no", f"{closed} cannot be written") for name in ("socket", "history", "audit")
    ]
    assert [check["works"] for check in checks if check["area"] == "rights"] == ["partly"]


def test_files_and_what_would_help(tree: HostTree, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    good = [
        check
        for check in examine_without_agent(tree.config(), locations_in(tmp_path / "new" / "deep"))
        if check.area == "files"
    ]
    assert [(check.name, check.works, check.help) for check in good] == [
        ("socket", "yes", ""),
        ("history", "yes", ""),
        ("audit", "yes", ""),
    ]
    assert not (tmp_path / "new").exists()  # it only looks
    bad = [
        check
        for check in examine_without_agent(tree.config(), locations_in(tmp_path / "file" / "deep"))
        if check.area == "files"
    ]
    assert [(check.works, check.help) for check in bad] == [
        ("no", f"`paths.{name}` of agent.toml names another one")
        for name in ("socket", "history", "audit")
    ]
