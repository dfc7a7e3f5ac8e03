"""Whether the agent can attach to processes here, and why not. Nothing is attached to to find out."""

from __future__ import annotations

import platform
from pathlib import Path

from traceloom.agent.attach import ptrace
from traceloom.agent.collect import read

_SYS_PTRACE = 19  # the number of the capability
_YAMA = "kernel.yama.ptrace_scope"


def unattachable(proc: Path = Path("/proc")) -> tuple[str, str]:
    """Why processes cannot be attached to, and what would help; both "" where they can."""
    if not ptrace.is_possible():
        return f"the registers of {platform.machine()} are not known to it", ""
    try:
        scope = int(read(proc / "sys/kernel/yama/ptrace_scope"))
    except (OSError, ValueError):  # a kernel without Yama
        scope = 0
    if scope >= 3:
        return f"Yama forbids it to everybody ({_YAMA} is {scope})", "it stays so until the host is started again"
    # Yama makes exceptions for who has CAP_SYS_PTRACE.
    status = read(proc / "self/status").splitlines() if scope else []
    capabilities = next((int(line.split()[1], 16) for line in status if line.startswith(b"CapEff:")), 0)
    if scope and not capabilities >> _SYS_PTRACE & 1:
        return (
            f"Yama lets parents and root alone do so ({_YAMA} is {scope})",
            f"run the agent as root, or set {_YAMA} to 0",
        )
    if not ptrace.is_call_allowed():
        return (
            "a filter of system calls (seccomp) refuses ptrace(2)",
            "start the container with --cap-add SYS_PTRACE, or with a seccomp profile that allows it",
        )
    return "", ""
