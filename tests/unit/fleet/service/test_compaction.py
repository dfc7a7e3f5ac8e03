"""Tables are compacted every night, once, and when an operator says so; no time is lost by it."""

from __future__ import annotations

from datetime import date, datetime, timedelta, timezone
from pathlib import Path

import polars as pl
import pytest

for package in ("sqlalchemy", "obstore", "deltalake", "prometheus_client", "uvicorn"):
    pytest.importorskip(package, reason="the extra `fleet` is not installed")

from support.answering import answering  # noqa: E402
from support.fleet import places  # noqa: E402
from traceloom.cli import main  # noqa: E402
from traceloom.fleet.service.pipeline import get_capture_directory  # noqa: E402
from traceloom.fleet.store.captures import CaptureFile, CaptureRecord  # noqa: E402
from traceloom.fleet.store.objects import ObjectStore  # noqa: E402
from traceloom.fleet.store.schema import SCHEMAS  # noqa: E402

TODAY = date(2026, 11, 26)
_MINUTE_NS = 60 * 10**9


def at(day: date, hour: int = 0, minute: int = 0) -> int:
    when = datetime(day.year, day.month, day.day, hour, minute, tzinfo=timezone.utc)
    return int(when.timestamp()) * 10**9


def busy(day: date, minute: int) -> dict[str, pl.DataFrame]:
    """A minute of a device, as it is committed: its row, and its part of the hour."""
    parts = {}
    for name, time_ns in (("usage_minute", at(day, 5, minute)), ("usage_hour", at(day, 5))):
        row = {
            "day": day,
            "time_ns": time_ns,
            "host": "n",
            "device": "d",
            "job": "j",
            "state": "busy",
            "device_ms": 60_000,
            "energy_mj": 7,
        }
        parts[name] = SCHEMAS[name].complete(pl.DataFrame([row]))
    return parts


def test_every_night_once_and_hours_stay_what_they_were(tmp_path: Path) -> None:
    with answering(tmp_path) as service:
        pipeline, tables = service.service.pipeline, service.service.tables
        yesterday, long_ago = TODAY - timedelta(days=1), TODAY - timedelta(days=31)
        for number, (day, minute) in enumerate(
            [(yesterday, 0), (yesterday, 1), (yesterday, 2), (long_ago, 0)]
        ):
            tables.commit("usage", number, busy(day, minute))
        now_ns = at(TODAY, 1)
        pipeline.clock = lambda: now_ns
        assert not pipeline.compact(nightly=True)
        assert tables.scan("usage_hour", yesterday).collect().height == 3
        now_ns = at(TODAY, 3)
        assert pipeline.compact(nightly=True)
        assert not pipeline.compact(nightly=True)
        hours = tables.scan("usage_hour").sort("day").collect()
        assert hours.select("day", "device_ms", "energy_mj").rows() == [
            (long_ago, 60_000, 7),
            (yesterday, 180_000, 21),
        ]
        assert set(tables.scan("usage_minute").collect()["day"]) == {yesterday}
        tables.commit("usage", 4, busy(yesterday, 3))  # of a host that was away
        now_ns = at(TODAY + timedelta(days=1), 2)
        assert pipeline.compact(nightly=True)
        assert tables.scan("usage_hour", yesterday).collect()["device_ms"].to_list() == [240_000]


def test_an_operator_has_it_done_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with answering(tmp_path) as service:
        monkeypatch.setenv("TRACELOOM_SERVER", service.url)
        monkeypatch.setenv("TRACELOOM_TOKEN", service.token("viewer"))
        assert main(["fleet", "compact"]) == 3
        assert "not-allowed" in capsys.readouterr().err
        monkeypatch.setenv("TRACELOOM_TOKEN", service.token("operator"))
        before = service.service.tables.version("captures")
        assert main(["fleet", "compact"]) == 0
        assert "The tables are compacted" in capsys.readouterr().out
        assert service.service.tables.version("captures") >= before
        assert ("operator", "POST /api/v1/compact", "done") in {
            (entry["who"], entry["what"], entry["result"])
            for entry in service.admin.get("audit")["entries"]
        }


def test_uploads_that_were_never_finished_are_forgotten_with_their_files(tmp_path: Path) -> None:
    with answering(tmp_path) as service:
        pipeline, state = service.service.pipeline, service.service.state
        for name, days_ago, complete in (("old", 9, False), ("done", 9, True), ("new", 1, False)):
            record = CaptureRecord(
                id=name,
                day=TODAY.isoformat(),
                job="",
                uploader="ada",
                received_ns=at(TODAY - timedelta(days=days_ago)),
                complete=complete,
                bytes=1,
                files=(CaptureFile("a.json", 1, "0" * 64), CaptureFile("b.json", 1, "0" * 64)),
            )
            state.add_capture(record)
            pipeline.objects.put(f"{get_capture_directory(record)}/a.json", b"x")
        pipeline.clock = lambda: at(TODAY, 3)
        assert pipeline.compact(nightly=True)
        assert [state.capture(name) is None for name in ("old", "done", "new")] == [
            True,
            False,
            False,
        ]
        kept = {name.split("/")[2] for name in pipeline.objects.sizes("captures")}
        assert kept == {"done", "new"}


def test_what_comes_late_to_a_signed_address_is_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = ObjectStore(places("shared", tmp_path, monkeypatch).store)
    days = [TODAY - timedelta(days=days_ago) for days_ago in (30, 8, 7, 1, 0)]
    for day in days:
        objects.put(f"incoming/{day}/c1/rank0.json", b"late")
    objects.put("captures/2026-01-01/c1/rank0.json", b"kept")
    with answering(tmp_path) as service:
        service.service.pipeline.objects = objects
        service.service.pipeline.clock = lambda: at(TODAY, 3)
        assert service.service.pipeline.compact(nightly=True)
    assert list(objects.sizes("incoming")) == [f"incoming/{day}/c1/rank0.json" for day in days[2:]]
    assert objects.sizes("captures") == {"captures/2026-01-01/c1/rank0.json": 4}
