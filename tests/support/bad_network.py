"""A proxy before a server on loopback, on which some answers are late, refused, cut off, or lost after the deed."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal

Fault = Literal["", "late", "refused", "reset", "lost", "cut"]
_HOP = {"connection", "keep-alive", "transfer-encoding"}


class BadNetwork:
    """Deals out faults, one after the other, and counts them."""

    def __init__(self, port: int, faults: tuple[Fault, ...]) -> None:
        self.port, self.faults = port, faults
        self.asked = 0
        self.dealt = 0
        self._one = threading.Lock()

    def next(self) -> Fault:
        """What happens to the next request."""
        with self._one:
            fault = self.faults[self.asked % len(self.faults)]
            self.asked += 1
            self.dealt += bool(fault)
            return fault


@contextmanager
def bad_network(port: int, faults: tuple[Fault, ...]) -> Iterator[tuple[int, BadNetwork]]:
    """A proxy before `127.0.0.1:port`; its own port and what it deals out, again and again."""
    network = BadNetwork(port, faults)

    class Proxy(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            fault = network.next()
            body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
            if fault == "refused":
                self.answer(503, {}, b"<Error><Code>SlowDown</Code></Error>")
                return
            if fault == "reset":
                self.close_connection = True
                return
            if fault == "late":
                time.sleep(0.2)
            server = http.client.HTTPConnection("127.0.0.1", network.port, timeout=60)
            # The signature is of the address that the client knows, so its host stays.
            server.request(self.command, self.path, body, dict(self.headers))
            answer = server.getresponse()
            content = answer.read()
            server.close()
            if fault == "lost":
                self.close_connection = True
                return
            headers = {name: value for name, value in answer.getheaders() if name.lower() not in _HOP}
            self.answer(answer.status, headers, content, cut=fault == "cut" and len(content) > 1)

        def answer(self, status: int, headers: dict[str, str], content: bytes, *, cut: bool = False) -> None:
            self.send_response(status)
            if "content-length" not in {name.lower() for name in headers}:
                self.send_header("Content-Length", str(len(content)))
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content[: len(content) // 2] if cut else content)
            if cut:
                self.close_connection = True

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_any

        def log_message(self, *_arguments: object) -> None:
            """Nothing: the test says what went wrong."""

    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    proxy.daemon_threads = True
    thread = threading.Thread(target=proxy.serve_forever)
    thread.start()
    try:
        yield proxy.server_address[1], network
    finally:
        proxy.shutdown()
        thread.join()
        proxy.server_close()
