"""Lets a process run the text of `in_target.py`. Runs in a worker: a process that attaches has nothing else to lose.

CPython runs what is scheduled in its main thread, between two instructions of the program, as it runs handlers of
signals: nothing of the program's is half done then, and no lock of ours can meet one of it. The text only starts a
thread. `sys.remote_exec` of Python 3.14 does the same, where the agent has the same version.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
from pathlib import Path
from typing import Any

from traceloom.agent.attach.ptrace import StoppedThread, is_possible
from traceloom.agent.attach.support import unattachable
from traceloom.agent.bpf.elf import Elf
from traceloom.agent.bpf.mappings import mappings, open_mapped

_LIMIT_S = 2.0  # for all that is done while the thread stands still
_MOST_TEXT = 1 << 20
_MMAP, _MUNMAP = 9, 11  # numbers of system calls of x86-64
_SYSCALL = b"\x0f\x05"  # the instruction
_MOST_INSTRUCTIONS = 64  # bytes of libc's `syscall` that are looked through for it
_FILES = ("libpython", "libc.so", "libc-2")  # beside the program itself
_ADD_PENDING, _RUN = "Py_AddPendingCall", "PyRun_SimpleString"
# Python does not expect what is scheduled to fail, and this may be where the program is to be interrupted.
_START = """\
try:
    __import__("_thread").start_new_thread(__import__("builtins").exec, ({source}, {names}))
except KeyboardInterrupt:
    __import__("_thread").interrupt_main()
except BaseException:
    pass
"""


class _AttachFaultError(Exception):
    def __init__(self, detail: str, *, slug: str) -> None:
        super().__init__(detail)
        self.slug = slug


def schedule(*, pid: int, start_ticks: int, order: dict[str, Any]) -> dict[str, Any]:
    """Let a process do what an order says, once its main thread runs Python again.

    Args:
        pid: The process.
        start_ticks: When it started: another process may have its number now.
        order: As of `in_target.AttachedWork`.

    Returns:
        `pause_ns`, how long its main thread stood still; or `fault` (a slug) and `detail`.
    """
    try:
        if not is_possible():
            raise _AttachFaultError(unattachable()[0], slug="not-permitted")  # noqa: TRY301
        _check(pid, start_ticks, order["folder"])
        functions, instruction = _functions(pid)
        source = Path(__file__).with_name("in_target.py").read_text(encoding="utf-8")
        size = -(-(len(_text(source, order, 2**63, 2**63)) + 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        assert size <= _MOST_TEXT
        with StoppedThread(pid, _LIMIT_S) as thread:
            at = thread.system_call(
                _MMAP, instruction, 0, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS,
                -1, 0,
            )  # fmt: skip
            if at < 0:
                raise OSError(-at, os.strerror(-at))  # noqa: TRY301
            thread.write(at, _text(source, order, at, size))
            if thread.function_call(functions[_ADD_PENDING], instruction, functions[_RUN], at):
                thread.system_call(_MUNMAP, instruction, at, size)
                raise OSError(errno.EBUSY, "too much is scheduled in the program already")  # noqa: TRY301
    except _AttachFaultError as fault:
        return _fault(str(fault), slug=fault.slug)
    except (ProcessLookupError, FileNotFoundError):
        return _fault("the process has ended", slug="exited")
    except PermissionError:
        why, _ = unattachable()
        detail = f"the kernel does not let the agent attach to process {pid}" + (f": {why}" if why else "")
        return _fault(detail, slug="not-permitted")
    except TimeoutError:
        return _fault(f"its main thread could not be had in {_LIMIT_S:g} s, and was let go", slug="not-stopped")
    except OSError as error:
        return _fault((error.strerror or str(error)).lower(), slug="not-permitted")
    else:
        return {"pause_ns": thread.pause_ns}


def _fault(detail: str, *, slug: str) -> dict[str, Any]:
    return {"fault": slug, "detail": detail}


def _check(pid: int, start_ticks: int, folder: str) -> None:
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    if int(fields[19]) != start_ticks or fields[0] in (b"Z", b"X"):
        raise ProcessLookupError
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    tracer = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("TracerPid:"))
    if tracer:
        raise _AttachFaultError(f"it is traced already, by process {tracer}", slug="traced-already")
    inside, outside = os.stat(f"/proc/{pid}/root{folder}"), os.stat(folder)  # noqa: PTH116
    if (inside.st_dev, inside.st_ino) != (outside.st_dev, outside.st_ino):
        raise _AttachFaultError(f"{folder} is another directory for it", slug="not-mounted")


def _functions(pid: int) -> tuple[dict[str, int], int]:
    """Where the process has Python's two functions, and an instruction for system calls."""
    parts = [mapping for mapping in mappings(pid) if mapping.executable]
    if not any(mapping.path.rpartition("/")[2].startswith("libtorch") for mapping in parts):
        raise _AttachFaultError("it has no PyTorch", slug="no-torch")
    program = str(Path(f"/proc/{pid}/exe").readlink())
    functions: dict[str, int] = {}
    instruction = 0
    for mapping in parts:
        if mapping.path != program and not mapping.path.rpartition("/")[2].startswith(_FILES):
            continue
        descriptor = open_mapped(pid, mapping)
        try:
            elf = Elf(descriptor)
            for wanted in (_ADD_PENDING, _RUN, "syscall"):
                function = elf.find(f"{wanted}\0")
                if function is None or not 0 <= function.offset - mapping.offset < mapping.end - mapping.start:
                    continue
                address = mapping.start + function.offset - mapping.offset
                if wanted != "syscall":
                    functions.setdefault(wanted, address)
                elif not instruction:
                    at = os.pread(descriptor, _MOST_INSTRUCTIONS, function.offset).find(_SYSCALL)
                    instruction = address + at if at >= 0 else 0
        finally:
            os.close(descriptor)
    if len(functions) < 2 or not instruction:
        raise _AttachFaultError("it runs no CPython whose functions can be seen", slug="not-python")
    return functions, instruction


def _text(source: str, order: dict[str, Any], at: int, size: int) -> bytes:
    """What Python is to run: our text and, as a value in it, the order."""
    names = {"__name__": "traceloom_attached", "ORDER": json.dumps(order | {"text_at": at, "text_bytes": size})}
    # As literals, so that nothing in a value is ever read as code.
    return _START.format(source=ascii(source), names=ascii(names)).encode("ascii")
