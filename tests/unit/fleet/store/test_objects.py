"""The files of the service: in a directory, in S3 and in Azure's store the same."""

from __future__ import annotations

import os
import time
import urllib.request
from datetime import date
from pathlib import Path

import polars as pl
import pytest

pytest.importorskip("obstore", reason="the extra `fleet` is not installed")

from support.fleet import KINDS, Kind, azure_store, places
from traceloom.cli.upload import FleetClient
from traceloom.errors import InputError, OutputError, UsageError
from traceloom.fleet.store.objects import ObjectStore, check_object_name, describe_store_error
from traceloom.fleet.store.schema import SCHEMAS
from traceloom.fleet.store.tables import Tables


@pytest.fixture(params=[*KINDS, "azure"])
def objects(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> ObjectStore:
    if request.param == "azure":
        return ObjectStore(azure_store(monkeypatch))
    kind: Kind = request.param
    return ObjectStore(places(kind, tmp_path, monkeypatch).store)


def test_what_is_put_stays_as_it_was_first(objects: ObjectStore, tmp_path: Path) -> None:
    assert objects.size("captures/d/c/a.json") is None
    assert objects.put("captures/d/c/a.json", b"first")
    assert not objects.put("captures/d/c/a.json", b"second")
    assert b"".join(objects.chunks("captures/d/c/a.json")) == b"first"
    assert objects.size("captures/d/c/a.json") == 5
    assert objects.put("captures/d/c/empty", b"")
    assert objects.sizes("captures/d") == {"captures/d/c/a.json": 5, "captures/d/c/empty": 0}
    objects.delete("captures/d/c/a.json")
    objects.delete("captures/d/c/a.json")
    assert objects.sizes("captures") == {"captures/d/c/empty": 0}
    with pytest.raises(InputError) as raised:
        b"".join(objects.chunks("captures/d/c/a.json"))
    assert raised.value.slug == "unreadable"


def test_large_objects_come_in_pieces_and_whole(objects: ObjectStore) -> None:
    content = os.urandom(3 << 20)
    objects.put("big", content)
    pieces = list(objects.chunks("big"))
    assert len(pieces) > 1
    assert b"".join(pieces) == content


@pytest.mark.parametrize(
    "name",
    [
        "../x",
        "a/../b",
        "/etc/passwd",
        "",
        "a//b",
        ".hidden",
        "a/.",
        "a\\b",
        "a b",
        "a\0",
        "é",
        "a/b/c/d/e/f/g",
        "x" * 201,
        "a\n",
    ],
)
def test_a_name_that_leads_elsewhere_is_refused(name: str, tmp_path: Path) -> None:
    objects = ObjectStore(str(tmp_path / "store"))
    for ask in (
        check_object_name,
        objects.size,
        objects.delete,
        objects.sizes,
        lambda name: objects.put(name, b"x"),
    ):
        with pytest.raises(UsageError) as raised:
            ask(name)  # type: ignore[operator]
        assert raised.value.slug == "unsafe-name"
    assert [*tmp_path.rglob("*")] == [tmp_path / "store"]


def test_a_file_that_is_not_written_to_its_end_is_not_there(tmp_path: Path) -> None:
    objects = ObjectStore(str(tmp_path))
    with pytest.raises(KeyError), objects.writing("a/b") as file:  # noqa: PT012
        file.write(b"half")
        assert objects.size("a/b") is None
        raise KeyError
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    with objects.writing("a/b") as file:
        file.write(b"all")
    with objects.writing("a/b") as file:
        file.write(b"other")
    assert file.existed
    assert (tmp_path / "a" / "b").read_bytes() == b"all"


def test_what_a_killed_process_left_goes_after_a_day(tmp_path: Path) -> None:
    for name, age_s in ((".incoming-old", 90_000), (".incoming-young", 60)):
        (tmp_path / name).write_text("half")
        os.utime(tmp_path / name, (time.time() - age_s,) * 2)
    ObjectStore(str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == [".incoming-young"]


def test_a_signed_address_takes_one_object_without_credentials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ObjectStore(str(tmp_path)).upload_url("a/b", 60) is None
    objects = ObjectStore(places("shared", tmp_path, monkeypatch).store)
    url = objects.upload_url("captures/d/c/a+b=c@d.json", 60)
    assert url is not None
    headers = {"Content-Type": "application/octet-stream"}
    urllib.request.urlopen(urllib.request.Request(url, b"content", headers, method="PUT")).close()
    assert b"".join(objects.chunks("captures/d/c/a+b=c@d.json")) == b"content"

    readable = objects.readable_at("captures/d/c/a+b=c@d.json", 60)
    assert readable is not None
    with urllib.request.urlopen(readable) as answer:
        assert answer.read() == b"content"
    assert "X-Amz-Signature" in readable
    assert "X-Amz-Expires=60" in readable


def test_azure_takes_what_clients_send_and_holds_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = azure_store(monkeypatch)
    objects = ObjectStore(where)
    url = objects.upload_url("captures/d/c/a+b=c@d.json", 60)
    assert url is not None
    (content := tmp_path / "trace.json").write_bytes(b"content")
    FleetClient("http://127.0.0.1:1", "").send(url, content)  # to the store alone
    assert b"".join(objects.chunks("captures/d/c/a+b=c@d.json")) == b"content"
    readable = objects.readable_at("captures/d/c/a+b=c@d.json", 60)
    assert readable is not None
    with urllib.request.urlopen(readable) as answer:
        assert answer.read() == b"content"
    with pytest.raises(InputError) as refused:  # what is signed for reading does not write
        FleetClient("http://127.0.0.1:1", "").send(readable, content)
    assert refused.value.slug == "upload-failed"
    tables = Tables(where)
    tables.create()
    row = SCHEMAS["jobs"].complete(pl.DataFrame({"day": [date(2026, 11, 2)], "job": ["j"]}))
    assert [tables.commit("jobs", 1, {"jobs": row}) for _ in range(2)] == [{"jobs": 1}, {}]
    assert tables.scan("jobs").collect()["job"].to_list() == ["j"]


def test_a_file_of_a_directory_is_read_where_it_lies(tmp_path: Path) -> None:
    objects = ObjectStore(str(tmp_path))
    objects.put("a/b", b"content")
    assert objects.readable_at("a/b", 60) == str(tmp_path / "a" / "b")
    assert objects.readable_at("a/c", 60) is None


def test_a_store_that_does_not_answer_is_an_error_of_ours(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    options = {
        "aws_endpoint": "http://127.0.0.1:1",
        "aws_allow_http": "true",
        "aws_region": "us-east-1",
    }
    objects = ObjectStore("s3://bucket/x", options)
    with pytest.raises(InputError):
        objects.size("a")
    with pytest.raises(OutputError):
        objects.put("a", b"x")


@pytest.mark.parametrize("url", ["ftp://x/y", "http://x/y", "memory://x"])
def test_an_address_of_another_kind_is_refused(url: str) -> None:
    with pytest.raises(UsageError):
        ObjectStore(url)


def test_a_directory_that_cannot_be_made_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(OutputError) as raised:
        ObjectStore(str(tmp_path / "file" / "store"))
    assert raised.value.slug == "cannot-write"


@pytest.mark.parametrize(
    ("change", "bucket", "words"),
    [
        ({}, "missing1", "no such bucket"),
        ({"AWS_ALLOW_HTTP": "false"}, "", "AWS_ALLOW_HTTP"),
        ({"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, "", "AWS_ENDPOINT_URL"),
    ],
)
def test_a_wrong_setting_of_a_store_is_named(
    change: dict[str, str],
    bucket: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("traceloom.fleet.store.objects._RETRY_OPTIONS", {"max_retries": 0})
    url = f"s3://{bucket}/x" if bucket else places("shared", tmp_path, monkeypatch).store
    places("shared", tmp_path, monkeypatch)  # for its variables
    for name, value in change.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(OutputError, match=words):
        ObjectStore(url).put("checks/x", b"x")
    if "AWS_ENDPOINT_URL" not in change:  # which deltalake tries ten times
        with pytest.raises(InputError, match=words):
            Tables(url).scan("captures")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Generic S3 error: ... kind: Connect invalid peer certificate: UnknownIssuer", "SSL_CERT"),
        ("Generic S3 error: PUT http://169.254.169.254/latest/api/token", "AWS_ACCESS_KEY_ID"),
        ("<Error><Code>PermanentRedirect</Code>", "AWS_REGION"),
        ("<Error><Code>SignatureDoesNotMatch</Code>", "refuses the credentials"),
        (
            "Kernel error\n \x1b[31m↳\x1b[0m Disk on fire\n\nDebug source: x",
            "kernel error disk on fire",
        ),
    ],
)
def test_the_cause_is_found_in_what_libraries_say(text: str, words: str) -> None:
    assert words in describe_store_error(OSError(text))
