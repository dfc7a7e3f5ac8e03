"""Tables of a fleet: a batch is in them once, whatever interrupts it; what is old goes, what is of another version is refused."""

from __future__ import annotations

from datetime import date, datetime, timedelta, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import polars as pl
import pytest

deltalake = pytest.importorskip("deltalake", reason="the extra `fleet` is not installed")

from traceloom.errors import InputError, OutputError  # noqa: E402
from traceloom.fleet.store.schema import MINUTE_MS, SCHEMAS, get_utc_day  # noqa: E402
from traceloom.fleet.store.tables import Tables  # noqa: E402

DAY = date(2026, 11, 2)


def frame(name: str, *rows: dict[str, object]) -> pl.DataFrame:
    types = SCHEMAS[name].types
    return pl.DataFrame([{**dict.fromkeys(types), "day": DAY, **row} for row in rows], schema=types)


def batch(capture: str, kernels: int = 3, findings: int = 1) -> dict[str, pl.DataFrame]:
    return {
        "captures": frame(
            "captures",
            {"capture": capture, "job": "a", "start_ns": 1, "notices": ["gaps", "steps"]},
        ),
        "kernels": frame(
            "kernels",
            *({"capture": capture, "kernel": f"k{at}", "total_ns": at} for at in range(kernels)),
        ),
        "findings": frame(
            "findings", *({"capture": capture, "slug": f"f{at}"} for at in range(findings))
        ),
    }


def of_version(version: int | None) -> deltalake.CommitProperties | None:
    if version is None:
        return None
    return deltalake.CommitProperties(
        app_transactions=[deltalake.Transaction("traceloom.schema", version)]
    )


@pytest.fixture
def tables(tmp_path: Path) -> Tables:
    made = Tables(str(tmp_path))
    made.create()
    return made


def test_what_is_committed_is_read_with_all_columns_and_types(tables: Tables) -> None:
    tables.commit("captures", 0, batch("c0"))
    for name, schema in SCHEMAS.items():
        assert tables.scan(name).collect_schema() == schema.types
        assert tables.scan(name).collect().height == {
            "captures": 1,
            "kernels": 3,
            "findings": 1,
        }.get(name, 0)
    assert tables.scan("captures").collect()["notices"].to_list() == [["gaps", "steps"]]


def test_a_batch_stands_once_however_often_it_is_committed(tables: Tables) -> None:
    for number in (0, 1, 1, 0, 1):
        tables.commit("captures", number, batch(f"c{number}"))
    kernels = tables.scan("kernels").select("capture", "kernel").sort("capture", "kernel").collect()
    assert kernels.rows() == [(f"c{number}", f"k{at}") for number in (0, 1) for at in range(3)]


