"""Finds the files of the given inputs, detects their formats, and groups them into runs."""

from __future__ import annotations

import contextlib
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import Struct, field

from traceloom.errors import InputError, unreadable
from traceloom.formats import capture_document
from traceloom.system.files import (
    build_natural_key,
    open_input,
    read_small,
    remember_input,
    restore_addresses,
)
from traceloom.trace.notice import Notice

if TYPE_CHECKING:
    from traceloom.trace.trace import Trace


_HEAD_BYTES = 4096
Step = Callable[[int, int], None]


class Source(Protocol):
    """A trace format.

    Attributes:
        endings: Lower-case endings of such files in a directory.
    """

    endings: tuple[str, ...]

    def matches(self, head: bytes) -> bool:
        """Whether a file with this beginning (4096 bytes or less, unpacked) is of the format."""

    def peek(self, file: InputFile) -> FileHead:
        """Reads from the first part of a file which run it belongs to.

        Raises:
            InputError: It is not of this format.
        """

    def read(
        self,
        path: str | Path,
        *,
        capture: dict[str, Any] | None,
        step: Step | None,
        processes: int | None,
    ) -> Trace:
        """Returns the trace; arguments and errors as for `traceloom.formats.read_kineto`."""


class KinetoSource:
    """Kineto traces; for any other file their reader reports what it is instead."""

    endings: tuple[str, ...] = (".json", ".json.gz")

    def matches(self, head: bytes) -> bool:  # noqa: ARG002
        """Always true: the last of all formats."""
        return True

    def peek(self, file: InputFile) -> FileHead:
        return read_head(file)

    def read(
        self,
        path: str | Path,
        *,
        capture: dict[str, Any] | None,
        step: Step | None,
        processes: int | None,
    ) -> Trace:
        from traceloom.formats.kineto import read_kineto

        return read_kineto(path, capture=capture, step=step, processes=processes)


def identify_job(entry: dict[str, Any]) -> str | int:
    """Returns a value that is common to the parts of a capture of one job, and unique to them.

    A process on its own is a job of its own.
    """
    job, name = entry.get("job"), entry.get("name")
    if isinstance(job, str):
        return job
    return f"process {name}" if isinstance(name, str) else id(entry)


_JOB = re.compile(
    r"^(PT_PROFILER_JOB_\w*ID\w*|group_trace_id|mast_job_name|tw_job|job_id)$", re.IGNORECASE
)


class FileHead(Struct, frozen=True):
    """Identification of a trace, from its first part.

    Attributes:
        source: The file.
        rank: From capture.json, `distributedInfo` or the file name.
        world_size: From the same.
        job: Job ids.
        part: For a capture, the value of `identify_job`.
        host: Host name.
        process: Process id of the first event.
        start_ns: Earliest time of the first slice; None where the clock is not Unix time.
        pattern: Directory and file name, digits replaced.
    """

    source: InputFile
    rank: int | None
    world_size: int | None
    job: tuple[tuple[str, str], ...]
    part: str | int | None
    host: str | None
    process: Any
    start_ns: int | None
    pattern: str


