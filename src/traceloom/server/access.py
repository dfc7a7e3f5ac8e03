"""Identity of callers (unix peer credentials, bearer token, client certificate), and their limits:
request rate, connections, body size.

Devices and the host are visible to everybody. Processes, jobs, cgroups and their series are visible
to their owner: over the unix socket the kernel provides the user id.

Root, the user of the agent and the configured group see all of them. Over TCP a token `read` sees
everything but command lines and changes nothing; `all` sees and does everything; without a token a
caller sees only the host, and that only over loopback.
"""

from __future__ import annotations

import grp
import hashlib
import hmac
import ipaddress
import math
import os
import socket
import struct
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Literal

import msgspec

from traceloom.server.problem import HttpError
from traceloom.server.settings import Access, Token

Visibility = Literal["all", "own", "host"]

# Supplementary groups of a peer, since Linux 4.13; not in Python's socket module.
_SO_PEERGROUPS = 59
_OWNER_LABELS = frozenset({"process", "job", "cgroup"})  # labels that identify a series' owner


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """The client of a request.

    `name` is for limits and the audit log; `uid` and `pid` are None over TCP.
    """

    name: str
    sees: Visibility
    uid: int | None = None
    pid: int | None = None
    acts: bool = False  # may pause counters and the like
    commands: bool = False  # sees command lines of other users

    @property
    def unlimited(self) -> bool:
        """Whether the limits of requests and connections do not apply: they protect root from
        others.
        """
        return self.uid == 0


def identify_unix_caller(connection: socket.socket | Any, group: str) -> Caller:
    """Returns the peer of a unix socket, from its kernel credentials.

    Args:
        connection: A connected socket, or asyncio's view of it.
        group: Its members see everything, as root does; may be empty.
    """
    pid, uid, gid = struct.unpack(
        "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    )
    privileged = uid in (0, os.geteuid()) or (group and _is_member(connection, gid, group))
    return Caller(
        name=f"uid {uid}",
        uid=uid,
        pid=pid,
        sees="all" if privileged else "own",
        acts=bool(privileged),
        commands=bool(privileged),
    )


def _is_member(connection: socket.socket | Any, gid: int, group: str) -> bool:
    try:
        group_id = grp.getgrnam(group).gr_gid
        groups = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 4 * 65_536)
    except (KeyError, OSError):  # no such group, or an old kernel: use the primary group only
        return False
    return group_id == gid or group_id in struct.unpack(f"{len(groups) // 4}I", groups)


_SOCK_DIAG = 4  # the netlink protocol that tells of sockets
_SOCK_DIAG_BY_FAMILY = 20
_UID_AT = 16 + 4 + 48 + 12  # behind the header, the kind, the identity and three numbers


def find_tcp_peer(connection: socket.socket | Any) -> Caller:
    """Returns who is at the other end of a TCP connection, for limits alone: the user where it is a
    process of this host, else the address.
    """
    peer, own = connection.getpeername(), connection.getsockname()
    unknown = Caller(name=f"tcp {peer[0]}", sees="host")
    if not ipaddress.ip_address(peer[0].partition("%")[0]).is_loopback:
        return unknown
    kind, everything = connection.family, 0xFFFF_FFFF
    addresses = b"".join(socket.inet_pton(kind, end[0]).ljust(16, b"\0") for end in (peer, own))
    question = struct.pack("=BBxxI", kind, socket.IPPROTO_TCP, everything)
    question += struct.pack("!HH", peer[1], own[1]) + addresses
    question += struct.pack("=III", 0, everything, everything)
    header = struct.pack("=IHHII", 16 + len(question), _SOCK_DIAG_BY_FAMILY, 1, 0, 0)
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as kernel:
            kernel.settimeout(0.1)
            kernel.send(header + question)
            answer = kernel.recv(4096)
    except OSError:  # a kernel without it, or a system without netlink
        return unknown
    if struct.unpack_from("=H", answer, 4)[0] != _SOCK_DIAG_BY_FAMILY:  # it has closed already
        return unknown
    (uid,) = struct.unpack_from("=I", answer, _UID_AT)
    # Without the address: all of 127.0.0.0/8 is open to each user.
    return Caller(name=f"tcp uid {uid}", sees="host")


def authenticate_tcp_caller(
    name: str, authorization: str, tokens: Sequence[Token], *, loopback: bool, certified: str
) -> Caller:
    """Returns the peer of a TCP connection.

    Args:
        name: Who it is for limits, see `find_tcp_peer`.
        authorization: Its `Authorization` header.
        tokens: The configured tokens.
        loopback: Whether the agent listens on loopback only.
        certified: The name in the client's verified certificate; "" if none was required.

    Raises:
        HttpError: `unknown-token`: a token is needed, or it is not a configured one.
    """
    scheme, _, secret = authorization.partition(" ")
    if scheme.lower() == "bearer":
        digest = hashlib.sha256(secret.strip().encode()).hexdigest()
        # Compare all of them, so that timing does not reveal a near match.
        matching = [token for token in tokens if hmac.compare_digest(token.sha256.lower(), digest)]
        if not matching:
            raise HttpError(
                401,
                "this token is none of ours",
                slug="unknown-token",
                hint="`tcp.tokens` of agent.toml",
            )
        token = matching[0]
        return Caller(
            name=f"token {token.name}",
            sees="all",
            acts=token.may == "all",
            commands=token.may == "all",
        )
    if certified and not tokens:
        return Caller(name=f"certificate {certified}", sees="all")
    if loopback:
        return Caller(name=name, sees="host")
    raise HttpError(
        401,
        "a token is needed",
        slug="unknown-token",
        hint="send `Authorization: Bearer TOKEN`; its SHA-256 stands in `tcp.tokens`",
    )


