"""What triggers have spent, on disk (SQLite): budgets and cooldowns hold across restarts of the agent."""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec

from traceloom.agent.databases import is_damage, opened, put_aside
from traceloom.agent.triggers.ledger import Charge

LOG = logging.getLogger("traceloom.agent")
VERSION = 1
_SCHEMA = """
CREATE TABLE IF NOT EXISTS charges (
    request TEXT NOT NULL, process TEXT NOT NULL, document BLOB NOT NULL, PRIMARY KEY (request, process)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS rules (name TEXT PRIMARY KEY, document BLOB NOT NULL) WITHOUT ROWID;
"""


class Fired(msgspec.Struct, frozen=True, kw_only=True):
    """When a rule last made a request, and why. `uid`: whose the processes are."""

    at_ns: int
    request: str
    target: str
    what: str
    uid: int


class Refused(msgspec.Struct, frozen=True, kw_only=True):
    """When a rule was last refused, and why."""

    at_ns: int
    target: str
    what: str
    uid: int
    reason: str
    detail: str


class RuleCounts(msgspec.Struct, kw_only=True):
    """What a rule has done since it is there. None: never."""

    fired: int = 0
    refusals: dict[str, int] = {}  # by reason
    traced_seconds: float = 0.0
    kept_bytes: int = 0
    last: Fired | None = None
    last_refusal: Refused | None = None


class TriggerStore:
    """Blocks, so it is called in a thread, once the loop runs.

    A file that cannot be read is put aside: what requests tell of their triggers is still there.

    Args:
        path: The file; its directory is made. None keeps in memory alone.

    Raises:
        InputError: `other-version`: the file has another schema.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.trouble = ""  # why the last change is not on disk
        self._lock = threading.Lock()
        self._database: sqlite3.Connection | None = None
        with self._lock:
            self._try_open()

    def load(self) -> tuple[list[Charge], dict[str, RuleCounts]]:
        """Charges, and what each rule has done; nothing where the file cannot be read, which `trouble` says."""
        with self._lock:
            try:
                if self._database is None:
                    return [], {}
                charges = [
                    msgspec.json.decode(document, type=Charge)
                    for (document,) in self._database.execute("SELECT document FROM charges")
                ]
                rules = {
                    name: msgspec.json.decode(document, type=RuleCounts)
                    for name, document in self._database.execute("SELECT name, document FROM rules")
                }
            except (sqlite3.DatabaseError, msgspec.DecodeError) as error:
                self.trouble = str(error)
                self._put_aside()
                self._try_open()
                return [], {}
            return charges, rules

    def put(self, charges: Sequence[Charge], rules: dict[str, RuleCounts], gone: Sequence[Charge] = ()) -> None:
        """Write what has changed; what cannot be is said by `trouble`, and told to the next agent by the requests."""
        with self._lock:
            if self._database is None:
                self._try_open()
            if self._database is None:
                return
            try:
                with self._database as database:
                    database.executemany(
                        "INSERT OR REPLACE INTO charges VALUES (?, ?, ?)",
                        [(charge.request, charge.process, msgspec.json.encode(charge)) for charge in charges],
                    )
                    database.executemany(
                        "DELETE FROM charges WHERE request = ? AND process = ?",
                        [(charge.request, charge.process) for charge in gone],
                    )
                    database.executemany(
                        "INSERT OR REPLACE INTO rules VALUES (?, ?)",
                        [(name, msgspec.json.encode(counts)) for name, counts in rules.items()],
                    )
                self.trouble = ""
            except sqlite3.Error as error:
                self.trouble = str(error)
                if is_damage(error):
                    self._put_aside()

    def close(self) -> None:
        """Let go of the file."""
        with self._lock:
            if self._database is not None:
                with contextlib.suppress(sqlite3.Error):
                    self._database.close()
                self._database = None

    def _try_open(self) -> None:
        try:
            try:
                self._database = opened(self.path, _SCHEMA, VERSION, "database of triggers")
            except sqlite3.DatabaseError as error:
                if not is_damage(error):
                    raise
                self._put_aside()
                self._database = opened(self.path, _SCHEMA, VERSION, "database of triggers")
            self.trouble = ""
        except (OSError, sqlite3.Error) as error:
            self.trouble = str(error)

    def _put_aside(self) -> None:
        if self._database is not None:
            with contextlib.suppress(sqlite3.Error):
                self._database.close()
            self._database = None
        if self.path is None:
            return
        try:
            aside = put_aside(self.path)
        except OSError as error:
            self.trouble = str(error)
            return
        LOG.warning("what triggers have spent is damaged and put aside as %s", aside)
