"""Other users of this host: their commands, and a directory that they share."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ANNA, BERT = 4001, 4002

needs_users = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0 or shutil.which("setpriv") is None,
    reason="needs root and setpriv, to be other users",
)


def build_command(uid: int, *words: str, may_read: bool = False) -> list[str]:
    """Returns the command of a user. With `may_read` it reads all, so that it can run this interpreter, which may lie
    where only root reads; what it writes is that user's."""
    rights = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"] if may_read else []
    who = [f"--reuid={uid}", f"--regid={uid}", "--clear-groups"]
    return ["setpriv", *who, *rights, *words]


def run_python(
    uid: int, *words: str, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs this interpreter as a user."""
    return subprocess.run(
        build_command(uid, sys.executable, *words, may_read=True),
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
        env={**os.environ, **(environment or {})},
        timeout=120,
    )


@contextmanager
def start_python(uid: int, *words: str, **more: Any) -> Iterator[subprocess.Popen[str]]:
    """Lends this interpreter as a user runs it, once it has printed a line."""
    command = build_command(uid, sys.executable, *words, may_read=True)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd="/", **more) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline()
            yield process
        finally:
            process.kill()


@contextmanager
def lend_shared_directory(mode: int = 0o1777) -> Iterator[Path]:
    """Lends a directory that all users reach, as /tmp."""
    directory = Path(tempfile.mkdtemp(prefix="tl", dir="/tmp"))
    directory.chmod(mode)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
