"""Relevant processes: those that use a device, have a framework loaded, or belong to a job.

A process is (boot, pid, start time), as pids are reused. Every process is examined in full once,
and again if it has used CPU since, while it is young or when its turn comes. In between only the
directory of /proc is read: an entry with the same inode is the same process, because the kernel
creates a new inode for a new process.
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Iterable
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from traceloom.agent.collectors.collector import HostCollector, read
from traceloom.agent.config import Config
from traceloom.agent.metrics import Reading
from traceloom.system.elf import MAX_MAPS_BYTES
from traceloom.system.units import format_quantity

if TYPE_CHECKING:
    from traceloom.agent.ownership.model import Process

MAX_PROCESSES = 512  # about 3,000 series
YOUNG_PROCESS_S = 120.0
"""A process of up to this age is examined each time: it loads its framework, is moved to its
cgroup, starts others.
"""
RESCAN_PERIOD_S = 10.0  # between examinations of older ones
RESCAN_GROUPS = 16
MAX_RESCANS_PER_TURN = 256
OLD_TICKS_S = 0.5  # CPU time that an old process must have used to be examined again
MAX_COMMAND_BYTES = 32 << 10  # bytes read of a command line
MAX_ENVIRONMENT_BYTES = 2 << 20
MAX_CHARS = 4096  # kept of a variable: lists of devices are long
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

# Variables that only a launcher or a job scheduler sets.
JOB_VARIABLES = frozenset(
    {
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
    }
)
_PF_KTHREAD = 0x00200000
_FILE_CONTENTS = {"environ": "environment", "maps": "libraries", "cmdline": "command"}
_LIBRARIES = {
    "pytorch": re.compile(rb"/[^\n]*/lib(?:torch_cpu|c10)\.so[^\n]*"),
    "jax": re.compile(rb"/[^\n]*(?:/jaxlib/|/xla_extension)[^\n]*"),
    "tensorflow": re.compile(rb"/[^\n]*/libtensorflow[^/\n]*\.so[^\n]*"),
}


_Owned = TypeVar("_Owned", "ProcessFacts", "Process")


class ProcessFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The kernel's view of a process. `command` is unmasked and never leaves the agent.

    `environment` holds listed variables only, as they were when the program started. `cgroups` has
    the path per controller ("" is cgroup v2), `cgroup` the most specific one. `frameworks`: name ->
    library by which it was detected. `read_bytes` and `written_bytes` are None if they cannot be
    read; `unreadable` names what else, and why.
    """

    key: str  # PID@START
    pid: int
    start_ticks: int
    started_ns: int
    parent_pid: int
    uid: int
    name: str
    command: tuple[str, ...] = ()
    environment: dict[str, str] = {}
    cgroup: str = ""
    cgroups: dict[str, str] = {}
    exe: str = ""
    frameworks: dict[str, str] = {}
    unreadable: str = ""
    state: str = ""  # R, S, D, T, Z ... as in /proc
    cpu_user_s: float = 0.0
    cpu_system_s: float = 0.0
    resident_bytes: int = 0
    threads: int = 0
    read_bytes: int | None = None
    written_bytes: int | None = None


def read_user(directory: str) -> int:
    """Returns whose a process is, by its directory in /proc: its user's, and root's where it has more
    rights than its user, as a setuid program, since the kernel lets only root look into it.

    Raises:
        OSError: It has ended or is hidden.
    """
    status = read(f"{directory}/status")
    ids = re.findall(rb"^[UG]id:\s+(\d+)\s+(\d+)\s+(\d+)", status, re.MULTILINE)
    return int(ids[0][0]) if all(len(set(numbers)) == 1 for numbers in ids) else 0


def order_by_turns(processes: Iterable[_Owned]) -> list[_Owned]:
    """Returns processes with the first one of each user first, then the second ones, so that whoever
    has many takes the place of nobody else.
    """
    numbers: Counter[int] = Counter()
    turns = []
    for process in processes:
        numbers[process.uid] += 1
        turns.append((numbers[process.uid], process))
    return [process for _, process in sorted(turns, key=itemgetter(0))]


