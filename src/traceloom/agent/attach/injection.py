"""Runs our Python text in another process: stops its main thread by ptrace, and calls a function
that schedules the text.

CPython runs scheduled text in its main thread between two instructions, as it runs signal handlers:
nothing of the program is half done then, and no lock of ours can collide with one of its own. The
text only starts a thread (payload.py), which reports its progress through a file
(profilers/attached.py). `sys.remote_exec` of Python 3.14 does the same, if the agent has the same
version.

A debugger is not used: those of distributions cannot write back the registers of processors with
AMX (gdb 13: "Couldn't write extended state status: Bad address"), which ends the process, and stop
all threads for 300 ms.

The thread is stopped by the kernel alone: no signal reaches the process and nothing is written into
its code. If it was in a system call, the kernel restarts that, as after any stop; a few
(epoll_wait) return with EINTR, which programs have to expect and Python hides. This blocks, so it
runs in a worker.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import mmap
import os
import platform
import signal
import time
from pathlib import Path
from typing import Any

from traceloom.agent.collectors.collector import read
from traceloom.agent.collectors.processes import read_user
from traceloom.agent.kineto import read_process_state
from traceloom.system.elf import Elf, open_mapped, read_mappings

# Values of <linux/ptrace.h>.
_CONT, _DETACH, _SYSCALL = 7, 17, 24
_SEIZE, _INTERRUPT = 0x4206, 0x4207
_GET_REGISTERS, _SET_REGISTERS = 0x4204, 0x4205  # PTRACE_GETREGSET, PTRACE_SETREGSET
_GET_MASK, _SET_MASK = 0x420A, 0x420B
_MARK_SYSCALLS = 1  # distinguishes stops at system calls from signals
_GENERAL, _EXTENDED = 1, 0x202  # register sets: NT_PRSTATUS, NT_X86_XSTATE
_EVENT_STOP = 128
_AT_SYSTEM_CALL = signal.SIGTRAP | 0x80
_WALL = 0x40000000
_MAX_EXTENDED_BYTES = 1 << 16  # bytes; AMX needs 11,008
_RED_ZONE = 128  # bytes below the stack pointer that a function may use
_CODE_64 = 0x33  # selector of the 64-bit code segment
_POLL_S = 0.0002
_REGISTER_NAMES = (
    "r15",
    "r14",
    "r13",
    "r12",
    "rbp",
    "rbx",
    "r11",
    "r10",
    "r9",
    "r8",
    "rax",
    "rcx",
    "rdx",
    "rsi",
    "rdi",
    "orig_rax",
    "rip",
    "cs",
    "eflags",
    "rsp",
    "ss",
    "fs_base",
    "gs_base",
    "ds",
    "es",
    "fs",
    "gs",
)
_NO_CALL = 2**64 - 1
_CALL_FLAGS_MASK = ~0x500  # clears the trap and direction flags
SUPPORTED_MACHINES = ("x86_64",)
UNUSED_PID = 2**22 + 1  # above the max pid of Linux


class _Registers(ctypes.Structure):
    """General-purpose registers: `struct user_regs_struct` of x86-64."""

    _fields_ = [(name, ctypes.c_uint64) for name in _REGISTER_NAMES]


class _Vector(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]


_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_LIBC.ptrace.restype = ctypes.c_long


def is_architecture_supported() -> bool:
    """Whether the registers of this machine's architecture are supported."""
    return platform.system() == "Linux" and platform.machine() in SUPPORTED_MACHINES


def is_ptrace_allowed() -> bool:
    """Whether the kernel allows this process ptrace(2) at all: filters of containers may refuse
    it.
    """
    try:
        _call_ptrace(_SEIZE, UNUSED_PID)
    except OSError as error:
        return error.errno == errno.ESRCH
    return True


