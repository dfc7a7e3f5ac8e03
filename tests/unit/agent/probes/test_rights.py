"""Rights are taken away, one after the other: what is missing is said, and what stands in for it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

from support.probes import needs_probes

pytestmark = [
    needs_probes,
    pytest.mark.skipif(
        os.geteuid() != 0 or None in map(shutil.which, ("setpriv", "unshare")),
        reason="needs root, setpriv and unshare (apt-get install util-linux)",
    ),
]
ASK = "import json; from traceloom.agent.probes.calls import explain_unsupported as unsupported; print(json.dumps(unsupported()))"
# Answers a system call with an error, as the rules of a container do (seccomp, Linux's filter.h and seccomp.h).
FORBID = """
import ctypes, struct, sys
number, error = int(sys.argv[1]), int(sys.argv[2])
libc = ctypes.CDLL(None, use_errno=True)
rules = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x00050000 | error), (0x06, 0, 0, 0x7FFF0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *rule) for rule in rules))
program = ctypes.create_string_buffer(struct.pack("<H6xQ", len(rules), ctypes.addressof(code)))
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, program, 0, 0) == 0
"""
SYSTEM_CALLS = {"x86_64": (321, 298), "aarch64": (280, 241)}[
    os.uname().machine
]  # bpf, perf_event_open


def answer(*command: str) -> tuple[str, str]:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    why, helps = json.loads(result.stdout)
    return why, helps


@pytest.mark.parametrize(
    ("rights", "why"),
    [
        ("-bpf,-sys_admin", "bpf(2) is refused: operation not permitted"),
        ("-perfmon,-sys_admin", "the kernel loads no programs for probes: operation not permitted"),
        ("-all,+bpf,+perfmon", "perf_event_open(2) is refused: permission denied"),
        ("-all,+sys_admin", ""),
    ],
)
def test_rights_that_it_needs(rights: str, why: str) -> None:
    said, helps = answer("setpriv", f"--bounding-set={rights}", sys.executable, "-c", ASK)
    assert said == why
    assert ("CAP_SYS_ADMIN" in helps) == bool(why)


@pytest.mark.parametrize(
    ("call", "error", "why"),
    [
        (0, 1, "bpf(2) is refused: operation not permitted"),
        (0, 38, "the kernel has no bpf(2) (CONFIG_BPF_SYSCALL)"),
        (1, 1, "perf_event_open(2) is refused: operation not permitted"),
        (1, 13, "perf_event_open(2) is refused: permission denied"),
    ],
)
def test_calls_that_a_container_forbids(call: int, error: int, why: str) -> None:
    assert answer(sys.executable, "-c", FORBID + ASK, str(SYSTEM_CALLS[call]), str(error))[0] == why


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("mount -t tmpfs none /sys", "/sys/bus/event_source/devices is not there"),
        (
            "mount -t tmpfs none /sys/bus/event_source/devices",
            "the kernel has no probes of functions of programs",
        ),
    ],
)
def test_files_of_the_kernel_that_are_hidden(change: str, why: str) -> None:
    assert answer(
        "unshare", "-m", "sh", "-c", f'{change} && exec "$0" -c "$1"', sys.executable, ASK
    )[0].startswith(why)


def test_numbers_of_processes_of_its_own() -> None:
    why, helps = answer("unshare", "-p", "-f", "--mount-proc", sys.executable, "-c", ASK)
    assert "other numbers" in why
    assert "hostPID" in helps


@pytest.mark.parametrize(
    ("rights", "works", "words"),
    [
        (
            "-bpf,-sys_admin",
            "no",
            {
                "steps": "steps count where processes report them",
                "launches": "--profilers timeline",
                "allocations": "record --memory",
            },
        ),
        (
            "-sys_ptrace",
            "partly",
            dict.fromkeys(("steps", "launches", "allocations"), "of your own processes alone"),
        ),
    ],
)
def test_the_doctor_says_what_there_is_instead(
    rights: str, works: str, words: dict[str, str]
) -> None:
    command = [
        "setpriv",
        f"--bounding-set={rights}",
        sys.executable,
        "-m",
        "traceloom",
        "agent",
        "doctor",
        "--json",
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    checks = json.loads(result.stdout)["checks"]
    probes = {check["name"]: check for check in checks if check["area"] == "probes"}
    assert probes.keys() == words.keys()
    for name, word in words.items():
        assert probes[name]["works"] == works
        assert word in probes[name]["why"]
        assert "CAP_" in probes[name]["help"]
    (stacks,) = (check for check in checks if check["area"] == "stacks")
    assert stacks["works"] == ("partly" if "ptrace" in rights else "yes")  # py-spy needs no probes
