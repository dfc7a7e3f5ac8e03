"""The agent's databases (SQLite): of one schema each; a damaged file is put aside, never thrown away."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from pathlib import Path

from traceloom.errors import InputError, other_version


def opened(path: Path | None, schema: str, version: int, what: str) -> sqlite3.Connection:
    """A database with the tables of a schema, in a file of the agent's user alone; None keeps it in memory.

    Args:
        path: The file; its directory is made.
        schema: Makes the tables of a new file.
        version: Of the schema, which the file names.
        what: It is called in errors.

    Raises:
        InputError: `other-version`: the file has another schema.
        OSError, sqlite3.Error: It cannot be opened.
    """
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
    database = sqlite3.connect(path or ":memory:", check_same_thread=False, timeout=2.0)
    try:
        there = database.execute("PRAGMA user_version").fetchone()[0]
        if there not in {0, version}:  # a new file has 0
            raise other_version(what, there, version, path)
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = NORMAL")
        if not there:
            database.executescript(schema)
            database.execute(f"PRAGMA user_version = {version}")
        if path is not None:
            path.chmod(0o600)
    except (OSError, sqlite3.Error, InputError):
        database.close()
        raise
    return database


def is_damage(error: Exception) -> bool:
    """Whether a file holds what no database may: subclasses of the error say that a disk or a lock is in the way."""
    return type(error) is sqlite3.DatabaseError


def put_aside(path: Path) -> str:
    """Give a damaged file, which is closed, another name; that name.

    Raises:
        OSError: It cannot be renamed.
    """
    aside = f"{path}.damaged-{time.time_ns()}"
    path.rename(aside)
    for end in ("-wal", "-shm"):  # what they hold belongs to it
        with contextlib.suppress(FileNotFoundError):
            Path(f"{path}{end}").rename(f"{aside}{end}")
    return aside
