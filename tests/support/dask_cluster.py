"""A Dask cluster on loopback, its processes as somebody would start them, over TLS."""

from __future__ import annotations

import atexit
import ctypes
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import pytest

from support.prometheus import free_port
from support.waiting import until
from traceloom.fleet.service.executors import EngineTls


def certificates(folder: Path) -> EngineTls:
    """A certificate for localhost that is its own authority."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    certificate, key = str(folder / "cluster.pem"), str(folder / "cluster.key")
    subprocess.run(
        [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "rsa:2048",
            "-nodes",
            "-days",
            "2",
            "-subj",
            "/CN=localhost",
            "-addext",
            "subjectAltName=DNS:localhost,IP:127.0.0.1",
            "-keyout",
            key,
            "-out",
            certificate,
        ],
        check=True,
        capture_output=True,
    )
    return EngineTls(certificate, certificate, key)


class RunningCluster(NamedTuple):
    """Where it is, and what it takes to get in."""

    address: str
    tls: EngineTls

    @property
    def options(self) -> list[str]:
        """Those of `traceloom serve`."""
        files = [
            "--engine-ca",
            self.tls.ca,
            "--engine-certificate",
            self.tls.certificate,
            "--engine-key",
            self.tls.key,
        ]
        return ["--engine", f"dask://{self.address}", *files]


def _end_with_parent() -> None:
    """Ends this process when its parent does, however that ends: a session of its own outlives it otherwise."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


@cache
def running_cluster() -> RunningCluster:
    """A cluster of one worker for all tests of this process."""
    stack = ExitStack()
    atexit.register(stack.close)
    folder = Path(stack.enter_context(TemporaryDirectory(prefix="traceloom-dask-")))
    tls = certificates(folder)
    return RunningCluster(stack.enter_context(dask_cluster(folder, 1, tls, threads=2)), tls)


@contextmanager
def dask_cluster(
    folder: Path,
    workers: int,
    tls: EngineTls | None,
    threads: int = 1,
    scheduler: list[int] | None = None,
) -> Iterator[str]:
    """`HOST:PORT` of a scheduler with so many workers, which are started again when they are killed.

    The number of the scheduler's process is put into the list `scheduler`.
    """
    pytest.importorskip("distributed", reason="the extra `dask` is not installed")
    port = free_port()
    environment = (
        os.environ
        | {
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "0",  # a task whose worker is killed comes back at once
            "DASK_DISTRIBUTED__ADMIN__SYSTEM_MONITOR__GIL__ENABLED": "false",
        }
    )
    for name in [name for name in environment if name.startswith("AWS_")]:
        del environment[name]  # workers have no credentials
    security = []
    if tls is not None:
        security = ["--tls-ca-file", tls.ca, "--tls-cert", tls.certificate, "--tls-key", tls.key]
    scheme = "tcp" if tls is None else "tls"
    commands = [
        [
            "scheduler",
            "--host",
            f"{scheme}://127.0.0.1",
            "--port",
            str(port),
            "--no-dashboard",
            *security,
        ],
        *[
            [
                "worker",
                f"{scheme}://127.0.0.1:{port}",
                "--nthreads",
                str(threads),
                "--no-dashboard",
                "--nanny",
                "--local-directory",
                str(folder),
                "--death-timeout",
                "300",
                *security,
            ]
            for _ in range(workers)
        ],
    ]
    log = folder / "dask.log"
    with log.open("wb") as output:
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", f"distributed.cli.dask_{command[0]}", *command[1:]],
                env=environment,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=_end_with_parent,  # noqa: PLW1509  (it only makes a system call)
            )
            for command in commands
        ]
    if scheduler is not None:
        scheduler.append(processes[0].pid)
    try:

        def ready() -> bool:
            assert all(process.poll() is None for process in processes), log.read_text()
            return log.read_text().count("Starting established connection") >= 2 * workers

        until(ready, 300)
        yield f"127.0.0.1:{port}"
    finally:
        for process in reversed(processes):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # its nanny would start a worker again
            process.wait()
