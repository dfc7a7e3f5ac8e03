"""A training loop asks for a trace: whatever listens there, it goes on, and one line says what is wrong."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from support.waiting import until
from support.webhooks import receiver
from traceloom.capture import autoprofile as module, settings
from traceloom.capture.autoprofile import Autoprofile, autoprofile


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_said", set())
    for name in (
        "TRACELOOM_SERVER",
        "TRACELOOM_TOKEN",
        "TRACELOOM_JOB",
        "RANK",
        "WORLD_SIZE",
        "SLURM_JOB_ID",
    ):
        monkeypatch.delenv(name, raising=False)


@contextmanager
def listening(answer: Callable[[socket.socket, threading.Event], object]) -> Iterator[str]:
    """Something at an address that does with each connection what it likes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.1)
        ended = threading.Event()

        def serve() -> None:
            while not ended.is_set():
                try:
                    connection, _ = server.accept()
                except TimeoutError:
                    continue
                with connection:
                    try:
                        answer(connection, ended)
                    except OSError:  # it has gone
                        continue

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}"
        finally:
            ended.set()
            thread.join()


def loop(profile: Autoprofile, steps: int = 1000) -> None:
    for _ in range(steps):
        profile.step()


def test_a_loop_ends_while_a_service_that_never_answers_is_still_asked() -> None:
    loop_ended, asked = threading.Event(), threading.Event()

    def keep(connection: socket.socket, _ended: threading.Event) -> None:
        connection.recv(10)
        asked.set()
        loop_ended.wait(60)  # if the loop waited for this, it would never end

    with listening(keep) as url:
        profile = autoprofile(url, job="j", token="t")
        assert asked.wait(60)
        loop(profile)
        loop_ended.set()
        profile.close()
    assert profile.request == ""


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n[1]",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{{",
        b"HTTP/1.1 200 OK\r\nContent-Length: 200000\r\n\r\n" + b"[" * 200_000,
        b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * (3 << 20),
        b"HTTP/1.1 403 No\r\nContent-Length: 2\r\n\r\n{}",
    ],
    ids=["list", "no-json", "deep", "endless", "refused"],
)
def test_what_is_no_service_is_said_once_and_asked_no_more(
    answer: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    def respond(connection: socket.socket, _ended: threading.Event) -> None:
        asked = b""
        while not asked.endswith(b"}") and (piece := connection.recv(1 << 16)):
            asked += piece
        connection.sendall(answer)

    with listening(respond) as url:
        profile = autoprofile(url, job="j", token="t")
        until(lambda: profile.last_error)
        until(lambda: not profile._thread.is_alive())
        loop(profile)
        again = autoprofile(url, job="j", token="t")
        until(lambda: again.last_error)
        until(lambda: not again._thread.is_alive())
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("traceloom: no trace of this job was asked for: ")
    assert line.endswith("[no-autoprofile]")


def test_who_sends_a_letter_now_and_then_is_not_listened_to_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_EXCHANGE_S", 0.3)
    cut = threading.Event()

    def drip(connection: socket.socket, ended: threading.Event) -> None:
        try:
            connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            while not ended.is_set():
                connection.sendall(b" ")
                time.sleep(0.02)
        except OSError:
            cut.set()
            raise

    with listening(drip) as url:
        profile = autoprofile(url, job="j", token="t", at_step=3)
        loop(profile, 2)
        assert cut.wait(60)
        loop(profile, 2)
        until(lambda: profile.last_error)


def test_a_service_that_is_down_is_asked_until_the_step_has_passed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    profile = autoprofile(f"http://127.0.0.1:{port}", job="j", token="t", at_step=10)
    loop(profile, 9)
    assert profile.last_error == ""
    loop(profile, 2)
    until(lambda: profile.last_error)
    assert "does not answer" in profile.last_error


def test_no_token_goes_where_a_redirect_leads_or_over_a_network_in_the_clear() -> None:
    with receiver() as service:
        service.codes = [307]
        profile = autoprofile(service.url.rpartition("/")[0], job="j", token="t")
        until(lambda: profile.last_error)
        assert len(service.came) == 1, "it leads to the same place, and nobody went there"
    profile = autoprofile("http://10.0.0.1:9466", job="j", token="t")
    until(lambda: profile.last_error)
    assert "others can listen" in profile.last_error


@pytest.mark.parametrize(
    ("given", "variables", "last_error"),
    [
        ({}, {}, "which job"),
        ({"job": "j"}, {}, "where the service is"),
        ({"job": "j", "server": "nonsense"}, {}, "no address"),
        ({"server": "http://[::1"}, {"SLURM_JOB_ID": "4"}, "no address"),
    ],
    ids=["job", "server", "address", "slurm"],
)
def test_what_is_missing_is_said(
    given: dict[str, str],
    variables: dict[str, str],
    last_error: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    profile = autoprofile(**given)  # type: ignore[arg-type]
    until(lambda: profile.last_error)
    assert last_error in profile.last_error


def test_other_ranks_ask_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with receiver() as service:
        profile = autoprofile(service.url, job="j", model="m", token="t")
        until(lambda: not profile._thread.is_alive())
        assert (service.came, profile.last_error) == ([], "")
