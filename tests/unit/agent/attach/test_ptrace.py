"""One thread of another process, stopped and left as it was: it computes, sleeps and waits as if nothing had been."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.attaching import tracer_of
from support.waiting import until
from traceloom.agent.attach.injection import StoppedThread, explain_attach_refusal
from traceloom.system.elf import Elf, open_mapped, read_mappings

WHY = explain_attach_refusal()[0]
pytestmark = pytest.mark.skipif(bool(WHY), reason=WHY)
GETPID, TIMES = 39, 40
BUSY = """
import math, select, sys
values = [math.sin(number) * 1.5 for number in range(500)]
total, rounds = math.fsum(math.sqrt(abs(value)) for value in values), 0
print("up", flush=True)
while not select.select([sys.stdin], [], [], 0)[0]:
    assert math.fsum(math.sqrt(abs(value)) for value in values) == total
    rounds += 1
print("rounds", rounds)
"""
WAITING = """
import select, sys, time
print("up", flush=True)
began, rounds = time.monotonic(), 0
while not select.select([sys.stdin], [], [], {0})[0]:
    time.sleep(0.003)
    rounds += 1
print("rounds", rounds)
"""


@contextmanager
def program(code: str) -> Iterator[subprocess.Popen[str]]:
    """It runs until its input ends, and must end in order after it did something."""
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        yield process
        assert tracer_of(process.pid) == 0
        out, errors = process.communicate("\n", timeout=120)
    finally:
        process.kill()
        process.communicate()
    assert (process.returncode, errors) == (0, "")
    assert out.startswith("rounds")


def instruction_and(pid: int, function: str) -> tuple[int, int]:
    """Where the process has the instruction `syscall`, and a function of libc."""
    for mapping in read_mappings(pid):
        if mapping.executable and mapping.path.rpartition("/")[2].startswith("libc.so"):
            with os.fdopen(open_mapped(pid, mapping), "rb") as file:
                elf, moved = Elf(file.fileno()), mapping.start - mapping.offset
                call, wanted = elf.find("syscall\0"), elf.find(f"{function}\0")
                assert call is not None
                assert wanted is not None
                file.seek(call.offset)
                return call.offset + file.read(64).index(b"\x0f\x05") + moved, wanted.offset + moved
    raise AssertionError("it has no libc")


@pytest.mark.parametrize(
    "code", [BUSY, WAITING.format(0.002), WAITING.format(30)], ids=["busy", "sleeping", "waiting"]
)
def test_it_goes_on_where_it_was(code: str) -> None:
    with program(code) as process:
        instruction, function = instruction_and(process.pid, "getppid")
        for _ in range(TIMES):
            with StoppedThread(process.pid, 60.0) as thread:
                assert thread.system_call(GETPID, instruction) == process.pid
                assert thread.function_call(function, instruction) == int(
                    Path(f"/proc/{process.pid}/stat")
                    .read_text(encoding="ascii")
                    .rpartition(")")[2]
                    .split()[1]
                )
                assert tracer_of(process.pid) > 0
            assert thread.pause_ns > 0


def test_errors_of_the_kernel_are_negative_numbers() -> None:
    with program(BUSY) as process:
        instruction, _ = instruction_and(process.pid, "getppid")
        with StoppedThread(process.pid, 60.0) as thread:
            assert thread.system_call(GETPID + 10_000, instruction) == -errno.ENOSYS


@pytest.mark.parametrize("code", [BUSY, WAITING.format(30)], ids=["busy", "waiting"])
def test_what_does_not_return_in_time_is_taken_back(code: str) -> None:
    """`pause` waits for a signal that never comes."""
    with program(code) as process:
        instruction, function = instruction_and(process.pid, "pause")
        with pytest.raises(TimeoutError), StoppedThread(process.pid, 0.5) as thread:
            thread.function_call(function, instruction)
        assert until(lambda: tracer_of(process.pid) == 0)


def test_one_that_is_traced_already_is_left_alone() -> None:
    with program(BUSY) as process:
        code = (
            "import sys\nfrom traceloom.agent.attach.injection import StoppedThread\n"
            f"try:\n    with StoppedThread({process.pid}, 5.0): print('stopped')\nexcept PermissionError: print('refused')"
        )
        with StoppedThread(process.pid, 60.0):
            other = subprocess.run(
                [sys.executable, "-c", code], capture_output=True, text=True, check=True
            )
        assert other.stdout == "refused\n"


def test_one_that_has_ended_is_none() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    with pytest.raises(ProcessLookupError), StoppedThread(process.pid, 5.0):
        pass
