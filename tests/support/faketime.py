"""Clocks that are set for one process, by Debian's libfaketime; what only counts up goes on as it does."""

from __future__ import annotations

from pathlib import Path

import pytest

_LIBRARY = next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"), None)
needs_faketime = pytest.mark.skipif(
    _LIBRARY is None, reason="libfaketime is not installed (Debian: faketime)"
)


def ahead_by(seconds: int) -> dict[str, str]:
    """The environment of a process whose clock is so far ahead."""
    return {
        "LD_PRELOAD": str(_LIBRARY),
        "FAKETIME": f"{seconds:+d}s",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }


def as_file_says(clock: Path) -> dict[str, str]:
    """The environment of a process whose clock is as far ahead as stands in a file, as +3600, and may change."""
    return {
        "LD_PRELOAD": str(_LIBRARY),
        "FAKETIME_TIMESTAMP_FILE": str(clock),
        "FAKETIME_CACHE_DURATION": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }
