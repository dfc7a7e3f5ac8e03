"""Decodes one file in several processes, starting before Polars is imported (see core.md 3c).

A part begins where an entry ends, near an agreed byte. Something that looks like such an end may be
inside a string or a list of an entry; only the process that has decoded all of the preceding part
can decide. So each process stops only where its own text proves that the next part can begin, and
parts are joined only where one begins exactly where the other stopped. Otherwise this process
decodes the rest alone.

Python runs one thread at a time in a process, so using another core needs another process. It is a
fork, which costs a hundredth of what a new interpreter would. The fork inherits nothing of the
other threads of this process except the locks that they held, so decoding uses only code that takes
none of their locks: Polars is not used. If anything goes wrong in the fork, nothing is lost: the
file is then decoded here.
"""

import contextlib
import gc
import mmap
import os
import pickle
import select
import signal
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

from msgspec import Struct

from traceloom.formats.kineto_columns import Columns, ColumnTables, Decoded, Step, decode
from traceloom.formats.kineto_document import TextRange, store_entry
from traceloom.formats.resync import DamageLog
from traceloom.system import process, processes
from traceloom.trace import mapped_arrays
from traceloom.trace.array_types import Array
from traceloom.trace.cache import Cache, FileStamp
from traceloom.trace.mapped_arrays import BLOCK_POOL

MIN_TEXT_BYTES = 1 << 23  # bytes of text that justify a process
# Bytes of text that are decoded in the time that handing over a part takes.
_HANDOVER_BYTES = 7 << 20
# Processes for one compressed file, since each has to unpack everything before its part.
_MAX_GZIP_PROCESSES = 4
_MAX_PROCESSES = 8
_MAX_EXPANSION = 250
# Bytes of memory of a process: larger page tables take longer to copy than is gained.
_MAX_FORK_BYTES = 2 << 30
_TIMEOUT_S = 30  # beyond what the file has taken so far


class ForkResult(Struct, frozen=True):
    """The data of a part other than its columns; see `Decoded`."""

    legend: ColumnTables
    metadata: dict[str, Any]
    damage: DamageLog
    size: int
    began: int | None
    left_at: int | None


class Fork:
    """A process that decodes a part of a file.

    Raises:
        OSError: No further process, file or memory is available.
    """

    def __init__(self, path: Path, part: TextRange) -> None:
        self._since = time.monotonic()
        self._until_stopped = contextlib.ExitStack()
        parent = os.getpid()
        answer, write_fd = os.pipe()
        try:
            with process.defer_signals():
                with warnings.catch_warnings():
                    warnings.simplefilter(
                        "ignore", DeprecationWarning
                    )  # about other threads: see the module's docstring
                    self._process = os.fork()
                if not self._process:
                    _decode_into(path, part, write_fd, parent)
                self._until_stopped.enter_context(process.clean_up_on_exit(self._kill))
        except OSError:
            os.close(answer)
            raise
        finally:
            os.close(write_fd)
        self._answer = open(answer, "rb")  # noqa: PTH123, SIM115  (no path; open until `stop`)

    def result(self) -> ForkResult | None:
        """Waits for the process and returns what it decoded; None if it failed."""
        waiting = select.poll()
        waiting.register(self._answer, select.POLLIN)
        took_s = time.monotonic() - self._since
        if not waiting.poll((_TIMEOUT_S + 4 * took_s) * 1000):
            return None
        try:
            decoded: ForkResult = pickle.load(self._answer)  # noqa: S301  (written by this very program)
        except (EOFError, pickle.UnpicklingError):
            return None
        return decoded

    def pieces(self) -> Iterator[tuple[str, str, Array]]:
        """Yields the decoded columns, in the form of `Columns.pieces`.

        Raises:
            EOFError: The process was killed.
        """
        while (chunk := pickle.load(self._answer)) is not None:  # noqa: S301
            yield chunk

    def stop(self) -> None:
        """Kills the process if it is still running."""
        self._answer.close()
        self._until_stopped.close()
        self._kill()
        with contextlib.suppress(
            ChildProcessError
        ):  # where SIGCHLD is ignored, the system has reaped it already
            os.waitpid(self._process, 0)

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process, signal.SIGKILL)