AGENT_HINT = "`access.request_bytes` of agent.toml"
_REFUSAL_ENTRY_S = 60.0
_MAX_CALLERS = 4096  # the least recently seen are dropped


class RateLimiter:
    """A token bucket per peer: it holds the tokens of two seconds, or `burst`, and each request
    takes one.
    """

    def __init__(
        self,
        per_second: float,
        clock: Callable[[], float] = time.monotonic,
        *,
        burst: float | None = None,
        hint: str = "`access.requests_per_second` of agent.toml",
    ) -> None:
        self.per_second, self.hint = per_second, hint
        self.burst = max(1.0, 2 * per_second) if burst is None else burst
        self.clock = clock
        # peer -> (tokens, time), least recently seen first.
        self.buckets: dict[str, tuple[float, float]] = {}

    def has_room(self, name: str) -> bool:
        """Counts what a peer does; returns whether a token was left for it."""
        now = self.clock()
        tokens, last_s = self.buckets.pop(name, (self.burst, now))
        tokens = min(self.burst, tokens + (now - last_s) * self.per_second)
        # A refused request takes nothing: who comes again as told is let in.
        self.buckets[name] = (tokens - 1 if tokens >= 1 else tokens, now)
        if len(self.buckets) > _MAX_CALLERS:
            del self.buckets[next(iter(self.buckets))]
        return tokens >= 1

    def take(self, name: str) -> None:
        """Count a request of a peer.

        Raises:
            HttpError: `too-many-requests`: no token is left.
        """
        if not self.has_room(name):
            tokens, _ = self.buckets[name]
            raise HttpError(
                429,
                f"more than {self.per_second:g} requests a second",
                slug="too-many-requests",
                retry_s=math.ceil((1 - tokens) / self.per_second),
                hint=self.hint,
            )


class RefusalCounter:
    """Counts repeated refusals, so that each has an entry in the audit at most once a minute."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        # what is refused -> (number since the last entry, time of that entry), last refused last
        self._counts: dict[tuple[str, ...], tuple[int, float]] = {}

    def count(self, *what: str) -> int:
        """Counts a refusal; returns for how many an entry is due, 0: none."""
        number, noted_s = self._counts.pop(what, (0, -math.inf))
        is_due = self.clock() - noted_s >= _REFUSAL_ENTRY_S
        self._counts[what] = (0, self.clock()) if is_due else (number + 1, noted_s)
        if len(self._counts) > _MAX_CALLERS:
            del self._counts[next(iter(self._counts))]
        return number + 1 if is_due else 0


_FEW_CONNECTIONS = 4


class ConnectionLimiter:
    """Limits the connections in total and of each peer, who may have half of them; root is not
    counted. The last quarter is for peers with few, as those that read metrics are.
    """

    def __init__(self, access: Access) -> None:
        self.max_connections = access.connections
        self.open_by_peer: Counter[str] = Counter()

    def enter(self, peer: Caller) -> None:
        """Count a new connection.

        Raises:
            HttpError: `too-many-connections`.
        """
        own, everybody = self.open_by_peer[peer.name], self.open_by_peer.total()
        reserved = 0 if own < _FEW_CONNECTIONS else self.max_connections // 4
        if not peer.unlimited and (
            everybody >= self.max_connections - reserved or own >= max(1, self.max_connections // 2)
        ):
            raise HttpError(
                503,
                "too many connections are open",
                slug="too-many-connections",
                retry_s=1,
                hint="`access.connections` of agent.toml; one user may have half of them",
            )
        self.open_by_peer[peer.name] += not peer.unlimited

    def leave(self, peer: Caller) -> None:
        self.open_by_peer[peer.name] -= not peer.unlimited
        if not self.open_by_peer[peer.name]:
            del self.open_by_peer[peer.name]


async def read_limited_body(
    chunks: AsyncIterator[bytes], declared: str, max_bytes: int, hint: str = AGENT_HINT
) -> bytes:
    """Returns the body of a request of at most `max_bytes` bytes; `declared` is its Content-Length,
    or "".

    Raises:
        HttpError: `too-large`.
    """
    body = bytearray()  # `bytes` would be copied for every chunk
    if not declared.isdecimal() or int(declared) <= max_bytes:
        async for chunk in chunks:
            body += chunk
            if len(body) > max_bytes:
                break
        else:
            return bytes(body)
    raise HttpError(
        413,
        f"the body is larger than {max_bytes:,} bytes",
        slug="too-large",
        hint=hint,
    )
