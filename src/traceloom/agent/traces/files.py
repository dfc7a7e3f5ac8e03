"""Trace directories per user, and verification and compression of traces that a process wrote.

    ROOT/UID/incoming/      the user's own: libkineto writes there, as its process
    ROOT/UID/REQUEST/       the agent's: verified and compressed copies
    ROOT/UID/hangs/HANG/    written by the agent, then given to the user: evidence of a hang

Verification runs in a worker process (`worker.py`). The user, who may be hostile, can change
`incoming` at any time: a file there is opened once without following links, has to be a regular
file of that user with one name, and is copied before it is read.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from isal import igzip

from traceloom.errors import InputError, OutputError
from traceloom.system.files import compute_sha256, open_own

INCOMING_DIRECTORY = "incoming"
_HANGS_DIRECTORY = "hangs"
_STALE_AFTER_S = 3600.0


class TraceDirectories:
    """The directories below the root; blocks, so it is called in a thread.

    Args:
        root: Nothing is written outside of it.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def incoming(self, uid: int) -> Path:
        return self.root / str(uid) / INCOMING_DIRECTORY

    def of_request(self, uid: int, request: str) -> Path:
        return self.root / str(uid) / request

    def prepare(self, uid: int, request: str) -> None:
        """Create the directories for a request.

        Raises:
            OutputError: `cannot-write`.
        """
        with _report_write_errors(self.root):
            self._make(uid, self.of_request(uid, request))
            path = self.incoming(uid)
            with contextlib.suppress(FileExistsError):
                path.mkdir(mode=0o700)
            handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.geteuid() != uid:
                    os.fchown(handle, uid, -1)
                os.fchmod(handle, 0o700)
            finally:
                os.close(handle)

    def hangs(self, uid: int) -> Path:
        """Returns the directory of the bundles of a user's hanging jobs."""
        return self.root / str(uid) / _HANGS_DIRECTORY

    def prepare_hang(self, uid: int, hang: str) -> Path:
        """Create the directory of a bundle.

        Raises:
            OutputError: `cannot-write`.
        """
        path = self.hangs(uid) / hang
        with _report_write_errors(self.root):
            self._make(uid, path.parent, path)
        return path

    def hand_over(self, uid: int, directory: Path) -> None:
        """Give a complete bundle to its user.

        Raises:
            OutputError: `cannot-write`.
        """
        if os.geteuid() == uid:
            return
        with _report_write_errors(self.root), _open_directory(directory) as handle:
            for name in os.listdir(handle):  # noqa: PTH208  (of what is open, whatever has its name)
                os.chown(name, uid, -1, dir_fd=handle, follow_symlinks=False)
            os.fchown(handle, uid, -1)

    def _make(self, uid: int, *paths: Path) -> None:
        """Create the directory of a user, and these directories in it, the last one accessible to
        the agent only.
        """
        shared = 0o700 if os.geteuid() == uid else 0o711
        modes = [
            (self.root, 0o711),
            (self.root / str(uid), shared),
            *((path, shared) for path in paths[:-1]),
        ]
        for path, mode in (*modes, (paths[-1], 0o700)):
            path.mkdir(mode=mode, parents=True, exist_ok=True)
            if path.is_symlink() or path.stat().st_uid != os.geteuid():
                raise OutputError(
                    "that directory is not the agent's", slug="cannot-write", where=str(path)
                )

    def remove(self, uid: int, request: str) -> None:
        shutil.rmtree(self.of_request(uid, request), ignore_errors=True)

    def sweep(self) -> None:
        """Delete leftovers in users' directories: traces that no request waits for any more."""
        old = time.time() - _STALE_AFTER_S
        with contextlib.suppress(OSError):
            for path in self.root.iterdir():
                directory = path / INCOMING_DIRECTORY
                with (
                    contextlib.suppress(OSError),
                    _open_directory(directory) as handle,
                    os.scandir(handle) as entries,
                ):
                    for entry in entries:
                        with contextlib.suppress(OSError):  # a directory, or deleted meanwhile
                            if entry.stat(follow_symlinks=False).st_mtime < old:
                                os.unlink(entry.name, dir_fd=handle)


def delete_output(directory: Path, name: str) -> None:
    """Delete the complete and partial output of a process under a name; no link is followed."""
    for part in (name, f"{name}.tmp"):
        with contextlib.suppress(OSError), _open_directory(directory) as handle:
            os.unlink(part, dir_fd=handle)


@contextlib.contextmanager
def _report_write_errors(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"traces cannot be written: {(error.strerror or str(error)).lower()}",
            slug="cannot-write",
            where=str(error.filename or root),
            hint="`paths.traces` of agent.toml",
        ) from error


@contextlib.contextmanager
def _open_directory(directory: Path) -> Iterator[int]:
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield handle
    finally:
        os.close(handle)


