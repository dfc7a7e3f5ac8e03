"""Capture.json: parts of processes, merged; host and versions; kernel sources.

A host trace names the file of each kernel's source and not where it lies; PyTorch's profiler, which
runs meanwhile, writes the whole path. PyTorch's own list (`PyCodeCache.modules`) lacks the kernels
that its worker processes compiled.

The format is described in docs/reference/capture-json.md.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import shutil
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import traceloom
from traceloom.capture import writing
from traceloom.capture.steps import Mark, StepLog
from traceloom.capture.writing import NOTES, write_json

SOURCES_SUFFIX = (
    ".host_resources"  # behind the name of a process: where PyTorch's observer would leave them
)
FILE_NAME = re.compile(r"\w[\w-]*\.py")
MAX_SOURCE_BYTES = 1 << 20  # of a source; a plan reads no longer one
MAX_TOTAL_BYTES = 1 << 26
_CHUNK_BYTES = 1 << 20
_MAX_PATH_CHARS = 4096  # of a path
_KERNEL_FILE = re.compile(rb'"kernel_file": ?("(?:[^"\\\n]|\\.){1,%d}")' % _MAX_PATH_CHARS)


@dataclass
class KernelSources:
    """What was copied.

    Attributes:
        files: Names in the folder.
        omitted: Of those that were not copied the name and why.
    """

    files: list[str] = field(default_factory=list)
    omitted: list[tuple[str, str]] = field(default_factory=list)


def copy_sources(trace: Path, folder: Path, others: Iterable[str] = ()) -> KernelSources:
    """Copy the sources that a trace of Kineto in plain JSON names into a folder, which is made
    where there are any.

    Raises:
        OSError: The trace cannot be read, or the folder not be written.
    """
    out, left = KernelSources(), MAX_TOTAL_BYTES
    for path in sorted({*_find_source_paths(trace), *map(Path, others)}):
        if path.suffix != ".py":  # none is stated, or it is no module of Python
            continue
        if not FILE_NAME.fullmatch(path.name) or path.name in out.files:
            out.omitted.append((path.name, "no name for a file of its own"))
            continue
        most = min(MAX_SOURCE_BYTES, left)
        try:
            if not path.is_file():
                out.omitted.append((path.name, "there is no such file any more"))
                continue
            with path.open("rb") as file:
                text = file.read(most + 1)
        except OSError as error:
            out.omitted.append((path.name, error.strerror or str(error)))
            continue
        if len(text) > most:
            out.omitted.append((path.name, "too large"))
            continue
        folder.mkdir(exist_ok=True)
        with writing.write_atomically(folder / path.name) as temporary:
            temporary.write_bytes(text)
        left -= len(text)
        out.files.append(path.name)
    return out


def _find_source_paths(trace: Path) -> set[Path]:
    """The paths of sources in a trace, read piece by piece: it may be long."""
    texts: set[bytes] = set()
    rest = b""
    with trace.open("rb") as file:
        while piece := file.read(_CHUNK_BYTES):
            text = rest + piece
            texts.update(_KERNEL_FILE.findall(text))
            rest = text[-2 * _MAX_PATH_CHARS :]
    paths = set()
    for text in texts:
        try:
            paths.add(Path(json.loads(text)))
        except ValueError:  # noqa: PERF203  (there are few; no JSON: PyTorch escapes little)
            continue
    return paths


FORMAT = "traceloom-capture"
VERSION = 1
STAGE = "profiled"  # as Chakra tells graphs apart: executed on a platform; not the model as written, nor as compiled
NAME = "capture.json"
MIN_STEPS = 3
_NEIGHBOURS = 10  # unrecorded steps that recorded ones are compared with, at least
"""The median of fewer steps says nothing about what recording costs."""
_PART_FILE = re.compile(r"(rank\d+(-pid\d+)?|pid\d+)\.capture\.json")
_CAPTURE_FILE = re.compile(
    r"capture\.json|(rank\d+(-pid\d+)?|pid\d+)\."
    r"(capture\.json|(steps|collectives|thread_cpu|stacks)\.json\.gz|memory\.pickle|oom\.json|((graph|before)\.)?kineto\.json(\.gz)?|host\.json(\.gz)?)"
)

_SOURCES = re.compile(rf"(rank\d+(-pid\d+)?|pid\d+){re.escape(SOURCES_SUFFIX)}")


def list_parts(directory: Path) -> list[Path]:
    paths = [path for path in directory.iterdir() if _PART_FILE.fullmatch(path.name)]
    return sorted(paths, key=lambda path: [int(number) for number in re.findall(r"\d+", path.name)])


def document(ranks: list[dict[str, Any]], run: dict[str, Any]) -> dict[str, Any]:
    """A capture's document: of the whole, or of one rank as its part."""
    head = {
        "format": FORMAT,
        "version": VERSION,
        "traceloom": traceloom.__version__,
        "stage": STAGE,
    }
    return {**head, "run": run, "ranks": ranks}


