"""Running the anonymiser in a temporary directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from traceloom.workload.anonymize import run as run_module
from traceloom.workload.anonymize.policy import Key, Policy
from traceloom.workload.anonymize.run import Anonymized, anonymize

Anonymise = Callable[..., Anonymized]


@pytest.fixture
def run(tmp_path: Path) -> Anonymise:
    """Anonymise some paths into `tmp_path / "out"` (or a file)."""

    def anonymise(
        *inputs: Path, output: str = "out", policy: Policy | None = None, **options: Any
    ) -> Anonymized:
        key = Key(b"a key that only tests have")
        return anonymize(list(inputs), tmp_path / output, policy or Policy(), key, **options)

    return anonymise


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the comparison of the analyses, for tests of some hundred files that are about something else."""
    monkeypatch.setattr(run_module, "measure", lambda trace: {})
