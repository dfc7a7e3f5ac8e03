"""Loads files as traces and traces as sessions, with a cache, worker processes and progress
reports.

Worker processes run this module in a fresh interpreter, without the current directory on their
import path.
"""

import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from msgspec import Struct

from traceloom.errors import InputError, TraceloomError, UsageError
from traceloom.formats.inputs import (
    FileHead,
    InputFile,
    InputSet,
    choose_run_names,
    detect_source,
    filter_by_job,
    find,
    identify_job,
    split_into_runs,
)
from traceloom.formats.sidecars import read_allocations, read_stacks, read_telemetry
from traceloom.system import units
from traceloom.system.files import is_address, remember_input, restore_addresses
from traceloom.system.process import block_signals
from traceloom.system.processes import (
    ProcessPool,
    count_cores,
    create_shared_directory,
    start_workers,
)
from traceloom.trace import storage
from traceloom.trace.cache import Cache, FileStamp
from traceloom.trace.notice import Notice
from traceloom.trace.session import Session
from traceloom.trace.storage import MappedFiles
from traceloom.trace.trace import Trace

_PROGRESS_INTERVAL_BYTES = 1 << 21  # bytes between two progress messages


def main() -> None:
    """Reads one file after the other, until there are no more jobs."""
    for line in sys.stdin:
        _read(json.loads(line))


def _read(job: dict[str, Any]) -> None:
    reported = 0

    def step(read: int, _text: int) -> None:
        nonlocal reported
        if read - reported >= _PROGRESS_INTERVAL_BYTES:
            reported = read
            _send_message({"read": read})

    try:
        trace = detect_source(job["path"]).read(
            job["path"], capture=job["capture"], step=step, processes=job["processes"]
        )
    except InputError as error:
        _send_message({"refused": error.to_dict()})
        return
    storage.save(trace, Path(job["folder"]), permanent=False)
    _send_message({"done": True})


def _send_message(line: dict[str, Any]) -> None:
    try:
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:  # the parent process has ended
        os._exit(1)


_MIN_POOL_BYTES = 40 << 20  # of text in all: below, starting processes costs more than it saves
_EXPANSION = 16  # approximate, of gzip


class ReadProgress(Struct, frozen=True):
    """Progress of the reading.

    Attributes:
        done_bytes: Of the files on disk, read so far.
        total_bytes: Of all files.
        files_done: Whole files.
        files: All files.
        name: The file that was read last.
    """

    done_bytes: int
    total_bytes: int
    files_done: int
    files: int
    name: str


Report = Callable[[ReadProgress], None]


class _ProgressCounter:
    """Adds up the progress of the readers of several files."""

    def __init__(self, inputs: list[InputFile], report: Report | None) -> None:
        self._sizes = [_get_size(source) for source in inputs]
        self._read = [0] * len(inputs)
        self._done = [False] * len(inputs)
        self._names = [str(source.path) for source in inputs]
        self._report = report

    def moved(self, number: int, read: int) -> None:
        """Records how many bytes of a file have been read."""
        self._read[number] = min(read, self._sizes[number] or read)
        self.tell(number)

    def finished(self, number: int) -> None:
        self._read[number], self._done[number] = self._sizes[number], True
        self.tell(number)

    def tell(self, number: int) -> None:
        if self._report:
            progress = ReadProgress(
                sum(self._read),
                sum(self._sizes),
                sum(self._done),
                len(self._sizes),
                self._names[number],
            )
            self._report(progress)


def _get_size(source: InputFile) -> int:
    try:
        return source.path.stat().st_size if str(source.path) != "-" else 0
    except OSError:
        return 0


