"""What the fleet's service stands on: SQLite and a directory, or PostgreSQL and S3; and captures for it."""

from __future__ import annotations

import atexit
import base64
import hashlib
import hmac
import itertools
import os
import shutil
import socket
import subprocess
import sys
import urllib.request
from email.utils import formatdate
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

import pytest

from support.postgres import database
from support.prometheus import free_port
from support.sessions import busy_step
from support.waiting import until
from traceloom.fleet.store.captures import CaptureFile, CaptureRecord, ServiceState
from traceloom.fleet.store.objects import ObjectStore
from traceloom.fleet.store.tables import Tables
from traceloom.testing import TraceBuilder

Kind = Literal["alone", "shared"]
KINDS: tuple[Kind, ...] = ("alone", "shared")
VERSION = "0.2.0"
_numbers = itertools.count()


class Places(NamedTuple):
    """Addresses of a state and a store."""

    state: str
    store: str


class Stores(NamedTuple):
    """A state and a store, opened."""

    state: ServiceState
    objects: ObjectStore
    tables: Tables


def places(kind: Kind, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Places:
    """Where a service may keep things: in a folder, or in real servers."""
    if kind == "alone":
        return Places(str(folder / "state.db"), str(folder / "store"))
    state = database()
    for name, value in _s3().items():
        monkeypatch.setenv(name, value)
    import boto3

    bucket = f"fleet-{os.getpid()}-{next(_numbers)}"
    boto3.client("s3").create_bucket(Bucket=bucket)
    return Places(state, f"s3://{bucket}/prefix")


def opened(where: Places) -> Stores:
    """Everything that a service opens."""
    objects = ObjectStore(where.store)
    tables = Tables(where.store)
    tables.create()
    return Stores(ServiceState(where.state), objects, tables)


@cache
def _s3() -> dict[str, str]:
    """The environment of who uses moto's S3: a process, as deltalake keeps Python's lock while it waits for an answer."""
    pytest.importorskip("moto.server", reason="moto is not installed")
    port = free_port()
    _started([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], port)
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
    }


def azure_store(monkeypatch: pytest.MonkeyPatch) -> str:
    """A new container of Azure's object store, as an address; credentials are in the environment."""
    port, account, key = _azurite(), "devstoreaccount1", base64.b64encode(b"of a test").decode()
    monkeypatch.setenv("AZURE_STORAGE_USE_EMULATOR", "true")
    monkeypatch.setenv("AZURITE_BLOB_STORAGE_URL", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", account)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", key)
    container = f"fleet-{next(_numbers)}"
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    signed = "".join(f"{name}:{value}\n" for name, value in headers.items())
    text = "PUT" + 12 * "\n" + signed + f"/{account}/{account}/{container}\nrestype:container"
    signature = base64.b64encode(
        hmac.new(base64.b64decode(key), text.encode(), hashlib.sha256).digest()
    ).decode()
    headers |= {"Authorization": f"SharedKey {account}:{signature}", "Content-Length": "0"}
    url = f"http://127.0.0.1:{port}/{account}/{container}?restype=container"
    urllib.request.urlopen(urllib.request.Request(url, method="PUT", headers=headers)).close()
    return f"az://{container}/prefix"


@cache
def _azurite() -> int:
    """The port of Microsoft's stand-in for Azure's object store, which keeps all in memory."""
    program = shutil.which("azurite-blob")
    if program is None:
        pytest.skip("azurite is not installed (npm install -g azurite)")
    port = free_port()
    _started(
        [
            program,
            "--silent",
            "--inMemoryPersistence",
            "--skipApiVersionCheck",
            "--blobPort",
            str(port),
        ],
        port,
        AZURITE_ACCOUNTS=f"devstoreaccount1:{base64.b64encode(b'of a test').decode()}",
    )
    return port


@cache
def trace_bytes(steps: int = 2) -> bytes:
    """A small trace, as its file."""
    made = TraceBuilder()
    for number in range(steps):
        busy_step(made, number, 1000 * number)
    return made.text().encode()


def add_capture(
    stores: Stores, name: str, content: bytes | None = None, version: str = VERSION
) -> CaptureRecord:
    """A capture that has arrived whole, of one file."""
    content = trace_bytes() if content is None else content
    file = CaptureFile("trace.json", len(content), hashlib.sha256(content).hexdigest())
    record = CaptureRecord(
        id=name,
        day="2026-11-26",
        job="job",
        uploader="anna",
        received_ns=1_790_000_000 * 10**9,
        complete=False,
        bytes=len(content),
        files=(file,),
    )
    stores.state.add_capture(record)
    stores.objects.put(f"captures/2026-11-26/{name}/trace.json", content)
    stores.state.complete_capture(name, version)
    return record


def _started(command: list[str], port: int, **variables: str) -> None:
    """Start a server, wait until it answers at its port, and end it with this process."""
    server = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **variables},
    )

    def end() -> None:
        server.kill()
        server.wait()

    atexit.register(end)

    def answers() -> bool:
        assert server.poll() is None, f"{command[0]} ended"
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    until(answers)