def test_whoever_opens_tables_lets_other_threads_go_on_while_the_store_is_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store is a thread of this process: it cannot answer whoever keeps Python's lock while waiting for it."""

    class Refusing(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(403)

        def log_message(self, *_arguments: object) -> None:
            """Nothing: the test says what went wrong."""

    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        options = {
            "aws_endpoint_url": f"http://127.0.0.1:{server.server_address[1]}",
            "aws_allow_http": "true",
            "aws_access_key_id": "a",
            "aws_secret_access_key": "b",
            "aws_region": "us-east-1",
            "timeout": "20s",
            "max_retries": "0",
        }
        try:
            with pytest.raises(InputError) as raised:
                Tables("s3://bucket/prefix", options).create()
        finally:
            server.shutdown()
            thread.join()
    assert raised.value.slug == "unreadable"
    assert "403" in str(raised.value.__cause__)


@pytest.mark.parametrize("held", ["captures", "kernels", "findings"])
def test_a_batch_that_stopped_between_tables_is_completed(tables: Tables, held: str) -> None:
    """What a kill between two tables leaves: the first have the batch, the others do not."""
    names = ["captures", "kernels", "findings"]
    before = names[: names.index(held) + 1]
    whole = batch("c0")
    tables.commit("captures", 7, {name: whole[name] for name in before})
    added = tables.commit("captures", 7, whole)
    assert set(added) == set(names) - set(before)
    assert {name: tables.scan(name).collect().height for name in names} == {
        "captures": 1,
        "kernels": 3,
        "findings": 1,
    }


def test_sources_number_for_themselves(tables: Tables) -> None:
    usage = {
        "usage_minute": frame(
            "usage_minute", {"time_ns": 0, "host": "h", "device": "d", "device_ms": MINUTE_MS}
        )
    }
    tables.commit("captures", 9, batch("c0"))
    assert tables.commit("usage", 0, usage) == {"usage_minute": 1}
    assert tables.commit("usage", 0, usage) == {}


def test_a_capture_that_is_analysed_again_replaces_its_rows_alone(tables: Tables) -> None:
    tables.commit(
        "captures",
        0,
        {
            name: pl.concat([a, b])
            for (name, a), b in zip(batch("c0").items(), batch("c1").values(), strict=True)
        },
    )
    for _ in range(2):
        tables.commit("backfill", 0, batch("c0", kernels=5, findings=0), replaced=["c0"])
    counts = tables.scan("kernels").group_by("capture").len().sort("capture").collect().rows()
    assert counts == [("c0", 5), ("c1", 3)]
    assert tables.scan("findings").select("capture").collect().to_series().to_list() == ["c1"]
    assert tables.scan("captures").collect().height == 2


@pytest.mark.parametrize("name", ["c') OR ('1' = '1", "", "../c", "a b", "x" * 300])
def test_the_name_of_a_capture_never_becomes_a_predicate(tables: Tables, name: str) -> None:
    tables.commit("captures", 0, batch("c0"))
    with pytest.raises(ValueError, match="no name of a capture"):
        tables.commit("captures", 1, batch("c0"), replaced=[name])
    assert tables.scan("captures").collect().height == 1


def test_days_are_chosen(tables: Tables) -> None:
    days = [DAY + timedelta(days=at) for at in range(5)]
    tables.commit(
        "captures",
        0,
        {"captures": frame("captures", *({"capture": str(day), "day": day} for day in days))},
    )
    chosen = tables.scan("captures", days[1], days[3]).collect()
    assert chosen["day"].sort().to_list() == days[1:4]


def test_a_row_of_no_day_is_refused(tables: Tables) -> None:
    with pytest.raises(ValueError, match="of no day"):
        tables.commit("captures", 0, {"captures": frame("captures", {"capture": "c", "day": None})})


def test_every_night_minutes_of_a_month_ago_go_and_small_files_become_few(
    tables: Tables, tmp_path: Path
) -> None:
    old, young = DAY - timedelta(days=31), DAY - timedelta(days=30)
    for number, day in enumerate([old, young, *([DAY] * 8)]):
        tables.commit(
            "usage",
            number,
            {
                name: frame(name, {"day": day, "time_ns": number})
                for name in ("usage_minute", "usage_hour")
            },
        )
    before = tables.scan("usage_minute").filter(pl.col("day") > old).sort("time_ns").collect()
    tables.compact(DAY)
    assert tables.scan("usage_minute").sort("time_ns").collect().equals(before)
    assert tables.scan("usage_hour").collect().height == 10
    files = deltalake.DeltaTable(tables.address("usage_minute")).file_uris()
    assert len(files) == 2
    assert (
        tables.commit("usage", 9, {"usage_hour": frame("usage_hour", {"time_ns": 9})}) == {}
    )  # still remembered


@pytest.mark.parametrize("version", [0, 2, 300, None])
def test_tables_of_another_version_are_refused(tmp_path: Path, version: int | None) -> None:
    tables = Tables(str(tmp_path))
    deltalake.write_deltalake(
        tables.address("captures"),
        SCHEMAS["captures"].empty(),
        partition_by=["day"],
        commit_properties=of_version(version),
    )
    for attempt in (
        tables.create,
        lambda: tables.scan("captures"),
        lambda: tables.commit("captures", 0, batch("c0")),
    ):
        with pytest.raises(InputError) as refusal:
            attempt()
        assert refusal.value.slug == "other-version"


def test_what_is_no_table_and_what_cannot_be_written_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputError) as refusal:
        Tables(str(tmp_path / "nothing")).scan("captures")
    assert refusal.value.slug == "unreadable"
    (tmp_path / "tables").write_text("in the way")
    with pytest.raises(OutputError) as error:
        Tables(str(tmp_path)).create()
    assert error.value.slug == "cannot-write"


def test_a_day_is_that_of_utc() -> None:
    midnight = int(datetime(2026, 11, 3, tzinfo=timezone.utc).timestamp()) * 10**9
    assert (get_utc_day(midnight - 1), get_utc_day(midnight)) == (
        date(2026, 11, 2),
        date(2026, 11, 3),
    )


@pytest.mark.parametrize("lost", [0, 2])
def test_an_entry_that_a_log_lacks_is_named_by_its_file(tmp_path: Path, lost: int) -> None:
    tables = Tables(str(tmp_path))
    tables.create()
    for number in range(1, 4):
        rows = pl.DataFrame({"day": [date(2026, 11, number)], "capture": ["c"]})
        tables.commit("captures", number, {"findings": rows})
    entry = tmp_path / "tables" / "findings" / "_delta_log" / f"{lost:020}.json"
    entry.unlink()
    with pytest.raises(InputError, match=entry.name) as unreadable:
        tables.scan("findings")
    assert unreadable.value.slug == "unreadable"
    assert tables.scan("captures").collect().is_empty()
