"""The agent's databases (SQLite): opened as this version knows them; a damaged file is put aside, never thrown away."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from pathlib import Path

from traceloom.errors import InputError, newer_format


def opened(path: Path | None, schema: str, version: int, what: str) -> sqlite3.Connection:
    """A database with the tables of a schema, in a file of the agent's user alone; None keeps it in memory.

    Args:
        path: The file; its directory is made.
        schema: Makes the tables that are not there.
        version: Of the schema.
        what: It is called in errors.

    Raises:
        InputError: `newer-format`: the file is of a later version.
        OSError, sqlite3.Error: It cannot be opened.
    """
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
    database = sqlite3.connect(path or ":memory:", check_same_thread=False, timeout=5.0)
    try:
        there = database.execute("PRAGMA user_version").fetchone()[0]
        if there > version:
            raise newer_format(what, there, version, path)
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = NORMAL")
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
