"""The address of a fleet service, and whether credentials may be sent there; standard library only."""

from __future__ import annotations

import http.client
import ipaddress
import ssl
from typing import NamedTuple
from urllib.parse import urlsplit

from traceloom.errors import InputError


class ServiceAddress(NamedTuple):
    """The address of a service: `https://host:port/prefix`; without TLS on loopback only."""

    host: str
    port: int
    prefix: str
    tls: bool

    @classmethod
    def of(cls, url: str) -> ServiceAddress:
        """Parse a URL.

        Raises:
            InputError: `wrong-address`: it is not such a URL, or is not on loopback and without
                TLS.
        """
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise InputError(f"`{url}` is no address: {error}", slug="wrong-address") from error
        if (
            parts.scheme not in {"http", "https"}
            or not parts.hostname
            or parts.username
            or parts.query
        ):
            raise InputError(
                f"`{url}` is no address, as https://fleet.example:9466", slug="wrong-address"
            )
        tls = parts.scheme == "https"
        if not tls and not _is_loopback(parts.hostname):
            raise InputError(
                f"`{url}` would send credentials over a network that others can listen to",
                slug="wrong-address",
                hint="use https://",
            )
        return cls(parts.hostname, port or (443 if tls else 80), parts.path.rstrip("/"), tls)

    def connection(
        self, timeout_s: float, tls: ssl.SSLContext | None = None
    ) -> http.client.HTTPConnection:
        """Returns a connection, which is opened by the first request.

        Args:
            timeout_s: Time-out of each socket operation.
            tls: Trusted certificates; None: those of the system. Unused without TLS.
        """
        if not self.tls:
            return http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)
        return http.client.HTTPSConnection(
            self.host, self.port, timeout=timeout_s, context=tls or ssl.create_default_context()
        )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