def _read_cgroups(directory: str) -> dict[str, str]:
    """Returns the path of a process in each hierarchy, by controller."""
    lines = (
        line.split(":", 2)
        for line in read(f"{directory}/cgroup").decode(errors="replace").splitlines()
    )
    return {
        controller: path.removesuffix(" (deleted)")
        for _, controllers, path in lines
        for controller in controllers.split(",")
    }


class _Stat(msgspec.Struct, frozen=True):
    """/proc/PID/stat."""

    name: str
    state: str
    parent_pid: int
    kernel: bool  # a kernel thread
    user_ticks: int
    system_ticks: int
    threads: int
    start_ticks: int
    resident_pages: int  # 0 once it has freed its memory while ending

    @classmethod
    def read(cls, directory: str) -> _Stat:
        """Parse the file.

        Raises:
            OSError: The process has ended or is hidden.
        """
        text = read(f"{directory}/stat")
        before, _, after = text.rpartition(b")")  # the name may contain any characters
        fields = after.split()
        return cls(
            before.partition(b"(")[2].decode(errors="replace"),
            fields[0].decode(),
            int(fields[1]),
            bool(int(fields[6]) & _PF_KTHREAD),
            int(fields[11]),
            int(fields[12]),
            int(fields[17]),
            int(fields[19]),
            int(fields[21]),
        )


class _ProcessScan(msgspec.Struct):
    """State of the examination of a pid. `facts` is None for an irrelevant process."""

    inode: int = 0
    start_ticks: int = -1
    ticks: int = -1  # CPU time at the last full examination; -1: none yet
    name: str = ""
    young_until: float = 0.0  # on the monotonic clock
    denied: bool = False
    # Its program is still being loaded: it has a name, and no environment yet.
    beginning: bool = False
    facts: ProcessFacts | None = None