def _entries(part: Path) -> list[dict[str, Any]]:
    """What a part says of its rank.

    Raises:
        OSError: It cannot be read.
        ValueError: It is no part.
    """
    try:
        entries: list[dict[str, Any]] = json.loads(part.read_text(encoding="utf-8"))["ranks"]
    except (KeyError, TypeError) as error:
        raise ValueError(f"`{part.name}` is no part of a capture") from error
    return entries


def merge(directory: Path, run: dict[str, Any] | None = None) -> dict[str, Any]:
    """Write `capture.json` from all parts that are there; any process may do it at any time.

    Args:
        directory: The capture.
        run: What is known of the whole run; None keeps what the file says already.

    Returns:
        What was written.

    Raises:
        OSError: It could not be written.
        ValueError: A part is none.
    """
    while True:
        before = list_parts(directory)
        if run is None:
            run = {}
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                merged = json.loads((directory / NAME).read_text(encoding="utf-8"))["run"]
                run = merged if isinstance(merged, dict) else {}
        capture = document([entry for path in before for entry in _entries(path)], run)
        write_json(directory / NAME, capture)
        # A part that came in while we wrote may have been merged by its process before our older
        # view replaced it.
        if list_parts(directory) == before:
            return capture


def drop_incidental(directory: Path) -> None:
    """Delete what workers beside the job recorded, where the job itself was recorded.

    Raises:
        OSError: A file cannot be read or deleted.
        ValueError: A part is none.
    """
    of = {path.name.removesuffix(f".{NAME}"): _entries(path) for path in list_parts(directory)}
    incidental = [
        stem for stem, entries in of.items() if any(entry.get("incidental") for entry in entries)
    ]
    if len(incidental) < len(of):
        for name in list_files(directory):
            if name.partition(".")[0] in incidental:
                remove(directory, name)


def list_files(directory: Path) -> dict[str, int]:
    """The files of the capture in a directory, and only those: paths in it and what the system
    knows them by.
    """
    paths = []
    for path in directory.iterdir():
        if _CAPTURE_FILE.fullmatch(path.name):
            paths.append(path)
        elif _SOURCES.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            paths += [source for source in path.iterdir() if FILE_NAME.fullmatch(source.name)]
    return {path.relative_to(directory).as_posix(): path.lstat().st_ino for path in paths}


def remove(directory: Path, name: str) -> None:
    """Delete a file of a capture, and the folder in it that is empty then.

    Raises:
        OSError: It cannot be deleted.
    """
    path = directory / name
    path.unlink(missing_ok=True)
    if path.parent != directory:
        with contextlib.suppress(OSError):  # it holds something
            path.parent.rmdir()


def replace_capture(
    made: Path, directory: Path, old: dict[str, int], run: dict[str, Any], stem: str = ""
) -> None:
    """Put the files of a whole capture into the place of an earlier one.

    Args:
        made: The directory in which they were made; in the same file system.
        directory: Where they belong.
        old: The files of the earlier one, as `files` gave them; they are removed.
        run: What is known of the whole run.
        stem: The front part of the names of one process, to move only its files.

    Raises:
        OSError: A file cannot be moved or removed.
    """
    for name in list_files(made):
        if name != NAME and name.startswith(f"{stem}." if stem else ""):
            (directory / name).parent.mkdir(exist_ok=True)
            (made / name).replace(directory / name)
    present = list_files(directory)
    for name, inode in old.items():
        if present.get(name) == inode:
            remove(directory, name)
    merge(directory, run)


