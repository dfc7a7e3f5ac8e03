"""What a user may give: files, directories, captures, standard input; which files in them are traces."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from traceloom.errors import InputError, unreadable
from traceloom.files import natural, note_input, read_small
from traceloom.model.notice import Notice
from traceloom.read import capture_document
from traceloom.read.sources import SOURCES

_DEPTH = 4  # levels below a directory
_CAPTURE = "capture.json"
# What the host agent records beside a trace; none is one.
_BESIDE_TRACES = (".allocations.json.gz", ".launches.json.gz", ".stacks.json.gz", ".telemetry.json.gz", ".dump.json")
_Capture = tuple[dict[str, Any], list[Notice]]
_MOST_CAPTURE = 1 << 28  # bytes
_OF_CAPTURE = re.compile(r"capture\.json$|(rank\d+(-pid\d+)?|pid\d+)\.\w")


class Input(Struct, frozen=True):
    """One file to read.

    Attributes:
        path: The file; `-` is standard input.
        given: It was named by the user, not found in a directory.
        capture: The directory of the capture it belongs to.
        entry: This rank's part of capture.json.
    """

    path: Path
    given: bool
    capture: Path | None = None
    entry: dict[str, Any] | None = None


class FoundInputs(Struct):
    """The inputs and the documents of captures, by directory, with what was left out of each."""

    inputs: list[Input] = field(default_factory=list)
    captures: dict[Path, dict[str, Any]] = field(default_factory=dict)
    notices: dict[Path, list[Notice]] = field(default_factory=dict)


def find(paths: tuple[str, ...]) -> FoundInputs:
    """Every file that the paths stand for.

    Raises:
        InputError: `unreadable` for a path that does not exist; `no-traces` for a directory without any candidate.
    """
    discovered = FoundInputs()
    seen: set[Path] = set()
    captures: dict[Path, _Capture | None] = {}
    for text in paths:
        path = Path(text)
        if text != "-":
            try:
                path.stat()
            except (FileNotFoundError, NotADirectoryError) as error:
                raise InputError("there is no such file or directory", slug="unreadable", where=str(path)) from error
            except (OSError, ValueError) as error:
                raise unreadable(path, error) from error
        if path.is_dir():
            if not _directory(path, discovered, seen, _DEPTH):
                raise InputError(
                    "the directory holds no trace (no .json or .json.gz file)", slug="no-traces", where=text
                )
        elif path.name == _CAPTURE:
            _directory(path.parent, discovered, seen, 0)
        else:
            _add(discovered, seen, _of_its_capture(path, discovered, captures) or Input(path, given=True))
    return discovered


def _of_its_capture(path: Path, discovered: FoundInputs, captures: dict[Path, _Capture | None]) -> Input | None:
    """The input for a window in its capture, with its part of capture.json; None for any other file."""
    if not _OF_CAPTURE.match(path.name):
        return None
    folder = path.parent
    if folder not in captures:
        captures[folder] = None
        with contextlib.suppress(InputError):  # the file itself may be good
            captures[folder] = read_capture(folder)
    capture = captures[folder]
    if capture is None:
        return None
    document, discovered.notices[folder] = capture
    for name, entry in windows(document):
        if name == path.name:
            subset = discovered.captures.setdefault(folder, {**document, "ranks": []})
            if entry not in subset["ranks"]:
                subset["ranks"].append(entry)
            return Input(path, given=True, capture=folder, entry=entry)
    return None


def _add(discovered: FoundInputs, seen: set[Path], candidate: Input) -> None:
    real = candidate.path.resolve() if str(candidate.path) != "-" else candidate.path
    if real not in seen:
        seen.add(real)
        discovered.inputs.append(candidate)


def _directory(folder: Path, discovered: FoundInputs, seen: set[Path], depth: int) -> bool:
    """Add the files of a directory; whether there is any, added before or not."""
    candidates = False
    capture = read_capture(folder)
    if capture is not None:
        document, discovered.notices[folder] = capture
        discovered.captures[folder] = document
        for name, entry in windows(document):
            path = folder / name
            if path.is_file():
                candidates = True
                _add(discovered, seen, Input(path, given=False, capture=folder, entry=entry))
        return candidates
    try:
        entries = sorted(folder.iterdir(), key=natural)
    except OSError as error:
        raise unreadable(folder, error, "directory") from error
    for path in entries:
        if path.is_dir() and depth > 0 and not path.name.startswith("."):
            candidates |= _directory(path, discovered, seen, depth - 1)
        elif path.name.endswith(_BESIDE_TRACES):
            continue
        elif path.is_file() and path.name.lower().endswith(tuple(chain(*(source.endings for source in SOURCES)))):
            candidates = True
            _add(discovered, seen, Input(path, given=False))
    return candidates


def read_capture(folder: Path) -> _Capture | None:
    """capture.json of a directory, or the parts that its ranks wrote where the run did not end well.

    Returns:
        The document, in which values are of the types that they should be, and what was left out; None without either.

    Raises:
        InputError: `other-version`; `damaged-capture`: the file is there but is not what it should be.
    """
    whole = folder / _CAPTURE
    if whole.is_file():
        note_input(whole)
        decoded = _decoded(whole)
        if decoded is None:
            raise InputError("capture.json is damaged or of another program", slug="damaged-capture", where=str(whole))
    else:
        parts = [_decoded(path) for path in sorted(folder.glob("*.capture.json"), key=natural)]
        whole_parts = [part for part in parts if part is not None]
        ranks = [entry for document, _ in whole_parts for entry in document["ranks"]]
        if not ranks:
            return None
        decoded = {**whole_parts[0][0], "ranks": ranks}, [notice for _, notices in whole_parts for notice in notices]
    for path in folder.iterdir():  # all that belongs to the capture is an input, whatever of it is read today
        if _OF_CAPTURE.match(path.name):
            note_input(path)
    return decoded


def _decoded(path: Path) -> _Capture | None:
    try:
        return capture_document.decode(read_small(path, _MOST_CAPTURE), path)
    except OSError:
        return None


def job_of(entry: dict[str, Any]) -> str | int:
    """What the parts of a capture that are of one job have in common, and no other part has.

    A process on its own is a job of its own.
    """
    job, name = entry.get("job"), entry.get("name")
    if isinstance(job, str):
        return job
    return f"process {name}" if isinstance(name, str) else id(entry)


def of_jobs(document: dict[str, Any], jobs: set[str | int]) -> dict[str, Any]:
    """The document of a capture with the parts of these jobs only."""
    return {**document, "ranks": [entry for entry in document.get("ranks", []) if job_of(entry) in jobs]}


def windows(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """File name and part of capture.json of every timed window; graph steps are none."""
    ranks = document.get("ranks")
    for entry in ranks if isinstance(ranks, list) else []:
        if not isinstance(entry, dict):
            continue
        several = entry.get("windows")
        for window in several if isinstance(several, list) else [entry.get("window")]:
            name = window.get("file") if isinstance(window, dict) else None
            # A name from a file of a stranger never leaves the directory.
            if isinstance(name, str) and Path(name).name == name:
                yield name, entry
