"""A proxy before a server on loopback, on which some answers are late, refused, cut off, or lost after the deed.

`PORT FAULT,FAULT,...` runs it: a process, as deltalake keeps Python's lock while it waits for an answer. It prints its
own port, and the number of its faults when its input ends.
"""

from __future__ import annotations

import http.client
import subprocess
import sys
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
def bad_network(port: int, faults: tuple[Fault, ...]) -> Iterator[int]:
    """A proxy before `127.0.0.1:port`, that deals out faults again and again; its own port."""
    command = [sys.executable, __file__, str(port), ",".join(faults)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline())
        text, _ = process.communicate()
        assert int(text) > 0, "nothing went wrong"


def main(port: int, faults: tuple[Fault, ...]) -> None:
    """Be the proxy until the input ends."""
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

        def log_message(self, *_arguments: object) -> None:
            """Nothing: the test says what went wrong."""

    for method in ("GET", "PUT", "POST", "DELETE", "HEAD"):
        setattr(Proxy, f"do_{method}", Proxy.handle_any)
    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    proxy.daemon_threads = True
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    sys.stdout.write(f"{proxy.server_address[1]}\n")
    sys.stdout.flush()
    sys.stdin.read()
    sys.stdout.write(f"{network.dealt}\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), tuple(sys.argv[2].split(",")))  # type: ignore[arg-type]
