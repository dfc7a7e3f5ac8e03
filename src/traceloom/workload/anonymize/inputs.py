"""Finding the files to rewrite and their kinds, and staging the output."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, cast

from isal import igzip

from traceloom.errors import InputError
from traceloom.formats.chakra.files import find_group_file
from traceloom.formats.inputs import read_capture
from traceloom.formats.resync import DamageLog
from traceloom.formats.text_stream import open_input, read_text_pieces
from traceloom.system import files
from traceloom.system.files import build_natural_key, read_small
from traceloom.system.process import clean_up_on_exit

ENDINGS = (".json", ".json.gz", ".et", ".et.gz")
"""Suffixes of single files; all other output names are directories."""
OUTPUT_FILES = (
    r"(capture-\d+/)?(rank\d+|trace-\d+|workload\.\d+|capture|comm_groups)[\w.-]*\.(json|et)(\.gz)?"
)
"""Names of the files in an output directory of ours, as a regular expression."""
_GZIP_LEVEL = 1
_COPY_BYTES = 1 << 20


@contextlib.contextmanager
def open_output(path: Path) -> Iterator[BinaryIO]:
    """Opens a file for writing, compressed if its name ends in .gz, without the time and name that
    gzip would add.
    """
    with path.open("wb") as handle:
        if path.name.endswith(".gz"):
            with igzip.IGzipFile(
                "", "wb", compresslevel=_GZIP_LEVEL, fileobj=handle, mtime=0
            ) as packed:
                yield cast("BinaryIO", packed)
        else:
            yield handle


class Staging:
    """Temporary output next to its final place, moved there by `commit`.

    Args:
        target: A directory, or a single file if `single`.
        single: The target is one file.
        force: Allow replacing earlier output of ours.

    Raises:
        OutputError: slug `file-exists`: something is there; slug `cannot-write`: no permission.
    """

    def __init__(self, target: Path, *, single: bool, force: bool) -> None:
        self.target = target
        self._single = single
        if single:
            files.refuse_existing(target, force=force)
        else:
            files.check_directory(target, OUTPUT_FILES, force=force)
        self.folder = files.make_temporary_path(target)
        self._until_done = contextlib.ExitStack()

    def __enter__(self) -> Staging:  # noqa: PYI034  (typing.Self is younger than Python 3.10)
        self._until_done.enter_context(
            clean_up_on_exit(partial(shutil.rmtree, self.folder, ignore_errors=True))
        )
        with files.report_write_errors(self.target):
            self.folder.mkdir(parents=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self._until_done.close()
        if isinstance(error, OSError):
            with files.report_write_errors(self.target):
                raise error

    def path(self, name: str) -> Path:
        """Returns the temporary path of a file, below the staging directory."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def commit(self, name: str | None = None) -> None:
        """Moves everything to its final place."""
        if self._single and name is not None:
            files.keep_mode(self.target, self.folder / name)
            (self.folder / name).replace(self.target)
            return
        files.keep_mode(self.target, self.folder)
        files.replace_directory(self.folder, self.target)


def concatenate_files(parts: list[Path], target: Path) -> None:
    """Concatenates files and deletes them; gzip allows several members in sequence."""
    with target.open("wb") as out:
        for part in parts:
            with part.open("rb") as source:
                shutil.copyfileobj(source, out, _COPY_BYTES)
            part.unlink()


KINETO, HOST, CHAKRA, CAPTURE, GROUPS = "kineto", "host", "et", "capture", "groups"
_MAX_DEPTH = 4
_MAX_BYTES = 1 << 28
_HEAD_BYTES = 1 << 16
_HOST_KEYS = re.compile(rb'"(?:nodes|schema)"\s*:')
_RANK = re.compile(r"(?:^|[^a-z])(?:rank|worker)[-_ ]?(\d{1,7})(?!\d)", re.IGNORECASE)
_NUMBER = re.compile(r"(\d{1,7})(?=\.(?:et|et\.gz)$)")


@dataclass(slots=True)
class InputFile:
    """One file to rewrite.

    Attributes:
        path: The file.
        kind: KINETO, HOST, CHAKRA, CAPTURE (capture.json or a part of it) or GROUPS
            (comm_groups.json).
        name: Path of the rewritten file, below the output.
        rank: From capture.json or the file's name; None where unknown.
        entry: This rank's part of capture.json.
        graph: It is the graph step of a capture, whose times are not comparable with the others.
    """

    path: Path
    kind: str
    name: str = ""
    rank: int | None = None
    entry: dict[str, Any] | None = None
    graph: bool = False


@dataclass(slots=True)
class InputFiles:
    """All files to rewrite, and the number of those left out.

    Attributes:
        files: In the order in which they are rewritten.
        captures: Directory of a capture -> (its document, its new folder below the output).
        left: Reason -> number of files left out; files that are not understood are never copied.
    """

    files: list[InputFile] = field(default_factory=list)
    captures: dict[Path, tuple[dict[str, Any], str]] = field(default_factory=dict)
    left: dict[str, int] = field(default_factory=dict)

    def leave(self, reason: str) -> None:
        self.left[reason] = self.left.get(reason, 0) + 1


