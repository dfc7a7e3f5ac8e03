"""A receiver of webhooks: a real HTTP server that answers what it is told to, and keeps what came."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "webhooks.md"


class Came(NamedTuple):
    """A request that came."""

    path: str
    headers: dict[str, str]
    body: bytes


class Receiver:
    """Answers with the codes of `codes`, one after the other, then with 204."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}/hook"
        self.came: list[Came] = []
        self.codes: list[int] = []


@contextmanager
def receiver(tls: ssl.SSLContext | None = None) -> Iterator[Receiver]:
    """A receiver on loopback, with a certificate where `tls` has one."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            receiving.came.append(Came(self.path, dict(self.headers), body))
            self.send_response(receiving.codes.pop(0) if receiving.codes else 204)
            self.send_header("Location", receiving.url)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Quiet."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        receiving = Receiver(server.server_port)
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
            receiving.url = f"https://localhost:{server.server_port}/hook"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield receiving
        finally:
            server.shutdown()
            thread.join()


def is_genuine(secret: str, came: Came) -> bool:
    """The check of the page, as it stands there."""
    [code] = [part for part in PAGE.read_text().split("```") if part.startswith("python\n")]
    names: dict[str, object] = {}
    exec(code.removeprefix("python\n"), names)
    check = names["is_genuine"]
    assert callable(check)
    return bool(check(secret, came.headers, came.body))
