"""How files of a capture come about: names that nobody else has, whole or not at all, one recording at a time."""

from __future__ import annotations

import contextlib
import errno
import gzip
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from traceloom.capture import distributed, settings, writing
from traceloom.capture.writing import (
    CaptureFolders,
    Lock,
    check_free,
    describe_write_error,
    reserve_name,
    write_atomically,
    write_json,
)
from traceloom.errors import OutputError


@pytest.fixture(autouse=True)
def _say_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_said", set(), raising=False)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "run" / writing.NOTES).mkdir(parents=True)
    return tmp_path / "run"


def test_of_many_processes_each_has_a_name_of_its_own(directory: Path) -> None:
    with ThreadPoolExecutor(16) as pool:
        stems = list(pool.map(lambda _: reserve_name(directory, 3), range(40)))
    assert stems.count("rank3") == 1
    assert set(stems) == {"rank3", f"rank3-pid{os.getpid()}"}
    assert reserve_name(directory, 4) == "rank4"


@pytest.mark.parametrize(
    ("rank", "is_child", "there", "stem"),
    [
        (None, False, [], "rank0"),
        (None, False, ["rank0"], "pid"),
        (None, True, [], "pid"),
        (0, True, [], "rank0"),
        (7, False, ["rank7"], "rank7-pid"),
        (7, False, ["rank0"], "rank7"),
        (0, False, ["rank0", "rank7"], "rank0-pid"),
    ],
)
def test_who_has_which_name(
    directory: Path, rank: int | None, is_child: bool, there: list[str], stem: str
) -> None:
    for name in there:
        (directory / f"{name}.capture.json").write_text("{}")  # of an earlier run
    expected = stem if stem[-1].isdigit() else f"{stem}{os.getpid()}"
    assert reserve_name(directory, rank, is_child=is_child) == expected


def test_a_file_is_whole_or_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"old": [1, 2]})
    assert path.read_text() == '{"old":[1,2]}\n'
    with pytest.raises(TypeError):
        write_json(path, {"new": object()})
    with contextlib.suppress(KeyboardInterrupt), write_atomically(path) as temporary:
        temporary.write_text("half")
        raise KeyboardInterrupt
    assert json.loads(path.read_text()) == {"old": [1, 2]}
    with write_atomically(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() != "new"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_trace_is_compressed_where_it_is_to_be(directory: Path) -> None:
    plain = directory / "rank0.kineto.json"
    plain.write_bytes(b'{"traceEvents": []}' * 1000)
    target = CaptureFolders(directory).compress(plain)
    assert target == directory / "rank0.kineto.json.gz"
    assert gzip.decompress(target.read_bytes()) == b'{"traceEvents": []}' * 1000
    assert {path.name for path in directory.iterdir()} == {writing.NOTES, target.name}


def test_what_the_directory_does_not_take_is_kept_elsewhere_and_said(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").write_text("in the way")  # a file, where the directory was
    folders = CaptureFolders(tmp_path / "run")
    folder = folders.choose(1000)
    assert folder.is_dir()
    assert folder == folders.choose(1) == folders.refuge()  # once found, it stays
    plain = folder / "rank0.kineto.json"
    plain.write_bytes(b"trace")
    target = folders.compress(plain)
    assert gzip.decompress(target.read_bytes()) == b"trace"
    assert target.parent == folder
    assert str(folder) in capfd.readouterr().err
    folders.leave()  # it holds something
    assert target.exists()
    target.unlink()
    folders.leave()
    assert not folder.exists()


@pytest.fixture
def disks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, int]:
    """Free bytes of the capture directory and of the temporary directory, of 10,000 each."""
    free = {"run": 2000, "temporary": 2000}
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(writing.tempfile, "gettempdir", lambda: str(temporary))
    monkeypatch.setattr(
        writing.tempfile, "mkdtemp", lambda prefix: str(temporary / prefix.rstrip("-"))
    )
    monkeypatch.setattr(
        writing.shutil,
        "disk_usage",
        lambda path: SimpleNamespace(free=free[Path(path).name], total=10_000),
    )
    return free


def test_a_tenth_of_each_disk_is_left_to_the_program(
    directory: Path, disks: dict[str, int], tmp_path: Path
) -> None:
    assert CaptureFolders(directory).choose(1000) == directory
    disks["temporary"] = 3000
    assert CaptureFolders(directory).choose(1001) == tmp_path / "temporary" / "traceloom"
    with pytest.raises(OSError, match="No space left") as full:
        CaptureFolders(directory).choose(2001)
    assert full.value.errno == errno.ENOSPC


def test_a_limit_on_the_size_of_files_is_one_for_ours(directory: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        assert CaptureFolders(directory).choose(100_000) == directory
        with pytest.raises(OSError, match="too large") as large:
            CaptureFolders(directory).choose(100_001)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert large.value.errno == errno.EFBIG


def test_forks_that_write_are_waited_for_and_those_that_are_gone_are_not(tmp_path: Path) -> None:
    done = tmp_path / "rank0.writing"
    writer = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import os, sys, time; time.sleep(0.3); os.unlink(sys.argv[1])",
            done,
        ]
    )
    done.write_text(str(writer.pid))
    (tmp_path / "rank1.writing").write_text("4194303")  # no process has this number
    (tmp_path / "rank2.writing").write_text("")
    writing.wait_for_writers(tmp_path)
    assert not done.exists()
    assert writer.wait() == 0
    writing.wait_for_writers(tmp_path / "nowhere")


