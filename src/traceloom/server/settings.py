"""Settings of listeners: addresses, certificates, tokens, and limits of clients."""

from __future__ import annotations

import re
from typing import Annotated

import msgspec

from traceloom.errors import InputError


class ConfigTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table of a configuration file; unknown keys are errors."""


class Token(ConfigTable, frozen=True):
    """A client over TCP: the SHA-256 of its token in hex, and its role: `read` or `all`."""

    sha256: str
    name: str
    may: str = "read"


class Tcp(ConfigTable, frozen=True):
    """The TCP listener, which is off without `address`.

    Beyond loopback it needs TLS, and tokens or client certificates.
    """

    address: str = ""  # 127.0.0.1:9465
    certificate: str = ""
    key: str = ""
    client_ca: str = ""
    tokens: tuple[Token, ...] = ()


class Access(ConfigTable, frozen=True):
    """Access and limits of clients of the unix socket."""

    group: str = ""  # sees all, as root does
    requests_per_second: Annotated[float, msgspec.Meta(gt=0)] = 200.0  # per peer
    connections: Annotated[int, msgspec.Meta(ge=1)] = 256
    request_bytes: Annotated[int, msgspec.Meta(ge=1)] = 1 << 20
    seconds: Annotated[float, msgspec.Meta(gt=0, le=1e9)] = (
        10.0  # for a client to send its request, and to read the response
    )


_ADDRESS = re.compile(r"(?:\[(?P<six>[0-9A-Fa-f:]+)\]|(?P<name>[^:\[\]]+)):(?P<port>\d{1,5})")


def host_and_port(text: str) -> tuple[str, int]:
    """Parses `127.0.0.1:9465` or `[::1]:9465`.

    Raises:
        InputError: `wrong-config`: it is neither.
    """
    match = _ADDRESS.fullmatch(text)
    if match is None or int(match["port"]) > 65535:
        raise InputError(f"`{text}` is no address, as 127.0.0.1:9465", slug="wrong-config")
    return match["six"] or match["name"], int(match["port"])
