"""Lines and frames of Python, against what Python says of itself."""

from __future__ import annotations

import ast
import asyncio
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from types import CodeType

import pytest
from hypothesis import given, strategies as st

from traceloom.system.python_frames import PythonFrames, find_line

current = pytest.mark.skipif(
    not (3, 11) <= sys.version_info[:2] <= (3, 13), reason="frames of Python 3.11 to 3.13 are read"
)


def functions_of(code: CodeType) -> list[CodeType]:
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return [code, *(function for constant in inner for function in functions_of(constant))]


@pytest.mark.sampled(2)
@current
@pytest.mark.parametrize(
    "module", [ast, asyncio.base_events, re, subprocess], ids=lambda module: module.__name__
)
def test_lines_are_those_of_the_code(module: object) -> None:
    path = Path(str(module.__file__))  # type: ignore[attr-defined]
    checked = 0
    for code in functions_of(compile(path.read_text(encoding="utf-8"), str(path), "exec")):
        for unit, (line, *_) in enumerate(code.co_positions()):
            assert find_line(code.co_linetable, code.co_firstlineno, unit) == (line or 0)
            checked += 1
    assert checked > 1000


@given(st.binary(max_size=200), st.integers(-5, 1000))
def test_any_table_gives_a_number(table: bytes, unit: int) -> None:
    assert isinstance(find_line(table, 7, unit), int)


@current
def test_frames_of_this_process_are_those_that_it_has() -> None:
    frames = PythonFrames(os.getpid())
    layout = frames.layout

    def seen() -> list[tuple[str, str, int]]:
        thread = frames.threads()[threading.get_native_id()]
        assert thread is not None
        at = frames._number(thread.state + layout.newest)
        if layout.newest_behind is not None:
            at = frames._number(at + layout.newest_behind)
        result = []
        while at:
            result.append(
                frames.describe(
                    frames._number(at + layout.code), frames._number(at + layout.instruction)
                )
            )
            at = frames._number(at + layout.previous)
        return [frame for frame in result if frame is not None]

    # The innermost ones read the process's memory; from here on it is what Python says.
    names = [name for name, _, _ in seen()]
    own = sys._getframe()
    begins = names.index(own.f_code.co_name)
    truth = []
    frame = own
    while frame is not None:
        truth.append((frame.f_code.co_name, frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back  # type: ignore[assignment]
    result = seen()[begins:]
    assert [(name, file) for name, file, _ in result] == [(name, file) for name, file, _ in truth]
    assert result[1:] == truth[1:]
    frames.close()


@current
def test_threads_are_those_that_run() -> None:
    frames = PythonFrames(os.getpid())
    ready, end = threading.Event(), threading.Event()

    def wait() -> None:
        ready.set()
        end.wait(60)

    thread = threading.Thread(target=wait)
    before = frames.threads()
    thread.start()
    assert ready.wait(60)
    during = frames.threads()
    assert thread.native_id not in before
    assert during[thread.native_id] is not None  # type: ignore[index]
    assert during[threading.get_native_id()] == before[threading.get_native_id()]
    end.set()
    thread.join()
    frames.close()


def test_what_runs_no_python_says_so() -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as other:
        with pytest.raises(OSError, match="runs no Python"):
            PythonFrames(other.pid)
        other.kill()


@current
def test_memory_that_changes_is_no_frame() -> None:
    frames = PythonFrames(os.getpid())
    for code in (0, 8, 1 << 40, (1 << 64) - 1, id(frames), id("text")):
        assert frames.describe(code, 5) is None
    frames.close()
