"""Files written next to the steps, whole or not at all; the lock of the directory.

A file is made beside its place and renamed. Where the directory is full or forbidden, it goes to the
temporary directory, and the user is told.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import json
import math
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from traceloom.capture.settings import print_once
from traceloom.errors import OutputError

if sys.platform != "win32":
    import resource

_T = TypeVar("_T")
GZIP_LEVEL = 3
_CHUNK_BYTES = 1 << 20
_WRITER_SECONDS = 120.0
_RESERVED_PART = 10  # of a disk: one part of so many stays free
NOTES = ".recording"  # directory of claims and diagnoses, removed at the end
WINDOWS = "windows"  # in it: the pipe that tells `traceloom record` of windows
OPENS, CLOSES = "opens", "closes"


def reserve_name(directory: Path, rank: int | None, *, is_child: bool = False) -> str:
    """Take a name for this process's files that no other process has taken.

    `rank<N>`; a second process of the same rank (a restart) becomes `rank<N>-pid<P>`. Of the
    processes without a rank the first becomes `rank0`, the others `pid<P>`; so does one that a
    recorded process has started (`is_child`).
    """
    first = f"rank{rank or 0}"
    second = f"pid{os.getpid()}" if rank is None else f"{first}-pid{os.getpid()}"
    for stem in (second,) if rank is None and is_child else (first, second):
        if (directory / f"{stem}.capture.json").exists():
            continue
        with contextlib.suppress(FileExistsError):
            (directory / NOTES / stem).open("x").close()
            return stem
    return second


def wait_for_writers(notes: Path) -> None:
    """Waits for forks that still write what their processes had recorded."""
    deadline = time.monotonic() + _WRITER_SECONDS
    for path in notes.glob("*.writing"):
        with contextlib.suppress(OSError, ValueError):
            process = int(path.read_text(encoding="ascii"))
            while path.exists() and time.monotonic() < deadline:
                os.kill(process, 0)
                time.sleep(0.02)


def read_process_namespace() -> str:
    """Returns what tells apart processes whose numbers do not mean the same."""
    return os.readlink("/proc/self/ns/pid")  # noqa: PTH115  (it is no path)


def announce_window(directory: Path, word: str) -> None:
    """Tells the process of `traceloom record`, where one looks, that the window of this process
    opens or is over (`OPENS`, `CLOSES`).
    """
    with contextlib.suppress(OSError):  # nobody looks
        # As a reader, too: neither can block, and no signal comes where the other one is gone.
        pipe = os.open(directory / NOTES / WINDOWS, os.O_RDWR | os.O_NONBLOCK)
        with os.fdopen(pipe, "wb", buffering=0) as file:
            file.write(f"{word} {os.getpid()} {read_process_namespace()}\n".encode())


@contextlib.contextmanager
def write_atomically(path: Path) -> Iterator[Path]:
    """Give a temporary file that becomes `path` at the end of the block; where that fails, nothing
    is left behind.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically.

    Raises:
        OSError: It could not be written; nothing is left behind.
    """
    with write_atomically(path) as temporary:
        temporary.write_text(json.dumps(value, separators=(",", ":")) + "\n", encoding="utf-8")


def describe_write_error(error: OSError, directory: Path) -> str:
    """Why something cannot be written, and as whom: a program may have changed its user since it
    began.
    """
    why = error.strerror or str(error)
    if isinstance(error, (PermissionError, FileNotFoundError)) and hasattr(os, "geteuid"):
        why += f"; the process runs as user {os.geteuid()}"
        with contextlib.suppress(OSError):
            why += f", the directory belongs to user {directory.stat().st_uid}"
    return why


def _has_room(directory: Path, expected_bytes: int) -> bool:
    usage = shutil.disk_usage(directory)
    return usage.free - usage.total // _RESERVED_PART >= expected_bytes


def _read_file_limit() -> float:
    if sys.platform == "win32":
        return math.inf
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return math.inf if limit == resource.RLIM_INFINITY else limit


class CaptureFolders:
    """Where files go: the capture directory, or a refuge in the temporary directory where that is
    full or forbidden.
    """

    def __init__(self, directory: Path, note: Callable[[str, str], None] = print_once) -> None:
        self.directory = directory
        self._note = note
        self._refuge: Path | None = None

    def for_torch(self, expected_bytes: int) -> Path:
        """As `choose`, for a file that PyTorch writes: it takes no path that is not UTF-8."""
        try:
            str(self.directory).encode("utf-8")
        except UnicodeEncodeError:
            return self.refuge()
        return self.choose(expected_bytes)

    def choose(self, expected_bytes: int) -> Path:
        """A directory for a file of about this size before compression.

        The program's own files need room as well: a tenth of a disk stays free, and a limit on the
        size of files is one for ours too.

        Raises:
            OSError: There is no room for it.
        """
        if expected_bytes > _read_file_limit():
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        with contextlib.suppress(OSError):
            self.directory.mkdir(parents=True, exist_ok=True)
            if os.access(
                self.directory,
                os.W_OK | os.X_OK,
                effective_ids=os.access in os.supports_effective_ids,
            ) and _has_room(self.directory, expected_bytes):
                return self.directory
        if not _has_room(Path(tempfile.gettempdir()), expected_bytes):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self.refuge()

    def refuge(self) -> Path:
        if self._refuge is None:
            try:
                self._refuge = Path(tempfile.mkdtemp(prefix="traceloom-"))
            except OSError as error:
                both = f"neither `{self.directory}` nor the temporary directory can be written"
                raise OSError(
                    error.errno, f"{both}: {describe_write_error(error, self.directory)}"
                ) from error
        return self._refuge

    def compress(self, plain: Path) -> Path:
        """Make `x.json.gz` of `x.json` in the capture directory, atomically; the file that holds
        the data afterwards.

        Where that is impossible, it is compressed where it is, or stays as it is.
        """

        def copy(sink: gzip.GzipFile) -> None:
            with plain.open("rb") as source:
                shutil.copyfileobj(source, sink, _CHUNK_BYTES)

        try:
            target, _ = self.write_compressed(f"{plain.name}.gz", plain.parent, copy)
        except OSError as error:
            why = describe_write_error(error, self.directory)
            print_once("not-compressed", f"`{plain}` stays uncompressed: {why}")
            if plain.parent != self.directory:
                self.say_moved(plain.parent, why)
            return plain
        plain.unlink()
        return target

    def write_compressed(
        self, name: str, fallback: Path, write: Callable[[gzip.GzipFile], _T]
    ) -> tuple[Path, _T]:
        """Writes a compressed file into the capture directory, atomically, or else into another one.

        Returns:
            The file, and what `write` returned.

        Raises:
            OSError: It can be written into neither; the error is that of the capture directory.
        """
        problem: OSError | None = None
        for folder in dict.fromkeys((self.directory, fallback)):
            target = folder / name
            try:
                with (
                    write_atomically(target) as temporary,
                    gzip.open(temporary, "wb", compresslevel=GZIP_LEVEL) as sink,
                ):
                    result = write(sink)
            except OSError as error:
                problem = problem or error
                continue
            if problem is not None:
                self.say_moved(folder, describe_write_error(problem, self.directory))
            return target, result
        assert problem is not None
        raise problem

    def say_moved(self, folder: Path, why: str) -> None:
        """Says that the capture directory takes no more data, and where it goes."""
        where = f"what was recorded is in `{folder}`"
        self._note("capture-moved", f"`{self.directory}` takes no more data ({why}); {where}")

    def leave(self) -> None:
        """Remove the refuge where it was not needed in the end."""
        if self._refuge is not None:
            with contextlib.suppress(OSError):
                self._refuge.rmdir()


if sys.platform != "win32":
    import fcntl

NAME = "lock"


class Lock:
    """One recording's claim to a directory.

    Args:
        path: The lock's file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._handle: int | None = None
        self._process = os.getpid()

    @property
    def held(self) -> bool:
        return self._handle is not None and self._process == os.getpid()

    def take(self) -> None:
        """Take it; a lock whose holder is gone is free.

        Raises:
            OutputError: slug `being-recorded`.
            OSError: There can be no such file.
        """
        while self._handle is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(
                self._path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o644
            )
            is_free = True
            if sys.platform != "win32":
                try:
                    fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError as error:  # where a file system has no locks, nobody holds one
                    is_free = not isinstance(error, (BlockingIOError, PermissionError))
            if not is_free:
                holder = ""
                with contextlib.suppress(
                    OSError, ValueError, KeyError, TypeError
                ):  # it is being written just now
                    about = json.loads(os.read(handle, 1000))
                    holder = f" (process {int(about['process'])} on {about['host']})"
                os.close(handle)
                raise OutputError(
                    f"another recording into this directory is running{holder}",
                    slug="being-recorded",
                    where=str(self._path.parent.parent),
                    hint="wait for its end, or choose another directory",
                )
            with contextlib.suppress(
                OSError
            ):  # its last holder may have removed it just now: then it is none any more
                if os.path.samestat(self._path.stat(), os.fstat(handle)):
                    os.truncate(handle, 0)
                    os.write(
                        handle,
                        json.dumps({"process": os.getpid(), "host": socket.gethostname()}).encode(),
                    )
                    self._handle = handle
                    return
            os.close(handle)

    def release(self) -> None:
        if self.held:  # not of a fork, which does not hold what its parent does
            with contextlib.suppress(OSError):
                self._path.unlink()
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)


def check_free(notes: Path, pattern: str) -> None:
    """Refuse where one of these locks is held; those whose holders are gone are removed.

    Raises:
        OutputError: slug `being-recorded`.
    """
    for path in notes.glob(pattern):
        other = Lock(path)
        with contextlib.suppress(OSError):  # gone meanwhile
            other.take()
        other.release()
