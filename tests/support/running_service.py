"""The fleet's service in a process of its own, and who asks it."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode

from support.prometheus import free_port
from support.waiting import until
from traceloom.cli.upload import FleetClient


class Seen(NamedTuple):
    """What a browser is answered."""

    status: int
    headers: http.client.HTTPMessage
    text: str


class RunningService:
    """A service in a process of its own, and who asks it."""

    def __init__(self, folder: Path, *arguments: str, command: Sequence[str] | None = None) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.folder = folder
        self.log = folder / "serve.log"
        # Its user's files lie in the test's folder.
        self.environment = {
            **os.environ,
            "XDG_CONFIG_HOME": str(folder),
            "XDG_DATA_HOME": str(folder),
            "PYTHONPATH": ":".join(filter(None, sys.path)),
            "HOME": str(folder),
        }
        if "--store" not in arguments:
            arguments = ("--store", str(folder / "store"), "--workers", "1", *arguments)
        self.arguments = ["--address", f"127.0.0.1:{self.port}", *arguments]
        self.start(command)

    def start(self, command: Sequence[str] | None = None) -> None:
        """Start it, again; `command` instead of `traceloom serve`."""
        command = command or [sys.executable, "-m", "traceloom", "serve"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, *self.arguments], stdout=log, stderr=log, env=self.environment
            )
        until(lambda: b"answers at" in self.log.read_bytes() or self.process.poll() is not None)
        assert self.process.poll() is None, self.log.read_text()

    def end(self, number: int = signal.SIGTERM) -> int:
        """End it; its exit code."""
        self.process.send_signal(number)
        return self.process.wait(60)

    @property
    def lives(self) -> bool:
        """Whether its process has not ended."""
        return self.process.poll() is None

    @property
    def token_file(self) -> Path:
        return self.folder / "traceloom" / f"fleet-token-{self.port}"

    @property
    def token(self) -> str:
        """Of its own user."""
        return self.token_file.read_text().strip()

    def client(self, token: str = "") -> FleetClient:
        """Who asks it; as its own user, without a token."""
        return FleetClient(self.url, token or self.token)

    def run(self, *words: str, code: int = 0) -> str:
        """A command of its own user; what it prints."""
        done = subprocess.run(
            [sys.executable, "-m", "traceloom", *words, "--server", self.url],
            capture_output=True,
            text=True,
            check=False,
            env=self.environment,
        )
        assert done.returncode == code, done.stderr
        return done.stdout

    def ask(
        self, method: str, path: str, token: str = "", body: Any = None, **headers: str
    ) -> tuple[int, Any]:
        """A bare request: the code and the answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        content = body if isinstance(body, (bytes, type(None))) else json.dumps(body)
        connection.request(
            method, path, content, {"Authorization": f"Bearer {token or self.token}", **headers}
        )
        response = connection.getresponse()
        text = response.read()
        connection.close()
        return response.status, json.loads(text) if "json" in response.headers[
            "content-type"
        ] else text

    def browse(
        self,
        path: str,
        cookie: str = "",
        form: Mapping[str, str] | None = None,
        *,
        address: str = "127.0.0.1",
        **headers: str,
    ) -> Seen:
        """A request for a page as a browser sends it from an address, with a form where there is one."""
        connection = http.client.HTTPConnection(
            "127.0.0.1", self.port, timeout=60, source_address=(address, 0)
        )
        sent = {"Cookie": cookie, **({} if form is None else {"Origin": self.url}), **headers}
        method, body = ("GET", None) if form is None else ("POST", urlencode(form))
        connection.request(
            method,
            path,
            body,
            {name.replace("_", "-"): value for name, value in sent.items() if value},
        )
        response = connection.getresponse()
        seen = Seen(response.status, response.headers, response.read().decode())
        connection.close()
        return seen

    def signed_in(self, token: str = "") -> str:
        """The cookie of who signs in, as its own user without a token."""
        form = {"token": token or self.token, "next": "/"}
        return self.browse("/sign-in", form=form).headers["Set-Cookie"].partition(";")[0]
