"""Whether probes work here, and why not. Nothing that runs notices that it is asked."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from traceloom.agent.bpf.elf import Elf
from traceloom.agent.bpf.instructions import ProbeProgram
from traceloom.agent.bpf.kernel import UPROBE_TYPE, Map, MapKind, attach, load, machine

_HOST_PROCESSES = "pid:[4026531836]"  # the first namespace, whose numbers the kernel gives to programs
_MAY_TRACE = 19  # CAP_SYS_PTRACE
_RIGHTS = "run the agent as root, or with CAP_SYS_ADMIN, which the kernel demands for probes of programs"


def unsupported() -> tuple[str, str]:
    """Why there are no probes here, and what would help; both "" where they work."""
    try:
        machine()
        if not UPROBE_TYPE.exists():
            if not UPROBE_TYPE.parent.parent.exists():
                return f"{UPROBE_TYPE.parent.parent} is not there", "mount sysfs where the agent runs"
            return "the kernel has no probes of functions of programs (CONFIG_UPROBE_EVENTS)", ""
        if Path("/proc/self/ns/pid").readlink().name != _HOST_PROCESSES:
            return (
                "the agent knows processes by other numbers than the kernel does",
                "start it in the host's pid namespace (docker --pid=host, Kubernetes hostPID: true)",
            )
    except OSError as error:
        return str(error.strerror), ""
    try:
        Map(MapKind.HASH, 8, 8, 1).close()
    except OSError as error:
        if error.errno == errno.ENOSYS:
            return "the kernel has no bpf(2) (CONFIG_BPF_SYSCALL)", ""
        return f"bpf(2) is refused: {_reason(error)}", _RIGHTS
    try:
        Map(MapKind.RING, 0, 0, os.sysconf("SC_PAGE_SIZE")).close()
    except OSError as error:
        return f"the kernel has no ring buffers for programs: {_reason(error)}", "a kernel of 5.8 or later"
    program = ProbeProgram()
    program.exit()
    try:
        loaded = load(program.encoded(), "support")
    except OSError as error:
        return f"the kernel loads no programs for probes: {_reason(error)}", _RIGHTS
    try:
        with Path("/proc/self/exe").open("rb") as own:
            elf = Elf(own.fileno())
            # Where this program started and will never be again: it is not slowed down.
            position = elf.offset_of(elf.entry) or 0
            os.close(attach(loaded, "/proc/self/exe", position, process=os.getpid()))
    except OSError as error:
        return f"perf_event_open(2) is refused: {_reason(error)}", _RIGHTS
    finally:
        os.close(loaded)
    return "", ""


def looks_into_others() -> bool:
    """Whether processes of other users may be looked into: what they have mapped, and their memory (CAP_SYS_PTRACE)."""
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    effective = status.partition("\nCapEff:")[2].split(maxsplit=1)
    return bool(effective and int(effective[0], 16) >> _MAY_TRACE & 1)


def _reason(error: OSError) -> str:
    return (error.strerror or "").lower()