def read_head(source: InputFile) -> FileHead:
    """Reads the metadata and the first slice of a file.

    Raises:
        InputError: It is not a trace.
    """
    # What only lists files, as a remembered report does, loads no columns.
    from traceloom.formats import kineto_metadata as md, text_stream
    from traceloom.formats.kineto_document import Document
    from traceloom.formats.kineto_fields import parse_text_times
    from traceloom.formats.resync import DamageLog

    damage = DamageLog()
    with text_stream.open_input(source.path) as stream:
        document = Document(
            partial(text_stream.read_first_pieces, stream, damage), damage, str(source.path)
        )
        slices = document.slices()
        first = next(slices, None)
        slices.close()
    metadata = document.metadata
    entries = [entry for entry in first.entries if entry.ph == "X"] if first else []
    process = next(
        (entry.pid for entry in entries if isinstance(entry.pid, int) and entry.pid > 0), None
    )
    start = None
    if entries and first and first.exact:
        starts, _, valid, _ = parse_text_times(
            [entry.ts for entry in entries], [b"0"] * len(entries)
        )
        start = int(starts[valid].min()) if valid.any() else None
    elif times := [entry.ts for entry in entries if entry.ts == entry.ts]:  # no NaN
        start = int(min(times) * 1000)
    if start is not None:
        start += md.compute_time_offset_ns(metadata, source.entry)
    info = md.get_distributed_info(metadata)
    entry = source.entry or {}
    rank, _, _ = md.find_rank(metadata, None, str(source.path), source.entry)
    host = metadata.get("host_name")
    return FileHead(
        source=source,
        rank=rank,
        world_size=md.parse_whole_number(entry.get("world_size"))
        or md.parse_whole_number(info.get("world_size")),
        part=None if source.entry is None else identify_job(source.entry),
        job=tuple(sorted((key, str(value)) for key, value in metadata.items() if _JOB.match(key))),
        host=host if isinstance(host, str) and host else None,
        process=process,
        start_ns=start if start is not None and start > 10**18 else None,
        pattern=re.sub(r"\d+", "#", str(source.path)),
    )


SOURCES: list[Source] = [KinetoSource()]  # the first that matches reads a file


def detect_source(path: str | Path) -> Source:
    """Returns the format of a file; the last one for standard input, pipes and unreadable files."""
    head = read_first_bytes(Path(path)) if Path(path).is_file() else None
    return (
        SOURCES[-1] if head is None else next(source for source in SOURCES if source.matches(head))
    )


def read_first_bytes(path: Path) -> bytes | None:
    """Returns the beginning of a file, unpacked; None where it cannot be read."""
    try:
        with open_input(path) as file:
            head = file.read(_HEAD_BYTES)
        return (
            zlib.decompressobj(31).decompress(head, _HEAD_BYTES)
            if head.startswith(b"\x1f\x8b")
            else head
        )
    except (OSError, zlib.error):
        return None


_MAX_DEPTH = 4  # levels below a directory
_CAPTURE = "capture.json"
# Files that the host agent records beside a trace; none of them is a trace.
_SIDECAR_ENDINGS = (
    ".allocations.json.gz",
    ".launches.json.gz",
    ".stacks.json.gz",
    ".telemetry.json.gz",
    ".dump.json",
)
_Capture = tuple[dict[str, Any], list[Notice]]
_MAX_CAPTURE_BYTES = 1 << 28  # bytes
_CAPTURE_FILE_NAME = re.compile(r"capture\.json$|(rank\d+(-pid\d+)?|pid\d+)\.\w")


class InputFile(Struct, frozen=True):
    """One file to read.

    Attributes:
        path: The file; `-` is standard input.
        given: The user named it; otherwise it was found in a directory.
        capture: The directory of the capture it belongs to.
        entry: This rank's part of capture.json.
    """

    path: Path
    given: bool
    capture: Path | None = None
    entry: dict[str, Any] | None = None


class InputSet(Struct):
    """The inputs, and the capture documents by directory, with notices of what was removed from
    each.
    """

    inputs: list[InputFile] = field(default_factory=list)
    captures: dict[Path, dict[str, Any]] = field(default_factory=dict)
    notices: dict[Path, list[Notice]] = field(default_factory=dict)


def list_files(paths: Sequence[str]) -> list[Path]:
    """Returns every file that the paths stand for; for a capture, all of its files.

    Raises:
        InputError: As for `find`.
    """
    discovered = find(tuple(paths))
    files = [source.path for source in discovered.inputs]
    for directory in discovered.captures:
        files += sorted(path for path in directory.iterdir() if path.is_file())
    return files


