"""A file decoded by several processes, begun before Polars is imported (goes with core.md 3c).

A part begins where an entry ends, near a byte that is agreed upon. What looks like such an end may
stand in a text or a list of an entry; whether it is one is known to who has the part before, if all
of that is decoded. So each process stops only where its own text proves that the next part can
begin there, and parts are put together only where one begins where the other stopped. Otherwise
this process goes on alone.

Python does one thing at a time in a process, so another core needs another process. It is a fork,
which costs a hundredth of what a new interpreter would. Of other threads of this process the fork
has nothing but what they held locked, so decoding keeps to what takes no locks of theirs: Polars
has no part in it. Whatever goes wrong there is no
loss: the file is decoded here then.
"""

from __future__ import annotations

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

MIN_TEXT_BYTES = 1 << 23  # bytes of text that are worth a process
_HANDOVER_BYTES = (
    7 << 20
)  # bytes of text that are decoded in the time that handing a part over takes
_MAX_GZIP_PROCESSES = (
    4  # processes for one compressed file, since each has to unpack what is before its part
)
_MAX_PROCESSES = 8
_MAX_EXPANSION = 250
_MAX_FORK_BYTES = (
    2 << 30
)  # bytes of memory of a process: the tables of more take longer to copy than is gained
_TIMEOUT_S = 30  # beyond what the file has taken so far


class ForkResult(Struct, frozen=True):
    """What a part holds beside its columns; see `Decoded`."""

    legend: ColumnTables
    metadata: dict[str, Any]
    damage: DamageLog
    size: int
    began: int | None
    left_at: int | None


class Fork:
    """The process that decodes a part of a file.

    Raises:
        OSError: There is no more process, file or memory to be had.
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
                    )  # of other threads: see above
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
        """What it decoded, once it is done; None if it failed."""
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
        """The columns of what it decoded, as of `Columns.pieces`.

        Raises:
            EOFError: It was ended from outside.
        """
        while (chunk := pickle.load(self._answer)) is not None:  # noqa: S301
            yield chunk

    def stop(self) -> None:
        """End it, if it has not ended."""
        self._answer.close()
        self._until_stopped.close()
        self._kill()
        with contextlib.suppress(
            ChildProcessError
        ):  # where somebody ignores SIGCHLD, the system has seen to it
            os.waitpid(self._process, 0)

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process, signal.SIGKILL)


def count_usable_cores() -> int:
    """How many processes may decode at once; 1 where this one may not be forked."""
    if sys.platform != "linux":
        return 1
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return 1 if pages * mmap.PAGESIZE > _MAX_FORK_BYTES else processes.count_cores()


def _decode_into(path: Path, part: TextRange, write_fd: int, parent: int) -> NoReturn:
    """What the fork does, in place of anything that its parent was doing."""
    try:
        process.forget_in_child()
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in range(
            3
        ):  # whoever waits for the end of our output must not wait for this process
            os.dup2(nowhere, stream)
        for descriptor in set(map(int, os.listdir("/proc/self/fd"))) - {0, 1, 2, write_fd}:  # noqa: PTH208  (of names alone)
            with contextlib.suppress(OSError):  # the listing itself is among them
                os.close(descriptor)
        BLOCK_POOL.forget()
        gc.disable()

        def step(_read: int, _text: int) -> None:
            if os.getppid() != parent:
                os._exit(0)  # nobody waits for it any more

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
    """Forks that decode a file from a byte on.

    Args:
        path: The file.
        begins: Bytes of the text at which their parts begin; 0 if they have all of it.
        size: Bytes of the text.

    Raises:
        OSError: There are not so many processes to be had.

    Attributes:
        first: Byte at which the first part begins.
        share: Of how many times its own part this process decodes the whole.
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
        """Whether they decoded all that follows a byte; waits until they have."""
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
        """Add what they have to what is before it.

        Raises:
            EOFError: One was ended from outside; `target` is of no use any more.
        """
        if self._results[-1].size >= mapped_arrays.MIN_SPILL_BYTES and target.columns.spill is None:
            target.columns.spill = mapped_arrays.ColumnSpool()
        for fork, decoded in zip(
            self._forks, self._results, strict=False
        ):  # one may have gone to the end by itself
            target.columns.extend(decoded.legend, fork.pieces())
            for key, value in decoded.metadata.items():
                store_entry(target.metadata, key, value, target.damage)
            target.damage.add(decoded.damage)
            target.size = decoded.size

    def stop(self) -> None:
        """End them all."""
        for fork in self._forks:
            fork.stop()


def start_helpers(path: Path, processes: int | None = None, lead: int = 0) -> Helpers | None:
    """Have a file decoded by as many processes as are worth it, this one among them; None where
    only this one is.

    Args:
        path: The file.
        processes: How many at most; all cores if None.
        lead: Bytes of text that helpers decode before this process can begin.

    Raises:
        OSError: The file cannot be read, or there are not so many processes to be had.
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
    """Where the parts of the others begin, in bytes of the text; none where they are not worth it."""
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
    """Decode the first part here and take the rest from helpers, which are stopped afterwards.

    Raises:
        InputError: As of `decode`.
    """
    try:
        decoded = None
        if helping.first:  # what is before the part of the first helper; all where they fail
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
            except (EOFError, pickle.UnpicklingError):  # one was ended meanwhile
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


_MIN_FILE_BYTES = 1 << 17  # bytes of a file: less is decoded at once
_LEAD_BYTES = 29_000_000  # bytes of text that are decoded until the libraries are loaded

_running: dict[Path, tuple[Helpers, FileStamp]] = {}


@contextlib.contextmanager
def decode_ahead(paths: Sequence[str | Path], cache: Cache | None) -> Iterator[None]:
    """Decode the largest of these files beside what is done inside; `taken` has it then.

    Args:
        paths: What the user gave. Whether it is a trace at all is for the reader to say.
        cache: What it holds is not decoded.
    """
    path = max(map(Path, paths), key=_get_file_size, default=Path())
    if _get_file_size(path) < _MIN_FILE_BYTES or "polars" in sys.modules:
        yield
        return
    if cache:
        entry = cache.entry(path, None)
        # It must not hold the file, and must see it change from now on.
        if entry is None or not entry.settled or entry.exists():
            yield
            return
    with contextlib.suppress(OSError):  # the reader will say why it cannot be read
        file_stamp = FileStamp.now(path)
        if helping := start_helpers(path, lead=_LEAD_BYTES):
            _running[path] = helping, file_stamp
    try:
        yield
    finally:
        if unwanted := _running.pop(path, None):
            unwanted[0].stop()


def take_helpers(path: str | Path) -> Helpers | None:
    """Who decodes a file, if that began ahead, nobody took it yet and the file is still the same."""
    helping, file_stamp = _running.pop(Path(path), (None, None))
    if helping is None or file_stamp is None:
        return None
    with contextlib.suppress(OSError):
        if FileStamp.now(Path(path)).stamp == file_stamp.stamp:
            return helping
    helping.stop()
    return None


def _get_file_size(path: Path) -> int:
    """Bytes of a file; 0 of what is none."""
    try:
        return path.stat().st_size if path.is_file() else 0
    except OSError:
        return 0
