"""What a report and an exported trace must hold, as fixtures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from support import reports


@pytest.fixture(scope="session")
def check_document() -> Callable[[dict[str, Any]], None]:
    """Validates a report against the published schema and the laws of adding up."""
    return reports.check_report


@pytest.fixture(scope="session")
def check_perfetto() -> Callable[[bytes, dict[str, Any]], dict[str, list[dict[str, Any]]]]:
    """Reads an exported trace as Perfetto does."""
    return reports.check_perfetto