def count_usable_cores() -> int:
    """Returns how many processes may decode at once; 1 where this process must not be forked."""
    if sys.platform != "linux":
        return 1
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return 1 if pages * mmap.PAGESIZE > _MAX_FORK_BYTES else processes.count_cores()


def _decode_into(path: Path, part: TextRange, write_fd: int, parent: int) -> NoReturn:
    try:
        process.forget_in_child()
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in range(
            3
        ):  # a reader waiting for the end of our output must not wait for this process
            os.dup2(nowhere, stream)
        for descriptor in set(map(int, os.listdir("/proc/self/fd"))) - {0, 1, 2, write_fd}:  # noqa: PTH208  (of names alone)
            with contextlib.suppress(OSError):  # the listing itself is among them
                os.close(descriptor)
        BLOCK_POOL.forget()
        gc.disable()

        def step(_read: int, _text: int) -> None:
            if os.getppid() != parent:
                os._exit(0)  # no process waits for the result any more

        decoded = decode(path, step, part=part)
        columns = decoded.columns
        result = ForkResult(
            columns.legend(),
            decoded.metadata,
            decoded.damage,
            decoded.size,
            decoded.began,
            decoded.left_at,
        )
        with open(write_fd, "wb") as pipe:
            for item in chain([result], columns.pieces(), [None]):
                pickle.dump(item, pipe, pickle.HIGHEST_PROTOCOL)
    finally:
        os._exit(0)


class Helpers:
    """Forks that decode a file from a given byte on.

    Args:
        path: The file.
        starts: Bytes of the text at which their parts begin; 0 if they decode all of it.
        size: Bytes of the text.

    Raises:
        OSError: Not enough processes are available.

    Attributes:
        first: Byte at which the first part begins.
        share: The whole text as a multiple of the part that this process decodes itself.
    """

    def __init__(self, path: Path, starts: list[int], size: int) -> None:
        self.first = starts[0]
        self.share = size / max(1, self.first)
        self._forks: list[Fork] = []
        self._results: list[ForkResult] = []
        try:
            for start, until in zip(starts, [*starts[1:], None], strict=True):
                self._forks.append(Fork(path, TextRange(start, until)))
        except OSError:
            self.stop()
            raise

    def have(self, byte: int) -> bool:
        """Whether the forks decoded everything after a byte; waits until they have."""
        position: int | None = byte
        for fork in self._forks:
            decoded = fork.result()
            if decoded is None or decoded.began != position:
                break
            self._results.append(decoded)
            if (position := decoded.left_at) is None:
                return True
        return False

    def join(self, target: Decoded) -> None:
        """Adds what the forks decoded to `target`, which holds what precedes it.

        Raises:
            EOFError: A fork was killed; `target` is unusable then.
        """
        if self._results[-1].size >= mapped_arrays.MIN_SPILL_BYTES and target.columns.spill is None:
            target.columns.spill = mapped_arrays.ColumnSpool()
        for fork, decoded in zip(
            self._forks, self._results, strict=False
        ):  # one may have continued to the end by itself
            target.columns.extend(decoded.legend, fork.pieces())
            for key, value in decoded.metadata.items():
                store_entry(target.metadata, key, value, target.damage)
            target.damage.add(decoded.damage)
            target.size = decoded.size

    def stop(self) -> None:
        for fork in self._forks:
            fork.stop()


def start_helpers(path: Path, processes: int | None = None, lead: int = 0) -> Helpers | None:
    """Starts decoding a file in as many processes as are worthwhile, this one included; None where
    one suffices.

    Args:
        path: The file.
        processes: Max number of processes; all cores if None.
        lead: Bytes of text that helpers decode before this process can begin.

    Raises:
        OSError: The file cannot be read, or not enough processes are available.
    """
    size, max_processes = path.stat().st_size, _MAX_PROCESSES
    with path.open("rb") as file:
        if file.read(2) == b"\x1f\x8b":
            max_processes = _MAX_GZIP_PROCESSES
            if size >= 4:  # gzip states the size of the text at its end, and may be wrong
                file.seek(-4, os.SEEK_END)
                size = min(max(int.from_bytes(file.read(4), "little"), size), size * _MAX_EXPANSION)
    starts = compute_part_starts(
        size, min(count_usable_cores(), processes or max_processes, max_processes), lead
    )
    return Helpers(path, starts, size) if starts else None


