"""A file that is decoded beside the loading of libraries gives the trace that it gives anyway."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support import damage
from traceloom.testing import TraceBuilder

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2,
    reason="needs Linux and a second core",
)

# The process may have no other thread, so linear algebra must not start any.
ENVIRONMENT = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
BEGIN = """
import os, signal, sys
from pathlib import Path
from traceloom.errors import InputError
from traceloom.formats import ahead
from traceloom.trace import cache
path = Path(sys.argv[1])
def alone():
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return True
    return False
"""


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Large enough to be worth it, and cut off, so that there is something to say about it."""
    made = TraceBuilder()
    for number in range(3000):
        made.op(f"aten::op{number % 7}", number * 10, 5, shapes=[[number, 3]])
    path = tmp_path / "trace.json"
    path.write_bytes(damage.truncated(made.text(), len(made.text()) - 300))
    return path


def run(code: str, path: Path, *more: str) -> list[str]:
    """What a fresh process prints."""
    command = [sys.executable, "-c", BEGIN + code, str(path), *more]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=ENVIRONMENT)
    return done.stdout.split()


COMPARE = """
    from traceloom.formats import read_kineto
    ahead_of_us = read_kineto(path)
print(alone())
here = read_kineto(path)
frames = here.frames()
print(all(frames[name].equals(frame) for name, frame in ahead_of_us.frames().items()))
print(here.meta == ahead_of_us.meta, here.notices == ahead_of_us.notices, len(here.notices) > 1)
"""


def test_the_trace_is_the_same_and_the_process_is_gone(trace: Path) -> None:
    code = f"with ahead.decode_ahead([path.parent, path, 'elsewhere', '-'], None):\n    print(bool(ahead._running))\n{COMPARE}"
    assert run(code, trace) == ["True"] * 6


def test_a_process_that_is_killed_costs_nothing_but_time(trace: Path) -> None:
    kill = "    os.kill(ahead._running[path][0]._forks[0]._process, signal.SIGKILL)\n"
    assert run(f"with ahead.decode_ahead([path], None):\n{kill}{COMPARE}", trace) == ["True"] * 5


def test_a_system_that_allows_no_process_or_ends_it_unseen_is_no_obstacle(trace: Path) -> None:
    begin = "with ahead.decode_ahead([path], None):\n    print(bool(ahead._running))\n"
    ignored = "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
    assert run(ignored + begin + COMPARE, trace) == ["True"] * 6
    assert run(ignored + begin, trace) == ["True"]
    refused = "def fork():\n    raise BlockingIOError(11, 'try again')\nos.fork = fork\n"
    assert run(refused + begin + COMPARE, trace) == ["False", *["True"] * 5]


def test_a_process_whose_answer_nobody_wants_is_ended(trace: Path) -> None:
    assert run(
        "with ahead.decode_ahead([path], None):\n    print(alone())\nprint(alone(), ahead._running)",
        trace,
    ) == [
        "False",
        "True",
        "{}",
    ]


def test_what_is_no_trace_is_refused_as_ever(trace: Path) -> None:
    trace.write_text("<html>" + " " * 200_000)
    refused = """
with ahead.decode_ahead([path], None):
    print(bool(ahead._running))
    from traceloom.formats import read_kineto
    try:
        read_kineto(path)
    except InputError as error:
        print(error.slug, alone())
"""
    assert run(refused, trace) == ["True", "not-a-trace", "True"]


def test_nothing_is_decoded_ahead_that_is_small_or_cached_or_too_late(trace: Path) -> None:
    code = """
from traceloom.trace.cache import Cache
if sys.argv[2:] == ["long ago"]:
    cache._CLOCK_GRANULARITY_NS = 0
kept = Cache(path.parent / "cache")
(path.parent / "small").write_bytes(path.read_bytes()[:10_000])
for given in ([path.parent / "small"], [], [path]):
    with ahead.decode_ahead(given, kept):
        print(bool(ahead._running))
from traceloom.formats import read_kineto
from functools import partial
from traceloom.trace import storage as trace_store
kept.entry(path, None).put(partial(trace_store.save, read_kineto(path)))
with ahead.decode_ahead([path], None):
    print(bool(ahead._running))
"""
    assert run(code, trace, "long ago") == ["False", "False", "True", "False"]
    assert run(code, trace, "long ago") == ["False", "False", "False", "False"]


def test_nothing_is_decoded_ahead_for_the_cache_that_may_change_unseen(trace: Path) -> None:
    code = """
path.touch()  # it may have been written a while ago
with ahead.decode_ahead([path], cache.Cache(path.parent / "cache")):
    print(bool(ahead._running))
"""
    assert run(code, trace) == ["False"]


def test_a_file_that_changes_before_it_is_read_is_decoded_anew(trace: Path) -> None:
    code = """
with ahead.decode_ahead([path], None):
    print(bool(ahead._running))
    path.write_bytes(path.read_bytes()[:-1000])
    from traceloom.formats import read_kineto
    changed = read_kineto(path)
print(alone(), changed.events.height == read_kineto(path).events.height)
"""
    assert run(code, trace) == ["True"] * 3
