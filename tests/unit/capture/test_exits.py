"""Threads and forks of the recorder, of which the program must see nothing."""

from __future__ import annotations

import _thread
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from traceloom.capture import exits
from traceloom.capture.exits import Watch


def threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def until(condition: Any) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_watch_looks_until_it_is_told_that_there_is_no_more_to_see() -> None:
    left = [True, True, True, False]
    watch = Watch(lambda: left.pop(0))
    before = threading.enumerate()
    watch.start()
    assert watch.running
    assert threading.enumerate() == before, "`threading` does not know of it"
    until(lambda: not watch.running)
    assert left == []
    watch.stop()
    left += [False]
    watch.start()  # it begins again
    until(lambda: not left)
    watch.stop()


def test_a_watch_that_is_stopped_has_no_thread_any_more() -> None:
    looked = threading.Event()

    def look() -> bool:
        looked.set()
        return True

    before = threads()
    watch = Watch(look)
    for _ in range(3):
        watch.start()
        watch.start()
        assert looked.wait(30)
        assert threads() == before + 1
        watch.stop()
        assert not watch.running
        until(lambda: threads() == before)
        watch.stop()
        looked.clear()


def test_a_watch_that_fails_ends(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)

    def look() -> bool:
        raise ValueError

    watch = Watch(look)
    watch.start()
    until(lambda: not watch.running)
    watch.stop()


def test_where_no_thread_can_be_had_nobody_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> int:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(_thread, "start_new_thread", refuse)
    watch = Watch(lambda: True)
    watch.start()
    assert not watch.running
    watch.stop()


FORKS = """
import os, signal, sys, threading, time
from traceloom.capture.exits import fork_quietly
said = []
os.register_at_fork(before=lambda: said.append(1), after_in_parent=lambda: said.append(2), after_in_child=lambda: said.append(3))
signal.alarm(60)
over = threading.Event()
def count():
    number = 0
    while not over.is_set(): number += 1
threads = [threading.Thread(target=KIND) for _ in range(3)]
for thread in threads: thread.start()
interval, ends, refused = sys.getswitchinterval(), [], 0
began = time.monotonic()
for number in range(20):
    child = fork_quietly()
    if child == 0:
        signal.alarm(10)  # as its parent ends one that does not run
        time.sleep(0.001)  # it gives the interpreter away, and gets it back
        os._exit(number if not said else 99)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) if child > 0 else -signal.SIGALRM
    if status == -signal.SIGALRM: refused += 1
    else: ends.append(status - number)
took = time.monotonic() - began
over.set()
for thread in threads: thread.join()
print(set(ends) <= {0}, said, sys.getswitchinterval() == interval, threading.active_count(), took < 30, refused)
"""


@pytest.mark.sampled(1)
@pytest.mark.skipif(sys.platform != "linux", reason="forks are used on Linux alone")
@pytest.mark.parametrize(("kind", "refuses"), [("over.wait", False), ("count", True)])
def test_a_quiet_fork_calls_no_handler_and_is_none_beside_threads_that_keep_python_busy(
    kind: str, refuses: bool
) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", FORKS.replace("KIND", kind)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.stderr, done.returncode) == ("", 0)
    *said, refused = done.stdout.split()
    assert said == ["True", "[]", "True", "1", "True"]
    assert int(refused) >= 8 if refuses else int(refused) == 0


PENDING = """
import threading, time
from traceloom.capture.exits import run_on_main_thread
ran = []
def ask(): print(run_on_main_thread(lambda: ran.append(threading.current_thread() is threading.main_thread())))
thread = threading.Thread(target=ask); thread.start()
end = time.monotonic() + 30
while not ran and time.monotonic() < end: sum(range(100))
thread.join()
print(ran)
"""


def test_the_main_thread_runs_what_another_one_asks_of_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PENDING], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.stdout, done.stderr) == ("True\n[True]\n", "")


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_a_fork_may_leave_out_what_c_would_run_at_its_end_and_keeps_its_status() -> None:
    code = """
import ctypes, os, sys
from traceloom.capture.session import leave_forks_without_handlers
library = ctypes.CDLL(None)
at_exit = library.__getattr__("__cxa_atexit")
word = ctypes.create_string_buffer(b"handler")
at_exit(ctypes.cast(library.puts, ctypes.c_void_p), ctypes.c_void_p(ctypes.addressof(word)), None)
if len(sys.argv) > 1: leave_forks_without_handlers()
process = os.fork()
if process == 0:
    library.puts(b"of C")
    print("of Python")
    sys.exit(3)
os._exit(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
"""
    plain, quiet = (
        subprocess.run(
            [sys.executable, "-c", code, *words],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        for words in ([], ["x"])
    )
    assert (plain.returncode, quiet.returncode) == (3, 3)
    assert sorted(plain.stdout.split("\n")) == ["", "handler", "of C", "of Python"]
    assert sorted(quiet.stdout.split("\n")) == ["", "of C", "of Python"]


@pytest.mark.parametrize(
    ("words", "launches"),
    [
        (["python", "-m", "torch.distributed.run", "t.py"], True),
        (["/usr/bin/python3", "/opt/bin/torchrun", "t.py"], True),
        (["python", "-u", "-m", "accelerate.commands.launch", "t.py"], True),
        (["python", "train.py", "torchrun"], True),
        (["python", "train.py", "--by", "torchrun"], False),
        (["python", "-m", "train", "torchrun"], False),
        (["python", "-c", "1", "-m"], False),
        ([], False),
    ],
)
def test_a_launcher_is_known_by_its_command_line(
    words: list[str], launches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "orig_argv", words)
    assert exits.is_launcher() == launches
