"""Debian's Prometheus on a scratch directory, over loopback."""

from __future__ import annotations

import json
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import urlopen

MOST_S = 120.0  # for a thing to happen on a machine that is busy with others


def until(condition: Callable[[], Any]) -> Any:
    """What it gives, when it gives something."""
    end = time.monotonic() + MOST_S
    while not (value := condition()):
        assert time.monotonic() < end, f"it did not happen within {MOST_S:g} s"
        time.sleep(0.1)
    return value


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Prometheus:
    """Its questions."""

    def __init__(self, address: str) -> None:
        self.address = address

    def ask(self, query: str) -> list[dict[str, Any]]:
        """The series of an expression, each with `metric` and `value`."""
        with urlopen(
            f"http://{self.address}/api/v1/query?{urlencode({'query': query})}", timeout=30
        ) as answer:
            result = json.load(answer)["data"]["result"]
        assert isinstance(result, list)
        return result

    def number(self, query: str) -> float:
        """The value of an expression that has one."""
        (series,) = self.ask(query)
        return float(series["value"][1])


@contextmanager
def prometheus(directory: Path, configuration: str) -> Iterator[Prometheus]:
    """A Prometheus that scrapes as its configuration says; ends with the block."""
    directory.mkdir()
    (directory / "prometheus.yml").write_text(configuration, encoding="utf-8")
    address = f"127.0.0.1:{free_port()}"
    command = [
        "prometheus",
        f"--config.file={directory / 'prometheus.yml'}",
        f"--storage.tsdb.path={directory / 'data'}",
        f"--web.listen-address={address}",
        "--log.level=warn",
    ]
    with (
        (directory / "log").open("w+b") as log,
        subprocess.Popen(command, stdout=log, stderr=log) as process,
    ):

        def ready() -> bool:
            assert process.poll() is None, (directory / "log").read_text(encoding="utf-8")
            try:
                return bool(urlopen(f"http://{address}/-/ready", timeout=30).status == 200)
            except URLError:
                return False

        try:
            until(ready)
            yield Prometheus(address)
        finally:
            process.terminate()
            process.wait(MOST_S)
