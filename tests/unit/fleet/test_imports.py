"""What the service loads as it starts: analyses are the business of processes beside it."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("deltalake")
pytest.importorskip("htpy")

_LOADED = """
import sys
import traceloom.cli.serve, traceloom.fleet.service.executors, traceloom.fleet.service.service, traceloom.fleet.portal.app
print(*sys.modules)
"""


def test_the_service_and_its_pages_load_no_analysis() -> None:
    """Only the causes of idle time with what they need, the statistics, the judge of stuck jobs, and the styles of reports."""
    loaded = subprocess.run(
        [sys.executable, "-c", _LOADED], capture_output=True, text=True, check=True
    ).stdout.split()
    parts = {"analyze", "changes", "findings", "formats", "graph", "report", "workload"}
    heavy = {
        name for name in loaded if name.startswith("traceloom.") and name.split(".")[1] in parts
    }
    assert "traceloom.fleet.portal.app" in loaded
    assert heavy == {
        "traceloom.analyze",
        "traceloom.analyze.ancestry",
        "traceloom.analyze.flame",
        "traceloom.analyze.gate_statistics",
        "traceloom.analyze.gpu_work",
        "traceloom.analyze.host_events",
        "traceloom.analyze.host_time",
        "traceloom.analyze.idle",
        "traceloom.analyze.intervals",
        "traceloom.analyze.kernel_rules",
        "traceloom.analyze.names",
        "traceloom.analyze.steps",
        "traceloom.analyze.stuck_jobs",
        "traceloom.formats",
        "traceloom.formats.capture_document",
        "traceloom.formats.flight_recorder",
        "traceloom.formats.pickles",
        "traceloom.report",
        "traceloom.report.views",
    }