class StoppedThread:
    """A context within which a thread is stopped; afterwards it continues where it was.

    Args:
        thread: Its id.
        limit_s: Time limit of all operations; then the thread is restored.

    Raises:
        OSError: EPERM: the kernel does not allow it; ESRCH: there is no such thread; ETIMEDOUT: it
            did not stop in time.
    """

    def __init__(self, thread: int, limit_s: float) -> None:
        self._thread = thread
        self._until = time.monotonic() + limit_s
        self._saved = _Registers()
        self._mask = ctypes.c_uint64()
        self._extended = ctypes.create_string_buffer(_MAX_EXTENDED_BYTES)
        self._extended_size = 0
        self._is_stopped = False
        self._stopped_ns = 0
        self.pause_ns = 0  # how long it was stopped, set on exit

    def __enter__(self) -> StoppedThread:  # noqa: PYI034  (Self is of Python 3.11)
        """Stop the thread."""
        _call_ptrace(_SEIZE, self._thread, 0, _MARK_SYSCALLS)
        try:
            self._stopped_ns = time.monotonic_ns()
            self._interrupt()
            self._registers(_GET_REGISTERS, _GENERAL, self._saved)
            if self._saved.cs != _CODE_64:
                raise OSError(errno.ENOEXEC, "it does not run code of 64 bits")  # noqa: TRY301
            self._extended_size = self._registers(_GET_REGISTERS, _EXTENDED, self._extended)
            _call_ptrace(_GET_MASK, self._thread, 8, ctypes.addressof(self._mask))
            # Block signals meanwhile, except those that an instruction itself raises.
            faults = {signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGTRAP, signal.SIGFPE}
            blocked = ctypes.c_uint64((2**64 - 1) & ~sum(1 << (number - 1) for number in faults))
            _call_ptrace(_SET_MASK, self._thread, 8, ctypes.addressof(blocked))
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the registers and signal mask, and let the thread continue."""
        try:
            # Registers restored in a stop before the return to user mode make the kernel restart
            # the interrupted system call.
            self._until = max(self._until, time.monotonic() + 1.0)
            self._interrupt()
            self._registers(_SET_REGISTERS, _EXTENDED, self._extended, self._extended_size)
            self._registers(_SET_REGISTERS, _GENERAL, self._saved)
            _call_ptrace(_SET_MASK, self._thread, 8, ctypes.addressof(self._mask))
        finally:
            self._leave()

    def system_call(self, number: int, instruction: int, *arguments: int) -> int:
        """Make the thread execute a system call.

        Args:
            number: Number of the call.
            instruction: Address of a `syscall` instruction in the program.
            arguments: At most six.

        Returns:
            The kernel's result; negative numbers are errors.

        Raises:
            OSError: ETIMEDOUT.
        """
        registers = self._prepared(instruction)
        registers.rax = number
        for name, value in zip(("rdi", "rsi", "rdx", "r10", "r8", "r9"), arguments, strict=False):
            setattr(registers, name, value & _NO_CALL)
        self._registers(_SET_REGISTERS, _GENERAL, registers)
        self._to_system_call()
        return self._after_system_call()

    def function_call(self, function: int, instruction: int, *arguments: int) -> int:
        """Make the thread call a function that returns an `int`; it returns to a `syscall`
        instruction, where it is stopped.

        Raises:
            OSError: ETIMEDOUT: it did not return in time.
        """
        registers = self._prepared(function)
        for name, value in zip(("rdi", "rsi", "rdx", "rcx", "r8", "r9"), arguments, strict=False):
            setattr(registers, name, value)
        registers.rsp = ((self._saved.rsp - _RED_ZONE) & ~15) - 8
        self.write(registers.rsp, instruction.to_bytes(8, "little"))
        self._registers(_SET_REGISTERS, _GENERAL, registers)
        while True:
            self._to_system_call()
            self._registers(_GET_REGISTERS, _GENERAL, registers)
            if (
                registers.rip == instruction + 2
                and registers.rsp > self._saved.rsp - _RED_ZONE - 32
            ):
                break
            self._after_system_call()  # a system call of the function itself
        result = ctypes.c_int32(
            registers.orig_rax & 0xFFFFFFFF
        ).value  # the result is in the register of the call's number
        registers.orig_rax = _NO_CALL
        self._registers(_SET_REGISTERS, _GENERAL, registers)
        self._after_system_call()
        return result

    def write(self, address: int, content: bytes) -> None:
        """Write into the process's memory.

        Raises:
            OSError: The address is not mapped.
        """
        descriptor = os.open(f"/proc/{self._thread}/mem", os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.pwrite(descriptor, content, address)
        finally:
            os.close(descriptor)

    def _prepared(self, address: int) -> _Registers:
        registers = _Registers.from_buffer_copy(self._saved)
        registers.rip, registers.orig_rax = address, _NO_CALL
        registers.eflags &= _CALL_FLAGS_MASK
        registers.rax = 0
        return registers

    def _to_system_call(self) -> None:
        """Let the thread run until it enters a system call, or leaves the current one."""
        number = 0
        while True:
            _call_ptrace(_SYSCALL, self._thread, 0, number)
            self._is_stopped = False
            status = self._next_stop()
            if os.WSTOPSIG(status) == _AT_SYSTEM_CALL:
                return
            # A signal is passed on to the program.
            number = 0 if status >> 16 else os.WSTOPSIG(status)

    def _after_system_call(self) -> int:
        self._to_system_call()
        registers = _Registers()
        self._registers(_GET_REGISTERS, _GENERAL, registers)
        return ctypes.c_int64(registers.rax).value

    def _interrupt(self) -> None:
        """Stop the thread where it returns to user mode, whether it runs or is stopped
        elsewhere.
        """
        number = 0
        while True:
            # Repeated, as any other stop discards the request.
            _call_ptrace(_INTERRUPT, self._thread)
            if self._is_stopped:
                _call_ptrace(_CONT, self._thread, 0, number)
                self._is_stopped = False
            status = self._next_stop()
            if status >> 16 == _EVENT_STOP:
                return
            # A signal is passed on to the program; other stops have none.
            number = (
                0 if status >> 16 or os.WSTOPSIG(status) == _AT_SYSTEM_CALL else os.WSTOPSIG(status)
            )

    def _next_stop(self) -> int:
        while True:
            pid, status = os.waitpid(self._thread, os.WNOHANG | _WALL)
            if pid and not os.WIFSTOPPED(status):
                raise ProcessLookupError(errno.ESRCH, "it has ended")
            if pid:
                self._is_stopped = True
                return status
            if time.monotonic() > self._until:
                raise TimeoutError(errno.ETIMEDOUT, "it did not stop in time")
            time.sleep(_POLL_S)

    def _registers(
        self,
        request: int,
        kind: int,
        buffer: ctypes.Structure | ctypes.Array[ctypes.c_char],
        size: int = 0,
    ) -> int:
        """Get or set a set of registers; returns its size in bytes."""
        vector = _Vector(ctypes.addressof(buffer), size or ctypes.sizeof(buffer))
        _call_ptrace(request, self._thread, kind, ctypes.addressof(vector))
        return int(vector.size)

    def _leave(self) -> None:
        # It has ended, or runs: then it is detached when this process ends.
        with contextlib.suppress(OSError):
            _call_ptrace(_DETACH, self._thread)
        self.pause_ns = time.monotonic_ns() - self._stopped_ns


def _call_ptrace(request: int, thread: int, address: int = 0, value: int = 0) -> None:
    if _LIBC.ptrace(request, thread, address, value) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


_SYS_PTRACE = 19  # the number of the capability
_YAMA = "kernel.yama.ptrace_scope"


def explain_attach_refusal(proc: Path = Path("/proc")) -> tuple[str, str]:
    """Returns why processes cannot be attached to, and what would help; both "" if they can."""
    if not is_architecture_supported():
        return f"the registers of {platform.machine()} are not known to it", ""
    try:
        scope = int(read(proc / "sys/kernel/yama/ptrace_scope"))
    except (OSError, ValueError):  # a kernel without Yama
        scope = 0
    if scope >= 3:
        return (
            f"Yama forbids it to everybody ({_YAMA} is {scope})",
            "it stays so until the host is started again",
        )
    # Yama exempts processes with CAP_SYS_PTRACE.
    status = read(proc / "self/status").splitlines() if scope else []
    capabilities = next(
        (int(line.split()[1], 16) for line in status if line.startswith(b"CapEff:")), 0
    )
    if scope and not capabilities >> _SYS_PTRACE & 1:
        return (
            f"Yama lets parents and root alone do so ({_YAMA} is {scope})",
            f"run the agent as root, or set {_YAMA} to 0",
        )
    if not is_ptrace_allowed():
        return (
            "a filter of system calls (seccomp) refuses ptrace(2)",
            "start the container with --cap-add SYS_PTRACE, or with a seccomp profile that allows it",
        )
    return "", ""


_ATTACH_TIMEOUT_S = 2.0  # for everything done while the thread is stopped
_MAX_TEXT_BYTES = 1 << 20
_MMAP, _MUNMAP = 9, 11  # numbers of system calls of x86-64
_SYSCALL_OPCODE = b"\x0f\x05"  # the instruction
_SYSCALL_SEARCH_BYTES = 64  # bytes of libc's `syscall` that are searched for the instruction
_LIBRARY_NAMES = ("libpython", "libc.so", "libc-2")  # searched in addition to the program itself
_ADD_PENDING, _RUN = "Py_AddPendingCall", "PyRun_SimpleString"
# Scheduled text must not raise, and KeyboardInterrupt may arrive while it runs.
_BOOTSTRAP = """\
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


