"""The fleet's service as a user runs it: a process on loopback, with its files in a folder."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from support.waiting import until
from traceloom.collect.client import FleetClient


class RunningService:
    """`traceloom serve`, with more arguments; its user's files lie in the folder, too."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.folder = folder
        self.environment = {**os.environ, "XDG_CONFIG_HOME": str(folder / "config"), "XDG_DATA_HOME": str(folder)}
        self.arguments = ["--store", str(folder / "store"), "--workers", "1", *arguments]
        self.start("127.0.0.1:0")

    def start(self, address: str) -> None:
        """Start it, again."""
        with (self.folder / "serve.log").open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "traceloom", "serve", *self.arguments, "--address", address],
                stdout=log, stderr=log, env=self.environment,
            )  # fmt: skip
        self.url = until(self._address)

    def _address(self) -> str:
        text = (self.folder / "serve.log").read_text()
        assert self.process.poll() is None, text
        match = re.search(r"answers at (\S+),", text)
        return match[1] if match else ""

    @property
    def token(self) -> str:
        """Of its user."""
        return (self.folder / "config" / "traceloom" / "fleet-token").read_text().strip()

    def client(self) -> FleetClient:
        """Who asks it as its user."""
        return FleetClient(self.url, self.token)

    def run(self, *words: str, code: int = 0) -> str:
        """A command of its user; what it prints."""
        done = subprocess.run(
            [sys.executable, "-m", "traceloom", *words, "--server", self.url], capture_output=True, text=True,
            check=False, env=self.environment,
        )  # fmt: skip
        assert done.returncode == code, done.stderr
        return done.stdout

    def ask(self, *words: str) -> Any:
        """The answer of a command of `traceloom fleet`."""
        return json.loads(self.run("fleet", *words, "--json"))

    def kill(self) -> None:
        """End it at once, as a power cut does."""
        self.process.kill()
        self.process.wait(60)

    def close(self) -> None:
        """End it in order."""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(60) == 0, (self.folder / "serve.log").read_text()