def read_all(
    inputs: list[InputFile], *, cache: Cache | None, report: Report | None = None
) -> list[Trace | InputError]:
    """Reads every file; the result for a refused file is its error.

    Args:
        inputs: The files.
        cache: Checked first, and filled; None disables it.
        report: Called with the progress of the reading.
    """
    meter, column_files = _ProgressCounter(inputs, report), MappedFiles()
    out: list[Trace | InputError | None] = [None] * len(inputs)
    entries = [
        cache.entry(source.path, source.entry) if cache and str(source.path) != "-" else None
        for source in inputs
    ]
    missing = []
    for number, entry in enumerate(entries):
        cached = entry.get(storage.load_trace) if entry else None
        if cached is None:
            missing.append(number)
        else:
            # The same content may have been read under another name.
            cached = replace(cached, meta=replace(cached.meta, path=str(inputs[number].path)))
            out[number] = column_files.kept(cached)
            meter.finished(number)
    stamps = [_get_stamp(inputs[number]) for number in missing]
    text_bytes = sum(
        _get_size(inputs[index]) * (_EXPANSION if inputs[index].path.name.endswith(".gz") else 1)
        for index in missing
    )
    at_once = min(count_cores(), len(missing))
    if at_once > 1 and text_bytes > _MIN_POOL_BYTES:
        _read_in_processes(inputs, missing, out, meter, column_files, at_once=at_once)
    else:
        for number in missing:
            source = inputs[number]

            def step(read: int, _text: int, number: int = number) -> None:
                meter.moved(number, read)

            try:
                trace = detect_source(source.path).read(
                    source.path, capture=source.entry, step=step, processes=None
                )
            except InputError as error:
                out[number] = error
                continue
            meter.finished(number)
            out[number] = column_files.kept(trace)
    for number, before in zip(missing, stamps, strict=True):
        result, entry = out[number], entries[number]
        if not isinstance(result, Trace):
            continue
        if entry:
            entry.put(partial(storage.save, result))
        notices, location = list(result.notices), result.meta.path
        if _get_stamp(inputs[number]) != before:
            text = "the file changed while it was read: this may be a mixture of what it was and what it is; read it again"
            notices.append(Notice("changed-while-read", "warning", text, where=location))
        if entry and entry.damaged:
            text = "what the cache had of this file was damaged; it was thrown away, and the file has been read again"
            notices.append(Notice("damaged-cache", "info", text, where=location))
        if len(notices) > len(result.notices):
            out[number] = replace(result, notices=tuple(notices))
    if cache and missing:
        cache.prune()

    return [trace for trace in out if trace is not None]


def _get_stamp(source: InputFile) -> tuple[int, ...] | None:
    """Returns the file's stamp, which changes when the file does; None if it is not a file."""
    try:
        return FileStamp.now(source.path).stamp
    except OSError:
        return None


def _read_in_processes(
    inputs: list[InputFile],
    missing: list[int],
    out: list[Trace | InputError | None],
    meter: _ProgressCounter,
    column_files: MappedFiles,
    *,
    at_once: int,
) -> None:
    """Reads in separate processes: fresh interpreters, so that no script of the user is
    run again.
    """
    with (
        create_shared_directory() as directory,
        start_workers("traceloom.formats.loading") as readers,
        ThreadPoolExecutor(
            at_once, thread_name_prefix="traceloom-rank", initializer=block_signals
        ) as pool,
    ):
        try:
            largest = sorted(missing, key=lambda at: -_get_size(inputs[at]))
            read_one = partial(
                _read_by_worker,
                readers=readers,
                meter=meter,
                column_files=column_files,
                processes=count_cores() // at_once,
            )
            jobs = {
                index: pool.submit(read_one, inputs[index], index, directory / str(index))
                for index in largest
            }
            for number, job in jobs.items():
                out[number] = job.result()
        except BaseException:
            readers.stop()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _read_by_worker(
    source: InputFile,
    number: int,
    directory: Path,
    *,
    readers: ProcessPool,
    meter: _ProgressCounter,
    column_files: MappedFiles,
    processes: int,
) -> Trace | InputError:
    directory.mkdir()
    job = {
        "path": str(source.path),
        "capture": source.entry,
        "folder": str(directory),
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
                hint="it may have run out of memory; read fewer ranks at a time"
                if code < 0
                else "please report it",
            )
    trace = column_files.kept(storage.load_trace(directory, permanent=False))
    shutil.rmtree(directory, ignore_errors=True)
    meter.finished(number)
    return trace


AnyPath = str | os.PathLike[str]
# Errors of files that are common beside traces in a directory, and are not reported.
_IGNORED_ERRORS = ("not-a-trace", "empty-file")


@dataclass(frozen=True, slots=True)
class Loaded:
    """The result of loading the inputs.

    Attributes:
        runs: One session per run, at least one.
        refused: One notice (`refused-input`) per unusable file; the CLI then exits with 4.
    """

    runs: tuple[Session, ...]
    refused: tuple[Notice, ...] = ()


