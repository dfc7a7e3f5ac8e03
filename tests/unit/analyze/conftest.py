"""Traces that many tests of analyses share."""

from __future__ import annotations

import pytest

from support.odd_traces import SEEDS, odd_trace
from traceloom.trace.trace import Trace


@pytest.fixture(params=SEEDS)
def odd(request: pytest.FixtureRequest) -> Trace:
    """Each of the odd traces; built once, so nobody may change it."""
    return odd_trace(request.param)