def test_a_path_that_is_not_utf_8_is_none_for_torch(tmp_path: Path) -> None:
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/r\xff"))
    odd.mkdir()
    folders = CaptureFolders(odd)
    assert folders.choose(1) == odd
    elsewhere = folders.for_torch(0)
    assert elsewhere != odd
    str(elsewhere).encode("utf-8")
    folders.leave()


def test_why_something_cannot_be_written_names_both_users(tmp_path: Path) -> None:
    text = describe_write_error(PermissionError(errno.EACCES, "Permission denied"), tmp_path)
    assert (
        text
        == f"Permission denied; the process runs as user {os.geteuid()}, the directory belongs to user {os.getuid()}"
    )
    assert (
        describe_write_error(OSError(errno.ENOSPC, "No space left on device"), tmp_path)
        == "No space left on device"
    )
    gone = describe_write_error(
        FileNotFoundError(errno.ENOENT, "No such file or directory"), tmp_path / "gone"
    )
    assert gone == f"No such file or directory; the process runs as user {os.geteuid()}"


HOLDER = """
import sys, time
from pathlib import Path
from traceloom.capture.writing import Lock
lock = Lock(Path(sys.argv[1]))
lock.take()
print("held", flush=True)
sys.stdin.read()
"""


def test_a_lock_is_one_process_s_until_it_ends_however(directory: Path) -> None:
    path = directory / writing.NOTES / "lock"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        other = Lock(path)
        with pytest.raises(OutputError, match=f"process {holder.pid} on ") as refused:
            other.take()
        assert (refused.value.slug, refused.value.where) == ("being-recorded", str(directory))
        assert not other.held
        with pytest.raises(OutputError):
            check_free(path.parent, "lo*")
        assert path.exists()
        holder.send_signal(signal.SIGKILL)
    check_free(path.parent, "lo*")
    assert not path.exists()
    other.take()
    assert other.held
    other.take()  # it has it already
    other.release()
    other.release()
    assert not path.exists()


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"process": "x", "host": 1}', b"\xff" * 2000, b'{"process": 1}']
)
def test_what_stands_in_a_lock_is_no_matter(directory: Path, content: bytes) -> None:
    path = directory / writing.NOTES / "lock"
    path.write_bytes(content)  # its holder has ended
    lock = Lock(path)
    lock.take()
    assert json.loads(path.read_bytes())["process"] == os.getpid()
    lock.release()


def test_a_fork_does_not_hold_what_its_parent_does(directory: Path) -> None:
    path = directory / writing.NOTES / "lock"
    lock = Lock(path)
    lock.take()
    child = os.fork()
    if not child:
        held = lock.held
        lock.release()
        os._exit(1 if held else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert path.exists()
    assert lock.held
    lock.release()


def test_a_lock_is_no_link(directory: Path, tmp_path: Path) -> None:
    path = directory / writing.NOTES / "lock"
    (tmp_path / "victim").write_text("precious")
    path.symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="symbolic"):
        Lock(path).take()
    assert (tmp_path / "victim").read_text() == "precious"


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, str]], None]:
    monkeypatch.setattr(distributed, "_parent", ("", ""))
    monkeypatch.setattr(
        distributed, "get_distributed", lambda: None
    )  # another test of this process may have begun a job

    def launch(variables: dict[str, str]) -> None:
        for name in list(os.environ):
            if name.startswith(
                (
                    "RANK",
                    "WORLD_SIZE",
                    "LOCAL_RANK",
                    "OMPI_",
                    "PMI_",
                    "MPI_",
                    "SLURM_",
                    "TORCHELASTIC",
                    "MASTER_",
                )
            ):
                monkeypatch.delenv(name)
        monkeypatch.setenv("TRACELOOM_PARENT", "")
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return launch


def test_what_a_rank_starts_has_not_its_place(
    launched: Callable[[dict[str, str]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_PORT": "29500"}
    launched(variables)
    assert not distributed.is_child()
    distributed.mark_children()
    assert distributed.read_rank_and_world() == (1, 2, 1)  # it itself
    inherited = os.environ["TRACELOOM_PARENT"].replace(str(os.getpid()), "4194303", 1)
    monkeypatch.setattr(distributed, "_parent", ("", ""))
    monkeypatch.setenv("TRACELOOM_PARENT", inherited)  # as one that it has started sees it
    distributed.mark_children()
    assert distributed.is_child()
    assert distributed.read_rank_and_world() == (None, None, None)
    monkeypatch.setenv("RANK", "0")  # a launcher of its own
    assert distributed.read_rank_and_world() == (0, 2, 1)