def load(*paths: AnyPath, cache: bool = True, progress: Report | None = None) -> Session:
    """Loads the traces of one run.

    Args:
        paths: Files, directories (also TensorBoard's log directories and captures), addresses
            (`s3://`, `gs://`, `http://`, `https://`), `-` for standard input.
        cache: Use the cache of read traces, and fill it.
        progress: Called repeatedly with a `ReadProgress` while reading.

    Returns:
        The session; files that were refused alongside usable ones become notices (`refused-input`).

    Raises:
        UsageError: `several-runs`: the inputs hold more than one run; `no-inputs`: nothing was
            given.
        InputError: None of the inputs is a trace.

    Example:
        >>> import traceloom
        >>> session = traceloom.load("captures/run1")  # doctest: +SKIP
    """
    discovered, runs, labels, refused = _find_runs(fetch_remote(paths, cache=cache))
    if len(runs) > 1:
        listing = "; ".join(
            f"{label} ({units.format_quantity(len(run), 'file')})"
            for label, run in list(zip(labels, runs, strict=True))[:6]
        )
        folders = {source.capture for source in runs[0]}
        directory = folders.pop() if len(folders) == 1 else None
        first_paths = (
            [str(directory)]
            if directory is not None
            else [str(source.path) for source in runs[0][:8]]
        )
        raise UsageError(
            f"the inputs hold {len(runs)} runs, expected one: {listing}{'; ...' if len(runs) > 6 else ''}",
            slug="several-runs",
            where=", ".join(str(path) for path in paths[:3]),
            hint=f"give the files of one run, as in: traceloom report {shlex.join(first_paths)}",
        )
    return _load_sessions(discovered, runs, labels, refused, cache=cache, progress=progress).runs[0]


def fetch_remote(paths: tuple[AnyPath, ...], *, cache: bool) -> tuple[AnyPath, ...]:
    """Returns the paths, where remote ones are replaced by local copies."""
    if not any(map(is_address, paths)):
        return paths
    from traceloom.system.remote import fetch_inputs

    return fetch_inputs(paths, cache=cache)


def load_runs(*paths: AnyPath, cache: bool = True, progress: Report | None = None) -> list[Session]:
    """Loads every run that the inputs hold; see `load`."""
    return list(load_inputs(*paths, cache=cache, progress=progress).runs)


def load_inputs(
    *paths: AnyPath,
    cache: bool = True,
    progress: Report | None = None,
    ranks: tuple[int, ...] | None = None,
    most: int | None = None,
) -> Loaded:
    """Loads every run that the inputs hold, and reports which files were refused; see `load`.

    With `ranks`, files whose beginning shows another rank are not read. `most` is the max number of
    files to read.

    Raises:
        UsageError: `too-many-files`: there are more than `most`.
    """
    paths = fetch_remote(paths, cache=cache)
    discovered, runs, labels, refused = _find_runs(paths, ranks, most)
    _check_number([source for run in runs for source in run], most)
    loaded = _load_sessions(discovered, runs, labels, refused, cache=cache, progress=progress)
    loaded_ranks = {rank for session in loaded.runs for rank in session.ranks}
    # The rank at the beginning of a file may be corrected at its end.
    if ranks is None or loaded_ranks >= set(ranks):
        return loaded
    return load_inputs(*paths, cache=cache, progress=progress, most=most)


def _check_number(inputs: list[InputFile], max_files: int | None) -> None:
    if max_files is not None and len(inputs) > max_files:
        raise UsageError(
            f"the inputs hold {len(inputs):,} traces; at most {max_files:,} are read together",
            slug="too-many-files",
            where=str(inputs[0].path.parent),
            hint="choose some ranks, as with --rank 0,1,2,3, or give fewer files",
        )


