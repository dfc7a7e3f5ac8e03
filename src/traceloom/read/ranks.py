"""Reads the files of a run: from the cache, in this process where they are small, one process per core where not."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import Struct

from traceloom.errors import InputError, TraceloomError
from traceloom.leaving import block
from traceloom.model import Notice, Trace, trace_store
from traceloom.model.parked import ColumnFiles
from traceloom.read.graph_step import with_shapes
from traceloom.read.inputs import Input
from traceloom.read.sources import source_of
from traceloom.storage.cache import Cache, Seen
from traceloom.workers import Workers, cores, shared_folder, workers

_WORTH_BYTES = 40 << 20  # of text in all: below, starting processes costs more than it saves
_EXPANSION = 16  # of gzip, roughly


class ReadProgress(Struct, frozen=True):
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


Report = Callable[[ReadProgress], None]


class _Meter:
    """Adds up what the readers of several files say."""

    def __init__(self, inputs: list[Input], report: Report | None) -> None:
        self._sizes = [_size(source) for source in inputs]
        self._read = [0] * len(inputs)
        self._done = [False] * len(inputs)
        self._names = [str(source.path) for source in inputs]
        self._report = report

    def moved(self, number: int, read: int) -> None:
        """A file has been read up to here."""
        self._read[number] = min(read, self._sizes[number] or read)
        self.tell(number)

    def finished(self, number: int) -> None:
        """A file is done."""
        self._read[number], self._done[number] = self._sizes[number], True
        self.tell(number)

    def tell(self, number: int) -> None:
        if self._report:
            progress = ReadProgress(
                sum(self._read), sum(self._sizes), sum(self._done), len(self._sizes), self._names[number]
            )
            self._report(progress)


def _size(source: Input) -> int:
    try:
        return source.path.stat().st_size if str(source.path) != "-" else 0
    except OSError:
        return 0


def read_all(inputs: list[Input], *, cache: Cache | None, report: Report | None = None) -> list[Trace | InputError]:
    """Read every file; for a refused one, its error is in its place.

    Args:
        inputs: The files.
        cache: Looked into first and filled; None leaves it alone.
        report: Called with the progress of the reading.
    """
    meter, column_files = _Meter(inputs, report), ColumnFiles()
    out: list[Trace | InputError | None] = [None] * len(inputs)
    entries = [
        cache.entry(source.path, source.entry) if cache and str(source.path) != "-" else None for source in inputs
    ]
    missing = []
    for number, entry in enumerate(entries):
        cached = entry.get(trace_store.saved) if entry else None
        if cached is None:
            missing.append(number)
        else:
            # the same content may have been read under another name
            cached = replace(cached, meta=replace(cached.meta, path=str(inputs[number].path)))
            out[number] = column_files.kept(cached)
            meter.finished(number)
    seen = [_seen(inputs[number]) for number in missing]
    text_bytes = sum(_size(inputs[at]) * (_EXPANSION if inputs[at].path.name.endswith(".gz") else 1) for at in missing)
    at_once = min(cores(), len(missing))
    if at_once > 1 and text_bytes > _WORTH_BYTES:
        _beside(inputs, missing, out, meter, column_files, at_once=at_once)
    else:
        for number in missing:
            source = inputs[number]

            def step(read: int, _text: int, number: int = number) -> None:
                meter.moved(number, read)

            try:
                trace = source_of(source.path).read(source.path, capture=source.entry, step=step, processes=None)
            except InputError as error:
                out[number] = error
                continue
            meter.finished(number)
            out[number] = column_files.kept(trace)
    for number, before in zip(missing, seen, strict=True):
        made, entry = out[number], entries[number]
        if not isinstance(made, Trace):
            continue
        if entry:
            entry.put(partial(trace_store.save, made))
        notices, where = list(made.notices), made.meta.path
        if _seen(inputs[number]) != before:
            text = (
                "the file changed while it was read: this may be a mixture of what it was and what it is; read it again"
            )
            notices.append(Notice("changed-while-read", "warning", text, where=where))
        if entry and entry.damaged:
            text = "what the cache had of this file was damaged; it was thrown away, and the file has been read again"
            notices.append(Notice("damaged-cache", "info", text, where=where))
        if len(notices) > len(made.notices):
            out[number] = replace(made, notices=tuple(notices))
    if cache and missing:
        cache.prune()

    def read(path: Path, entry: dict[str, Any]) -> Trace | InputError:
        return read_all([Input(path, given=False, entry=entry)], cache=cache)[0]

    return [
        with_shapes(trace, source.capture, read) if isinstance(trace, Trace) else trace
        for source, trace in zip(inputs, out, strict=True)
        if trace is not None
    ]


def _seen(source: Input) -> tuple[int, ...] | None:
    """The file's stamp, which changes when it does; None if it is no file."""
    try:
        return Seen.now(source.path).stamp
    except OSError:
        return None


def _beside(
    inputs: list[Input],
    missing: list[int],
    out: list[Trace | InputError | None],
    meter: _Meter,
    column_files: ColumnFiles,
    *,
    at_once: int,
) -> None:
    """Read in processes of their own: fresh interpreters, so that no script of the user's is run again."""
    with (
        shared_folder() as folder,
        workers("traceloom.read.worker") as readers,
        ThreadPoolExecutor(at_once, thread_name_prefix="traceloom-rank", initializer=block) as pool,
    ):
        try:
            largest = sorted(missing, key=lambda at: -_size(inputs[at]))
            each = partial(
                _in_process,
                readers=readers,
                meter=meter,
                column_files=column_files,
                processes=cores() // at_once,
            )
            jobs = {at: pool.submit(each, inputs[at], at, folder / str(at)) for at in largest}
            for number, job in jobs.items():
                out[number] = job.result()
        except BaseException:
            readers.stop()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _in_process(
    source: Input,
    number: int,
    folder: Path,
    *,
    readers: Workers,
    meter: _Meter,
    column_files: ColumnFiles,
    processes: int,
) -> Trace | InputError:
    folder.mkdir()
    job = {
        "path": str(source.path),
        "capture": source.entry,
        "folder": str(folder),
        "processes": processes,
    }
    with readers.idle() as process:
        process.send(job)
        for answer in process.answers():
            if "read" in answer:
                meter.moved(number, answer["read"])
            elif "refused" in answer:
                return InputError(**answer["refused"])
            else:
                break
        else:
            code = process.ended()
            raise TraceloomError(
                f"the process that read the file ended with code {code}",
                slug="reader-died",
                where=str(source.path),
                hint="it may have run out of memory; read fewer ranks at a time" if code < 0 else "please report it",
            )
    trace = column_files.kept(trace_store.saved(folder, kept=False))
    shutil.rmtree(folder, ignore_errors=True)
    meter.finished(number)
    return trace