def set_aside_incomplete(made: Path, directory: Path) -> Path:
    """Put what is not whole, and so does not replace the capture in a directory, where it can be
    found: beside it.

    Raises:
        OSError: It cannot be moved.
    """
    number = 1
    while (kept := directory.with_name(f"{directory.name}-unfinished-{number}")).exists():
        number += 1
    shutil.rmtree(made / NOTES, ignore_errors=True)
    return made.rename(kept)


def clear_notes(directory: Path) -> None:
    """Delete claims and diagnoses; locks delete themselves."""
    notes = directory / NOTES
    if notes.is_dir():
        for path in notes.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif not path.name.startswith(writing.NAME):
                path.unlink()


def compute_overhead(log: StepLog, warm_up: int) -> dict[str, Any]:
    """What recording cost: recorded steps against the nearest unrecorded ones after the warm-up, by
    their medians.

    A run changes while it goes on (memory, caches, clocks, other programs): distant steps compare
    less well.

    The ratio is that of processor time, where the system tells it: how long a step takes depends on
    what else runs and on what it waits for, and a few steps of a busy machine differ by more than
    recording costs. Beside it stand the ratios of the quartiles that are nearest and farthest.
    Unknown figures are null: a run may end too early.
    """
    figures: dict[str, Any] = {}
    numbers = {mark: log.numbers(mark) for mark in (Mark.RECORDED, Mark.GRAPH)}
    numbers[Mark.PLAIN] = select_nearest_steps(
        log.numbers(Mark.PLAIN, skip=warm_up), numbers[Mark.RECORDED]
    )
    ran = {mark: log.processor_times(steps) for mark, steps in numbers.items()}
    durations = {mark: log.durations(steps) for mark, steps in numbers.items()}
    for mark, name in ((Mark.PLAIN, "unrecorded"), (Mark.RECORDED, "recorded")):
        figures[f"{name}_steps"] = len(durations[mark])
        for clock, values in (("", durations[mark]), ("_cpu", ran[mark])):
            figures[f"{name}{clock}_median_ns"] = int(statistics.median(values)) if values else None
    figures["graph_step_ns"] = durations[Mark.GRAPH][-1] if durations[Mark.GRAPH] else None
    by_processor = all(len(ran[mark]) == len(durations[mark]) for mark in durations)
    compared = ran if by_processor else durations
    figures["ratio_of"] = "cpu" if by_processor else "wall"
    enough = {mark: steps if len(steps) >= MIN_STEPS else [] for mark, steps in compared.items()}
    plain, recorded = enough[Mark.PLAIN], enough[Mark.RECORDED]
    for name, dividend, share, plain_share in (
        ("ratio", recorded, 0.5, 0.5),
        ("ratio_low", recorded, 0.25, 0.75),
        ("ratio_high", recorded, 0.75, 0.25),
        ("graph_step_ratio", compared[Mark.GRAPH], 0.5, 0.5),
    ):
        value, base = _compute_quantile(dividend, share), _compute_quantile(plain, plain_share)
        figures[name] = round(value / base, 4) if value and base else None
    return figures


def select_nearest_steps(steps: list[int], recorded: list[int]) -> list[int]:
    """Of some steps the nearest to recorded ones (both ascending): twice as many as those, and at
    least ten.
    """
    if not recorded:
        return steps
    ordered = sorted(steps, key=lambda step: max(recorded[0] - step, step - recorded[-1]))
    return sorted(ordered[: max(_NEIGHBOURS, 2 * len(recorded))])


def _compute_quantile(values: list[int], share: float) -> float | None:
    if not values:
        return None
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = ordered[int(at)]
    return low + (ordered[math.ceil(at)] - low) * (at - int(at))
