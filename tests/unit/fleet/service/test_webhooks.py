"""Webhooks: where they may lead, that events arrive signed and are lost by no restart, and what waits is bounded."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("sqlalchemy", reason="the extra `fleet` is not installed")

from support.fleet import KINDS
from support.postgres import database
from support.webhooks import Receiver, is_genuine, receiver
from traceloom.errors import InputError, UsageError
from traceloom.fleet.service import webhooks
from traceloom.fleet.service.webhooks import (
    WebhookAddressPolicy,
    WebhookDispatcher,
    build_fleet_event,
    sign_body,
)
from traceloom.fleet.store.captures import ServiceState
from traceloom.fleet.store.database import LEADER
from traceloom.fleet.store.rules import EVENTS, MAX_WAITING, MAX_WEBHOOKS, Delivery

LOOPBACK = WebhookAddressPolicy(["127.0.0.0/8"])
DAY = 86_400 * 10**9


@pytest.fixture
def hook() -> Iterator[Receiver]:
    with receiver() as receiving:
        yield receiving


@pytest.fixture(params=KINDS)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "state.db") if request.param == "alone" else database()


@pytest.fixture
def state(url: str) -> Iterator[ServiceState]:
    opened = ServiceState(url)
    yield opened
    opened.close()


def ended(state: ServiceState, name: str, result: str = "done") -> None:
    """A request ends, as the registry writes it down."""
    state.lead(LEADER, "term", 600)
    event = build_fleet_event(f"request.{result}", "request", name, {"id": name}, 1)
    state.put_request(name, 1, "{}", "term", ended=True, events=[event])


def send(state: ServiceState, later_ns: int = 0, tls: ssl.SSLContext | None = None) -> None:
    """Send all that is due so much later, by a sender that is new each time, as after a restart."""

    async def run() -> None:
        clock = webhooks.time.time_ns
        sender = WebhookDispatcher(state, LOOPBACK, lambda: clock() + later_ns, tls)
        while await sender.start_due_deliveries():
            await asyncio.gather(*sender._in_flight.values())

    asyncio.run(run())


@pytest.mark.parametrize(
    "url",
    [
        "https://10.0.0.1/",
        "https://127.0.0.1/",
        "http://127.0.0.1/",
        "https://169.254.169.254/latest",
        "https://[::1]/",
        "https://[::ffff:10.0.0.1]/",
        "https://[64:ff9b::a00:1]/",
        "https://[2002:a00:1::]/",
        "https://100.64.0.1/",
        "https://0.0.0.0/",
        "https://[fe80::1]/",
        "https://[fd00::1]/",
        "https://[fec0::1]/",
        "https://[::127.0.0.1]/",
        "https://[64:ff9b::7f00:1]/",
        "https://[64:ff9b:1::7f00:1]/",
        "https://[5f00::1]/",
        "https://192.0.0.8/",
        "https://224.0.0.1/",
        "http://8.8.8.8/",
        "ftp://8.8.8.8/",
        "https://user@8.8.8.8/",
        "https://8.8.8.8/\r\nX: y",
        "https:///x",
        "https://8.8.8.8:99999/",
        "https://[::1",
        "https://2130706433/",
        "https://no-such-name.invalid/",
    ],
)
def test_nobody_makes_the_service_talk_to_other_networks(url: str) -> None:
    with pytest.raises(InputError) as error:
        asyncio.run(WebhookAddressPolicy().resolve(url))
    assert error.value.slug == "wrong-webhook"


def test_where_webhooks_may_lead() -> None:
    async def run() -> None:
        public = await WebhookAddressPolicy().resolve("https://8.8.8.8/a?b=c")
        assert (public.address, public.port, public.path, public.tls) == (
            "8.8.8.8",
            443,
            "/a?b=c",
            True,
        )
        near = await WebhookAddressPolicy(["10.1.0.0/16"]).resolve("http://10.1.2.3:81/")
        assert (near.address, near.port, near.tls) == ("10.1.2.3", 81, False)
        with pytest.raises(InputError):
            await WebhookAddressPolicy(["10.1.0.0/16"]).resolve("http://10.2.0.1/")

    asyncio.run(run())
    with pytest.raises(InputError):
        WebhookAddressPolicy(["10.1.0.1/16"])


def test_an_event_arrives_signed_after_errors_a_redirect_and_restarts(
    url: str, hook: Receiver
) -> None:
    state = ServiceState(url)
    secret = state.add_webhook("ci", hook.url, EVENTS)
    hook.codes = [500, 302]
    ended(state, "r1")
    ended(state, "r1")  # written down once more
    send(state)
    send(state)  # not yet again
    assert [len(hook.came), state.webhooks()[0].error] == [1, "it answers 500"]
    for days in (0.5, 0.9):
        state.close()
        state = ServiceState(url)
        send(state, int(days * DAY))
    assert len(hook.came) == 3
    send(state, int(0.95 * DAY))
    first, *_, last = hook.came
    assert len(hook.came) == 3
    assert (
        {came.headers["webhook-id"] for came in hook.came}
        == {"request.done:r1"}
        == {json.loads(last.body)["id"]}
    )
    assert json.loads(last.body)["event"] == "request.done"
    [webhook] = state.webhooks()
    assert (webhook.waiting, webhook.delivered, webhook.failed, webhook.error) == (0, 1, 0, "")
    assert is_genuine(secret, first)
    assert not is_genuine("whsec_YW5vdGhlcg==", first)
    assert not is_genuine(secret, first._replace(body=first.body + b" "))
    assert not is_genuine(secret, last), "its timestamp is 20 hours ahead"
    state.close()


def test_only_what_is_wanted_is_told_and_a_webhook_that_is_removed_nothing(
    state: ServiceState, hook: Receiver
) -> None:
    state.add_webhook("bad", hook.url, ["request.failed"])
    state.add_webhook("all", hook.url, EVENTS)
    ended(state, "good")
    ended(state, "bad", "failed")
    assert state.remove_webhook("all")
    assert not state.remove_webhook("all")
    send(state)
    assert [came.headers["webhook-id"] for came in hook.came] == ["request.failed:bad"]


def test_who_never_answers_is_given_up_after_a_day_and_keeps_nobody_waiting(
    state: ServiceState, hook: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhooks, "_REQUEST_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and says nothing
        state.add_webhook("silent", f"http://127.0.0.1:{silent.getsockname()[1]}/", EVENTS)
        state.add_webhook(
            "inside", "https://10.0.0.1/", EVENTS
        )  # as if its name led elsewhere by now
        state.add_webhook("well", hook.url, EVENTS)
        ended(state, "r1")
        send(state)
        send(state, DAY + 10**9)
    hooks = {webhook.name: webhook for webhook in state.webhooks()}
    assert (hooks["well"].delivered, hooks["silent"].failed, hooks["inside"].failed) == (1, 1, 1)
    assert "no answer within" in hooks["silent"].error
    assert "may not lead" in hooks["inside"].error


def test_whose_certificate_is_not_trusted_or_is_of_another_name_is_told_nothing(
    tmp_path: Path,
) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    certificate, key = str(tmp_path / "c.pem"), str(tmp_path / "k.pem")
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=DNS:localhost", "-out", certificate, "-keyout", key]
    subprocess.run([*command.split(), *names], check=True, capture_output=True)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(certificate, key)
    trusting = ssl.create_default_context(cafile=certificate)
    state = ServiceState(str(tmp_path / "state.db"))
    with receiver(server) as hook:
        state.add_webhook("name", hook.url, EVENTS)
        state.add_webhook("other", hook.url.replace("localhost", "127.0.0.1"), EVENTS)
        ended(state, "r1")
        send(state)
        assert hook.came == []
        send(state, DAY // 2, trusting)
        assert len(hook.came) == 1
    webhooks = {webhook.name: webhook for webhook in state.webhooks()}
    assert (webhooks["name"].delivered, webhooks["other"].delivered) == (1, 0)
    assert "certificate" in webhooks["other"].error
    state.close()


def test_what_waits_is_bounded_and_what_is_dropped_counted(state: ServiceState) -> None:
    state.add_webhook("away", "http://127.0.0.1:1/", EVENTS)
    events = [
        build_fleet_event("regression.new", "regression", str(number), {}, 1)
        for number in range(MAX_WAITING + 3)
    ]
    state.lead(LEADER, "term", 600)
    state.put_request("r", 1, "{}", "term", ended=True, events=events)
    assert (state.webhooks()[0].waiting, state.webhooks()[0].dropped) == (MAX_WAITING, 3)
    for number in range(MAX_WEBHOOKS - 1):
        state.add_webhook(str(number), "https://8.8.8.8", EVENTS)
    with pytest.raises(UsageError) as error:
        state.add_webhook("more", "https://8.8.8.8", EVENTS)
    assert error.value.slug == "too-many-webhooks"


def test_a_signature_is_that_of_the_convention() -> None:
    """The example that libraries of the convention test themselves with."""
    delivery = Delivery(
        webhook="chat",
        url="https://chat.example",
        secret="whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",
        id="msg_p5jXN8AQM9LWM0D4loKWxJek",
        event="request.done",
        document='{"test": 2432232314}',
        created_ns=1,
        attempts=0,
    )
    expected = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
    assert sign_body(delivery, 1_614_265_330) == expected