_CHUNK_BYTES = 1 << 20
_COMPRESSION_LEVEL = 2
_SLACK_NS = 5_000_000_000  # a busy machine starts and ends late
_LATEST_NS = 2**61  # max time in a trace, so that sums of two fit into 64 bits
_BASE_MEMORY_BYTES = 1 << 30  # address space of the interpreter and its libraries
# Max memory of a trace's objects relative to its file; crafted files that need more are refused.
_MEMORY_FACTOR = 8
_DISK_FULL_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class _Operator(msgspec.Struct):
    name: str = ""
    ph: str = ""
    cat: str = ""
    ts: float | str = 0.0
    dur: float = 0.0


class _Trace(msgspec.Struct):
    traceEvents: list[_Operator]  # noqa: N815  (as in the file)
    trace_id: str = ""
    baseTimeNanoseconds: int = 0  # noqa: N815


class _FaultError(Exception):
    def __init__(self, detail: str, *, slug: str) -> None:
        super().__init__(detail)
        self.slug = slug


def verify_and_store(
    *,
    folder: str,
    name: str,
    uid: int,
    to: str,
    max_bytes: int,
    max_kept_bytes: int,
    trace_id: str,
    start_ns: int | None,
    duration_s: float | None,
    steps: int | None,
    max_result_bytes: int | None = None,
) -> dict[str, Any]:
    """Verify a trace, and keep it compressed as `to`.

    Args:
        folder: The directory that it was written into.
        name: Its file name.
        uid: Its required owner.
        to: Destination, an absolute path.
        max_bytes: Max size of the written file.
        max_kept_bytes: Max size of everything kept for this user.
        trace_id: The id that it must contain.
        start_ns: Requested start of its window; None if there was none.
        duration_s: Requested duration; None for a trace by steps.
        steps: Min number of steps; None for any.
        max_result_bytes: Max size of the kept file; None for any.

    Returns:
        Its content (`operators`, `steps`, `window_start_ns`, `window_end_ns`) and the kept file's
            `bytes` and `sha256`; or `fault` (a slug) and `detail`.
    """
    target = Path(to)
    copy = target.with_name(f".{target.name}.copy")

    def kept() -> dict[str, Any]:
        _copy(folder, name, uid, max_bytes, copy)
        facts = _verify_trace(copy, trace_id, start_ns, duration_s, steps)
        return facts | _compress_trace(copy, target, max_kept_bytes, max_result_bytes)

    return _return_facts_or_fault(kept, copy)


def verify_and_store_memory(
    *, folder: str, name: str, uid: int, to: str, max_bytes: int, max_kept_bytes: int
) -> dict[str, Any]:
    """Verify a memory snapshot, and keep it as `to`: it is an untrusted pickle, of which nothing is
    executed.

    Args:
        folder: The directory that it was written into.
        name: Its file name.
        uid: Its required owner.
        to: Destination, an absolute path.
        max_bytes: Max size of the file.
        max_kept_bytes: Max size of everything kept for this user.

    Returns:
        The kept file's `bytes` and `sha256`; or `fault` (a slug) and `detail`.
    """
    from traceloom.formats.memory_files import read_snapshot

    target = Path(to)
    copy = target.with_name(f".{target.name}.copy")

    def kept() -> dict[str, Any]:
        _copy(folder, name, uid, max_bytes, copy)
        read_snapshot(copy)
        size = copy.stat().st_size
        if _count_stored_bytes(target) + size > max_kept_bytes:
            raise _FaultError(
                slug="quota",
                detail=f"more than {max_kept_bytes:,} bytes of this user would be kept",
            )
        with copy.open("rb") as reader:
            digest = compute_sha256(reader)
        copy.replace(target)
        return {"bytes": size, "sha256": digest}

    return _return_facts_or_fault(kept, copy)


def _return_facts_or_fault(store: Callable[[], dict[str, Any]], copy: Path) -> dict[str, Any]:
    """Returns the facts of the kept file, or the fault; the temporary copy is deleted in any
    case.
    """
    try:
        return store()
    except _FaultError as fault:
        return {"fault": fault.slug, "detail": str(fault)}
    except InputError as error:
        return {"fault": error.slug, "detail": error.message}
    except OSError as error:
        return {
            "fault": "disk-full" if error.errno in _DISK_FULL_ERRORS else "cannot-write",
            "detail": (error.strerror or str(error)).lower(),
        }
    finally:
        with contextlib.suppress(OSError):  # the disk may have become read-only
            copy.unlink(missing_ok=True)


def _copy(source_directory: str, name: str, uid: int, max_bytes: int, copy: Path) -> None:
    try:  # the way to the directory is the agent's, so that only the last name may be a link
        source = open_own(Path(source_directory, name), uid)
    except OSError as error:
        raise _FaultError(
            slug="foreign-file",
            detail=f"it cannot be opened: {(error.strerror or str(error)).lower()}",
        ) from error
    with os.fdopen(source, "rb") as reader, copy.open("wb") as writer:
        remaining = max_bytes
        while chunk := reader.read(min(_CHUNK_BYTES, remaining + 1)):
            remaining -= len(chunk)
            if remaining < 0:
                raise _FaultError(slug="quota", detail=f"it is larger than {max_bytes:,} bytes")
            writer.write(chunk)


