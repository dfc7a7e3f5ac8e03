"""Asking the fleet's service: over real connections, and what it says is taken as far as it is an answer."""

from __future__ import annotations

import threading
from pathlib import Path

import msgspec
import pytest

from support.scripted_service import Question, Reply, refusal, scripted
from traceloom.agent.fleet_link.client import ServiceClient, ServiceError
from traceloom.agent.fleet_link.protocol import Enrolment, HostCredentials, WorkResponse
from traceloom.errors import InputError

WORK = Reply(msgspec.json.encode({"version": "7", "work": []}))
MEBI = 1 << 20
DEEP = b"[" * 100_000 + b"]" * 100_000


def test_questions_go_over_one_connection_with_the_credential_below_the_prefix() -> None:
    enrolled = Reply(b'{"host": "node1", "credential": "secret"}')
    with scripted(lambda question: WORK if question.method == "GET" else enrolled) as service:
        client = ServiceClient(f"{service.url}/behind/a/proxy/")
        assert client.get("agents/node1/work?version=&wait=30", WorkResponse) == WorkResponse(
            version="7"
        )
        enrolment = Enrolment(token="once", host="node1")
        client.credential = client.post("agents/enrol", enrolment, HostCredentials).credential
        client.get("agents/node1/work", WorkResponse)
        client.close()
    first, second, third = service.questions
    assert (first.method, first.path) == (
        "GET",
        "/behind/a/proxy/api/v1/agents/node1/work?version=&wait=30",
    )
    assert (first.credential, first.body) == ("", b"")
    assert (second.method, second.path) == ("POST", "/behind/a/proxy/api/v1/agents/enrol")
    assert msgspec.json.decode(second.body, type=Enrolment) == enrolment
    assert third.credential == "Bearer secret"
    assert [question.connection for question in service.questions] == [1, 1, 1]


