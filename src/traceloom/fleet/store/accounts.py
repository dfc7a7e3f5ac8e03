"""Sessions of people signed in at the portal: only hashes of their secrets, and when they
expire.
"""

from __future__ import annotations

import secrets
import time

from traceloom.fleet.store.database import StateDatabase, hash_secret


class SessionState(StateDatabase):
    """Sessions of signed-in people.

    A session ends when it expires, when the person signs out, or when its token is no longer valid.
    """

    def open_session(self, token: str, seconds: float) -> str:
        """Opens a session for the holder of a token; returns the secret for the session's cookie.

        Expired sessions are deleted.
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
        """Returns the SHA-256 of the token that opened a session; None if the session is unknown or
        has expired.
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
        """Ends a session, if it exists."""
        with self._transaction() as connection:
            self._change(
                connection,
                "DELETE FROM sessions WHERE sha256 = :sha256",
                sha256=hash_secret(secret),
            )