def inject_order(*, pid: int, start_ticks: int, order: dict[str, Any]) -> dict[str, Any]:
    """Make a process execute an order, as soon as its main thread runs Python.

    Args:
        pid: The process.
        start_ticks: Its start time: its pid may have been reused.
        order: See `payload.AttachedWork`.

    Returns:
        `pause_ns`, how long its main thread was stopped; or `fault` (a slug) and `detail`.
    """
    try:
        if not is_architecture_supported():
            raise _AttachFaultError(explain_attach_refusal()[0], slug="not-permitted")  # noqa: TRY301
        _check(pid, start_ticks, order["folder"])
        functions, instruction = _find_python_functions(pid)
        source = Path(__file__).with_name("payload.py").read_text(encoding="utf-8")
        size = (
            -(-(len(_build_payload_text(source, order, 2**63, 2**63)) + 1) // mmap.PAGESIZE)
            * mmap.PAGESIZE
        )
        assert size <= _MAX_TEXT_BYTES
        with StoppedThread(pid, _ATTACH_TIMEOUT_S) as thread:
            _check_user(pid, order["folder"])  # it may run another program since it was looked at
            address = thread.system_call(
                _MMAP,
                instruction,
                0,
                size,
                mmap.PROT_READ | mmap.PROT_WRITE,
                mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS,
                -1,
                0,
            )
            if address < 0:
                raise OSError(-address, os.strerror(-address))  # noqa: TRY301
            thread.write(address, _build_payload_text(source, order, address, size))
            if thread.function_call(functions[_ADD_PENDING], instruction, functions[_RUN], address):
                thread.system_call(_MUNMAP, instruction, address, size)
                raise OSError(errno.EBUSY, "too much is scheduled in the program already")  # noqa: TRY301
    except _AttachFaultError as fault:
        return _build_fault(str(fault), slug=fault.slug)
    except (ProcessLookupError, FileNotFoundError):
        return _build_fault("the process has ended", slug="exited")
    except PermissionError:
        reason, _ = explain_attach_refusal()
        detail = f"the kernel does not let the agent attach to process {pid}" + (
            f": {reason}" if reason else ""
        )
        return _build_fault(detail, slug="not-permitted")
    except TimeoutError:
        return _build_fault(
            f"its main thread could not be had in {_ATTACH_TIMEOUT_S:g} s, and was let go",
            slug="not-stopped",
        )
    except OSError as error:
        return _build_fault((error.strerror or str(error)).lower(), slug="not-permitted")
    else:
        return {"pause_ns": thread.pause_ns}


def _build_fault(detail: str, *, slug: str) -> dict[str, Any]:
    return {"fault": slug, "detail": detail}


def _check(pid: int, start_ticks: int, directory: str) -> None:
    if not read_process_state(pid, start_ticks):
        raise ProcessLookupError
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    tracer = next(
        int(line.split()[1]) for line in status.splitlines() if line.startswith("TracerPid:")
    )
    if tracer:
        raise _AttachFaultError(f"it is traced already, by process {tracer}", slug="traced-already")
    _check_user(pid, directory)
    host_stat = os.stat(directory)  # noqa: PTH116
    try:
        process_stat = os.stat(f"/proc/{pid}/root{directory}")  # noqa: PTH116
    except (FileNotFoundError, NotADirectoryError) as error:
        if not read_process_state(pid, start_ticks):
            raise ProcessLookupError from error
        raise _AttachFaultError(f"there is no {directory} for it", slug="not-mounted") from error
    if (process_stat.st_dev, process_stat.st_ino) != (host_stat.st_dev, host_stat.st_ino):
        raise _AttachFaultError(f"{directory} is another directory for it", slug="not-mounted")


def _check_user(pid: int, directory: str) -> None:
    """Check that a process has no rights beyond those of whose the directory is."""
    if read_user(f"/proc/{pid}") != Path(directory).stat().st_uid:
        raise _AttachFaultError("it has more rights than its user", slug="not-permitted")


def _find_python_functions(pid: int) -> tuple[dict[str, int], int]:
    """Returns the addresses of Python's two functions in the process, and of a `syscall`
    instruction.
    """
    parts = [mapping for mapping in read_mappings(pid) if mapping.executable]
    if not any(mapping.path.rpartition("/")[2].startswith("libtorch") for mapping in parts):
        raise _AttachFaultError("it has no PyTorch", slug="no-torch")
    program = str(Path(f"/proc/{pid}/exe").readlink())
    functions: dict[str, int] = {}
    instruction = 0
    for mapping in parts:
        if mapping.path != program and not mapping.path.rpartition("/")[2].startswith(
            _LIBRARY_NAMES
        ):
            continue
        descriptor = open_mapped(pid, mapping)
        try:
            elf = Elf(descriptor)
            for symbol in (_ADD_PENDING, _RUN, "syscall"):
                function = elf.find(f"{symbol}\0")
                if (
                    function is None
                    or not 0 <= function.offset - mapping.offset < mapping.end - mapping.start
                ):
                    continue
                address = mapping.start + function.offset - mapping.offset
                if symbol != "syscall":
                    functions.setdefault(symbol, address)
                elif not instruction:
                    position = os.pread(descriptor, _SYSCALL_SEARCH_BYTES, function.offset).find(
                        _SYSCALL_OPCODE
                    )
                    instruction = address + position if position >= 0 else 0
        finally:
            os.close(descriptor)
    if len(functions) < 2 or not instruction:
        raise _AttachFaultError("it runs no CPython whose functions can be seen", slug="not-python")
    return functions, instruction


def _build_payload_text(source: str, order: dict[str, Any], address: int, size: int) -> bytes:
    """Returns the text for Python to run: payload.py and, as a literal in it, the order."""
    names = {
        "__name__": "traceloom_attached",
        "ORDER": json.dumps(order | {"text_at": address, "text_bytes": size}),
    }
    # As literals, so that no value is ever interpreted as code.
    return _BOOTSTRAP.format(source=ascii(source), names=ascii(names)).encode("ascii")