def _find_runs(
    paths: tuple[AnyPath, ...], ranks: tuple[int, ...] | None = None, max_files: int | None = None
) -> tuple[InputSet, list[list[InputFile]], list[str], list[InputError]]:
    """Returns the files of each run (of these ranks, where given), and what was refused."""
    if not paths:
        raise UsageError("expected at least one file or directory, got none", slug="no-inputs")
    path_texts = tuple(os.fspath(path) for path in paths)
    discovered = find(path_texts)
    if len(discovered.inputs) == 1:
        remember_input(discovered.inputs[0].path)
        return discovered, [discovered.inputs], [path_texts[0]], []
    if any(str(source.path) == "-" for source in discovered.inputs):
        raise UsageError("standard input (`-`) can only be read alone", slug="stdin-among-files")
    if ranks is None:
        _check_number(
            discovered.inputs, max_files
        )  # before anything is read: even the beginnings take a while
    peeks: list[FileHead] = []
    refused: list[InputError] = []
    for source in discovered.inputs:
        try:
            peeks.append(detect_source(source.path).peek(source))
        except InputError as error:
            if not source.given and source.capture is None and error.slug in _IGNORED_ERRORS:
                continue
            refused.append(error)
        remember_input(source.path)
    if not peeks:
        raise (
            refused[0]
            if refused
            else InputError(
                "the directory holds no Kineto trace among its .json files",
                slug="no-traces",
                where=", ".join(path_texts),
            )
        )
    runs = split_into_runs(peeks)
    selected = runs
    if ranks is not None:  # all files of a run in which none may be of these ranks
        selected = [
            [peek for peek in run if peek.rank is None or peek.rank in ranks] or run for run in runs
        ]
    return (
        discovered,
        [[peek.source for peek in run] for run in selected],
        choose_run_names(runs, path_texts),
        refused,
    )


def _separate_ranks(results: list[Trace], notices: list[Notice]) -> list[Trace]:
    """Returns one trace per rank, also of files in which ranks were merged; a merged file beside
    the files of all of its ranks adds nothing.
    """
    alone = {trace.rank for trace in results if not trace.siblings}
    traces = []
    for trace in results:
        ranks = [trace, *trace.siblings]
        if trace.siblings and alone >= {each.rank for each in ranks}:
            text = "the ranks that were merged in this file are read from their own files"
            notices.append(Notice("merged-twice", "info", text, where=trace.meta.path))
            continue
        traces += [
            replace(each, siblings=(), meta=replace(each.meta, path=trace.meta.path))
            if trace.siblings
            else each
            for each in ranks
        ]
    return traces


def _load_sessions(
    discovered: InputSet,
    runs: list[list[InputFile]],
    labels: list[str],
    refused: list[InputError],
    *,
    cache: bool,
    progress: Report | None,
) -> Loaded:
    all_sources = [source for run in runs for source in run]
    results = read_all(all_sources, cache=Cache() if cache else None, report=progress)
    sessions: list[Session] = []
    refused = list(refused)
    offset = 0
    for run, label in zip(runs, labels, strict=True):
        run_results = results[offset : offset + len(run)]
        offset += len(run)
        refused += [result for result in run_results if isinstance(result, InputError)]
        notices: list[Notice] = []
        traces = _separate_ranks(
            [result for result in run_results if isinstance(result, Trace)], notices
        )
        if not traces:
            continue
        traces.sort(key=lambda trace: (trace.rank is None, trace.rank or 0, trace.start_ns))
        # One rank at disjoint times has several windows; overlapping times are contradictory.
        for earlier, later in pairwise(traces):
            if (
                earlier.rank is not None
                and earlier.rank == later.rank
                and later.start_ns < earlier.end_ns
            ):
                both = f"{earlier.meta.path} and {later.meta.path}"
                text = (
                    f"two files claim rank {earlier.rank} at the same time: {both}; both are kept"
                )
                notices.append(
                    Notice(
                        "duplicate-rank", "warning", text, rank=earlier.rank, where=later.meta.path
                    )
                )
        document = next(
            (discovered.captures[source.capture] for source in run if source.capture is not None),
            None,
        )
        jobs = {identify_job(source.entry) for source in run if source.entry is not None}
        capture = None if document is None else filter_by_job(document, jobs)
        for directory in dict.fromkeys(
            source.capture for source in run if source.capture is not None
        ):
            notices += discovered.notices.get(directory, [])
        samples, sample_notices = read_stacks(traces)
        telemetry, telemetry_notices = read_telemetry(traces)
        allocations, allocation_notices = read_allocations(traces)
        notices += sample_notices + telemetry_notices + allocation_notices
        session = Session(tuple(traces), restore_addresses(label), capture, tuple(notices))
        sessions.append(
            replace(session, samples=samples, telemetry=telemetry, allocations=allocations)
        )
    if not sessions:
        raise refused[0]
    refusals = tuple(
        Notice("refused-input", "error", f"refused: {error}", where=error.where)
        for error in refused
    )
    if refusals:
        sessions[0] = replace(sessions[0], notices=sessions[0].notices + refusals)
    return Loaded(tuple(sessions), refusals)
