"""The file by which a process says how far it is: it is the user's, who may put anything there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from traceloom.agent.profilers.attached import ProgressFile, ProgressUpdate

FAR = b'{"state": "recording", "start_ns": 5}\n'


@pytest.fixture
def file(tmp_path: Path) -> ProgressFile:
    order = ProgressFile(tmp_path, "a.trace", os.geteuid())
    order.create()
    return order


def test_the_last_line_counts(file: ProgressFile) -> None:
    path = file.folder / "a.trace.order"
    assert (file.exists(), file.news()) == (True, ProgressUpdate())
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_bytes(
        b'{"state": "began"}\n' + FAR + b'{"state": "written", "st'
    )  # it writes just now
    assert file.news() == ProgressUpdate(state="recording", start_ns=5)
    with pytest.raises(FileExistsError):
        file.create()
    file.begin(7)
    assert (file.folder / "a.trace.begin").read_text(encoding="ascii") == "7"
    (file.folder / "a.trace.tmp").write_bytes(b"")
    file.drop()
    assert list(file.folder.iterdir()) == []
    assert (file.exists(), file.news()) == (False, ProgressUpdate())


@pytest.mark.parametrize(
    "line",
    [
        b"\xff\n",
        b"{\n",
        b"[]\n",
        b'{"state": "kept"}\n',
        b'{"state": 3}\n',
        b'{"state": "written", "start_ns": -1}\n',
        b'{"state": "written", "end_ns": 9999999999999999999}\n',
        b'{"state": "written", "held_ns": 1e400}\n',
        b"[" * 9000 + b"\n",
    ],
    ids=range(9),
)
def test_a_line_that_is_none_is_passed_over(file: ProgressFile, line: bytes) -> None:
    (file.folder / "a.trace.order").write_bytes(FAR + line)
    assert file.news().state == "recording"


def test_what_is_long_is_cut(file: ProgressFile) -> None:
    path = file.folder / "a.trace.order"
    path.write_bytes(b'{"state": "failed", "detail": "%s"}\n' % (b"x" * 5000))
    assert len(file.news().detail) == 300
    path.write_bytes(FAR + b"x" * (1 << 20))
    assert file.news().state == "recording"


@pytest.mark.parametrize("kind", ["symbolic", "hard", "pipe", "directory"])
def test_only_a_plain_file_of_the_user_is_read(
    file: ProgressFile, tmp_path: Path, kind: str
) -> None:
    path, other = file.folder / "a.trace.order", tmp_path / "other"
    path.unlink()
    other.write_bytes(FAR)
    if kind == "symbolic":
        path.symlink_to(other)
    elif kind == "hard":
        path.hardlink_to(other)
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    assert file.news() == ProgressUpdate()
    assert ProgressFile(tmp_path, "other", os.geteuid() + 1).news() == ProgressUpdate()


def test_what_lies_there_already_is_not_written_into(file: ProgressFile, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("mine", encoding="ascii")
    (tmp_path / "a.trace.begin.new").symlink_to(secret)
    with pytest.raises(FileExistsError):
        file.begin(7)
    assert secret.read_text(encoding="ascii") == "mine"
