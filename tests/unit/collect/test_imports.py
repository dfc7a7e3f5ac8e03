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
    """Of the 200 modules of analyses, findings and reports it has names, words, intervals and styles."""
    loaded = subprocess.run(
        [sys.executable, "-c", _LOADED], capture_output=True, text=True, check=True
    ).stdout.split()
    parts = {"analyze", "findings", "link", "read", "report", "retime", "simulate"}
    heavy = {
        name for name in loaded if name.startswith("traceloom.") and name.split(".")[1] in parts
    }
    assert "traceloom.fleet.portal.app" in loaded
    assert heavy == {
        "traceloom.analyze",
        "traceloom.analyze.gate",
        "traceloom.analyze.gate_statistics",
        "traceloom.analyze.idle",
        "traceloom.read",
        "traceloom.formats.capture_document",
        "traceloom.report",
        "traceloom.report.views",
        "traceloom.report.views.html",
        "traceloom.report.views.page",
        "traceloom.report.figure",
    }
