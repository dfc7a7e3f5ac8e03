"""The demo as `traceloom serve --demo` serves it, over a copy of its store, in a process of its own."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from support.patient_service import patient
from support.prometheus import free_port
from support.waiting import until
from traceloom.cli.upload import FleetClient
from traceloom.errors import InputError


class DemoService(NamedTuple):
    """Where it answers, and the token of its administrator."""

    url: str
    token: str


def hosts_have_spoken(client: FleetClient) -> bool:
    """Whether the service leads, and its hosts have said what they do."""
    try:
        return bool(client.get("now")["devices"].get("busy"))
    except InputError as error:
        if error.slug != "not-leading":
            raise
        return False


@contextmanager
def served_demo(store: Path, folder: Path) -> Iterator[DemoService]:
    """Serve a copy of a store, until the block ends.

    Args:
        store: Of `support.demo_store`.
        folder: For the copy, the log, and its user's files.
    """
    shutil.copytree(store, folder / "store")
    address, log = f"127.0.0.1:{free_port()}", folder / "log"
    arguments = ["--demo", "--store", str(folder / "store"), "--address", address, "--workers", "1"]
    environment = {
        **os.environ,
        "HOME": str(folder),
        "XDG_CONFIG_HOME": str(folder),
        "PYTHONPATH": ":".join(filter(None, sys.path)),
    }
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*patient(60), *arguments], stdout=file, stderr=file, env=environment
        )
    try:
        until(lambda: b"Try:" in log.read_bytes() or process.poll() is not None)
        token = re.search(r"tl_[\w-]+", log.read_text())
        assert token, log.read_text()
        demo = DemoService(f"http://{address}", token[0])
        client = FleetClient(demo.url, demo.token)
        until(lambda: hosts_have_spoken(client))
        yield demo
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0, log.read_text()
