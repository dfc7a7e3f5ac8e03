"""A service of a fleet that answers as a test says, over real connections, and remembers what it was asked."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

import msgspec


class Question(NamedTuple):
    """What came over a connection; connections are numbered from 1."""

    method: str
    path: str
    credential: str
    body: bytes
    connection: int


class Reply(NamedTuple):
    """What goes back. `hangs_up`: the connection is closed after it, and nothing says so."""

    body: bytes = b"{}"
    status: int = 200
    hangs_up: bool = False
    location: str = ""


def refusal(status: int, slug: str, message: str, hint: str = "") -> Reply:
    """As the service writes why it does not do something."""
    document = {"error": {"slug": slug, "message": message, "hint": hint}}
    return Reply(msgspec.json.encode(document), status)


class ScriptedService:
    """Its address, what it was asked, and what it answers; `answers` may be changed at any time."""

    def __init__(self, answers: Callable[[Question], Reply]) -> None:
        self.answers = answers
        self.questions: list[Question] = []
        self.connections = 0
        service = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                service.connections += 1
                self.number = service.connections

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                question = Question(
                    self.command,
                    self.path,
                    self.headers.get("Authorization", ""),
                    body,
                    self.number,
                )
                service.questions.append(question)
                reply = service.answers(question)
                self.send_response(reply.status)
                if reply.location:
                    self.send_header("Location", reply.location)
                self.send_header("Content-Length", str(len(reply.body)))
                self.end_headers()
                with contextlib.suppress(ConnectionError):  # who asked has gone
                    self.wfile.write(reply.body)
                self.close_connection = reply.hangs_up

            do_GET = do_POST = do_PUT = answer  # noqa: N815  (as the library calls them)

            def log_message(self, format: str, *_: object) -> None:  # noqa: A002  (as the library calls it)
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}
        )

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@contextmanager
def scripted(answers: Callable[[Question], Reply]) -> Iterator[ScriptedService]:
    """A service that answers so, until the block ends."""
    service = ScriptedService(answers)
    service.start()
    try:
        yield service
    finally:
        service.close()
