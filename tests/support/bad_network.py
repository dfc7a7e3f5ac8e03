"""A proxy before a server on loopback, by which some answers are late, refused, cut off, or lost after the deed.

It runs in a thread of the test: whoever kept Python's lock while waiting for an answer would never get it.
"""

from __future__ import annotations

import contextlib
import http.client
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal, NamedTuple

Fault = Literal["none", "late", "refused", "reset", "lost", "cut"]
# How many in a thousand requests. Whoever reads has to begin again after a cut, the others are asked once more at once.
_FAULTS: dict[Fault, int] = {
    "none": 830,
    "late": 50,
    "refused": 50,
    "reset": 30,
    "lost": 30,
    "cut": 10,
}
_LATE_S = 0.2
_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length"}


class BadNetwork(NamedTuple):
    """Where the proxy answers on 127.0.0.1, and how often what went wrong."""

    port: int
    dealt: Counter[Fault]


@contextlib.contextmanager
def bad_network(port: int, seed: int) -> Iterator[BadNetwork]:
    """A proxy before `127.0.0.1:port` that deals faults out to the requests in an order that the seed decides."""
    order, turn = random.Random(seed), threading.Lock()
    dealt: Counter[Fault] = Counter()

    class Proxy(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            with turn:
                [fault] = order.choices(list(_FAULTS), list(_FAULTS.values()))
                dealt[fault] += 1
            body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
            if fault == "refused":
                self.answer(503, {}, b"<Error><Code>SlowDown</Code></Error>")
                return
            if fault == "reset":
                self.close_connection = True
                return
            if fault == "late":
                time.sleep(_LATE_S)
            with contextlib.closing(
                http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            ) as server:
                # The signature is of the address that the client knows, so its host stays.
                server.request(self.command, self.path, body, dict(self.headers))
                answer = server.getresponse()
                content = answer.read()
            if fault == "lost":
                self.close_connection = True
                return
            headers = {
                name: value for name, value in answer.getheaders() if name.lower() not in _HOP
            }
            # Of what has no body the header says how long it would be.
            headers["Content-Length"] = answer.getheader("Content-Length") or str(len(content))
            if fault == "cut":
                content = content[: len(content) // 2]
                self.close_connection = True
            self.answer(answer.status, headers, content)

        def answer(self, status: int, headers: dict[str, str], content: bytes) -> None:
            self.send_response(status)
            for name, value in ({"Content-Length": str(len(content))} | headers).items():
                self.send_header(name, value)
            with contextlib.suppress(ConnectionError):  # whoever asked waits no more
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content)

        def log_message(self, *_arguments: object) -> None:
            """Nothing: the test says what went wrong."""

    for method in ("GET", "PUT", "POST", "DELETE", "HEAD"):
        setattr(Proxy, f"do_{method}", Proxy.handle_any)
    with ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as proxy:
        proxy.daemon_threads = True
        thread = threading.Thread(target=proxy.serve_forever)
        thread.start()
        try:
            yield BadNetwork(proxy.server_address[1], dealt)
        finally:
            proxy.shutdown()
            thread.join()
