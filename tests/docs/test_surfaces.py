"""What can be read without running anything is as in tests/surfaces; `make surfaces` compares the rest."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

for package in (
    "sqlalchemy",
    "starlette",
    "htpy",
    "deltalake",
    "obstore",
    "prometheus_client",
    "uvicorn",
):
    pytest.importorskip(package, reason="the extras `agent` and `fleet` are not installed")

ROOT = Path(__file__).resolve().parents[2]


def test_help_schemas_columns_slugs_and_names_are_as_in_the_snapshot_and_nothing_lacks_a_case() -> (
    None
):
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "surfaces"), "--static"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
