"""Uploads step by step over HTTP: what arrives counts whole or not at all, and is given back as it came."""

from __future__ import annotations

import hashlib
import http.client
import json
import random
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import pytest

for package in ("sqlalchemy", "obstore", "deltalake", "prometheus_client", "uvicorn"):
    pytest.importorskip(package, reason="the extra `fleet` is not installed")

from support.answering import AnsweringService, answering  # noqa: E402
from traceloom.errors import InputError  # noqa: E402
from traceloom.fleet.service.service import ServiceLimits  # noqa: E402

LIMITS = ServiceLimits(files=5, file_bytes=10_000, capture_bytes=25_000)


class Reply(NamedTuple):
    """What an uploader is answered."""

    status: int
    headers: http.client.HTTPMessage
    content: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.content)

    @property
    def slug(self) -> str:
        return str(self.json["error"]["slug"])


class Uploader:
    """Somebody with a token who uploads without the client of this package."""

    def __init__(self, service: AnsweringService, name: str) -> None:
        self.service, self.name = service, name
        self._token = service.token("requester", name)

    def ask(
        self, method: str, path: str, body: bytes | Iterable[bytes] | None = None, **headers: str
    ) -> Reply:
        """A request; a body of pieces is sent without its length."""
        connection = http.client.HTTPConnection(
            self.service.url.removeprefix("http://"), timeout=60
        )
        is_whole = body is None or isinstance(body, bytes)
        connection.request(
            method,
            path,
            body,
            {"Authorization": f"Bearer {self._token}", **headers},
            encode_chunked=not is_whole,
        )
        response = connection.getresponse()
        reply = Reply(response.status, response.headers, response.read())
        connection.close()
        return reply

    def announce(self, files: Mapping[str, bytes], job: str = "", **changes: Any) -> Reply:
        """Say what comes; `changes` of each file."""
        entries = [
            {
                "name": name,
                "size": len(content),
                "sha256": hashlib.sha256(content).hexdigest(),
                **changes,
            }
            for name, content in files.items()
        ]
        return self.ask(
            "POST", "/api/v1/captures", json.dumps({"files": entries, "job": job}).encode()
        )

    def send(self, files: Mapping[str, bytes], job: str = "") -> str:
        """A whole upload; the name of the capture."""
        answer = self.announce(files, job).json
        for target in answer["uploads"]:
            assert self.ask("PUT", target["url"], files[target["name"]]).status == 200
        assert self.ask("POST", f"/api/v1/captures/{answer['id']}/complete").status == 200
        return str(answer["id"])


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AnsweringService]:
    with answering(tmp_path_factory.mktemp("uploads"), limits=LIMITS) as running:
        yield running


def kept(service: AnsweringService, capture: str) -> list[str]:
    """Names of the files of a capture that lie in the store."""
    names = service.service.objects.sizes("captures")
    return [name.partition(f"/{capture}/")[2] for name in names if f"/{capture}/" in name]


def test_what_was_sent_is_given_back_byte_by_byte_and_a_browser_runs_none_of_it(
    service: AnsweringService,
) -> None:
    anna = Uploader(service, "anna")
    page = b"<html><script>fetch('/api/v1/tokens')</script>"
    files = {
        "rank0.json": b"{}" * 100,
        "empty.json": b"",
        "page.html": page,
        "sources/k.py": bytes(range(256)),
    }
    capture = anna.send(files, "job 1")
    assert kept(service, capture) == sorted(files)
    told = anna.ask("GET", f"/api/v1/captures/{capture}").json
    assert told["files"] == {name: len(content) for name, content in files.items()}
    assert (told["bytes"], told["job"], told["uploader"]) == (
        sum(map(len, files.values())),
        "job 1",
        "anna",
    )
    assert [task["state"] for task in told["tasks"]] == ["received"]
    for name, content in files.items():
        reply = anna.ask("GET", f"/api/v1/captures/{capture}/files/{name}")
        assert (reply.status, reply.content) == (200, content)
        assert reply.headers["Content-Type"] == "application/octet-stream"
        assert reply.headers["X-Content-Type-Options"] == "nosniff"
        assert reply.headers["Content-Security-Policy"].startswith("sandbox")
        assert "allow-same-origin" not in reply.headers["Content-Security-Policy"]
        assert (
            reply.headers["Content-Disposition"]
            == f'attachment; filename="{name.rpartition("/")[2]}"'
        )


