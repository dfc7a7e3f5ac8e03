"""Wait for what happens elsewhere, on a machine that may be busy."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(condition: Callable[[], T], seconds: float = 60) -> T:
    """The first true value of a condition.

    Raises:
        AssertionError: It did not become true.
    """
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, f"it did not happen within {seconds:g} s"
        time.sleep(0.05)
    return value
