"""An agent as a user runs it: a process, whose files lie in a directory, asked over its socket."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.waiting import until
from traceloom.agent.client import Client
from traceloom.errors import TraceloomError


@contextmanager
def running_agent(directory: Path, settings: str = "", simulated: int = 0) -> Iterator[Client]:
    """Run it, with more tables of agent.toml; it must end in order, and without a traceback."""
    directory.mkdir(parents=True, exist_ok=True)
    path, log = directory / "agent.sock", directory / "log"
    (directory / "agent.toml").write_text(
        f'[paths]\nsocket = "{path}"\nhistory = "{directory}/agent.db"\naudit = "{directory}/audit.jsonl"\n'
        "[history]\ninterval = 0.5\n" + ("" if "[collect]" in settings else "[collect]\nperiod = 0.2\n") + settings,
        encoding="utf-8",
    )
    command = [sys.executable, "-m", "traceloom", "agent", "run", "--config", str(directory / "agent.toml")]
    command += ["--simulate", str(simulated)] if simulated else []
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        client = Client(path, 30)

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
