"""Stacks of processes, read from outside while their windows are open; and why there are none."""

from __future__ import annotations

import errno
import gzip
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from traceloom.capture import manifest, stack_samples, writing
from traceloom.capture.stack_samples import StackSampler

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not (3, 11) <= sys.version_info[:2] <= (3, 13),
    reason="frames of Python 3.11 to 3.13 are read, on Linux",
)

# Opens its window when it is told to, with two threads that stay where they are, and says so.
PROGRAM = """
import sys, threading, time
from pathlib import Path
from traceloom.capture import writing

def wait_here(line):
    line.wait()

def main(directory):
    release = threading.Event()
    other = threading.Thread(target=wait_here, args=(release,))
    other.start()
    began = time.time_ns()
    writing.announce_window(directory, writing.OPENS)
    print(began, threading.get_native_id(), other.native_id, flush=True)
    sys.stdin.readline()  # the window
    writing.announce_window(directory, writing.CLOSES)
    print(time.time_ns(), flush=True)
    release.set()
    sys.stdin.readline()

main(Path(sys.argv[1]))
"""
LINES = {line.strip(): number for number, line in enumerate(PROGRAM.splitlines(), 1)}


def write_part(directory: Path, process: int, start_ns: int, end_ns: int) -> None:
    window = {"start_ns": start_ns, "end_ns": end_ns}
    rank = {"rank": 0, "name": "rank0", "process": process, "window": window}
    part = manifest.document([rank], {})
    writing.write_json(directory / "rank0.capture.json", part)


def save(sampler: StackSampler, directory: Path) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """What the part says of samples, and the file with them."""
    sampler.stop()
    sampler.save(directory)
    (rank,) = json.loads((directory / "rank0.capture.json").read_text())["ranks"]
    told = rank["stack_samples"]
    if told["file"] is None:
        return told, None
    return told, json.loads(gzip.decompress((directory / told["file"]).read_bytes()))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / writing.NOTES).mkdir()
    return tmp_path


