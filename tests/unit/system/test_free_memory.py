"""What a process can still take: what the host has free, or its container."""

from __future__ import annotations

from pathlib import Path

import pytest

from traceloom.system import process
from traceloom.system.process import get_free_memory


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host with 8 GB available, in whose folder the files of a group can be put."""
    monkeypatch.setattr(
        process, "Path", lambda *parts: tmp_path / "/".join(map(str, parts)).lstrip("/")
    )
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_text(
        "MemTotal: 16000000 kB\nMemFree: 1 kB\nMemAvailable:    8000000 kB\n"
    )
    folder = tmp_path / "sys" / "fs" / "cgroup"
    folder.mkdir(parents=True)
    return folder


def test_what_is_free_is_what_the_host_has_or_its_container(host: Path) -> None:
    assert get_free_memory() == 8_192_000_000
    (host / "memory.max").write_text("max\n")
    (host / "memory.current").write_text("5000\n")
    assert get_free_memory() == 8_192_000_000
    (host / "memory.max").write_text("1000000000\n")
    (host / "memory.current").write_text("400000000\n")
    assert get_free_memory() == 600_000_000
    (host / "memory.current").write_text("1200000000\n")
    assert get_free_memory() == 0
    (host / "memory.max").write_text("99000000000000\n")
    assert get_free_memory() == 8_192_000_000
    (host / "memory.max").write_text("odd\n")
    assert get_free_memory() == 8_192_000_000


def test_a_system_that_does_not_tell_has_no_number(host: Path) -> None:
    (host.parents[2] / "proc" / "meminfo").unlink()
    assert get_free_memory() is None


def test_what_is_free_on_this_machine_is_a_number() -> None:
    free = get_free_memory()
    assert free is not None
    assert 0 <= free < 2**50
