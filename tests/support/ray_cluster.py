"""A Ray cluster of this host over TLS, its processes as somebody would start them."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp

import pytest

from support.dask_cluster import RunningCluster, certificates
from support.prometheus import free_port
from support.waiting import until


@contextmanager
def ray_cluster(cpus: int) -> Iterator[RunningCluster]:
    """A node with so many CPUs, and where its clients come in."""
    ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")
    folder = Path(mkdtemp(prefix="traceloom-ray-", dir="/tmp"))  # its sockets need a short path
    tls = certificates(folder, ray.util.get_node_ip_address())  # where its own processes meet
    port = free_port()
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "RAY_USAGE_STATS_ENABLED": "0", "RAY_USE_TLS": "1",
        "RAY_TLS_SERVER_CERT": tls.certificate, "RAY_TLS_SERVER_KEY": tls.key, "RAY_TLS_CA_CERT": tls.ca,
    }  # fmt: skip
    log = folder / "log"
    with log.open("wb") as output:
        head = subprocess.Popen(
            [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--port", str(free_port()),
             "--ray-client-server-port", str(port), "--num-cpus", str(cpus), "--include-dashboard", "false",
             "--object-store-memory", str(100 << 20), "--temp-dir", str(folder / "r")],
            env=environment, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
    try:

        def ready() -> bool:
            assert head.poll() is None, log.read_text()
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", port)) == 0

        until(ready, 180)
        yield RunningCluster(f"127.0.0.1:{port}", tls)
    finally:
        os.killpg(head.pid, signal.SIGKILL)
        head.wait()
        shutil.rmtree(folder, ignore_errors=True)
