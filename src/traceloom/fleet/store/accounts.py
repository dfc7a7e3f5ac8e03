"""What the state knows of people who are signed in at the portal: of each only hashes, and until
when.
"""

from __future__ import annotations

import secrets
import time

from traceloom.fleet.store.database import StateDatabase, hash_secret


class SessionState(StateDatabase):
    """Sessions.

    One ends with its time, when its reader signs out, or when its token does not hold any more.
    """

    def open_session(self, token: str, seconds: float) -> str:
        """Begin a session of who showed a token; the secret that its cookie holds.

        Those whose time is over go.
        """
        secret, now = f"tls_{secrets.token_urlsafe(32)}", time.time_ns()
        with self._transaction() as connection:
            self._change(connection, "DELETE FROM sessions WHERE expires_ns <= :now", now=now)
            self._change(
                connection,
                "INSERT INTO sessions (sha256, token, expires_ns) VALUES (:sha256, :token, :expires)",
                sha256=hash_secret(secret),
                token=hash_secret(token),
                expires=now + int(seconds * 1e9),
            )
        return secret

    def session(self, secret: str) -> str | None:
        """SHA-256 of the token by which a session was begun; None where it is none, or its time is
        over.
        """
        with self._transaction() as connection:
            rows = self._rows(
                connection,
                "SELECT token FROM sessions WHERE sha256 = :sha256 AND expires_ns > :now",
                sha256=hash_secret(secret),
                now=time.time_ns(),
            )
        return str(rows[0]["token"]) if rows else None

    def close_session(self, secret: str) -> None:
        """End a session, if it is one."""
        with self._transaction() as connection:
            self._change(
                connection,
                "DELETE FROM sessions WHERE sha256 = :sha256",
                sha256=hash_secret(secret),
            )