def test_the_threads_of_a_grandchild_are_seen_in_its_window_alone(place: Path) -> None:
    script = place / "program.py"
    script.write_text(PROGRAM)
    sampler = StackSampler(place / writing.NOTES)
    with subprocess.Popen(
        ["sh", "-c", '"$0" "$1" "$2"; true', sys.executable, script, place],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        began_ns, main, other = map(int, process.stdout.readline().split())
        (sampled,) = wait_for(lambda: list(sampler._seen.values()))
        wait_for(lambda: len(sampled._looks) > 20)
        process.stdin.write("\n")
        process.stdin.flush()
        ended_ns = int(process.stdout.readline())
        time.sleep(0.1)  # whoever looks now looks too long
        process.stdin.write("\n")
    write_part(place, main, began_ns, 2**62)
    told, document = save(sampler, place)
    assert told == {"file": "rank0.stacks.json.gz", "reason": None}
    assert document is not None
    assert (document["pid"], document["rank"], document["format"]) == (main, 0, "traceloom-stacks")
    assert [thread["id"] for thread in document["threads"]].index(main) >= 0
    names = {thread["id"]: thread["name"] for thread in document["threads"]}
    assert names == {main: "MainThread", other: ""}
    seen: dict[int, set[tuple[str, str, int]]] = {main: set(), other: set()}
    times_ns = []
    for at_ns, thread, period_ns, stack in document["samples"]:
        number = document["threads"][thread]["id"]
        seen[number] |= {tuple(document["frames"][frame]) for frame in stack}
        times_ns += [at_ns, at_ns + period_ns]
    path = str(script)
    assert ("main", path, LINES["sys.stdin.readline()  # the window"]) in seen[main]
    assert ("<module>", path, LINES["main(Path(sys.argv[1]))"]) in seen[main]
    assert ("wait_here", path, LINES["line.wait()"]) in seen[other]
    assert all(function != "main" for function, *_ in seen[other])
    assert began_ns <= min(times_ns)
    assert max(times_ns) <= ended_ns
    # A part of the window keeps what was seen in it.
    half_ns = (min(times_ns) + max(times_ns)) // 2
    write_part(place, main, half_ns, 2**62)
    _, kept = save(sampler, place)
    assert kept is not None
    assert 0 < len(kept["samples"]) < len(document["samples"])
    assert all(half_ns <= sample[0] for sample in kept["samples"])


def wait_for(look: Any) -> Any:
    """What it finds, once that is something."""
    deadline = time.monotonic() + 60
    while not (found := look()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def say(directory: Path, line: str) -> None:
    with (directory / writing.NOTES / writing.WINDOWS).open("w") as pipe:
        pipe.write(f"{line}\n")


def test_a_process_that_is_not_python_is_not_looked_at(place: Path) -> None:
    sampler = StackSampler(place / writing.NOTES)
    with subprocess.Popen(["sleep", "60"]) as process:
        say(place, f"opens {process.pid} {writing.read_process_namespace()}")
        wait_for(lambda: sampler._reasons)
        process.kill()
    write_part(place, process.pid, 0, 2**62)
    assert save(sampler, place) == (
        {"file": None, "reason": "it cannot be read: it runs no Python"},
        None,
    )


def test_a_process_that_may_not_be_read_says_so(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_process: int) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(stack_samples, "PythonFrames", refuse)
    sampler = StackSampler(place / writing.NOTES)
    writing.announce_window(place, writing.OPENS)
    wait_for(lambda: sampler._reasons)
    write_part(place, os.getpid(), 0, 2**62)
    assert save(sampler, place)[0]["reason"] == "it cannot be read: Permission denied"


def test_the_number_of_a_process_in_a_container_is_not_taken_for_one_of_here(place: Path) -> None:
    sampler = StackSampler(place / writing.NOTES)
    say(place, f"opens {os.getpid()} pid:[1]")
    wait_for(lambda: sampler._reasons)
    write_part(place, os.getpid(), 0, 2**62)
    told, _ = save(sampler, place)
    assert told["reason"] == "it runs in a container, whose processes have other numbers"


def test_a_process_that_said_nothing_has_a_reason_and_what_nobody_says_ends_looking_alone(
    place: Path,
) -> None:
    sampler = StackSampler(place / writing.NOTES)
    write_part(place, os.getpid(), 0, 2**62)
    say(place, "no such word")
    wait_for(lambda: not sampler._thread.is_alive())
    told, _ = save(sampler, place)
    assert told["file"] is None
    assert told["reason"].startswith("the stacks could not be read: ")
    # Where nobody looks, nothing happens.
    writing.announce_window(place / "elsewhere", writing.OPENS)


def test_a_process_that_ends_without_a_word_is_no_fault(place: Path) -> None:
    sampler = StackSampler(place / writing.NOTES)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        say(place, f"opens {process.pid} {writing.read_process_namespace()}")
        wait_for(lambda: sampler._seen or sampler._reasons)
    time.sleep(0.05)
    assert sampler._thread.is_alive()
    sampler.stop()
    assert not sampler._thread.is_alive()


def test_where_there_is_no_pipe_the_reason_says_so(tmp_path: Path) -> None:
    sampler = StackSampler(tmp_path / "missing")
    write_part(tmp_path, 1, 0, 1)
    told, _ = save(sampler, tmp_path)
    assert told["reason"].startswith("there is no pipe to say when a window opens: ")


def test_where_processes_record_stacks_themselves_nobody_looks(place: Path) -> None:
    sampler = StackSampler(place / writing.NOTES, wanted=False)
    assert not (place / writing.NOTES / writing.WINDOWS).exists()
    write_part(place, 1, 0, 1)
    assert save(sampler, place)[0]["reason"] == "stacks were recorded in the process itself"