@pytest.mark.parametrize("size", [0, 1, MEBI - 1, MEBI, 3 * MEBI + 5])
def test_a_file_arrives_as_it_is(tmp_path: Path, size: int) -> None:
    path = tmp_path / "rank0.kineto.json.gz"
    path.write_bytes(bytes(range(256)) * (size // 256) + bytes(size % 256))
    with scripted(lambda _: Reply()) as service:
        client = ServiceClient(service.url, credential="secret")
        client.put_file("agents/node1/requests/r/files/rank0.kineto.json.gz", path, size)
        client.get(
            "agents/node1/work", msgspec.Raw
        )  # what follows on the connection is a question of its own
        client.close()
    put, get = service.questions
    assert (put.method, put.body == path.read_bytes(), put.credential) == (
        "PUT",
        True,
        "Bearer secret",
    )
    assert (get.method, get.connection) == ("GET", put.connection)


def test_a_refusal_is_told_in_the_services_words() -> None:
    with scripted(
        lambda _: refusal(409, "host-known", "node1 belongs to the fleet", "name it otherwise")
    ) as service:
        client = ServiceClient(service.url)
        with pytest.raises(ServiceError) as raised:
            client.get("agents/node1/work", WorkResponse)
        client.close()
    error = raised.value
    assert (error.status, error.slug, error.message) == (
        409,
        "host-known",
        "node1 belongs to the fleet",
    )
    assert error.hint == "name it otherwise"


@pytest.mark.parametrize(
    ("reply", "slug", "status"),
    [
        pytest.param(Reply(b"<html>It works!</html>"), "service-unclear", 0, id="a page"),
        pytest.param(Reply(b'{"version": 7}'), "service-unclear", 0, id="a number for a text"),
        pytest.param(Reply(b'{"work": []}'), "service-unclear", 0, id="half an answer"),
        pytest.param(Reply(b'{"version": "\xff\xfe"}'), "service-unclear", 0, id="no text"),
        pytest.param(
            Reply(b'{"error": {"slug": "\xff"}}', 400),
            "service-unclear",
            400,
            id="a refusal without text",
        ),
        pytest.param(
            Reply(b"<html>Bad Gateway</html>", 502), "service-unclear", 502, id="a page of a proxy"
        ),
        pytest.param(
            Reply(b'{"error": "no"}', 403), "service-unclear", 403, id="a refusal of another form"
        ),
        pytest.param(Reply(b"[" * 100_000, 500), "service-unclear", 500, id="depth"),
        pytest.param(
            Reply(b'{"version": "7", "more": %b}' % DEEP),
            "service-unclear",
            0,
            id="depth that is skipped",
        ),
        pytest.param(
            Reply(b'{"more": %b}' % DEEP, 403), "service-unclear", 403, id="a refusal of such depth"
        ),
        pytest.param(Reply(b" " * (16 * MEBI + 1)), "no-service", 0, id="an answer without end"),
    ],
)
def test_what_is_no_answer_is_none(reply: Reply, slug: str, status: int) -> None:
    with scripted(lambda _: reply) as service:
        client = ServiceClient(service.url)
        with pytest.raises(ServiceError) as raised:
            client.get("agents/node1/work", WorkResponse)
        assert (raised.value.slug, raised.value.status) == (slug, status)
        service.answers = lambda _: WORK
        assert (
            client.get("agents/node1/work", WorkResponse).version == "7"
        )  # and the client goes on
        client.close()


def test_no_credential_goes_where_a_redirect_leads() -> None:
    with scripted(lambda _: WORK) as elsewhere:
        moved = Reply(b"", 307, location=f"{elsewhere.url}/api/v1/agents/node1/work")
        with scripted(lambda _: moved) as service:
            client = ServiceClient(service.url, credential="secret")
            with pytest.raises(ServiceError) as raised:
                client.get("agents/node1/work", WorkResponse)
            client.close()
    assert (raised.value.slug, raised.value.status) == ("service-unclear", 307)
    assert elsewhere.questions == []


def test_a_connection_that_was_closed_while_it_was_idle_costs_no_question(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"0" * MEBI)
    with scripted(lambda _: WORK._replace(hangs_up=True)) as service:
        client = ServiceClient(service.url)
        for _ in range(3):
            assert client.get("agents/node1/work", WorkResponse).version == "7"
        assert [question.connection for question in service.questions] == [1, 2, 3]
        # What was sent of a file cannot be sent again by itself: whoever sends it asks the service what it lacks.
        with pytest.raises(ServiceError) as raised:
            client.put_file("agents/node1/requests/r/files/file", path, MEBI)
        assert raised.value.slug == "no-service"
        client.put_file("agents/node1/requests/r/files/file", path, MEBI)
        client.close()
    assert service.questions[-1].body == path.read_bytes()


def test_a_service_that_cannot_answer_just_now_is_asked_over_a_new_connection() -> None:
    """Behind one address there may be several."""
    statuses = iter((503, 200, 500, 200))

    def answers(_: Question) -> Reply:
        status = next(statuses)
        return WORK if status == 200 else refusal(status, "busy", "come again")

    with scripted(answers) as service:
        client = ServiceClient(service.url)
        for expected in (503, 0, 500, 0):
            try:
                client.get("agents/node1/work", WorkResponse)
                status = 0
            except ServiceError as error:
                status = error.status
            assert status == expected
        client.close()
    assert [question.connection for question in service.questions] == [1, 2, 2, 2]


def test_where_nobody_listens_it_is_said_and_asked_again_later() -> None:
    with scripted(lambda _: WORK) as service:
        address = service.url
    client = ServiceClient(address)
    with pytest.raises(ServiceError, match="does not answer: connection refused") as raised:
        client.get("agents/node1/work", WorkResponse)
    assert (raised.value.slug, raised.value.status, raised.value.exit_code) == ("no-service", 0, 3)
    client.close()


@pytest.mark.parametrize("before", [0, 1], ids=["the first", "the second over its connection"])
def test_a_question_that_waits_is_ended_from_another_thread(before: int) -> None:
    asked, go_on = threading.Event(), threading.Event()
    errors: list[ServiceError] = []

    def answers(_: Question) -> Reply:
        if len(service.questions) > before:
            asked.set()
            go_on.wait(60)
        return WORK

    with scripted(answers) as service:
        client = ServiceClient(service.url, timeout_s=120.0)
        for _ in range(before):
            client.get("agents/node1/work", WorkResponse)

        def ask() -> None:
            try:
                client.get("agents/node1/work?wait=30", WorkResponse)
            except ServiceError as error:
                errors.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        assert asked.wait(60)
        client.abort()
        thread.join(30)  # the service would have answered after a minute
        assert not thread.is_alive()
        go_on.set()
    assert [error.slug for error in errors] == ["no-service"]
    assert len(service.questions) == before + 1


@pytest.mark.parametrize(
    "url", ["http://10.0.0.1:9466", "ftp://127.0.0.1", "fleet.example", "http://user@127.0.0.1"]
)
def test_an_address_that_would_give_the_credential_away_is_refused(url: str) -> None:
    with pytest.raises(InputError) as raised:
        ServiceClient(url)
    assert raised.value.slug == "wrong-address"


def test_certificates_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("no certificate")
    for name in ("ca.pem", "missing.pem"):
        with pytest.raises(InputError) as raised:
            ServiceClient("https://fleet.example", ca=str(tmp_path / name))
        assert (raised.value.slug, raised.value.where) == ("wrong-config", str(tmp_path / name))
