"""Output files are whole or not there, and nothing is overwritten unasked."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

import pytest

from traceloom.errors import OutputError, UsageError
from traceloom.system.files import (
    build_natural_key,
    protect_inputs,
    refuse_existing,
    remember_input,
    write,
    write_directory,
)


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
        refuse_existing(path, force=False)
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
        refuse_existing(tmp_path, force=True)


def test_a_place_below_a_file_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot be written"):
        write(tmp_path / "file" / "out.json", _hello, force=False)


def test_a_file_that_is_replaced_hands_on_who_may_use_it(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_bytes(b"old")
    path.chmod(0o640)
    write(path, _hello, force=True)
    assert (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) == (b"hello", 0o640)
    folder = tmp_path / "out"
    write_directory(folder, lambda folder: None, "", force=False)
    folder.chmod(0o700)
    write_directory(folder, lambda folder: (folder / "a.et").touch(), r".*\.et", force=True)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    "other", ["notes.txt", "part-1/notes.txt", "part-1/deeper/a.et", "empty/", "link.et/"]
)
def test_a_directory_is_replaced_only_where_all_that_it_holds_is_ours(
    other: str, tmp_path: Path
) -> None:
    ours, folder = r"(part-\d+/)?[^/]*\.et", tmp_path / "out"
    (folder / "part-1").mkdir(parents=True)
    (folder / "part-1" / "a.et").touch()
    assert [
        path.name
        for path in write_directory(folder, lambda made: (made / "b.et").touch(), ours, force=True)
    ] == ["b.et"]
    path = folder / other
    if other == "link.et/":
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "elsewhere" / "diary.txt").touch()
        path.symlink_to(tmp_path / "elsewhere")
    elif other.endswith("/"):
        path.mkdir()
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    with pytest.raises(OutputError, match="holds other things"):
        write_directory(folder, lambda made: None, ours, force=True)
    assert path.exists()


def test_a_new_file_is_as_the_system_makes_files_and_a_private_one_is_the_owners(
    tmp_path: Path,
) -> None:
    (tmp_path / "made").touch()
    write(tmp_path / "new", _hello, force=False)
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "made").stat().st_mode
    for path in (tmp_path / "private", tmp_path / "made"):
        write(path, _hello, force=True, private=True)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("kind", ["link", "dangling link", "link to a directory", "pipe", "device"])
def test_only_ordinary_files_are_replaced(kind: str, force: bool, tmp_path: Path) -> None:
    target = tmp_path / "target"
    path = tmp_path / "out.json"
    if kind == "link":
        target.write_text("old")
    elif kind == "link to a directory":
        target.mkdir()
    if "link" in kind:
        path.symlink_to(target)
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path = Path(os.devnull)
    before = path.lstat()
    with pytest.raises(
        OutputError, match="symbolic link" if "link" in kind else "device, pipe"
    ) as caught:
        write(path, _hello, force=force)
    assert caught.value.slug == "cannot-write"
    with pytest.raises(OutputError) as caught:
        write_directory(path, lambda folder: None, ".*", force=force)
    assert caught.value.slug == "cannot-write"
    assert path.lstat() == before
    assert kind != "link" or target.read_text() == "old"


def test_what_is_not_whole_yet_has_a_name_that_nobody_can_foresee_and_takes_no_others_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = []

    def look(handle: BinaryIO) -> None:
        names.extend(path.name for path in tmp_path.iterdir())

    for number in range(2):
        write(tmp_path / f"{number}.json", look, force=False)
    first, second = (name for name in names if name.endswith(".partial"))
    assert first != second
    # Who had foreseen it all the same would not be written to.
    monkeypatch.setattr(os, "urandom", lambda size: b"a" * size)
    (tmp_path / "victim").write_text("mine")
    (tmp_path / f".{b'a'.hex() * 8}.partial").symlink_to(tmp_path / "victim")
    with pytest.raises(OutputError, match="exists"):
        write(tmp_path / "2.json", _hello, force=False)
    assert (tmp_path / "victim").read_text() == "mine"


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError, SystemExit])
def test_whatever_ends_the_writing_of_a_directory_leaves_what_was_there(
    error: type, tmp_path: Path
) -> None:
    path = tmp_path / "out"
    path.mkdir()
    (path / "a.et").write_text("old")

    def fails(folder: Path) -> None:
        (folder / "a.et").write_text("half")
        raise error

    with pytest.raises(error):
        write_directory(path, fails, r".*\.et", force=True)
    assert [(file.name, file.read_text()) for file in tmp_path.rglob("*") if file.is_file()] == [
        ("a.et", "old")
    ]
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


def test_nothing_is_written_over_what_is_read_whatever_it_is_called(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    source = folder / "a.json"
    source.write_text("trace")
    (tmp_path / "link").symlink_to(folder)
    os.link(source, tmp_path / "same.json")
    with protect_inputs([source]):
        for path in (
            source,
            folder / ".." / "in" / "a.json",
            tmp_path / "link" / "a.json",
            tmp_path / "same.json",
        ):
            with pytest.raises(UsageError, match="is an input too"):
                write(path, _hello, force=True)
        for path in (folder, tmp_path / "in" / "."):
            with pytest.raises(UsageError, match="is where the inputs are"):
                write_directory(path, lambda folder: None, ".*", force=True)
        with protect_inputs():  # what is done inside knows it too
            remember_input(tmp_path / "no such file")
            with pytest.raises(UsageError):
                refuse_existing(source, force=True)
        write(folder / "b.json", _hello, force=False)
        write(folder / "b.json", _hello, force=True)
    write(source, _hello, force=True)
    assert source.read_bytes() == b"hello"


def test_names_are_sorted_by_the_numbers_in_them_whatever_else_they_hold() -> None:
    names = ["rank10", "rank2", "rank²", "rank2²", "①", "rank٣", "", "rank02x", "日本1"]
    ordered = [path.name for path in sorted(map(Path, names), key=build_natural_key)]
    assert [name for name in ordered if name in ("rank2", "rank٣", "rank10")] == [
        "rank2",
        "rank٣",
        "rank10",
    ]
    assert sorted(ordered) == sorted(names)
