"""A client of this host's agent, over its unix socket."""

from __future__ import annotations

import http.client
import json
import os
import socket
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlencode

from traceloom.errors import InputError
from traceloom.system.files import find_foreign_part


class AgentClient:
    """Sends requests to an agent; one connection per request.

    Args:
        path: Its socket.
        timeout_s: Time-out of a response.
    """

    def __init__(self, path: Path, timeout_s: float = 10.0) -> None:
        self.path = path
        self.timeout_s = timeout_s

    def get(self, route: str, **parameters: str) -> Any:
        """Returns the decoded response of a route such as `status`.

        Raises:
            InputError: `no-agent`: nothing listens there; the agent's own slug if it refuses;
                `agent-unclear`: it is not a response of an agent.
        """
        return self._ask("GET", route, parameters, None)

    def post(self, route: str, body: Mapping[str, Any]) -> Any:
        """Send a JSON body and return the decoded response; raises the errors of `get`."""
        return self._ask("POST", route, {}, json.dumps(body).encode())

    def delete(self, route: str) -> Any:
        """Send a DELETE request and return the decoded response; raises the errors of `get`."""
        return self._ask("DELETE", route, {}, None)

    def fetch(self, route: str, path: Path) -> None:
        """Write the response of a route to a new file; raises the errors of `get`.

        Raises:
            OSError: The file cannot be written.
        """
        with path.open("xb") as file:
            self._ask("GET", route, {}, None, file)

    def _ask(
        self,
        method: str,
        route: str,
        parameters: Mapping[str, str],
        body: bytes | None,
        to: BinaryIO | None = None,
    ) -> Any:
        connection = _UnixConnection(self.path, self.timeout_s)
        query = f"?{urlencode(parameters)}" if parameters else ""
        is_writing = False  # a full disk on this side is not an error of the agent
        try:
            headers = {"Content-Type": "application/json"} if body else {}
            connection.request(method, f"/api/v1/{route}{query}", body, headers)
            response = connection.getresponse()
            if to is not None and response.status < 400:
                while chunk := response.read(1 << 20):
                    is_writing = True
                    to.write(chunk)
                    is_writing = False
                if response.length:  # reading in chunks does not detect a truncated body
                    raise http.client.IncompleteRead(b"", response.length)
                return None
            text = response.read()
        except (FileNotFoundError, ConnectionRefusedError) as error:
            raise InputError(
                "no agent runs here",
                slug="no-agent",
                where=str(self.path),
                hint="start one with `traceloom agent run`, or name its socket with --socket",
            ) from error
        except PermissionError as error:
            raise InputError(
                "the agent's socket is not yours to use", slug="no-agent", where=str(self.path)
            ) from error
        except (OSError, http.client.HTTPException) as error:
            if is_writing:
                raise
            reason = str(error) or type(error).__name__
            raise InputError(
                f"the agent does not answer: {reason}", slug="no-agent", where=str(self.path)
            ) from error
        finally:
            connection.close()
        return decode_answer(response.status, text, str(self.path))


def decode_answer(status: int, text: bytes, location: str, service_name: str = "agent") -> Any:
    """Returns the decoded JSON of a response.

    Args:
        status: HTTP status.
        text: The body.
        location: Address of the service, for errors.
        service_name: Kind of service, a word for errors.

    Raises:
        InputError: The slug of its error response; `agent-unclear`: it is not a response of ours.
    """
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"what listens there answers as no {service_name} does",
            slug="agent-unclear",
            where=location,
        ) from error
    if status >= 400:
        problem = answer.get("error") if isinstance(answer, dict) else None
        if not isinstance(problem, dict) or "slug" not in problem:
            raise InputError(
                f"the {service_name} refuses with {status} and gives no reason that is understood here",
                slug="agent-unclear",
                where=location,
            )
        message, hint = (
            str(problem.get("message", f"the {service_name} refuses")),
            str(problem.get("hint", "")),
        )
        raise InputError(message, slug=str(problem["slug"]), hint=hint)
    return answer


def make_untrusted_error(path: Path, reason: str) -> InputError:
    """Returns the error of a socket or directory that others may have made or may replace."""
    return InputError(
        f"an agent there may be neither yours nor root's: {reason}",
        slug="untrusted-agent",
        where=str(path),
        hint="name a place that only you and root can write: XDG_RUNTIME_DIR, `paths.socket` of agent.toml, or --socket",
    )


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        """Connect to an agent of root or of this user; what others listen at is sent nothing.

        Raises:
            InputError: `untrusted-agent`.
        """
        reason = find_foreign_part(self._path)
        if not reason:
            self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.sock.settimeout(self.timeout)
            self.sock.connect(str(self._path))
            peer = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            _, uid, _ = struct.unpack("3i", peer)
            if uid in {0, os.geteuid()}:
                return
            reason = f"user {uid} listens there"
        raise make_untrusted_error(self._path, reason)