def compute_part_starts(size: int, processes: int, lead: int) -> list[int]:
    """Returns where the parts of the other processes begin, in bytes of the text; empty where they
    are not worthwhile.
    """
    helper_count = min(processes - 1, max(1, size // MIN_TEXT_BYTES - (lead == 0)))
    local_bytes = (size - helper_count * (lead - _HANDOVER_BYTES)) // (helper_count + 1)
    if local_bytes < MIN_TEXT_BYTES:
        local_bytes = 0
    if helper_count < 1 or (not local_bytes and not lead):
        return []
    return [
        local_bytes + (size - local_bytes) * number // helper_count
        for number in range(helper_count)
    ]


def decode_with(helping: Helpers, path: str | Path, step: Step | None = None) -> Decoded:
    """Decodes the first part here and takes the rest from helpers, which are stopped afterwards.

    Raises:
        InputError: As for `decode`.
    """
    try:
        decoded = None
        if helping.first:  # the part before that of the first helper; all of it where helpers fail
            scaled = (
                None if step is None else lambda read, text: step(int(read * helping.share), text)
            )
            decoded = decode(path, scaled, TextRange(until=helping.first), helping.have)
        elif helping.have(0):
            damage = DamageLog()
            decoded = Decoded(Columns(damage), {}, damage, 0, 0, 0)
        if decoded is not None and decoded.left_at is not None:
            try:
                helping.join(decoded)
            except (EOFError, pickle.UnpicklingError):  # one was killed meanwhile
                decoded.columns.close()
                decoded = None
            except BaseException:
                decoded.columns.close()
                raise
        if decoded is not None:
            return decoded
    finally:
        helping.stop()
    return decode(path, step)


_MIN_FILE_BYTES = 1 << 17  # bytes of a file: smaller ones are decoded at once
_LEAD_BYTES = 29_000_000  # bytes of text that are decoded until the libraries are loaded

_running: dict[Path, tuple[Helpers, FileStamp]] = {}


@contextlib.contextmanager
def decode_ahead(paths: Sequence[str | Path], cache: Cache | None) -> Iterator[None]:
    """Decodes the largest of these files concurrently with the body of the `with` statement.

    `take_helpers` returns the processes that do so.

    Args:
        paths: The paths that the user gave. The reader decides whether they are traces.
        cache: A file that it holds is not decoded.
    """
    path = max(map(Path, paths), key=_get_file_size, default=Path())
    if _get_file_size(path) < _MIN_FILE_BYTES or "polars" in sys.modules:
        yield
        return
    if cache:
        entry = cache.entry(path, None)
        # The cache must not hold the file, and must notice any change of it from now on.
        if entry is None or not entry.settled or entry.exists():
            yield
            return
    with contextlib.suppress(OSError):  # the reader reports why it cannot be read
        file_stamp = FileStamp.now(path)
        if helping := start_helpers(path, lead=_LEAD_BYTES):
            _running[path] = helping, file_stamp
    try:
        yield
    finally:
        if unwanted := _running.pop(path, None):
            unwanted[0].stop()


def take_helpers(path: str | Path) -> Helpers | None:
    """Returns the processes that decode a file ahead; None if there are none, they were taken
    already, or the file has changed.
    """
    helping, file_stamp = _running.pop(Path(path), (None, None))
    if helping is None or file_stamp is None:
        return None
    with contextlib.suppress(OSError):
        if FileStamp.now(Path(path)).stamp == file_stamp.stamp:
            return helping
    helping.stop()
    return None


def _get_file_size(path: Path) -> int:
    """Returns the bytes of a file; 0 if it is not a regular file."""
    try:
        return path.stat().st_size if path.is_file() else 0
    except OSError:
        return 0
