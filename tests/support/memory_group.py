"""A real control group that limits memory, and a program that is killed in it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.waiting import until

LIMIT = 64 << 20
STARVED = """
import sys, time
from pathlib import Path
Path(sys.argv[1], "cgroup.procs").write_text("0")
print("up", flush=True)
sys.stdin.readline()
kept = []
while True:
    kept.append(b"x" * (4 << 20))
"""
SEPARATE, UNIFIED = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")


@contextmanager
def limited_group() -> Iterator[Path]:
    """A group that may have 64 MiB and no swap."""
    name = f"traceloom-test-{os.getpid()}"
    limits = {"memory.limit_in_bytes": LIMIT, "memory.memsw.limit_in_bytes": LIMIT}
    base = SEPARATE
    if not (base / "memory.limit_in_bytes").exists():
        base, limits = UNIFIED, {"memory.max": LIMIT, "memory.swap.max": 0}
        delegated = base / "cgroup.subtree_control"
        if not delegated.exists() or "memory" not in delegated.read_text(encoding="ascii").split():
            pytest.skip("no control groups that limit memory are mounted here")
    try:
        (base / name).mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        for file, value in limits.items():
            if (base / name / file).exists():  # swap is not counted everywhere
                (base / name / file).write_text(str(value), encoding="ascii")
        yield base / name
    finally:
        until(lambda: _removed(base / name))


def _removed(group: Path) -> bool:
    """The kernel refuses until the last process in it is gone."""
    try:
        group.rmdir()
    except OSError:
        return False
    return True
