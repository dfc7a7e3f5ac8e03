"""A PostgreSQL of Debian's package, on loopback: started once by a process of tests, a database for each test."""

from __future__ import annotations

import atexit
import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from support.prometheus import free_port
from support.waiting import until

_numbers = itertools.count()


def database() -> str:
    """The address of a new database; the test is skipped where there is no PostgreSQL."""
    programs = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    if not programs:
        pytest.skip("PostgreSQL is not installed")
    psycopg = pytest.importorskip("psycopg", reason="psycopg is not installed")

    port = _running(str(programs[-1]))
    name = f"fleet{next(_numbers)}"
    with psycopg.connect(
        f"host=127.0.0.1 port={port} user=fleet dbname=postgres", autocommit=True
    ) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    return f"postgresql://fleet@127.0.0.1:{port}/{name}"


@cache
def _running(programs: str) -> int:
    """The port of the server."""
    home = Path(tempfile.mkdtemp(prefix="traceloom-pg-", dir="/tmp"))
    identity: dict[str, Any] = {}
    if os.geteuid() == 0:  # as whom it does not run
        try:
            user = pwd.getpwnam("postgres")
        except KeyError:
            pytest.skip("there is no user `postgres`, and root cannot run it")
        os.chown(home, user.pw_uid, user.pw_gid)
        identity = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": ()}
    data, port = str(home / "data"), free_port()
    subprocess.run(
        [
            f"{programs}/initdb",
            "-D",
            data,
            "-U",
            "fleet",
            "-A",
            "trust",
            "--no-sync",
            "--locale=C",
            "-E",
            "UTF8",
        ],
        check=True,
        capture_output=True,
        cwd=home,
        **identity,
    )
    settings = {
        "port": port,
        "listen_addresses": "127.0.0.1",
        "unix_socket_directories": "",
        "fsync": "off",
        "shared_buffers": "16MB",
    }
    options = [word for key, value in settings.items() for word in ("-c", f"{key}={value}")]
    server = subprocess.Popen(
        [f"{programs}/postgres", "-D", data, *options],
        cwd=home,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        **identity,
    )

    def end() -> None:
        server.send_signal(
            signal.SIGINT
        )  # SIGTERM would wait for connections that a failed test left open
        server.wait()
        shutil.rmtree(home, ignore_errors=True)

    atexit.register(end)
    import psycopg

    def answers() -> bool:
        assert server.poll() is None, "PostgreSQL ended"
        try:
            psycopg.connect(f"host=127.0.0.1 port={port} user=fleet dbname=postgres").close()
        except psycopg.OperationalError:
            return False
        return True

    until(answers)
    return port


def copied(address: str) -> str:
    """The address of a copy of a database, as a backup that was put back."""
    import psycopg

    server, _, name = address.rpartition("/")
    copy = f"fleet{next(_numbers)}"
    with psycopg.connect(f"{server}/postgres", autocommit=True) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [name]
        )
        connection.execute(f"CREATE DATABASE {copy} TEMPLATE {name}")
    return f"{server}/{copy}"