class Processes(HostCollector):
    """`processes` has the relevant ones by key; each run replaces it.

    `device_pids`, the processes that use devices, is set by the caller.
    """

    name = "processes"

    def __init__(
        self, config: Config, listed: Iterable[str] = (), prefixes: tuple[str, ...] = ()
    ) -> None:
        super().__init__(config)
        self.processes: dict[str, ProcessFacts] = {}
        self.device_pids: frozenset[int] = frozenset()
        self.omitted = 0  # relevant processes beyond MAX_PROCESSES
        self.waiting = 0  # processes not examined yet for lack of time
        self._job_variables = JOB_VARIABLES.union(
            variable for variable, field in config.owners.variables.items() if field == "job"
        )
        self._listed = self._job_variables.union(listed, config.owners.variables)
        self._prefixes = prefixes
        self._looks: dict[int, _ProcessScan] = {}
        self._turn = 0
        self._turn_at = -RESCAN_PERIOD_S

    def collect(self) -> list[Reading]:
        """Read all processes; new ones that do not fit into half of the time-out wait for the next
        run.

        Raises:
            OSError: /proc cannot be listed.
        """
        with os.scandir(self.proc) as entries:
            inodes = {int(entry.name): entry.inode() for entry in entries if entry.name.isdigit()}
        now = time.monotonic()
        booted_ns = time.time_ns() - int(float(read(f"{self.proc}/uptime").split()[0]) * 1e9)
        group_count = max(RESCAN_GROUPS, len(inodes) // MAX_RESCANS_PER_TURN + 1)
        rescan_group = -1
        if now - self._turn_at >= RESCAN_PERIOD_S:
            rescan_group = self._turn = (self._turn + 1) % group_count
            self._turn_at = now
        current: dict[int, _ProcessScan] = {}
        waiting = 0
        for pid, inode in inodes.items():
            scan = self._looks.get(pid)
            if scan is None or (scan.inode != inode and scan.facts is None):
                # It may be another process that started in the same clock tick.
                scan = _ProcessScan()
            urgent = pid in self.device_pids
            if scan.ticks < 0 and not urgent and time.monotonic() > now + self.timeout_s / 2:
                waiting += 1
                continue
            its_turn = pid % group_count == rescan_group
            if scan.inode != inode or scan.facts or urgent or its_turn or now < scan.young_until:
                try:
                    self._read_process(pid, scan, booted_ns, now, its_turn)
                except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
                    continue
                except PermissionError:  # hidden
                    scan.facts, scan.ticks, scan.denied = None, 0, True
                scan.inode = inode
            current[pid] = scan
        self._looks, self.waiting = current, waiting
        relevant = [scan.facts for scan in current.values() if scan.facts]
        if len(relevant) > MAX_PROCESSES:
            relevant.sort(
                key=lambda facts: (
                    facts.pid not in self.device_pids,
                    not facts.frameworks,
                    facts.pid,
                )
            )
            relevant = order_by_turns(relevant)
        self.omitted = max(len(relevant) - MAX_PROCESSES, 0)
        self.processes = {facts.key: facts for facts in relevant[:MAX_PROCESSES]}
        readings: list[Reading] = []
        for facts in self.processes.values():
            readings += (
                Reading("process_cpu_seconds_total", (facts.key, "user"), facts.cpu_user_s),
                Reading("process_cpu_seconds_total", (facts.key, "system"), facts.cpu_system_s),
                Reading("process_memory_bytes", (facts.key,), facts.resident_bytes),
                Reading("process_threads", (facts.key,), facts.threads),
            )
            if facts.read_bytes is not None and facts.written_bytes is not None:
                readings += (
                    Reading("process_disk_bytes_total", (facts.key, "read"), facts.read_bytes),
                    Reading("process_disk_bytes_total", (facts.key, "write"), facts.written_bytes),
                )
        return readings

    def _read_process(
        self, pid: int, scan: _ProcessScan, booted_ns: int, now: float, its_turn: bool
    ) -> None:
        """Update `scan`: the numbers always, the rest only if it may have changed."""
        directory = f"{self.proc}/{pid}"
        stat = _Stat.read(directory)
        ticks = stat.user_ticks + stat.system_ticks
        if stat.start_ticks != scan.start_ticks:  # another process of the same pid
            scan.start_ticks, scan.ticks, scan.facts = stat.start_ticks, -1, None
            started_s = booted_ns / 1e9 + stat.start_ticks / TICKS_PER_S
            scan.young_until = now + YOUNG_PROCESS_S - max(time.time() - started_s, 0.0)
        if stat.kernel:
            scan.ticks, scan.young_until = ticks, 0.0
            return
        young = now < scan.young_until
        due = (
            scan.ticks < 0
            or stat.name != scan.name  # it runs another program
            or (young and ticks > scan.ticks)
            or (its_turn and ticks >= scan.ticks + OLD_TICKS_S * TICKS_PER_S)
            or (scan.facts is None and pid in self.device_pids)
        )
        if due and stat.state == "D" and (scan.facts or pid not in self.device_pids):
            # Its memory may be locked while it waits, which would block a reader: retry later.
            scan.young_until = max(scan.young_until, now + 2 * RESCAN_PERIOD_S)
        elif due and (stat.resident_pages or scan.facts is None):
            scan.facts = self._examine(pid, directory, stat, booted_ns, scan)
            scan.ticks, scan.name = (
                -1 if stat.state == "D" or (young and scan.beginning) else ticks,
                stat.name,
            )
        if scan.facts is None:
            return
        if not self._matters(pid, scan.facts.frameworks, scan.facts.environment):
            scan.facts = None
            return
        try:
            pairs = (line.split(b": ") for line in read(f"{directory}/io").splitlines())
            io = {name: int(value) for name, value in pairs}
        except PermissionError:
            io = {}
        cgroups = scan.facts.cgroups
        if stat.resident_pages or not cgroups:  # one that has ended is in none any more
            cgroups = _read_cgroups(directory)
        scan.facts = msgspec.structs.replace(
            scan.facts,
            cgroup=select_main_cgroup(cgroups),
            cgroups=cgroups,
            state=stat.state,
            parent_pid=stat.parent_pid,
            cpu_user_s=stat.user_ticks / TICKS_PER_S,
            cpu_system_s=stat.system_ticks / TICKS_PER_S,
            resident_bytes=stat.resident_pages * PAGE_BYTES,
            threads=stat.threads,
            read_bytes=io.get(b"read_bytes"),
            written_bytes=io.get(b"write_bytes"),
        )

    def _matters(self, pid: int, frameworks: dict[str, str], environment: dict[str, str]) -> bool:
        return (
            bool(frameworks)
            or pid in self.device_pids
            or not self._job_variables.isdisjoint(environment)
        )

    def _examine(
        self, pid: int, directory: str, stat: _Stat, booted_ns: int, scan: _ProcessScan
    ) -> ProcessFacts | None:
        """Returns the facts that rarely change; None for an irrelevant process."""
        unreadable = []
        scan.denied = False
        contents = {"environ": b"", "maps": b"", "cmdline": b""}
        for name, limit in (
            ("environ", MAX_ENVIRONMENT_BYTES),
            ("maps", MAX_MAPS_BYTES),
            ("cmdline", MAX_COMMAND_BYTES),
        ):
            if stat.state == "D":
                unreadable.append(f"{_FILE_CONTENTS[name]}: it waits in the kernel")
                continue
            try:
                contents[name] = read(f"{directory}/{name}", limit)
            except PermissionError:
                unreadable.append(f"{_FILE_CONTENTS[name]}: permission denied")
                scan.denied = True
            if name != "cmdline" and len(contents[name]) >= limit:
                unreadable.append(f"{_FILE_CONTENTS[name]}: beyond the first {limit >> 20} MiB")
        scan.beginning = not contents["environ"]
        variables = (
            entry.partition("=")
            for entry in contents["environ"].decode(errors="replace").split("\0")
        )
        environment = {
            name: value[:MAX_CHARS]
            for name, equals, value in variables
            if equals and (name in self._listed or name.startswith(self._prefixes))
        }
        frameworks = {
            framework: match[0].decode(errors="replace").removesuffix(" (deleted)")
            for framework, library in _LIBRARIES.items()
            if (match := library.search(contents["maps"]))
        }
        if not self._matters(pid, frameworks, environment):
            return None
        try:
            exe = str(Path(directory, "exe").readlink()).removesuffix(" (deleted)")
        except OSError:  # another user's
            exe = ""
        return ProcessFacts(
            key=f"{pid}@{stat.start_ticks}",
            pid=pid,
            start_ticks=stat.start_ticks,
            started_ns=booted_ns + stat.start_ticks * (1_000_000_000 // TICKS_PER_S),
            parent_pid=stat.parent_pid,
            uid=read_user(directory),
            name=stat.name,
            command=tuple(filter(None, contents["cmdline"].decode(errors="replace").split("\0"))),
            environment=environment,
            exe=exe,
            frameworks=frameworks,
            unreadable="; ".join(unreadable),
        )

    def list_problems(self) -> list[str]:
        problems = []
        if denied := sum(scan.denied for scan in self._looks.values()):
            needed = (
                "root" if os.geteuid() else "CAP_SYS_PTRACE and every capability that they have"
            )
            problems.append(
                f"environment and libraries of {format_quantity(denied, 'process')} cannot be read, so that jobs and "
                f"frameworks there are not known: the agent needs {needed}"
            )
        try:
            mounts = read(f"{self.proc}/self/mounts")
        except OSError:
            mounts = b""
        try:
            all_seen = _Stat.read(f"{self.proc}/2").kernel
        except OSError:
            all_seen = False
        proc_mount = re.search(
            rb"^\S+ %b proc (\S+)" % re.escape(os.fsencode(self.proc)), mounts, re.MULTILINE
        )
        if proc_mount and re.search(rb"hidepid=(?!0|off)", proc_mount[1]) and os.geteuid() != 0:
            problems.append(
                f"{self.proc} is mounted with hidepid, processes of other users are not seen: run the agent as root or "
                "in the group of the mount's gid="
            )
        elif not all_seen:  # pid 2 of a host is a kernel thread
            problems.append(
                "only the processes of this container are seen: start it in the host's pid namespace "
                "(docker --pid=host, Kubernetes hostPID: true)"
            )
        if self.omitted:
            problems.append(
                f"{self.omitted} processes that matter are left out, beyond {MAX_PROCESSES}; devices come first"
            )
        if self.waiting:
            problems.append(f"{self.waiting} processes are not looked at yet: the next runs do")
        return problems


def select_main_cgroup(cgroups: dict[str, str]) -> str:
    """Returns the path that identifies the owner best: that of a controller that limits jobs, else
    the only one.
    """
    # In hybrid mode version 2 ("") only has names, those of services rather than of the jobs that
    # they started.
    for controller in ("memory", "cpu", "devices", "freezer", "", "name=systemd"):
        if cgroups.get(controller, "/") != "/":
            return cgroups[controller]
    return "/" if cgroups else ""