def find(paths: tuple[str, ...]) -> InputSet:
    """Returns every file that the paths stand for.

    Raises:
        InputError: `unreadable` for a path that does not exist; `no-traces` for a directory without
            any candidate.
    """
    discovered = InputSet()
    known_paths: set[Path] = set()
    captures: dict[Path, _Capture | None] = {}
    for text in paths:
        path = Path(text)
        if text != "-":
            try:
                path.stat()
            except (FileNotFoundError, NotADirectoryError) as error:
                raise InputError(
                    "there is no such file or directory", slug="unreadable", where=str(path)
                ) from error
            except (OSError, ValueError) as error:
                raise unreadable(path, error) from error
        if path.is_dir():
            if not _add_directory(path, discovered, known_paths, _MAX_DEPTH):
                raise InputError(
                    "the directory holds no trace (no .json or .json.gz file)",
                    slug="no-traces",
                    where=text,
                )
        elif path.name == _CAPTURE:
            _add_directory(path.parent, discovered, known_paths, 0)
        else:
            _add(
                discovered,
                known_paths,
                _find_window_input(path, discovered, captures) or InputFile(path, given=True),
            )
    return discovered


def _find_window_input(
    path: Path, discovered: InputSet, captures: dict[Path, _Capture | None]
) -> InputFile | None:
    """Returns the input for a window in its capture, with its part of capture.json; None for any
    other file.
    """
    if not _CAPTURE_FILE_NAME.match(path.name):
        return None
    directory = path.parent
    if directory not in captures:
        captures[directory] = None
        with contextlib.suppress(InputError):  # the file itself may be good
            captures[directory] = read_capture(directory)
    capture = captures[directory]
    if capture is None:
        return None
    document, discovered.notices[directory] = capture
    for name, entry in list_windows(document):
        if name == path.name:
            subset = discovered.captures.setdefault(directory, {**document, "ranks": []})
            if entry not in subset["ranks"]:
                subset["ranks"].append(entry)
            return InputFile(path, given=True, capture=directory, entry=entry)
    return None


def _add(discovered: InputSet, known_paths: set[Path], candidate: InputFile) -> None:
    real = candidate.path.resolve() if str(candidate.path) != "-" else candidate.path
    if real not in known_paths:
        known_paths.add(real)
        discovered.inputs.append(candidate)


def _add_directory(
    directory: Path, discovered: InputSet, known_paths: set[Path], depth: int
) -> bool:
    """Adds the files of a directory; returns whether there are any, including those
    added before.
    """
    candidates = False
    capture = read_capture(directory)
    if capture is not None:
        document, discovered.notices[directory] = capture
        discovered.captures[directory] = document
        for name, entry in list_windows(document):
            path = directory / name
            if path.is_file():
                candidates = True
                _add(
                    discovered,
                    known_paths,
                    InputFile(path, given=False, capture=directory, entry=entry),
                )
        return candidates
    try:
        entries = sorted(directory.iterdir(), key=build_natural_key)
    except OSError as error:
        raise unreadable(directory, error, "directory") from error
    for path in entries:
        if path.is_dir() and depth > 0 and not path.name.startswith("."):
            candidates |= _add_directory(path, discovered, known_paths, depth - 1)
        elif path.name.endswith(_SIDECAR_ENDINGS):
            continue
        elif path.is_file() and path.name.lower().endswith(
            tuple(chain(*(source.endings for source in SOURCES)))
        ):
            candidates = True
            _add(discovered, known_paths, InputFile(path, given=False))
    return candidates


def read_capture(directory: Path) -> _Capture | None:
    """Reads capture.json of a directory, or the parts that its ranks wrote where the run did not
    finish.

    Returns:
        The document without values of a wrong type, and notices of what was removed; None if there
        is neither.

    Raises:
        InputError: `other-version`; `damaged-capture`: the file exists but is invalid.
    """
    capture_path = directory / _CAPTURE
    if capture_path.is_file():
        remember_input(capture_path)
        decoded = _read_document(capture_path)
        if decoded is None:
            raise InputError(
                "capture.json is damaged or of another program",
                slug="damaged-capture",
                where=str(capture_path),
            )
    else:
        parts = [
            _read_document(path)
            for path in sorted(directory.glob("*.capture.json"), key=build_natural_key)
        ]
        valid_parts = [part for part in parts if part is not None]
        ranks = [entry for document, _ in valid_parts for entry in document["ranks"]]
        if not ranks:
            return None
        decoded = (
            {**valid_parts[0][0], "ranks": ranks},
            [notice for _, notices in valid_parts for notice in notices],
        )
    # Everything that belongs to the capture is an input, even if it is not read.
    for path in directory.iterdir():
        if _CAPTURE_FILE_NAME.match(path.name):
            remember_input(path)
    return decoded


