"""The agent as a user runs it: a process, whose files lie in a directory, asked over its socket."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from support.waiting import until
from traceloom.errors import TraceloomError
from traceloom.server.client import AgentClient


class Running:
    """An agent with 2 simulated devices; its files lie in a directory, history and audit log on `disk`."""

    def __init__(
        self,
        directory: Path,
        more: str = "",
        *,
        disk: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.directory = directory
        self.socket = directory / "agent.sock"
        disk = disk or directory
        self.short = Path(tempfile.mkdtemp(prefix="tl"))  # names of sockets are short
        self.short.chmod(0o755)
        (directory / "agent.toml").write_text(
            f'[paths]\nsocket = "{self.socket}"\nhistory = "{disk}/agent.db"\naudit = "{disk}/audit.jsonl"\n'
            f'kineto = "{self.short}/k"\n'
            f"[collect]\nperiod = 0.2\n[history]\ninterval = 0.5\n{more}",
            encoding="utf-8",
        )
        self.log = (directory / "log").open("a", encoding="utf-8")
        self.environment = {**os.environ, **(environment or {})}
        self.client = AgentClient(self.socket, 30)
        self.start()

    def start(self) -> None:
        """Run it, also once more after it was killed."""
        command = [
            sys.executable,
            "-m",
            "traceloom",
            "agent",
            "run",
            "--config",
            str(self.directory / "agent.toml"),
        ]
        self.process = subprocess.Popen(
            [*command, "--simulate", "2"], stdout=self.log, stderr=self.log, env=self.environment
        )
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
        return any(state["history"].values()) and all(
            collector["runs"] for collector in state["collectors"]
        )

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        code = self.process.wait(60)
        shutil.rmtree(self.short, ignore_errors=True)
        self.log.close()
        return code


@contextmanager
def running_agent(directory: Path, settings: str = "", simulated: int = 0) -> Iterator[AgentClient]:
    """Run it, with more tables of agent.toml; it must end in order, and without a traceback."""
    directory.mkdir(parents=True, exist_ok=True)
    path, log = directory / "agent.sock", directory / "log"
    (directory / "agent.toml").write_text(
        f'[paths]\nsocket = "{path}"\nhistory = "{directory}/agent.db"\naudit = "{directory}/audit.jsonl"\n'
        "[history]\ninterval = 0.5\n"
        + ("" if "[collect]" in settings else "[collect]\nperiod = 0.2\n")
        + settings,
        encoding="utf-8",
    )
    command = [
        sys.executable,
        "-m",
        "traceloom",
        "agent",
        "run",
        "--config",
        str(directory / "agent.toml"),
    ]
    command += ["--simulate", str(simulated)] if simulated else []
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        client = AgentClient(path, 30)

        def answers() -> bool:
            assert process.poll() is None, log.read_text(encoding="utf-8")
            try:
                return all(collector["runs"] for collector in client.get("status")["collectors"])
            except TraceloomError:
                return False

        until(lambda: path.exists() and answers())
        yield client
        process.terminate()
        assert process.wait(60) == 0
        assert "Traceback" not in log.read_text(encoding="utf-8")
    finally:
        process.kill()
        process.wait(60)
