"""A client of the fleet service: one persistent connection, responses of limited size, no
redirects.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
from pathlib import Path
from typing import TypeVar

import msgspec

from traceloom.agent.fleet_link.protocol import FleetMessage
from traceloom.errors import InputError, TraceloomError
from traceloom.system.service_address import ServiceAddress

Message = TypeVar("Message")
_MAX_ANSWER_BYTES = 16 << 20
_BLOCK_BYTES = 1 << 20
_DECODE_ERRORS = (
    msgspec.DecodeError,
    UnicodeDecodeError,
    RecursionError,
)  # of any response


class ServiceError(TraceloomError):
    """The service does not respond, or refuses. `status` is that of HTTP; 0 if there was no
    response.
    """

    exit_code = 3

    def __init__(self, message: str, *, slug: str, status: int = 0, hint: str = "") -> None:
        super().__init__(message, slug=slug, hint=hint)
        self.status = status


class ServiceClient:
    """Sends requests to the service; used by one thread at a time.

    Args:
        url: Its address.
        ca: A file of certificates to trust instead of the system's.
        credential: Sent with every request; "" before enrolment.
        timeout_s: Time-out of a response.

    Raises:
        InputError: `wrong-address`, see `ServiceAddress.of`; `wrong-config`: the certificates
            cannot be read.
    """

    def __init__(
        self, url: str, *, ca: str = "", credential: str = "", timeout_s: float = 10.0
    ) -> None:
        self.address = ServiceAddress.of(url)
        self.url = url
        self.credential = credential
        self.timeout_s = timeout_s
        self._connection: http.client.HTTPConnection | None = None
        self._is_over = False
        self._tls: ssl.SSLContext | None = None
        if self.address.tls:
            try:
                self._tls = ssl.create_default_context(cafile=ca or None)
            except OSError as error:
                raise InputError(
                    f"the certificates cannot be read: {error}", slug="wrong-config", where=ca
                ) from error

    def get(self, route: str, kind: type[Message]) -> Message:
        """Returns the response of a route.

        Raises:
            ServiceError: `no-service`: nothing responds; `service-unclear`: it is not a response of
                a service; the service's own slug if it refuses.
        """
        return self._decoded(self._ask("GET", route, b"", {}), kind)

    def post(self, route: str, body: FleetMessage, kind: type[Message]) -> Message:
        """Send a message and return the response; raises the errors of `get`."""
        content = msgspec.json.encode(body)
        return self._decoded(
            self._ask("POST", route, content, {"Content-Type": "application/json"}), kind
        )

    def put_file(self, route: str, path: Path, size: int) -> None:
        """Send a file in chunks; raises the errors of `get`.

        Raises:
            OSError: It cannot be read.
        """
        with path.open("rb") as file:
            headers = {"Content-Type": "application/octet-stream", "Content-Length": str(size)}
            self._ask("PUT", route, iter(lambda: file.read(_BLOCK_BYTES), b""), headers)

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def abort(self) -> None:
        """Make the request of another thread fail, and disable retries."""
        self._is_over = True
        connection = self._connection
        if connection is not None and connection.sock is not None:
            with contextlib.suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)

    def _ask(self, method: str, route: str, body: object, headers: dict[str, str]) -> bytes:
        if self.credential:
            headers = {**headers, "Authorization": f"Bearer {self.credential}"}
        was_connected = self._connection is not None
        try:
            if self._connection is None:
                self._connection = self.address.connection(self.timeout_s, self._tls)
            url = f"{self.address.prefix}/api/v1/{route}"
            self._connection.request(method, url, body or None, headers)  # type: ignore[arg-type]
            response = self._connection.getresponse()
            answer, status = response.read(_MAX_ANSWER_BYTES + 1), response.status
            if len(answer) > _MAX_ANSWER_BYTES:
                raise http.client.HTTPException("an answer without end")  # noqa: TRY301
            if response.will_close:
                self.close()
        except (http.client.HTTPException, OSError) as error:
            self.close()
            if (
                was_connected
                and not self._is_over
                and isinstance(body, bytes)
                and isinstance(error, (http.client.RemoteDisconnected, BrokenPipeError))
            ):
                # The service closed an idle connection. All requests are idempotent.
                return self._ask(method, route, body, headers)
            reason = (
                getattr(error, "strerror", None) or str(error) or type(error).__name__
            ).lower()
            raise ServiceError(
                f"the fleet's service does not answer: {reason}", slug="no-service"
            ) from error
        if status < 300:
            return answer
        if status == 503:  # reconnect, as a load balancer may then choose another instance
            self.close()
        with contextlib.suppress(*_DECODE_ERRORS):
            problem = msgspec.json.decode(answer, type=_Refusal).error
            raise ServiceError(problem.message, slug=problem.slug, status=status, hint=problem.hint)
        raise ServiceError(
            f"the fleet's service answers {status} and gives no reason that is understood here",
            slug="service-unclear",
            status=status,
        )

    def _decoded(self, answer: bytes, kind: type[Message]) -> Message:
        try:
            return msgspec.json.decode(answer, type=kind)
        except _DECODE_ERRORS as error:
            raise ServiceError(
                f"what answers at {self.url} is no service of a fleet", slug="service-unclear"
            ) from error


class _Problem(msgspec.Struct):
    slug: str
    message: str
    hint: str = ""


class _Refusal(msgspec.Struct):
    error: _Problem