def test_a_capture_is_the_same_in_any_order_and_another_of_another_job_uploader_or_content(
    service: AnsweringService,
) -> None:
    berta, carl = Uploader(service, "berta"), Uploader(service, "carl")
    files = {"a.json": b"1", "b.json": b"22", "c/d.json": b"333"}
    capture = berta.announce(files).json["id"]
    for seed in range(3):
        names = random.Random(seed).sample(sorted(files), 3)
        assert berta.announce({name: files[name] for name in names}).json["id"] == capture
    others = [
        berta.announce(files, "j").json["id"],
        carl.announce(files).json["id"],
        berta.announce({**files, "a.json": b"2"}).json["id"],
        berta.announce({"a.json": b"1"}).json["id"],
    ]
    assert len({capture, *others}) == 5


def test_an_upload_goes_on_where_it_stopped_and_asks_for_nothing_that_is_there(
    service: AnsweringService,
) -> None:
    dora = Uploader(service, "dora")
    files = {f"rank{rank}.json": b"x" * (rank + 1) for rank in range(4)}
    for sent in range(4):
        answer = dora.announce(files).json
        assert [target["name"] for target in answer["uploads"]] == sorted(files)[sent:]
        refused = dora.ask("POST", f"/api/v1/captures/{answer['id']}/complete")
        assert (refused.status, refused.slug) == (409, "upload-incomplete")
        assert f"{4 - sent} files" in refused.json["error"]["message"]
        target = answer["uploads"][0]
        assert dora.ask("PUT", target["url"], files[target["name"]]).status == 200
        assert dora.ask("GET", f"/api/v1/captures/{answer['id']}").json["state"] == ""
        listed = dora.ask("GET", "/api/v1/captures").json["captures"]
        assert answer["id"] not in {
            of["id"] for of in listed
        }  # what is not whole is no capture yet
    for _ in range(2):  # done again it is done
        assert (
            dora.ask("POST", f"/api/v1/captures/{answer['id']}/complete").json["state"]
            == "received"
        )
    assert dora.announce(files).json == {"id": answer["id"], "complete": True, "uploads": []}
    late = dora.ask("PUT", f"/api/v1/captures/{answer['id']}/files/rank0.json", b"x")
    assert (late.status, late.slug) == (409, "not-taken")
    assert len(dora.ask("GET", f"/api/v1/captures/{answer['id']}").json["tasks"]) == 1


@pytest.mark.parametrize(
    ("body", "status", "slug"),
    [
        (b"short", 400, "upload-differs"),
        (b"other of it", 400, "upload-differs"),
        (b"what was announced and more", 413, "too-large"),
        ([b"what was ", b"announced", b" and more"], 413, "too-large"),
        ([b"what ", b"w"], 400, "upload-differs"),
        (b"", 400, "upload-differs"),
    ],
    ids=["short", "other", "long", "long in pieces", "short in pieces", "empty"],
)
def test_a_file_that_is_another_than_announced_leaves_nothing(
    service: AnsweringService, body: bytes | list[bytes], status: int, slug: str
) -> None:
    content = b"what is ann"
    emil = Uploader(service, f"emil-{slug}-{status}-{len(body)}")
    answer = emil.announce({"a.json": content}).json
    [target] = answer["uploads"]
    reply = emil.ask("PUT", target["url"], body)
    assert (reply.status, reply.slug) == (status, slug)
    assert kept(service, answer["id"]) == []
    assert emil.announce({"a.json": content}).json["uploads"] == [target]
    assert emil.ask("PUT", target["url"], [content[:3], content[3:]]).json == {
        "name": "a.json",
        "size": len(content),
    }
    assert kept(service, answer["id"]) == ["a.json"]


def test_what_a_signed_address_let_in_is_thrown_away_where_its_size_is_wrong(
    service: AnsweringService,
) -> None:
    fritz = Uploader(service, "fritz")
    files = {"a.json": b"right", "b.json": b"right too"}
    answer = fritz.announce(files).json
    folder = f"captures/{fritz.ask('GET', '/api/v1/captures/' + answer['id']).json['day']}/{answer['id']}"
    service.service.objects.put(f"{folder}/a.json", files["a.json"])
    service.service.objects.put(f"{folder}/b.json", b"an object store takes whatever comes")
    refused = fritz.ask("POST", f"/api/v1/captures/{answer['id']}/complete")
    assert (refused.status, refused.slug) == (409, "upload-incomplete")
    assert "b.json" in refused.json["error"]["message"]
    assert kept(service, answer["id"]) == ["a.json"]
    assert [target["name"] for target in fritz.announce(files).json["uploads"]] == ["b.json"]


