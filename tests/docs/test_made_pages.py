"""Pages that are made of the code say what the code says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "name",
    [
        "agent_dashboard",
        "agent_http_page",
        "agent_metrics_page",
        "command_line_page",
        "fleet_dashboard",
        "fleet_http_page",
        "fleet_metrics_page",
        "fleet_tables_page",
        "portal_page",
    ],
)
def test_the_page_is_up_to_date(name: str) -> None:
    script = ROOT / "scripts" / f"{name}.py"
    done = subprocess.run(
        [sys.executable, script, "--check"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")
