"""Processes that work beside this one: they answer what they are sent, are used again, and none outlives its caller."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import traceloom
from traceloom.system.processes import (
    ProcessPool,
    WorkerProcess,
    count_cores,
    create_shared_directory,
    start_workers,
)

ECHO = """
import json, os, sys

def main():
    for line in sys.stdin:
        job = json.loads(line)
        if job.get("end") is not None:
            sys.exit(job["end"])
        about = {"job": job, "process": os.getpid(), "threads": os.environ.get("POLARS_MAX_THREADS")}
        print(json.dumps(about), flush=True)
"""


@pytest.fixture
def echo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module that says back what it is sent."""
    monkeypatch.delenv("POLARS_MAX_THREADS", raising=False)
    (tmp_path / "echo_of_jobs.py").write_text(ECHO, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    return "echo_of_jobs"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may run a process as another user")
@pytest.mark.skipif(
    not Path("/usr/bin/python3").exists(), reason="needs a Python that every user may run"
)
def test_as_another_user_it_has_nothing_of_root(monkeypatch: pytest.MonkeyPatch) -> None:
    with create_shared_directory() as folder:
        folder.chmod(0o755)
        (folder / "who_it_is.py").write_text(
            "import json, os\n\ndef main():\n"
            "    print(json.dumps([os.getuid(), os.getgid(), os.getgroups(), os.environ.get('TOKEN'), os.getcwd()]))\n",
            encoding="utf-8",
        )
        libraries = map(
            str, Path("/usr/lib").glob("python3.*")
        )  # ours may lie where only root reads
        monkeypatch.setattr(sys, "path", [*sys.path, *libraries, str(folder)])
        monkeypatch.setenv("TOKEN", "secret")
        monkeypatch.setattr(sys, "executable", "/usr/bin/python3")
        worker = WorkerProcess("who_it_is", user=65534)
        assert list(worker.answers()) == [[65534, 65534, [], None, "/"]]
        worker.ended()


def is_gone(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    return False


def test_jobs_are_answered_in_their_order_whatever_they_hold(echo: str) -> None:
    worker = WorkerProcess(echo, threads=3)
    answers = worker.answers()
    jobs: list[dict[str, object]] = [
        {},
        {"text": "é\u2028\n\x00 \U0001f600"},
        {"deep": [{"a": None}]},
        {"n": 2**70},
    ]
    for job in jobs:
        worker.send(job)
        answer = next(answers)
        assert (answer["job"], answer["threads"]) == (job, "3")
    worker.send({"end": 7})
    assert list(answers) == []
    assert worker.ended() == 7
    assert worker.ended() == 7


def test_what_is_sent_to_a_process_that_has_ended_is_no_error(echo: str) -> None:
    worker = WorkerProcess(echo)
    worker.send({"end": 0})
    assert list(worker.answers()) == []
    for _ in range(3):
        worker.send({"text": "x" * 100_000})
    assert worker.ended() == 0


def test_a_process_that_is_killed_says_by_which_signal(echo: str) -> None:
    worker = WorkerProcess(echo)
    worker.kill()
    assert list(worker.answers()) == []
    assert worker.ended() == -signal.SIGKILL


def test_the_number_of_threads_that_the_user_chose_stays(
    echo: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLARS_MAX_THREADS", "5")
    worker = WorkerProcess(echo, threads=2)
    worker.send({})
    assert next(worker.answers())["threads"] == "5"
    worker.kill()
    worker.ended()


def test_nothing_is_imported_from_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "of_a_stranger.py").write_text(
        "print('{}')\ndef main(): print('{}')\n", encoding="utf-8"
    )
    (tmp_path / "json.py").write_text(
        "print('{}')\n", encoding="utf-8"
    )  # in place of what Python has
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    worker = WorkerProcess("of_a_stranger", quiet=True)
    assert list(worker.answers()) == []
    assert worker.ended() == 1
    assert capfd.readouterr().err == ""


def test_idle_processes_are_used_again_and_busy_ones_are_not(echo: str) -> None:
    def process(worker: WorkerProcess) -> int:
        worker.send({})
        return int(next(worker.answers())["process"])

    with start_workers(echo) as started:
        with started.idle() as first, started.idle() as second:
            both = {process(first), process(second)}
            assert len(both) == 2
        with started.idle() as again:
            assert process(again) in both
        with contextlib.suppress(ZeroDivisionError), started.idle() as failed:
            unsure = process(failed)
            raise ZeroDivisionError
        with started.idle() as one, started.idle() as other:
            assert unsure not in {process(one), process(other)}  # it may be amid a job
            processes = both | {process(one), process(other)}
        assert len(processes) == 3
    assert all(is_gone(number) for number in processes)


def test_none_begins_after_the_end(echo: str) -> None:
    with start_workers(echo) as started:
        pass
    with pytest.raises(InterruptedError), started.idle():
        pytest.fail("there is no process")
    never = ProcessPool(echo)
    never.stop()
    never.ended()
    with pytest.raises(OSError), never.idle():
        pytest.fail("there is no process")


def test_processes_end_with_what_is_done_inside_however_it_ends(echo: str) -> None:
    with contextlib.suppress(ZeroDivisionError), start_workers(echo) as started:
        with started.idle() as worker:
            worker.send({})
            process = int(next(worker.answers())["process"])
        raise ZeroDivisionError
    assert is_gone(process)


def test_a_shared_folder_is_for_its_user_alone_and_does_not_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with create_shared_directory() as folder, create_shared_directory() as other:
        assert folder != other
        assert {folder.parent, other.parent} == {tmp_path}
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        (folder / "deep").mkdir()
        (folder / "deep" / "file").write_text("x")
    with contextlib.suppress(ZeroDivisionError), create_shared_directory() as third:
        (third / "file").write_text("x")
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_without_room_for_the_folder_there_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    with pytest.raises(FileNotFoundError), create_shared_directory():
        pytest.fail("there is no folder")


@pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="needs a system that binds processes to cores"
)
def test_cores_are_those_that_this_process_may_use() -> None:
    may_use = os.sched_getaffinity(0)
    assert count_cores() == len(may_use)
    os.sched_setaffinity(0, {min(may_use)})
    try:
        assert count_cores() == 1
    finally:
        os.sched_setaffinity(0, may_use)


def test_answers_are_utf_8_in_every_locale(tmp_path: Path) -> None:
    says = 'def main():\n    import sys\n    sys.stdout.buffer.write(\'{"text": "2 \u00d7 \u00e9"}\\n\'.encode())\n'
    (tmp_path / "says_more_than_ascii.py").write_text(says, encoding="utf-8")
    code = "from traceloom.system.processes import WorkerProcess as Worker; print(ascii(next(Worker('says_more_than_ascii').answers())['text']))"
    paths = os.pathsep.join([str(tmp_path), str(Path(traceloom.__file__).parents[1])])
    ascii_alone = {
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
        "PYTHONPATH": paths,
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **ascii_alone},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.returncode) == (ascii("2 \u00d7 \u00e9") + "\n", 0), done.stderr
