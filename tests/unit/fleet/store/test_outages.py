"""A database that is silent, gone or back: who waits hears of it, who comes meanwhile at once, and the log twice."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from urllib.parse import urlsplit

import pytest

pytest.importorskip("sqlalchemy", reason="the extra `fleet` is not installed")

from support.postgres import database
from traceloom.errors import OutputError, UsageError
from traceloom.fleet.store.captures import ServiceState
from traceloom.fleet.store.database import is_news


class Link:
    """A way to a server that can fall silent, as a frozen server does, or be cut."""

    def __init__(self, port: int) -> None:
        self.port, self.goes = port, threading.Event()
        self.goes.set()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.sockets: list[socket.socket] = []
        self.threads: list[threading.Thread] = []
        self._begin(self._accept)

    def _begin(self, work: Callable[..., None], *arguments: object) -> None:
        self.threads.append(threading.Thread(target=work, args=arguments, daemon=True))
        self.threads[-1].start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                here, _ = self.listener.accept()
                there = socket.create_connection(("127.0.0.1", self.port))
                self.sockets += [here, there]
                for pair in ((here, there), (there, here)):
                    self._begin(self._pass_on, *pair)

    def _pass_on(self, one: socket.socket, other: socket.socket) -> None:
        with suppress(OSError), one:
            while data := one.recv(1 << 16):
                self.goes.wait()
                other.sendall(data)
            other.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        """Ends all connections."""
        while self.sockets:
            with suppress(OSError):
                self.sockets.pop().shutdown(socket.SHUT_RDWR)


@pytest.fixture
def link() -> Iterator[Link]:
    made = Link(urlsplit(database()).port or 0)
    yield made
    made.goes.set()
    made.listener.shutdown(socket.SHUT_RDWR)
    made.cut()
    for thread in made.threads:
        thread.join()
    made.listener.close()


def test_a_silent_database_is_given_up_and_told_once(
    link: Link, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("traceloom.fleet.store.database._ANSWER_S", 0.2)
    address = urlsplit(database())
    link.port = address.port or 0
    port = link.listener.getsockname()[1]
    state = ServiceState(f"postgres://fleet@127.0.0.1:{port}{address.path}?connect_timeout=2")
    assert state.tokens() == []
    link.goes.clear()
    errors: list[OutputError] = []

    def ask() -> None:
        try:
            state.tokens()
        except OutputError as error:
            errors.append(error)

    ask()
    first = threading.Thread(target=ask)
    first.start()
    while not state._probe.locked():
        time.sleep(0.01)
    ask()  # while the other one tries
    assert first.is_alive()
    first.join()
    assert {error.slug for error in errors} == {"state-unusable"}
    assert len(errors) == 3
    link.goes.set()
    link.cut()
    assert state.tokens() == []
    assert state.tokens() == []
    told = [record.getMessage() for record in caplog.records]
    assert [text.partition(":")[0].partition(",")[0] for text in told] == [
        "the state does not answer",
        "the state answers again",
    ]
    state.close()


def test_an_error_of_one_statement_is_no_outage(link: Link) -> None:
    state = ServiceState(database())
    with pytest.raises(OutputError), state._transaction() as connection:
        state._change(connection, "SELECT 1 / 0")
    assert not state._down_since_s
    state.close()


def test_what_says_that_the_state_does_not_answer_is_no_news() -> None:
    def record(*arguments: object) -> logging.LogRecord:
        return logging.LogRecord("n", logging.WARNING, "p", 1, "%s", arguments, None)

    assert not is_news(record(OutputError("m", slug="state-unusable")))
    assert is_news(record(OutputError("m", slug="cannot-write")))
    assert is_news(record("a text"))


def test_another_kind_of_database_is_refused_with_what_there_is() -> None:
    with pytest.raises(UsageError) as refused:
        ServiceState("mysql+pymysql://ada:secret@db/fleet")
    assert "secret" not in str(refused.value)
    assert refused.value.slug == "wrong-usage"