def _read_document(path: Path) -> _Capture | None:
    try:
        return capture_document.decode(read_small(path, _MAX_CAPTURE_BYTES), path)
    except OSError:
        return None


def filter_by_job(document: dict[str, Any], jobs: set[str | int]) -> dict[str, Any]:
    """Returns the document of a capture with only the parts of these jobs."""
    return {
        **document,
        "ranks": [entry for entry in document.get("ranks", []) if identify_job(entry) in jobs],
    }


def list_windows(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields file name and part of capture.json of every timed window; graph steps are not
    included.
    """
    ranks = document.get("ranks")
    for entry in ranks if isinstance(ranks, list) else []:
        if not isinstance(entry, dict):
            continue
        several = entry.get("windows")
        for window in several if isinstance(several, list) else [entry.get("window")]:
            name = window.get("file") if isinstance(window, dict) else None
            # A name from an untrusted file must not leave the directory.
            if isinstance(name, str) and Path(name).name == name:
                yield name, entry


_NEAR_NS = 600 * 10**9  # ranks of one run start their windows within ten minutes
_FAR_NS = 3600 * 10**9


def is_same_run(left: FileHead, right: FileHead) -> bool:
    """Whether two files are of one run: compares captures, job ids, world size, time, processes and
    names, in this order.
    """
    if left.source.capture is not None or right.source.capture is not None:
        return left.source.capture == right.source.capture and left.part == right.part
    jobs, other_jobs = dict(left.job), dict(right.job)
    if any(jobs[key] != other_jobs[key] for key in jobs.keys() & other_jobs.keys()):
        return False
    if (
        left.world_size is not None
        and right.world_size is not None
        and left.world_size != right.world_size
    ):
        return False
    gap = (
        None
        if left.start_ns is None or right.start_ns is None
        else abs(left.start_ns - right.start_ns)
    )
    alike = left.pattern == right.pattern
    if (left.world_size or 0) > 1 and (right.world_size or 0) > 1:
        return (gap is not None and gap <= (_FAR_NS if alike else _NEAR_NS)) or (
            gap is None and alike
        )
    same_process = (
        left.process is not None and left.process == right.process and left.host == right.host
    )
    if left.rank == right.rank:
        return alike and same_process and left.start_ns != right.start_ns
    return alike and None not in (left.rank, right.rank) and (gap is None or gap <= _FAR_NS)


def split_into_runs(peeks: list[FileHead]) -> list[list[FileHead]]:
    """Groups files by run, in the order of their first file."""
    runs: list[list[FileHead]] = []
    for candidate in peeks:
        home = next(
            (
                run
                for run in runs
                if is_same_run(run[0], candidate) or is_same_run(run[-1], candidate)
            ),
            None,
        )
        if home is None:
            runs.append([candidate])
        else:
            home.append(candidate)
    return runs


def choose_run_names(runs: list[list[FileHead]], requested: tuple[str, ...]) -> list[str]:
    """Returns a name for each run: the user's where there is one run, else what its files have in
    common.
    """
    if len(runs) == len(requested) == 1:
        return [requested[0]]
    captures = [run[0].source.capture for run in runs]  # the same for all files of a run
    runs_in = Counter(captures)
    labels = []
    for run, home in zip(runs, captures, strict=True):
        paths = [peek.source.path for peek in run]
        if len(runs) > 1 and home is not None and runs_in[home] == 1:
            labels.append(str(home))
        elif len(set(paths)) == 1:
            labels.append(str(paths[0]))
        elif len({path.parent for path in paths}) > 1:
            parts = [restore_addresses(path.as_posix()).split("/") for path in paths]
            shared = [column[0] for column in zip(*parts, strict=False) if len(set(column)) == 1]
            labels.append(("/".join(shared) or "/") if shared else str(paths[0]))
        else:
            masked = {re.sub(r"\d+", "*", path.name) for path in paths}
            labels.append(
                str(paths[0].parent / (masked.pop() if len(masked) == 1 else paths[0].name))
            )
    return labels
