"""From what the user gives to sessions."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass, replace
from itertools import pairwise

from traceloom.errors import InputError, UsageError
from traceloom.files import is_address, note_input, with_addresses
from traceloom.model import Notice, Session, Trace, units
from traceloom.read.beside import read_allocations, read_samples, read_telemetry
from traceloom.read.inputs import FoundInputs, Input, find, job_of, of_jobs
from traceloom.read.ranks import Report, read_all
from traceloom.read.runs import Peek, group, names
from traceloom.read.sources import source_of
from traceloom.storage.cache import Cache

AnyPath = str | os.PathLike[str]
# Kinds of files that lie beside traces in a directory and are no fault there.
_BESIDE = ("not-a-trace", "empty-file")


@dataclass(frozen=True, slots=True)
class Loaded:
    """What the inputs gave.

    Attributes:
        runs: One session per run, at least one.
        refused: One notice (`refused-input`) per file that could not be used; the CLI exits with 4 then.
    """

    runs: tuple[Session, ...]
    refused: tuple[Notice, ...] = ()


def load(*paths: AnyPath, cache: bool = True, progress: Report | None = None) -> Session:
    """Load the traces of one run.

    Args:
        paths: Files, directories (also TensorBoard's log directories and captures), addresses (`s3://`, `gs://`,
            `http://`, `https://`), `-` for standard input.
        cache: Look into the cache of read traces, and fill it.
        progress: Called with a `ReadProgress` as the reading goes on.

    Returns:
        The session; files that were refused beside good ones are notices of it (`refused-input`).

    Raises:
        UsageError: `several-runs`: the inputs hold more than one run; `no-inputs`: nothing was given.
        InputError: Nothing that was given is a trace.

    Example:
        >>> import traceloom
        >>> session = traceloom.load("captures/run1")  # doctest: +SKIP
    """
    discovered, runs, labels, refused = _plan(local_copies(paths, cache=cache))
    if len(runs) > 1:
        shown = "; ".join(
            f"{label} ({units.counted(len(run), 'file')})" for label, run in list(zip(labels, runs, strict=True))[:6]
        )
        folders = {source.capture for source in runs[0]}
        folder = folders.pop() if len(folders) == 1 else None
        of_first = [str(folder)] if folder is not None else [str(source.path) for source in runs[0][:8]]
        raise UsageError(
            f"the inputs hold {len(runs)} runs, expected one: {shown}{'; ...' if len(runs) > 6 else ''}",
            slug="several-runs",
            where=", ".join(str(path) for path in paths[:3]),
            hint=f"give the files of one run, as in: traceloom report {shlex.join(of_first)}",
        )
    loaded = _loaded(discovered, runs, labels, refused, cache=cache, progress=progress)
    return loaded.runs[0]


def local_copies(paths: tuple[AnyPath, ...], *, cache: bool) -> tuple[AnyPath, ...]:
    """The paths, with local copies of what lies elsewhere."""
    if not any(map(is_address, paths)):
        return paths
    from traceloom.read.remote import local

    return local(paths, cache=cache)


def load_runs(*paths: AnyPath, cache: bool = True, progress: Report | None = None) -> list[Session]:
    """Load every run that the inputs hold; see `load`."""
    return list(load_inputs(*paths, cache=cache, progress=progress).runs)


def load_inputs(
    *paths: AnyPath,
    cache: bool = True,
    progress: Report | None = None,
    ranks: tuple[int, ...] | None = None,
    most: int | None = None,
) -> Loaded:
    """Load every run that the inputs hold, and say which files were refused; see `load`.

    With `ranks`, files that say from the beginning that they are of another rank are not read. `most` is how many files
    are read at most.

    Raises:
        UsageError: `too-many-files`: there are more than `most`.
    """
    paths = local_copies(paths, cache=cache)
    discovered, runs, labels, refused = _plan(paths, ranks, most)
    _check_number([source for run in runs for source in run], most)
    loaded = _loaded(discovered, runs, labels, refused, cache=cache, progress=progress)
    loaded_ranks = {rank for session in loaded.runs for rank in session.ranks}
    # What a file says at its beginning may be corrected at its end.
    if ranks is None or loaded_ranks >= set(ranks):
        return loaded
    return load_inputs(*paths, cache=cache, progress=progress, most=most)


def _check_number(inputs: list[Input], most: int | None) -> None:
    if most is not None and len(inputs) > most:
        raise UsageError(
            f"the inputs hold {len(inputs):,} traces; at most {most:,} are read together",
            slug="too-many-files",
            where=str(inputs[0].path.parent),
            hint="choose some ranks, as with --rank 0,1,2,3, or give fewer files",
        )


def _plan(
    paths: tuple[AnyPath, ...], ranks: tuple[int, ...] | None = None, most: int | None = None
) -> tuple[FoundInputs, list[list[Input]], list[str], list[InputError]]:
    """The files of each run (of these ranks, where given), and what was refused."""
    if not paths:
        raise UsageError("expected at least one file or directory, got none", slug="no-inputs")
    path_texts = tuple(os.fspath(path) for path in paths)
    discovered = find(path_texts)
    if len(discovered.inputs) == 1:
        note_input(discovered.inputs[0].path)
        return discovered, [discovered.inputs], [path_texts[0]], []
    if any(str(source.path) == "-" for source in discovered.inputs):
        raise UsageError("standard input (`-`) can only be read alone", slug="stdin-among-files")
    if ranks is None:
        _check_number(discovered.inputs, most)  # at once: even their beginnings take a while
    peeks: list[Peek] = []
    refused: list[InputError] = []
    for source in discovered.inputs:
        try:
            peeks.append(source_of(source.path).peek(source))
        except InputError as error:
            if not source.given and source.capture is None and error.slug in _BESIDE:
                continue
            refused.append(error)
        note_input(source.path)
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
    runs = group(peeks)
    chosen = runs
    if ranks is not None:  # all files of a run where none may be of these ranks
        chosen = [[peek for peek in run if peek.rank is None or peek.rank in ranks] or run for run in runs]
    return discovered, [[peek.source for peek in run] for run in chosen], names(runs, path_texts), refused


def _loaded(
    discovered: FoundInputs,
    runs: list[list[Input]],
    labels: list[str],
    refused: list[InputError],
    *,
    cache: bool,
    progress: Report | None,
) -> Loaded:
    every = [source for run in runs for source in run]
    results = read_all(every, cache=Cache() if cache else None, report=progress)
    sessions: list[Session] = []
    refused = list(refused)
    at = 0
    for run, label in zip(runs, labels, strict=True):
        run_results = results[at : at + len(run)]
        at += len(run)
        refused += [result for result in run_results if isinstance(result, InputError)]
        traces = [result for result in run_results if isinstance(result, Trace)]
        if not traces:
            continue
        traces.sort(key=lambda trace: (trace.rank is None, trace.rank or 0, trace.start_ns))
        notices: list[Notice] = []
        # The same rank at disjoint times is a rank with several windows; at overlapping times it cannot be.
        for earlier, later in pairwise(traces):
            if earlier.rank is not None and earlier.rank == later.rank and later.start_ns < earlier.end_ns:
                both = f"{earlier.meta.path} and {later.meta.path}"
                text = f"two files claim rank {earlier.rank} at the same time: {both}; both are kept"
                notices.append(Notice("duplicate-rank", "warning", text, rank=earlier.rank, where=later.meta.path))
        document = next((discovered.captures[source.capture] for source in run if source.capture is not None), None)
        jobs = {job_of(source.entry) for source in run if source.entry is not None}
        capture = None if document is None else of_jobs(document, jobs)
        for folder in dict.fromkeys(source.capture for source in run if source.capture is not None):
            notices += discovered.notices.get(folder, [])
        samples, of_samples = read_samples(traces)
        telemetry, of_telemetry = read_telemetry(traces)
        allocations, of_allocations = read_allocations(traces)
        notices += of_samples + of_telemetry + of_allocations
        session = Session(tuple(traces), with_addresses(label), capture, tuple(notices))
        sessions.append(replace(session, samples=samples, telemetry=telemetry, allocations=allocations))
    if not sessions:
        raise refused[0]
    refusals = tuple(Notice("refused-input", "error", f"refused: {error}", where=error.where) for error in refused)
    if refusals:
        sessions[0] = replace(sessions[0], notices=sessions[0].notices + refusals)
    return Loaded(tuple(sessions), refusals)
