"""Sets of `.et` files: one per rank of a job, named `PREFIX.RANK.et`, and the file that says who is in which group."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import polars as pl

from traceloom.chakra.group_file import GROUP_FILES, GroupFile, read_groups
from traceloom.chakra.node_table import NodeTable, read_tables
from traceloom.errors import InputError, UsageError
from traceloom.files import note_input

# Larger numbers are dates or job ids.
_NUMBERED = re.compile(r"^(?P<prefix>.*?)\.(?P<rank>\d{1,7})\.et(?:\.gz)?$", re.IGNORECASE)
_ENDINGS = (".et", ".et.gz")


@dataclass(frozen=True)
class FileSet:
    """Where a set lies: its files by rank, None for a file without a number in its name.

    Attributes:
        name: Directory and prefix.
        files: (rank, path), ascending; a rank may be there twice.
        whole: Whether everything of the set was given: a directory, not single files of it.
        groups: Its group file, if any.
    """

    name: str
    files: tuple[tuple[int | None, Path], ...]
    whole: bool
    groups: Path | None


@dataclass(frozen=True)
class Workload:
    """A set that was read."""

    place: FileSet
    ranks: tuple[int | None, ...]
    tables: tuple[NodeTable, ...]
    groups: GroupFile

    @cached_property
    def nodes(self) -> pl.DataFrame:
        """The nodes of all files, file after file: `file` (its place in `tables`), `row` in it, and their columns."""
        return self._joined([table.nodes.with_row_index("row") for table in self.tables])

    @cached_property
    def odd(self) -> pl.DataFrame:
        """The odd attributes of all files, with the column `file`."""
        return self._joined([table.odd for table in self.tables])

    def _joined(self, frames: list[pl.DataFrame]) -> pl.DataFrame:
        file = np.repeat(np.arange(len(frames)), [frame.height for frame in frames])
        return pl.concat(frames).select(
            pl.Series("file", file, dtype=pl.Int64), pl.all().exclude("row"), pl.col("row").cast(pl.Int64)
        )

    def location(self, file: int) -> tuple[str, int | None]:
        """Path and rank of a file."""
        return self.tables[file].path, self.ranks[file]


def places(inputs: Sequence[str | Path], groups: Path | None = None) -> list[FileSet]:
    """The sets that files and directories belong to, in the order of their names.

    Args:
        inputs: `.et` or `.et.gz` files, or directories of them.
        groups: The group file; where not given, the one beside the files.

    Raises:
        UsageError: `no-file`: something does not exist.
        InputError: `no-traces`: a directory without `.et` files.
    """
    files_of_set: dict[tuple[Path, str], list[tuple[int | None, Path]]] = {}
    from_directory: dict[tuple[Path, str], bool] = {}
    for path in map(Path, inputs):
        if not path.exists():
            raise UsageError(f"there is no `{path}`", slug="no-file", hint="check the path")
        members = sorted(p for p in path.iterdir() if p.name.lower().endswith(_ENDINGS)) if path.is_dir() else [path]
        if not members:
            hint = (
                "of a recorded run: traceloom link RUN -o job.graph, traceloom convert job.graph DIR --target astra-sim"
            )
            raise InputError("the directory holds no .et files", slug="no-traces", where=str(path), hint=hint)
        for member in members:
            match = _NUMBERED.match(member.name)
            key = (member.parent, match["prefix"] if match else member.name)
            entry = (int(match["rank"]) if match else None, member)
            if entry not in files_of_set.setdefault(key, []):
                files_of_set[key].append(entry)
            from_directory[key] = from_directory.get(key, False) or path.is_dir()
    return [
        FileSet(
            str(home / prefix),
            tuple(sorted(files, key=lambda f: (-1 if f[0] is None else f[0], f[1]))),
            from_directory[home, prefix] or len(files) > 1,
            groups or next((home / name for name in GROUP_FILES if (home / name).is_file()), None),
        )
        for (home, prefix), files in sorted(files_of_set.items())
    ]


def read_workload(location: FileSet, step: Callable[[Path], None] | None = None) -> Workload:
    """Read all files of a set into columns.

    Args:
        location: The set.
        step: Called before each file is read.

    Raises:
        InputError: A file is no Chakra trace at all. What is readable of a damaged file is read, with a notice.
    """

    def noted() -> Iterator[Path]:
        for _, path in location.files:
            if step:
                step(path)
            note_input(path)
            yield path

    tables = tuple(read_tables(noted()))
    ranks = tuple(rank for rank, _ in location.files)
    if location.groups:
        note_input(location.groups)
    return Workload(location, ranks, tables, read_groups(location.groups) if location.groups else GroupFile())
