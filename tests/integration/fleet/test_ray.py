"""The same tasks in a Ray cluster, which takes half a minute to start."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

for package in ("sqlalchemy", "obstore", "deltalake", "ray"):
    pytest.importorskip(package, reason="the extras `fleet` and `ray` are not installed")

from support.fleet import add_capture, opened, places  # noqa: E402
from support.ray_cluster import ray_cluster  # noqa: E402
from support.waiting import until  # noqa: E402
from traceloom.collect.cluster import ClusterSettings  # noqa: E402
from traceloom.collect.engine import EngineTask, TaskError, TaskFile  # noqa: E402
from traceloom.collect.pipeline import CapturePipeline  # noqa: E402
from traceloom.collect.ray_cluster import Ray  # noqa: E402

pytestmark = [pytest.mark.thorough, pytest.mark.filterwarnings("ignore:::ray")]


def hanging_task(folder: Path) -> EngineTask:
    """An analysis that waits."""
    content = b'{"wait once": ' + json.dumps(str(folder / "noted")).encode() + b"}"
    (folder / "waits.json").write_bytes(content)
    file = TaskFile("waits.json", len(content), hashlib.sha256(content).hexdigest(), str(folder / "waits.json"))
    return EngineTask("analyse", (file,), {}, 600)


def test_captures_go_their_way_in_a_ray_cluster_over_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("traceloom.store.state._WAIT_NS", 10**7)
    stores = opened(places("alone", tmp_path, monkeypatch))
    with ray_cluster(2) as cluster:
        engine = Ray(cluster.address, 2, cluster.tls, ClusterSettings(main="support.hostile_worker"))
        try:
            assert engine.check() == f"ray://{cluster.address}, workers: 1"
            record = add_capture(stores, "c1")
            add_capture(stores, "c2", b"crash")
            pipeline = CapturePipeline(*stores, engine)

            def worked() -> bool:
                pipeline.work()
                return stores.state.counts()["analysed"] + stores.state.counts()["quarantined"] == 2

            until(worked, 180)
            [task] = stores.state.tasks("c2")
            assert task.attempts == 3
            assert "SIGSEGV" in task.error
            pipeline.lead()
            assert pipeline.commit() == 1
            assert stores.tables.scan("captures").collect()["capture"].to_list() == ["c1"]
            assert b"<html" in b"".join(stores.objects.chunks(pipeline.rendered(record, "render")))
            hanging = engine.submit(hanging_task(tmp_path))
            until((tmp_path / "noted").exists)
        finally:
            engine.close()
        with pytest.raises(TaskError, match="the service ends"):
            hanging.result(60)
    stores.state.close()
