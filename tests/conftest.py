"""What all tests share: where the public traces are."""

from __future__ import annotations

import os
from pathlib import Path

import hypothesis
import pytest

ROOT = Path(__file__).resolve().parents[1]
SHARED_DATA = ROOT.parent / "shared" / "data"

# No test is about time; and what CI says must not depend on luck.
hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of public traces beside the checkout; the test is skipped where it is absent."""
    if not SHARED_DATA.is_dir():
        pytest.skip("the public traces (../shared/data) are not on this machine")
    return SHARED_DATA
