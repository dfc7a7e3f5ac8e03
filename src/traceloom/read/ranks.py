"""Reads the files of a run: from the cache, in this process where they are small, one process per core where not."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from msgspec import Struct

from traceloom.errors import InputError, TraceloomError
from traceloom.model import Trace
from traceloom.read import store
from traceloom.read.cache import Cache
from traceloom.read.inputs import Input
from traceloom.read.kineto import read_kineto
from traceloom.read.parked import Lot

_WORTH_BYTES = 40 << 20  # of text in all: below, starting processes costs more than it saves
_EXPANSION = 16  # of gzip, roughly


class Progress(Struct, frozen=True):
    """How far the reading is.

    Attributes:
        done_bytes: Of the files on disk, read so far.
        total_bytes: Of all files.
        files_done: Whole files.
        files: All files.
        name: The file that moved last.
    """

    done_bytes: int
    total_bytes: int
    files_done: int
    files: int
    name: str


Report = Callable[[Progress], None]


class _Meter:
    """Adds up what the readers of several files say."""

    def __init__(self, inputs: list[Input], report: Report | None) -> None:
        self._sizes = [_size(one) for one in inputs]
        self._read = [0] * len(inputs)
        self._done = [False] * len(inputs)
        self._names = [str(one.path) for one in inputs]
        self._report = report

    def moved(self, number: int, read: int) -> None:
        """A file has been read up to here."""
        self._read[number] = min(read, self._sizes[number] or read)
        self._tell(number)

    def finished(self, number: int) -> None:
        """A file is done."""
        self._read[number], self._done[number] = self._sizes[number], True
        self._tell(number)

    def _tell(self, number: int) -> None:
        if self._report:
            progress = Progress(
                sum(self._read), sum(self._sizes), sum(self._done), len(self._sizes), self._names[number]
            )
            self._report(progress)


def _size(one: Input) -> int:
    try:
        return one.path.stat().st_size if str(one.path) != "-" else 0
    except OSError:
        return 0


def read_all(inputs: list[Input], *, cache: Cache | None, report: Report | None = None) -> list[Trace | InputError]:
    """Read every file; a refusal stands in its file's place.

    Args:
        inputs: The files.
        cache: Looked into first and filled; None leaves it alone.
        report: Told how far the reading is.
    """
    meter, lot = _Meter(inputs, report), Lot()
    out: list[Trace | InputError | None] = [None] * len(inputs)
    missing = []
    for number, one in enumerate(inputs):
        known = cache.get(one.path, one.entry) if cache and str(one.path) != "-" else None
        if known is None:
            missing.append(number)
        else:
            out[number] = lot.kept(known)
            meter.finished(number)
    text = sum(_size(inputs[at]) * (_EXPANSION if inputs[at].path.name.endswith(".gz") else 1) for at in missing)
    if _cores(missing) > 1 and text > _WORTH_BYTES:
        _beside(inputs, missing, out, meter, lot)
    else:
        for number in missing:
            out[number] = _here(inputs[number], number, meter, lot)
    if cache:
        for number in missing:
            trace = out[number]
            if isinstance(trace, Trace) and str(inputs[number].path) != "-":
                cache.put(trace, inputs[number].path, inputs[number].entry)
    return [trace for trace in out if trace is not None]


def _cores(missing: list[int]) -> int:
    return min(os.cpu_count() or 1, len(missing))


def _here(one: Input, number: int, meter: _Meter, lot: Lot) -> Trace | InputError:
    try:
        trace = read_kineto(one.path, capture=one.entry, step=lambda read, _text: meter.moved(number, read))
    except InputError as error:
        return error
    meter.finished(number)
    return lot.kept(trace)


def _beside(
    inputs: list[Input], missing: list[int], out: list[Trace | InputError | None], meter: _Meter, lot: Lot
) -> None:
    """Read in processes of their own: fresh interpreters, so that no script of the user's is run again."""
    folder = Path(tempfile.mkdtemp(prefix="traceloom-"))
    try:
        with ThreadPoolExecutor(_cores(missing), thread_name_prefix="traceloom-rank") as pool:
            largest = sorted(missing, key=lambda at: -_size(inputs[at]))
            each = partial(_in_process, meter=meter, lot=lot, processes=(os.cpu_count() or 1) // _cores(missing))
            jobs = {at: pool.submit(each, inputs[at], at, folder / str(at)) for at in largest}
            for number, job in jobs.items():
                out[number] = job.result()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _in_process(
    one: Input, number: int, folder: Path, *, meter: _Meter, lot: Lot, processes: int
) -> Trace | InputError:
    folder.mkdir()
    job = {"path": str(one.path), "capture": one.entry, "folder": str(folder), "processes": processes}
    process = subprocess.Popen(
        [sys.executable, "-m", "traceloom.read.worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process:
        process.stdin.write(json.dumps(job))
        process.stdin.close()
        answer = {}
        for line in process.stdout:
            answer = json.loads(line)
            if "read" in answer:
                meter.moved(number, answer["read"])
    if "refused" in answer:
        return InputError(**answer["refused"])
    if process.returncode or "done" not in answer:
        killed = (process.returncode or 0) < 0
        raise TraceloomError(
            f"the process that read the file ended with code {process.returncode}",
            slug="reader-died",
            where=str(one.path),
            hint="it may have run out of memory; read fewer ranks at a time" if killed else "please report it",
        )
    trace = lot.kept(store.saved(folder))
    shutil.rmtree(folder, ignore_errors=True)
    meter.finished(number)
    return trace
