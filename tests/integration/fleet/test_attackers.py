"""Who means harm to a fleet: other users of the host of its service, tokens that end, and whoever reaches its port."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

for package in ("sqlalchemy", "obstore", "deltalake", "prometheus_client"):
    pytest.importorskip(package, reason="the extra `fleet` is not installed")

from support.running_service import RunningService  # noqa: E402
from support.users import (  # noqa: E402
    ANNA,
    build_command,
    lend_shared_directory,
    needs_users,
    start_python,
)
from support.waiting import until  # noqa: E402

LOCK = """
import fcntl, os, sys, time
handles = [os.open(name, os.O_RDONLY) for name in sys.argv[1:]]
for handle in handles:
    fcntl.lockf(handle, fcntl.LOCK_SH)
print("locked", flush=True)
time.sleep(600)
"""


def _list_what_a_user_reads(uid: int, directory: Path) -> set[str]:
    done = subprocess.run(
        build_command(uid, "find", str(directory), "-type", "f", "-readable"),
        capture_output=True,
        text=True,
        check=False,
    )
    return {Path(line).name for line in done.stdout.splitlines()}


@needs_users
def test_a_store_in_a_directory_that_all_may_enter_is_for_nobody_else() -> None:
    with lend_shared_directory(0o755) as directory:
        store = directory / "store"
        store.mkdir(mode=0o755)
        store.chmod(0o755)
        before = os.umask(0o022)
        try:
            service = RunningService(directory)
        finally:
            os.umask(before)
        try:
            until(lambda: (store / "state.db-wal").exists() and (store / "tables").exists())
            assert service.ask("GET", "/api/v1/captures")[0] == 200
            assert _list_what_a_user_reads(ANNA, directory) <= {"serve.log"}
            service.process.kill()
            service.process.wait()
            # A store of a time when nobody cared: another user has locked what could be read.
            paths = [store / f"state.db{end}" for end in ("", "-wal", "-shm")]
            for path in (*paths, store / "tables"):
                path.chmod(0o755 if path.is_dir() else 0o644)
            with start_python(ANNA, "-c", LOCK, *map(str, paths)):
                service.start()
                assert (
                    service.ask("POST", "/api/v1/tokens", body={"name": "x", "role": "viewer"})[0]
                    == 200
                )
                assert _list_what_a_user_reads(ANNA, directory) <= {"serve.log"}
                assert "others could use" in service.log.read_text(encoding="utf-8")
        finally:
            service.end()