@pytest.mark.parametrize(
    ("sizes", "is_taken"),
    [
        ([10_000], True),
        ([10_001], False),
        ([10_000, 10_000, 5_000], True),
        ([10_000, 10_000, 5_001], False),
        ([1] * 5, True),
        ([1] * 6, False),
        ([0], True),
    ],
    ids=lambda value: str(value)[:30],
)
def test_limits_hold_to_the_byte_and_to_the_file(
    service: AnsweringService, sizes: list[int], is_taken: bool
) -> None:
    gerd = Uploader(service, f"gerd-{len(sizes)}-{sum(sizes)}")
    reply = gerd.announce({f"f{at}.json": b"x" * size for at, size in enumerate(sizes)})
    assert reply.status == (200 if is_taken else 413)
    assert is_taken or reply.slug == "too-large"


def test_names_that_some_disk_takes_for_one_are_refused(service: AnsweringService) -> None:
    hans = Uploader(service, "hans")
    for names in (("a.json", "A.json"), ("straße.json",), ("x", "x/y"), ("X", "x/y"), ("a/b/c",)):
        reply = hans.announce(dict.fromkeys(names, b""))
        assert (reply.status, reply.slug) in {(400, "wrong-request"), (400, "unsafe-name")}, names
    assert hans.announce(dict.fromkeys(("a/x", "b/x", "x", "a.x"), b"")).status == 200


def test_pages_of_captures_give_each_once_the_newest_first(service: AnsweringService) -> None:
    ida = Uploader(service, "ida")
    sent = [ida.send({"a.json": f"{at}".encode()}, f"paged-{at % 2}") for at in range(7)]
    for job, expected in (("paged-0", sent[0::2]), ("paged-1", sent[1::2])):
        seen: list[str] = []
        before = 0
        while True:
            page = ida.ask("GET", f"/api/v1/captures?job={job}&most=2&before_ns={before}").json[
                "captures"
            ]
            if not page:
                break
            assert len(page) <= 2
            seen += [capture["id"] for capture in page]
            before = page[-1]["received_ns"]
        assert seen == expected[::-1]


def test_an_operator_ends_what_another_began_and_a_viewer_begins_nothing(
    service: AnsweringService,
) -> None:
    jan = Uploader(service, "jan")
    answer = jan.announce({"a.json": b"abc"}).json
    viewer, operator = service.client("viewer", "v"), service.client("operator", "o")
    with pytest.raises(InputError) as refused:
        viewer.post("captures", {"files": [], "job": ""})
    assert refused.value.slug == "not-allowed"
    assert jan.ask("PUT", answer["uploads"][0]["url"], b"abc").status == 200
    with pytest.raises(InputError) as refused:
        service.client("requester", "kai").post(f"captures/{answer['id']}/complete")
    assert refused.value.slug == "not-allowed"
    assert operator.post(f"captures/{answer['id']}/complete")["state"] == "received"
    done = [
        entry
        for entry in service.admin.get("audit")["entries"]
        if answer["id"] in json.dumps(entry)
    ]
    assert {(entry["who"], entry["result"]) for entry in done} >= {("jan", "done"), ("o", "done")}


def test_a_report_of_what_is_not_analysed_is_refused_with_the_reason(
    service: AnsweringService,
) -> None:
    lea = Uploader(service, "lea")
    files = {"a.json": b"abc"}
    name = lea.announce(files).json["id"]
    refused = lea.ask("GET", f"/api/v1/captures/{name}/report")
    assert (refused.status, refused.slug) == (409, "not-analysed")
    assert "not all there" in refused.json["error"]["message"]
    assert (
        lea.ask("GET", f"/api/v1/captures/{name}/files/a.json").slug
    ) == "no-such-file"  # not there yet
    assert lea.send(files) == name
    assert lea.ask("GET", f"/api/v1/captures/{name}/report").status == 409
    other = lea.send({"b.json": b"abc"})
    refused = lea.ask("GET", f"/api/v1/captures/{name}/against/{other}")
    assert (refused.status, refused.slug) == (409, "not-analysed")
    assert lea.ask("GET", f"/api/v1/captures/{name}/against/c0").slug == "no-such-capture"
