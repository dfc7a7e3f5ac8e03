"""Wall times of the undisturbed steps, from capture.json."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from traceloom.trace.session import find_unrecorded_steps
from traceloom.trace.trace import Meta

STATES = ["unrecorded"] * 4 + ["recorded", "graph", "early", "disturbed", "unrecorded"]
TABLE = {
    "start_ns": list(range(9)),
    "duration_ns": [90, 80, 70, 10, 60, 50, 40, 30, 11],
    "state": STATES,
}


def meta(folder: Path, steps: Any) -> Meta:
    return Meta(str(folder / "rank0.kineto.json.gz"), capture={"steps": steps})


def test_only_undisturbed_steps_after_the_warm_up_count(tmp_path: Path) -> None:
    found = find_unrecorded_steps(meta(tmp_path, TABLE))
    assert found is not None
    assert [column.tolist() for column in found] == [[3, 8], [10, 11]]


@pytest.mark.parametrize("packed", [True, False])
def test_long_tables_lie_beside_the_trace(tmp_path: Path, packed: bool) -> None:
    data = json.dumps(TABLE).encode()
    (tmp_path / "rank0.steps.json").write_bytes(gzip.compress(data) if packed else data)
    found = find_unrecorded_steps(meta(tmp_path, {"file": "rank0.steps.json", "rows": 9}))
    assert found is not None
    assert found[1].tolist() == [10, 11]


@pytest.mark.parametrize(
    "steps",
    [
        None,
        [],
        {},
        {"file": "../rank0.steps.json"},
        {"file": "gone.json"},
        {"duration_ns": [1], "state": []},
    ],
)
def test_what_is_not_there_is_none(tmp_path: Path, steps: Any) -> None:
    (tmp_path.parent / "rank0.steps.json").write_text(json.dumps(TABLE), encoding="utf-8")
    assert find_unrecorded_steps(meta(tmp_path, steps)) is None
