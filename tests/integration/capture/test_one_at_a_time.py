"""A directory takes one recording at a time, and an earlier capture stays until a new one is whole."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from traceloom.capture import manifest, writing
from traceloom.capture.launch import Launch
from traceloom.capture.settings import Settings
from traceloom.capture.writing import Lock
from traceloom.errors import OutputError

pytestmark = pytest.mark.torch

FOREVER = "import time\nfor _ in range(12): step()\nprint('ready', flush=True)\nwhile True: time.sleep(0.01)"


def ready(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert any(line == "ready\n" for line in process.stdout)


def content(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def settled(folder: Path) -> dict[str, bytes]:
    """The content, when what was recorded has been written: that goes on beside the program."""
    while True:
        before = content(folder)
        time.sleep(1)
        if before == content(folder):
            return before


def others(recorder: Any) -> list[str]:
    """What lies beside the capture that a recording could have left there."""
    return [
        path.name for path in recorder.directory.parent.iterdir() if path.name.startswith("run-")
    ]


def test_two_recordings_into_one_directory_at_the_same_time_are_refused(recorder: Any) -> None:
    first = recorder.popen([sys.executable, recorder.script(FOREVER)], start_new_session=True)
    ready(first)
    before = settled(recorder.directory)
    for options in ([], ["--force"]):
        run = recorder.record([sys.executable, "-c", "print('run all the same')"], *options)
        assert (run.code, run.out) == (3, "")
        assert "#capture-exists" in run.err or "#being-recorded" in run.err
    assert f"is running (process {first.pid} on " in run.err
    inner = recorder.script(
        "import traceloom\nwith traceloom.record('run', force=True): step()", "inner.py"
    )
    assert (
        "being-recorded" in recorder.plain([sys.executable, inner]).err or "is running" in run.err
    )
    assert content(recorder.directory) == before
    os.killpg(first.pid, signal.SIGINT)
    first.communicate(timeout=300)
    run = type(run)(0, "", "", recorder.directory)
    assert run.marks() == [3, 4, 5, 6, 7, 8]
    assert not (recorder.directory / writing.NOTES).exists()


@pytest.mark.thorough
def test_what_a_killed_recorder_had_claimed_is_free_again(recorder: Any) -> None:
    first = recorder.popen(
        [sys.executable, recorder.script(FOREVER.replace("12", "2"))], start_new_session=True
    )
    ready(first)
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate(timeout=300)
    assert (recorder.directory / writing.NOTES / "lock").exists()
    run = recorder.python("for _ in range(6): step()")
    assert run.code == 0, run.err
    assert run.rank()["window"]["step_count"] == 3
    assert run.files == {"capture.json", "rank0.capture.json", "rank0.kineto.json.gz"}


FAILURES = {
    "a program without torch": "print('nothing')",
    "a program that fails": "import torch; raise SystemExit(3)",
    "a program that uses torch for nothing": "import torch",
    "a program that is killed": "import os, signal, torch; os.kill(os.getpid(), signal.SIGKILL)",
}


@pytest.fixture(scope="module")
def recorded(shared_recorder: Any) -> Any:
    run = shared_recorder.python("for _ in range(6): step()")
    assert run.marks()[:2] == [3, 4]
    return shared_recorder


@pytest.mark.sampled(1)
@pytest.mark.parametrize("failure", FAILURES)
def test_a_recording_that_comes_to_nothing_leaves_the_earlier_one_as_it_was(
    recorded: Any, failure: str
) -> None:
    before = content(recorded.directory)
    run = recorded.record([sys.executable, "-c", FAILURES[failure]], "--force")
    assert run.ours[-1].split("; ")[-1].startswith("the earlier capture in run stays ["), run.err
    assert content(recorded.directory) == before
    assert recorded.record(["no-such-command"], "--force").code == 2
    assert content(recorded.directory) == before
    assert {path.name for path in recorded.directory.iterdir() if path.is_dir()} == set()


def test_a_recorder_that_is_killed_leaves_the_earlier_one_as_it_was_and_loses_nothing(
    recorder: Any,
) -> None:
    recorder.python("for _ in range(6): step()")
    before = content(recorder.directory)
    killed = recorder.popen(
        [sys.executable, recorder.script(FOREVER)], "--force", start_new_session=True
    )
    ready(killed)
    made = recorder.directory / writing.NOTES / "new"
    for _ in range(3000):
        if (made / "capture.json").exists():
            break
        time.sleep(0.01)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate(timeout=300)
    left = {
        name: text
        for name, text in content(recorder.directory).items()
        if not name.startswith(writing.NOTES)
    }
    assert left == before
    run = recorder.record([sys.executable, "-c", "print(1)"], "--force")
    assert content(recorder.directory) == before
    assert others(recorder) == ["run-unfinished-1"]
    assert any(line.endswith("[kept-beside]") for line in run.ours)
    run.directory = recorder.directory.with_name("run-unfinished-1")
    assert run.marks() == [3, 4, 5, 6, 7, 8]


@pytest.mark.thorough
def test_a_whole_recording_takes_the_place_of_the_earlier_one_by_force(recorder: Any) -> None:
    recorder.record(recorder.torchrun(recorder.script("for _ in range(6): step()")))
    (recorder.directory / "mine.txt").write_text("mine")
    run = recorder.python("for _ in range(5): step()\nraise KeyError('at the end')", "--force")
    assert run.code == 1
    assert run.files == {"mine.txt", "capture.json", "rank0.capture.json", "rank0.kineto.json.gz"}
    assert [(part["rank"], part["world_size"]) for part in run.capture["ranks"]] == [(0, 1)]
    assert run.marks()[:2] == [3, 4]
    assert run.ours[-1].startswith("traceloom: wrote run (")
    assert others(recorder) == []


def test_what_is_not_whole_of_a_new_capture_is_kept_beside_the_earlier_one(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    writing.write_json(
        directory / "rank0.capture.json", manifest.document([{"rank": 0, "notices": []}], {})
    )
    manifest.merge(directory, {"command": ["old"]})
    before = content(directory)
    launch = Launch(Settings(str(directory)), ["true"], force=True)
    moved = {"slug": "capture-moved", "message": "rank0.kineto.json.gz is elsewhere"}
    part = manifest.document([{"rank": 0, "notices": [moved]}], {})
    writing.write_json(launch._place / "rank0.capture.json", part)
    launch.run()
    (remark,) = launch.summary("run")
    assert remark.endswith("[kept-beside]")
    assert content(directory) == before
    assert {path.name for path in (tmp_path / "run-unfinished-1").iterdir()} == {
        "capture.json",
        "rank0.capture.json",
    }


@pytest.mark.thorough
def test_a_block_of_code_replaces_an_earlier_capture_only_when_it_is_whole(recorder: Any) -> None:
    folder = recorder.tmp_path / "block"

    def state() -> dict[str, int]:
        return {path.name: path.stat().st_mtime_ns for path in folder.rglob("*")}

    def block(options: str, body: str) -> Any:
        text = "import os, traceloom\n"
        text += f"with traceloom.record('block', {options}) as recording:\n    {body}\nprint(recording.path)"
        return recorder.plain([sys.executable, recorder.script(text)])

    first = block("steps='1..3'", "[step() for _ in range(5)]")
    assert (first.code, first.out) == (0, "block\n"), first.err
    before = state()
    inside = block("steps='20..25', force=True", "step(); print(*sorted(os.listdir('block')))")
    assert set(inside.out.split()) == {*before, ".recording", "block"}
    assert state() == before
    assert block("steps='20..25', force=True", "raise KeyError").code == 1
    assert state() == before
    assert block("steps='2..3', force=True", "[step() for _ in range(5)]").code == 0
    assert set(state()) == set(before)
    assert not set(state().values()) & set(before.values())
    capture = json.loads((folder / "capture.json").read_text())
    assert capture["ranks"][0]["window"]["first_step"] == 2


@pytest.mark.thorough
def test_blocks_of_two_programs_do_not_write_into_one_directory_at_once(recorder: Any) -> None:
    text = "import sys, time, traceloom\nwith traceloom.record('run', force=True):\n    step()\n    {}\n"
    wait = "print('ready', flush=True); sys.stdin.read()"
    first = subprocess.Popen(
        [sys.executable, recorder.script(text.format(wait), "first.py")],
        env={**recorder.env, "PYTHONPATH": str(recorder.source)},
        cwd=recorder.tmp_path,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    ready(first)
    second = recorder.plain([sys.executable, recorder.script(text.format("pass"), "second.py")])
    assert "another recording into this directory is running" in second.err
    assert recorder.record([sys.executable, "-c", "print(1)"]).code == 3
    first.communicate("", timeout=300)
    assert first.returncode == 0
    run = recorder.plain([sys.executable, recorder.script(text.format("pass"), "second.py")])
    assert (run.code, run.files) == (
        0,
        {"capture.json", "rank0.capture.json", "rank0.kineto.json.gz"},
    )


def test_a_lock_that_was_removed_while_it_was_opened_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / writing.NOTES / "lock"
    opened = os.open
    calls = []

    def late(*arguments: Any) -> int:
        handle = opened(*arguments)
        if not calls:
            path.unlink()
        calls.append(handle)
        return handle

    monkeypatch.setattr(os, "open", late)
    lock = Lock(path)
    lock.take()
    assert len(calls) == 2
    assert path.exists()
    code = f"from traceloom.capture.writing import Lock; from pathlib import Path; Lock(Path({str(path)!r})).take()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert f"process {os.getpid()}" in done.stderr
    lock.release()
    assert not path.exists()
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_earlier_capture_is_not_replaced_unasked(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "capture.json").write_text(json.dumps({}))
    with pytest.raises(OutputError, match="holds a capture already"):
        Launch(Settings(str(tmp_path / "run")), ["true"], force=False)
    assert content(tmp_path) == {"run/capture.json": b"{}"}


@pytest.mark.thorough
@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root may become somebody else"
)
def test_a_program_that_changes_its_user_says_why_nothing_is_in_the_directory(
    recorder: Any,
) -> None:
    refuge = recorder.tmp_path / "refuge"
    refuge.mkdir()
    for directory in (refuge, *refuge.parents):
        if directory.stat().st_uid == 0 and directory != Path("/"):
            directory.chmod(directory.stat().st_mode | 0o711)
    text = "import os\nstep()\nos.setgid(65534); os.setuid(65534)\nfor _ in range(6): step()\n"
    recorder.env["TMPDIR"] = str(refuge)
    for writable, slug in ((0o777, "capture-moved"), (0o755, "recorder-failed")):
        refuge.chmod(writable)
        prepared = f"import tempfile; tempfile.tempdir = {str(refuge)!r}\n" + text
        run = recorder.python(prepared, "--force")
        assert run.code == 0, run.err
        said = next((line for line in run.ours if line.endswith(f"[{slug}]")), run.err)
        assert "the process runs as user 65534, the directory belongs to user 0" in said
        assert run.ours[-1].endswith("(then it says above why) [ended-unseen]")
    assert any(path.name == "rank0.kineto.json.gz" for path in refuge.rglob("*"))
