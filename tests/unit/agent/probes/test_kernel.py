"""Maps, programs and probes in the kernel; and why not, where it has none."""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from support.probes import compiled, needs_compiler, needs_probes
from traceloom.agent.probes import calls
from traceloom.agent.probes.ebpf import (
    R0,
    R1,
    R2,
    R3,
    R4,
    R6,
    R10,
    Helper,
    Map,
    MapKind,
    ProbeProgram,
    Ring,
    Uprobes,
    get_architecture,
    load_program,
)

LIBRARY = "long twice(long x) { return 2 * x; }"


@needs_probes
def test_a_map_keeps_what_is_put() -> None:
    held = Map(MapKind.HASH, 4, 8, 3)
    for number in range(3):
        held.put(struct.pack("<I", number), struct.pack("<Q", number * 10**12))
    with pytest.raises(OSError, match="too long"):  # it is full
        held.put(b"more", bytes(8))
    assert held.get(struct.pack("<I", 2)) == struct.pack("<Q", 2 * 10**12)
    held.remove(struct.pack("<I", 1))
    held.remove(struct.pack("<I", 1))
    assert held.get(struct.pack("<I", 1)) is None
    assert sorted(held.keys()) == [struct.pack("<I", 0), struct.pack("<I", 2)]
    held.close()


@needs_probes
def test_a_program_that_the_kernel_refuses_says_why() -> None:
    program = ProbeProgram()
    program.load(R1, R2)  # nothing is in R2
    program.exit()
    with pytest.raises(OSError, match=r"refuses the program wrong: .*R2 !read_ok"):
        load_program(program.encoded(), "wrong")


@needs_probes
@needs_compiler
def test_a_probe_sees_arguments_and_results_of_every_process(tmp_path: Path) -> None:
    """Every call is a record; a ring that is full loses some, and the program counts them."""
    path = compiled(LIBRARY, tmp_path / "lib.so", "-shared", "-fPIC")
    ring, lost = Ring(16, 4096), Map(MapKind.ARRAY, 4, 8, 1)
    programs = []
    for register in (get_architecture().arguments[0], get_architecture().result):
        program = ProbeProgram()
        program.load(R6, R1, register)
        program.call(Helper.PROCESS_AND_THREAD)
        program.store(R10, -16, R0)
        program.store(R10, -8, R6)
        program.map(R1, ring.map.descriptor)
        program.do(R2, "=", R10)
        program.do(R2, "+=", -16)
        program.do(R3, "=", 16)
        program.do(R4, "=", 1)
        program.call(Helper.RING_OUTPUT)
        program.jump_if(R0, "==", 0, "end")
        program.store(R10, -4, 0, 4)
        program.map(R1, lost.descriptor)
        program.do(R2, "=", R10)
        program.do(R2, "+=", -4)
        program.call(Helper.MAP_LOOKUP)
        program.jump_if(R0, "==", 0, "end")
        program.do(R1, "=", 1)
        program.add_at(R0, 0, R1)
        program.label("end")
        program.exit()
        programs.append(load_program(program.encoded(), "record"))
    probes = Uprobes(os.open(path, os.O_RDONLY))
    function = probes.find("twice")
    probes.attach(function, programs[0])
    probes.attach(function, programs[1], at_return=True)
    twice = ctypes.CDLL(str(path)).twice
    twice.argtypes, twice.restype = [ctypes.c_long], ctypes.c_long
    here = os.getpid()
    assert twice(-21) == -42
    code = f"import ctypes; ctypes.CDLL({str(path)!r}).twice(7)"
    with subprocess.Popen([sys.executable, "-c", code]) as other:
        pass
    records = [(who >> 32, value) for who, value in struct.iter_unpack("<Qq", ring.take())]
    assert records == [(here, -21), (here, -42), (other.pid, 7), (other.pid, 14)]
    # Round and round, every size of a lap; then more than it holds.
    for number in range(300):
        assert twice(number) == 2 * number
        assert [value for _, value in struct.iter_unpack("<Qq", ring.take())] == [
            number,
            2 * number,
        ]
    assert lost.get(bytes(4)) == bytes(8)
    for number in range(200):
        twice(number)
    kept = len(ring.take()) // 16
    (missing,) = struct.unpack("<Q", lost.get(bytes(4)) or b"")
    assert 0 < kept < 400
    assert kept + missing == 400
    probes.close()
    twice(5)
    assert ring.take() == b""
    ring.close()
    lost.close()


@needs_probes
@needs_compiler
def test_a_probe_of_one_process_leaves_others_alone(tmp_path: Path) -> None:
    path = compiled(LIBRARY, tmp_path / "lib.so", "-shared", "-fPIC")
    calls = Map(MapKind.ARRAY, 4, 8, 1)
    program = ProbeProgram()
    program.store(R10, -4, 0, 4)
    program.map(R1, calls.descriptor)
    program.do(R2, "=", R10)
    program.do(R2, "+=", -4)
    program.call(Helper.MAP_LOOKUP)
    program.jump_if(R0, "==", 0, "end")
    program.do(R1, "=", 1)
    program.add_at(R0, 0, R1)
    program.label("end")
    program.exit()
    code = (
        f"import ctypes, sys; call = ctypes.CDLL({str(path)!r}).twice\n"
        "for line in sys.stdin:\n    for _ in range(int(line)): call(1)\n    print('done', flush=True)\n"
    )
    jobs = [
        subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    probes = Uprobes(os.open(path, os.O_RDONLY), jobs[0].pid)
    probes.attach(probes.find("twice"), load_program(program.encoded(), "count"))
    for job, number in zip(jobs, (5, 7), strict=True):
        output, _ = job.communicate(f"{number}\n")
        assert output == "done\n"
    assert calls.get(bytes(4)) == struct.pack("<Q", 5)
    probes.close()
    calls.close()


def test_a_library_without_the_function_says_so() -> None:
    probes = Uprobes(os.open(Path(sys.executable).resolve(), os.O_RDONLY))
    with pytest.raises(OSError, match="it has no function cudaMalloc"):
        probes.find("cudaMalloc")
    probes.close()


def test_why_there_are_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    assert "riscv64" in calls.explain_unsupported()[0]
    monkeypatch.undo()
    monkeypatch.setattr(calls, "UPROBE_TYPE", tmp_path / "none")
    assert "CONFIG_UPROBE_EVENTS" in calls.explain_unsupported()[0]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user without rights")
def test_a_user_without_rights_is_told_which_are_needed() -> None:
    child = os.fork()
    if not child:  # a child that has dropped its rights answers by its exit code
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        why, helps = calls.explain_unsupported()
        os._exit(0 if "refused" in why and "CAP_SYS_ADMIN" in helps else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@needs_probes
def test_asking_leaves_nothing_open() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    assert calls.explain_unsupported() == ("", "")
    assert len(list(Path("/proc/self/fd").iterdir())) == before
