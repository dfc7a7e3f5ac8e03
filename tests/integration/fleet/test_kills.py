"""`kill -9` of who works, before and after each thing that it leaves behind: no row is lost, none stands twice."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest

for package in ("sqlalchemy", "obstore", "deltalake"):
    pytest.importorskip(package, reason="the extra `fleet` is not installed")

from support.fleet import KINDS, Kind, add_capture, opened, places  # noqa: E402
from support.killed_pipeline import Here  # noqa: E402
from traceloom.fleet.service.pipeline import CapturePipeline  # noqa: E402

POINTS = (
    "state.claim",
    "state.advance",
    "objects.put",
    "state.open_batch",
    "tables.commit",
    "state.close_batch",
    "objects.delete",
)
QUICK = {("shared", "tables.commit", "after")}


@pytest.mark.parametrize(
    ("kind", "point", "when"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.thorough)
        for case in [
            (kind, point, when)
            for kind in KINDS
            for point in POINTS
            for when in ("before", "after")
        ]
    ],
)
def test_whatever_is_killed_where_is_finished_by_the_next(
    kind: Kind, point: str, when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = places(kind, tmp_path, monkeypatch)
    stores = opened(where)
    for name in ("c1", "c2"):
        add_capture(stores, name)
    script = str(Path(__file__).parents[2] / "support" / "killed_pipeline.py")
    monkeypatch.setenv("PYTHONPATH", ":".join(filter(None, sys.path)))
    done = subprocess.run(
        [sys.executable, script, *where, point, when], capture_output=True, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()

    with stores.state._transaction() as connection:  # as if the time of its leases had gone by
        stores.state._change(connection, "UPDATE tasks SET free_at_ns = 0")
        stores.state._change(connection, "UPDATE leases SET until_ns = 0")
    pipeline = CapturePipeline(*stores, Here())
    pipeline.lead()
    while pipeline.work():
        pass
    while pipeline.commit():
        pass
    assert {state: n for state, n in stores.state.counts().items() if n} == {"committed": 2}
    assert stores.tables.scan("captures").collect()["capture"].sort().to_list() == ["c1", "c2"]
    kernels = stores.tables.scan("kernels").collect()
    by_capture = dict(kernels.group_by("capture").agg(pl.col("count").sum()).rows())
    assert by_capture == {"c1": 4, "c2": 4}  # two steps of a kernel and a copy
    stores.state.close()