def find(paths: list[Path]) -> InputFiles:
    """Returns every file that the paths stand for.

    Raises:
        InputError: slug `unreadable`: not found; `no-traces`: nothing in it can be rewritten.
    """
    sources = InputFiles()
    seen_paths: set[Path] = set()
    for path in paths:
        if not path.exists():
            raise InputError(
                "there is no such file or directory", slug="unreadable", where=str(path)
            )
        directory = path.parent if path.name == "capture.json" else path
        if directory.is_dir():
            _add_directory(directory, sources, seen_paths, _MAX_DEPTH)
        elif path.resolve() not in seen_paths:
            seen_paths.add(path.resolve())
            sources.files.append(InputFile(path, detect_kind(path), rank=_parse_rank(path)))
    if not sources.files:
        raise InputError(
            "there is no trace in it",
            slug="no-traces",
            where=", ".join(str(path) for path in paths),
        )
    # New names consist of rank and kind, without the old ones; several captures get a folder each.
    has_several = len(sources.captures) > 1 or (
        bool(sources.captures)
        and any(source.path.parent not in sources.captures for source in sources.files)
    )
    folders = {}
    for number, directory in enumerate(sources.captures, start=1):
        folders[directory] = f"capture-{number}/" if has_several else ""
        sources.captures[directory] = (sources.captures[directory][0], folders[directory])
    used_names: set[str] = set()
    for number, source in enumerate(sources.files, start=1):
        stem = f"rank{source.rank}" if source.rank is not None else f"trace-{number}"
        packed = ".gz" if source.path.name.lower().endswith(".gz") else ""
        ending = {
            KINETO: f"{'.graph' if source.graph else ''}.kineto.json{packed}",
            HOST: f".host.json{packed}",
            GROUPS: "",
            CHAKRA: f".et{packed}",
        }[source.kind]
        if source.kind == CHAKRA:
            stem = f"workload.{source.rank if source.rank is not None else number - 1}"
        elif source.kind == GROUPS:
            stem = "comm_groups.json"
        prefix = folders.get(source.path.parent, "")
        name, copy_number = f"{prefix}{stem}{ending}", 1
        while name in used_names:
            copy_number += 1
            name = f"{prefix}{stem}-{copy_number}{ending}"
        used_names.add(name)
        source.name = name
    return sources


def _add_directory(directory: Path, sources: InputFiles, seen_paths: set[Path], depth: int) -> None:
    capture = read_capture(directory)
    if capture is not None:
        # Only the files that capture.json lists
        document = capture[0]
        sources.captures[directory] = (document, "")
        rank_entries = document.get("ranks")
        files_by_name: dict[str, InputFile] = {}
        for entry in rank_entries if isinstance(rank_entries, list) else []:
            if not isinstance(entry, dict):
                continue
            windows, step = entry.get("windows"), entry.get("graph_step")
            listed_files: list[tuple[Any, str, bool]] = [
                (window.get("file"), KINETO, False)
                for window in (windows if isinstance(windows, list) else [entry.get("window")])
                if isinstance(window, dict)
            ]
            if isinstance(step, dict):
                listed_files += [
                    (step.get("file"), KINETO, True),
                    (step.get("host_file"), HOST, True),
                ]
            for name, kind, graph in listed_files:
                if not isinstance(name, str):
                    continue
                path = directory / name
                if Path(name).name == name and path.is_file() and name not in files_by_name:
                    rank = entry.get("rank") if isinstance(entry.get("rank"), int) else None
                    files_by_name[name] = InputFile(path, kind, rank=rank, entry=entry, graph=graph)
        for path in sorted(directory.iterdir(), key=build_natural_key):
            if path.name in files_by_name:
                seen_paths.add(path.resolve())
                sources.files.append(files_by_name[path.name])
            elif (
                not path.name.endswith("capture.json")
                and not path.name.startswith(".")
                and not path.is_dir()
            ):
                sources.leave("of a capture, but of no kind that can be rewritten")
            elif path.name.endswith("_resources") and path.is_dir():
                sources.leave(
                    "sources of compiled kernels and contents of tensors beside a host trace"
                )
        return
    for path in sorted(directory.iterdir(), key=build_natural_key):
        if path.name.startswith("."):
            continue
        if path.is_dir():
            if depth > 0:
                _add_directory(path, sources, seen_paths, depth - 1)
        elif path.resolve() not in seen_paths:
            seen_paths.add(path.resolve())
            if not path.name.lower().endswith((".json", ".json.gz", ".et", ".et.gz")):
                sources.leave("of no kind that is known")
                continue
            try:
                sources.files.append(InputFile(path, detect_kind(path), rank=_parse_rank(path)))
            except InputError:
                sources.leave("unreadable or empty")


def detect_kind(path: Path) -> str:
    """Returns KINETO, HOST, CHAKRA or GROUPS by the first bytes of a file; anything else counts as
    KINETO and is rejected later.

    Raises:
        InputError: slug `unreadable`, `empty-file`.
    """
    with open_input(path) as stream:
        chunks = read_text_pieces(stream, DamageLog())
        head = next(chunks, b"")[:_HEAD_BYTES]
        chunks.close()  # type: ignore[attr-defined]
    start = head.lstrip()[:1]
    if not head.strip(b"\0"):
        raise InputError("the file is empty", slug="empty-file", where=str(path))
    if path.name.endswith(".json") and path == find_group_file(path.parent):
        return GROUPS
    if start in (b"{", b"["):
        body = head.split(b'"traceEvents"', 1)[0]
        return HOST if b'"traceEvents"' not in head and _HOST_KEYS.search(body) else KINETO
    return CHAKRA if path.name.lower().removesuffix(".gz").endswith(".et") else KINETO


def read_json(path: Path) -> dict[str, Any]:
    """Reads a small JSON object.

    Raises:
        InputError: slug `unreadable`: it is not a JSON object.
    """
    try:
        document = json.loads(read_small(path, _MAX_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(
            "the file is no JSON object", slug="unreadable", where=str(path)
        ) from error
    if not isinstance(document, dict):
        raise InputError("the file is no JSON object", slug="unreadable", where=str(path))
    return document


def _parse_rank(path: Path) -> int | None:
    match = _RANK.search(path.name) or _NUMBER.search(path.name)
    return int(match.group(1)) if match else None
