"""Output files are whole or not there, and nothing is overwritten unasked."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import BinaryIO

import pytest

from traceloom.errors import OutputError, UsageError
from traceloom.files import check_free, write
from traceloom.report.formats import format_of


def _hello(handle: BinaryIO) -> None:
    handle.write(b"hello")


def test_a_file_is_written_with_its_folders_and_its_size_is_told(tmp_path: Path) -> None:
    path = tmp_path / "new" / "out.json"
    assert write(path, _hello, force=False) == 5
    assert path.read_bytes() == b"hello"
    assert [p.name for p in path.parent.iterdir()] == ["out.json"]


def test_a_file_is_overwritten_only_by_force(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_bytes(b"old")
    with pytest.raises(OutputError, match="exists already") as caught:
        check_free(path, force=False)
    assert caught.value.slug == "file-exists"
    assert "--force" in caught.value.hint
    write(path, _hello, force=True)
    assert path.read_bytes() == b"hello"


def test_a_full_disk_leaves_neither_a_half_file_nor_a_lost_old_one(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_bytes(b"old")

    def full(handle: BinaryIO) -> None:
        handle.write(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OutputError, match="no space left") as caught:
        write(path, full, force=True)
    assert caught.value.exit_code == 3
    assert "make room" in caught.value.hint
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("out.json", b"old")]


def test_an_interruption_leaves_nothing(tmp_path: Path) -> None:
    def interrupted(handle: BinaryIO) -> None:
        handle.write(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "out.json", interrupted, force=False)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_is_no_file_to_write(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="is a directory"):
        check_free(tmp_path, force=True)


def test_a_place_below_a_file_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot be written"):
        write(tmp_path / "file" / "out.json", _hello, force=False)


@pytest.mark.parametrize(
    "name", ["a.json", "A.JSON", "a.html", "a.htm", "a.md", "a.perfetto.json", "a.perfetto.json.gz"]
)
def test_the_ending_tells_the_format(name: str) -> None:
    assert name.lower().endswith(format_of(Path(name)).endings)


@pytest.mark.parametrize("name", ["a", "a.txt", "a.json.gz", "json", "a.xlsx"])
def test_other_endings_are_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        format_of(Path(name))
    assert ".perfetto.json.gz" in caught.value.hint
