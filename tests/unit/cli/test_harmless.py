"""Nothing in a name of a stranger's file steers the terminal of who reads about it."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from traceloom.system.sanitize import SanitizedStream, unwrap_stream
from traceloom.testing import TraceBuilder

HOSTILE = "a\x1b[2Jb\x07\x9b31m\u202ec\r"
_OURS = re.compile(r"\x1b\[[0-9;]*m|\r\x1b\[K")  # colours, and the line of progress


def test_a_stream_spells_what_could_steer_and_keeps_lines_and_tabs() -> None:
    beneath = io.BytesIO()
    stream = SanitizedStream(io.TextIOWrapper(beneath, "utf-8"))
    assert stream.write(f"{HOSTILE}\tend\n") == len(HOSTILE) + 5
    stream.write("\udc80")
    stream.flush()
    assert beneath.getvalue().decode() == "a\\x1b[2Jb\\x07\\x9b31m\\u202ec\\x0d\tend\n\\udc80"
    unwrap_stream(stream).write("\x1b[1m")
    unwrap_stream(stream).flush()
    assert beneath.getvalue().endswith(b"\x1b[1m")


@pytest.mark.skipif(sys.platform == "win32", reason="there are no pseudo terminals")
def test_no_control_character_of_a_file_name_reaches_a_terminal(tmp_path: Path) -> None:
    trace = tmp_path / f"{HOSTILE}.json"
    TraceBuilder().step(0, 0, 100).op("aten::mm\x1b[2J", 5, 50).write(trace)
    for words in (
        ["report", trace.name],
        ["report", f"{HOSTILE}-absent"],
        ["link", trace.name, "-o", f"{HOSTILE}.graph"],
    ):
        shown = _on_a_terminal(words, tmp_path)
        assert "a\\x1b[2Jb" in shown.replace("\r\n", "\n")
        rest = _OURS.sub("", shown.replace("\r\n", "\n"))
        assert re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", rest) is None, repr(rest)


def _on_a_terminal(words: list[str], directory: Path) -> str:
    ours, theirs = os.openpty()
    command = [
        sys.executable,
        "-c",
        "import sys; from traceloom.__main__ import console; sys.exit(console())",
        *words,
    ]
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, cwd=directory) as process:
        os.close(theirs)
        pieces = []
        while True:
            try:
                piece = os.read(ours, 1 << 16)
            except OSError:  # the other side is closed
                break
            if not piece:
                break
            pieces.append(piece)
        process.wait()
    os.close(ours)
    return b"".join(pieces).decode("utf-8", "replace")