def _verify_trace(
    path: Path, trace_id: str, start_ns: int | None, duration_s: float | None, steps: int | None
) -> dict[str, Any]:
    if not path.stat().st_size:
        raise _FaultError(slug="damaged", detail="it holds nothing")
    # A user's process must not make this one exhaust the host's memory, which would hit other
    # users.
    memory_limit, hard = (
        _BASE_MEMORY_BYTES + _MEMORY_FACTOR * path.stat().st_size,
        resource.getrlimit(resource.RLIMIT_AS)[1],
    )
    resource.setrlimit(
        resource.RLIMIT_AS,
        (memory_limit if hard == resource.RLIM_INFINITY else min(memory_limit, hard), hard),
    )
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        try:
            trace = msgspec.json.decode(memoryview(text), type=_Trace)
        except MemoryError:
            raise _FaultError(
                slug="damaged", detail="it needs more memory than a trace of its size"
            ) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise _FaultError(
                slug="damaged", detail=f"it is no whole trace: {error}"
            ) from None  # holds a view of the file
    if trace.trace_id != trace_id:
        raise _FaultError(slug="damaged", detail="it is the trace of another request")
    windows = [
        event
        for event in trace.traceEvents
        if event.ph == "X" and event.name.startswith("PyTorch Profiler (")
    ]
    if not windows:  # PyTorch was still being imported: only libkineto recorded
        raise _FaultError(slug="empty", detail="PyTorch's profiler was not there yet")
    ts, dur = windows[0].ts, windows[0].dur
    if (
        not isinstance(ts, float)
        or not 0 <= trace.baseTimeNanoseconds < _LATEST_NS
        or not 0 <= ts < _LATEST_NS / 1000
        or not 0 < dur < _LATEST_NS / 1000
    ):
        raise _FaultError(slug="damaged", detail="it does not say when its window was")
    began_ns = trace.baseTimeNanoseconds + round(ts * 1000)
    ended_ns = began_ns + round(dur * 1000)
    if duration_s is not None and not 0 < ended_ns - began_ns < duration_s * 1e9 + _SLACK_NS:
        lasted = (ended_ns - began_ns) / 1e9
        raise _FaultError(
            slug="damaged", detail=f"its window is {lasted:.3f} s, asked for were {duration_s} s"
        )
    if start_ns is not None and not -_SLACK_NS / 10 < began_ns - start_ns < _SLACK_NS:
        raise _FaultError(
            slug="damaged",
            detail=f"its window began {(began_ns - start_ns) / 1e9:+.3f} s from when it was to",
        )
    operators = sum(event.cat == "cpu_op" for event in trace.traceEvents)
    marks = [
        event.name
        for event in trace.traceEvents
        if event.cat == "user_annotation" and event.ph == "X"
    ]
    count = max(
        sum(name.startswith(mark) for name in marks)
        for mark in ("Optimizer.step#", "ProfilerStep#")
    )
    if steps is not None and count < steps:
        raise _FaultError(slug="not-stepping", detail=f"it holds {count} of {steps} steps")
    if not operators:
        raise _FaultError(slug="empty", detail="no operator ran in its window")
    return {
        "operators": operators,
        "steps": count,
        "window_start_ns": began_ns,
        "window_end_ns": ended_ns,
    }


def _compress_trace(
    copy: Path, target: Path, max_stored_bytes: int, max_result_bytes: int | None
) -> dict[str, Any]:
    stored_bytes = _count_stored_bytes(target)
    part = target.with_name(f".{target.name}.part")
    try:
        with copy.open("rb") as reader, part.open("w+b") as writer:
            with igzip.GzipFile(
                filename="", fileobj=writer, mode="wb", compresslevel=_COMPRESSION_LEVEL, mtime=0
            ) as packed:
                while chunk := reader.read(_CHUNK_BYTES):
                    packed.write(chunk)
            writer.seek(0)
            digest = compute_sha256(writer)
            size = writer.tell()
            os.fsync(writer.fileno())
        if stored_bytes + size > max_stored_bytes:
            raise _FaultError(
                slug="quota",
                detail=f"more than {max_stored_bytes:,} bytes of this user would be kept",
            )
        if max_result_bytes is not None and size > max_result_bytes:
            raise _FaultError(
                slug="quota",
                detail=f"{size:,} bytes are more than {max_result_bytes:,} that it may have",
            )
        part.replace(target)
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
    return {"bytes": size, "sha256": digest}


def _count_stored_bytes(target: Path) -> int:
    """Returns the bytes of all requests of the destination's user; files not kept yet start with a
    dot.
    """
    stored_bytes = 0
    for entry in target.parents[1].glob("*/*"):
        if entry.parent.name != INCOMING_DIRECTORY and not entry.name.startswith("."):
            with contextlib.suppress(FileNotFoundError):
                stored_bytes += entry.lstat().st_size
    return stored_bytes


def write_document(path: str, document: dict[str, Any]) -> None:
    """Write `capture.json` atomically.

    Raises:
        OSError: It cannot be written.
    """
    part = Path(f"{path}.part")
    try:
        part.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1))
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
