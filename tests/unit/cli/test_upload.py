"""Who asks the service, and sends it captures: names of files, answers that are none, transfers that break off."""

from __future__ import annotations

import hashlib
import io
import json
import random
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from traceloom.cli.upload import FleetClient, collect_files, upload
from traceloom.errors import InputError

TOKEN = "tl_secret"
Answer = Callable[[BaseHTTPRequestHandler], None]


@contextmanager
def service(answer: Answer) -> Iterator[FleetClient]:
    """Whoever asks at an address that answers everything by a function."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            answer(self)

        do_POST = do_PUT = do_DELETE = do_GET  # noqa: N815

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield FleetClient(f"http://127.0.0.1:{server.server_port}", TOKEN, timeout_s=30)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def saying(status: int, content: bytes, length: int | None = None, **headers: str) -> Answer:
    """An answer; `length`: what it says that it has."""

    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(status)
        request.send_header("Content-Length", str(len(content) if length is None else length))
        for name, value in headers.items():
            request.send_header(name, value)
        request.end_headers()
        request.wfile.write(content)

    return answer


REFUSAL = json.dumps(
    {"error": {"slug": "no-such-capture", "message": "there is no such capture", "hint": "look"}}
)


@pytest.mark.parametrize(
    ("answer", "slug", "words"),
    [
        (saying(404, REFUSAL.encode()), "no-such-capture", "no such capture"),
        (saying(200, b"<html>"), "agent-unclear", "answers as no service does"),
        (saying(200, b""), "agent-unclear", "answers as no service does"),
        (saying(502, b"<html>Bad gateway"), "agent-unclear", "answers as no service does"),
        (saying(500, b"[1]"), "agent-unclear", "refuses with 500"),
        (saying(404, b'{"error": "no"}'), "agent-unclear", "refuses with 404"),
        (
            saying(302, b"", Location="http://127.0.0.1:1/"),
            "agent-unclear",
            "answers as no service does",
        ),
        (saying(200, b'{"a":', length=99), "no-service", "does not answer"),
    ],
    ids=["refusal", "page", "nothing", "gateway", "list", "text", "redirect", "cut off"],
)
def test_an_answer_that_is_none_is_said_in_a_sentence(
    answer: Answer, slug: str, words: str
) -> None:
    with service(answer) as client, pytest.raises(InputError) as caught:
        client.get("captures/c1")
    assert caught.value.slug == slug
    assert words in str(caught.value)
    assert TOKEN not in str(caught.value)


def test_a_file_that_breaks_off_is_not_taken_for_whole() -> None:
    """With its length before it, as behind a proxy, and in pieces, as the service sends it."""
    whole = bytes(range(256)) * 40

    def pieces(request: BaseHTTPRequestHandler) -> None:
        request.protocol_version = "HTTP/1.1"
        request.send_response(200)
        request.send_header("Transfer-Encoding", "chunked")
        request.end_headers()
        request.wfile.write(f"{len(whole):x}\r\n".encode() + whole + b"\r\n")
        if request.path.endswith("whole"):
            request.wfile.write(b"0\r\n\r\n")
        request.close_connection = True

    for answer, route, complete in (
        (saying(200, whole), "report", True),
        (saying(200, whole, length=len(whole) + 1), "report", False),
        (pieces, "whole", True),
        (pieces, "cut", False),
    ):
        to = io.BytesIO()
        with service(answer) as client:
            if complete:
                client.fetch(route, to)
                assert to.getvalue() == whole
                continue
            with pytest.raises(InputError) as caught:
                client.fetch(route, to)
        assert caught.value.slug == "no-service"


def test_what_is_asked_is_what_arrives(tmp_path: Path) -> None:
    asked: list[tuple[str, str, str | None, bytes]] = []

    def answer(request: BaseHTTPRequestHandler) -> None:
        content = request.rfile.read(int(request.headers.get("Content-Length", 0)))
        asked.append((request.command, request.path, request.headers["Authorization"], content))
        saying(200, b"{}")(request)

    (tmp_path / "a").write_bytes(b"content")
    with service(answer) as client:
        client.get("captures", job="a b&c=d/\u00e9", most="3")
        client.post("tokens", {"name": "\u00e9"})
        client.put("owners", {"toml": ""})
        client.delete("hosts/node 1/x")
        client.send("/api/v1/captures/c1/files/a", tmp_path / "a")
        signed = f"{client.url}/bucket/a?X-Signature=abc"
        client.send(signed, tmp_path / "a")
    bearer = f"Bearer {TOKEN}"
    assert asked == [
        ("GET", "/api/v1/captures?job=a+b%26c%3Dd%2F%C3%A9&most=3", bearer, b""),
        ("POST", "/api/v1/tokens", bearer, b'{"name": "\\u00e9"}'),
        ("PUT", "/api/v1/owners", bearer, b'{"toml": ""}'),
        ("DELETE", "/api/v1/hosts/node%201/x", bearer, b""),
        ("PUT", "/api/v1/captures/c1/files/a", bearer, b"content"),
        (
            "PUT",
            "/bucket/a?X-Signature=abc",
            None,
            b"content",
        ),  # an object store has no part in the token
    ]


def test_a_store_that_refuses_is_named_without_what_was_signed(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"content")
    with (
        service(saying(403, b"<Error>SignatureDoesNotMatch</Error>")) as client,
        pytest.raises(InputError) as caught,
    ):
        client.send(f"{client.url}/bucket/a?X-Signature=abc", tmp_path / "a")
    assert caught.value.slug == "upload-failed"
    assert "abc" not in str(caught.value)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(InputError) as caught:
        client.send(f"http://127.0.0.1:{port}/bucket/a?X-Signature=abc", tmp_path / "a")
    assert caught.value.slug == "no-service"
    assert "abc" not in str(caught.value)


def test_an_upload_sends_what_is_missing_and_says_how_far_it_is(tmp_path: Path) -> None:
    contents = {"capture.json": b"{}", "rank0.json": bytes(3000), "sources/a.py": b"pass"}
    for name, content in contents.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    received: dict[str, bytes] = {}
    announced: list[dict[str, Any]] = []

    def answer(request: BaseHTTPRequestHandler) -> None:
        content = request.rfile.read(int(request.headers.get("Content-Length", 0)))
        if request.command == "PUT":
            received[request.path.partition("/files/")[2]] = content
            saying(200, b"{}")(request)
        elif request.path.endswith("/complete"):
            saying(200, b'{"id": "c1", "state": "received"}')(request)
        else:
            announced.append(json.loads(content))
            missing = [
                {"name": file["name"], "url": f"/api/v1/captures/c1/files/{file['name']}"}
                for file in announced[0]["files"]
                if file["name"] != "capture.json"  # it is there from an upload that stopped
            ]
            saying(200, json.dumps({"id": "c1", "complete": False, "uploads": missing}).encode())(
                request
            )

    said: list[tuple[int, int]] = []
    with service(answer) as client:
        assert (
            upload(client, tmp_path, "slurm-1", lambda sent, whole: said.append((sent, whole)))[
                "id"
            ]
            == "c1"
        )
    assert announced == [
        {
            "job": "slurm-1",
            "files": [
                {"name": name, "size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
                for name, content in sorted(contents.items())
            ],
        }
    ]
    assert received == {
        name: content for name, content in contents.items() if name != "capture.json"
    }
    assert said == [(3002, 3006), (3006, 3006)]


NAMES = st.text(st.sampled_from("ab .-_@+=é/\\:*\x01\u202e"), min_size=1, max_size=8).filter(
    lambda name: "/" not in name and name not in {".", ".."}
)


@given(names=st.sets(NAMES, min_size=1, max_size=6))
def test_names_in_the_store_are_safe_and_each_file_has_one_of_its_own(
    names: set[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("capture")
    for name in names:
        (folder / name).write_text(name)
    visible = {name for name in names if not name.startswith(".")}
    plain = [
        "".join(
            sign if sign.isascii() and (sign.isalnum() or sign in "._@+=-") else "_"
            for sign in name
        )
        for name in visible
    ]
    stored = [name if name[0].isalnum() or name[0] == "_" else f"_{name}" for name in plain]
    if not visible or len(set(stored)) < len(stored):  # nothing is left out in silence
        with pytest.raises(InputError) as caught:
            collect_files(folder)
        assert caught.value.slug == ("unsafe-name" if visible else "no-inputs")
        return
    files = collect_files(folder)
    assert {path.name for path in files.values()} == visible
    assert sorted(files) == sorted(stored)


@pytest.mark.parametrize("seed", range(4))
def test_an_upload_goes_on_through_outages_of_service_and_store(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests are refused, cut off or answered with 503 at random; files arrive whole, each kept once."""
    monkeypatch.setattr("traceloom.cli.upload._FIRST_DELAY_S", 0.001)
    monkeypatch.setattr("traceloom.cli.upload._MAX_DELAY_S", 0.01)
    order = random.Random(seed)
    sent = {f"rank{rank}.json": order.randbytes(order.randrange(1, 300_000)) for rank in range(12)}
    for name, content in sent.items():
        (tmp_path / name).write_bytes(content)
    kept: dict[str, list[bytes]] = {name: [] for name in sent}
    failures = 0

    def answer(request: BaseHTTPRequestHandler) -> None:
        nonlocal failures
        fails = order.random() < 0.5
        failures += fails
        if fails and order.random() < 0.5:
            request.connection.close()  # with a part of the body unread
            return
        content = request.rfile.read(int(request.headers.get("Content-Length", 0)))
        if fails:
            saying(503, b"<Error><Code>SlowDown</Code></Error>")(request)
        elif request.path.endswith("/captures"):
            store = f"http://{request.headers['Host']}/bucket"
            uploads = [{"name": name, "url": f"{store}/{name}?signed"} for name in sent]
            saying(200, json.dumps({"id": "c", "uploads": uploads}).encode())(request)
        elif request.path.startswith("/bucket"):
            kept[request.path[8:].partition("?")[0]].append(content)
            saying(200, b"")(request)
        else:
            saying(200, b'{"state": "received"}')(request)

    with service(answer) as client:
        client.persistent = True
        assert upload(client, tmp_path) == {"state": "received"}
    assert failures > 3
    assert kept == {name: [content] for name, content in sent.items()}


def test_a_command_waits_only_for_another_service_that_begins_to_lead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("traceloom.cli.upload._FIRST_DELAY_S", 0.001)
    asked = 0

    def answer(request: BaseHTTPRequestHandler) -> None:
        nonlocal asked
        asked += 1
        slug = "busy" if request.path.endswith("busy") else "not-leading"
        refusal = json.dumps({"error": {"slug": slug, "message": "later"}}).encode()
        saying(503 if asked < 4 else 200, refusal if asked < 4 else b"{}")(request)

    with service(answer) as client:
        assert client.get("hosts") == {}
        assert asked == 4
        asked = 0
        with pytest.raises(InputError, match="later"):
            client.get("busy")
        assert asked == 1
