"""The agent as a user runs it: a process, asked over its socket."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from traceloom.agent.client import Client
from traceloom.errors import TraceloomError


class Running:
    """An agent with 2 simulated devices; its files lie in a directory, history and audit log on `disk`."""

    def __init__(
        self, directory: Path, more: str = "", *, disk: Path | None = None, environment: Mapping[str, str] | None = None
    ) -> None:
        self.directory = directory
        self.socket = directory / "agent.sock"
        disk = disk or directory
        (directory / "agent.toml").write_text(
            f'[paths]\nsocket = "{self.socket}"\nhistory = "{disk}/agent.db"\naudit = "{disk}/audit.jsonl"\n'
            f"[collect]\nperiod = 0.2\n[history]\ninterval = 0.5\n{more}",
            encoding="utf-8",
        )
        command = [sys.executable, "-m", "traceloom", "agent", "run", "--config", str(directory / "agent.toml")]
        self.log = (directory / "log").open("a", encoding="utf-8")
        self.process = subprocess.Popen(
            [*command, "--simulate", "2"], stdout=self.log, stderr=self.log, env={**os.environ, **(environment or {})}
        )
        self.client = Client(self.socket, 30)
        try:
            until(lambda: self.socket.exists() and self._answers())
        except BaseException:
            self.end(signal.SIGKILL)
            raise

    def _answers(self) -> bool:
        try:
            state = self.client.get("status")
        except TraceloomError:
            assert self.process.poll() is None, (self.directory / "log").read_text(encoding="utf-8")
            return False
        return any(state["history"].values()) and all(collector["runs"] for collector in state["collectors"])

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        code = self.process.wait(60)
        self.log.close()
        return code


def until(condition: Callable[[], Any]) -> Any:
    end = time.monotonic() + 60
    while not (value := condition()):
        assert time.monotonic() < end, "it did not happen within a minute"
        time.sleep(0.05)
    return value
