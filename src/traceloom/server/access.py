"""Who asks (unix peer credentials, bearer token, client certificate) and how much they may: rate
limiter, connection limit, body limit.

Devices and the host are for everybody. Processes, jobs, cgroups and their series are for whose they
are: over the unix socket the kernel says who asks.

Root, the user of the agent and the configured group see all of them. Over TCP a token `read` sees
all but command lines and changes nothing; `all` sees and does all; who shows none sees the host,
and that only over loopback.
"""

from __future__ import annotations

import grp
import hashlib
import hmac
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

_SO_PEERGROUPS = (
    59  # supplementary groups of a peer, since Linux 4.13; not in Python's socket module
)
_OWNER_LABELS = frozenset({"process", "job", "cgroup"})  # labels that say whose a series is


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """The one who asks.

    `name` is for limits and the audit log; `uid` and `pid` are None over TCP.
    """

    name: str
    sees: Visibility
    uid: int | None = None
    pid: int | None = None
    acts: bool = False  # may pause counters and the like
    commands: bool = False  # sees command lines of others

    @property
    def unlimited(self) -> bool:
        """Whether limits of requests and connections do not hold: they protect root from others."""
        return self.uid == 0


def identify_unix_caller(connection: socket.socket | Any, group: str) -> Caller:
    """Who is at the other end of a unix socket, as the kernel says.

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
    except (
        KeyError,
        OSError,
    ):  # no such group; a kernel that does not say: then the first group alone counts
        return False
    return group_id == gid or group_id in struct.unpack(f"{len(groups) // 4}I", groups)


def authenticate_tcp_caller(
    address: str, authorization: str, tokens: Sequence[Token], *, loopback: bool, certified: str
) -> Caller:
    """Who is at the other end of a TCP connection.

    Args:
        address: Where it comes from.
        authorization: Its header.
        tokens: Those that are configured.
        loopback: Whether the agent listens to this host alone.
        certified: The name in the client's certificate, which was verified; "" where none was asked for.

    Raises:
        RequestError: `unknown-token`: a token is needed, or it is none of ours.
    """
    scheme, _, secret = authorization.partition(" ")
    if scheme.lower() == "bearer":
        digest = hashlib.sha256(secret.strip().encode()).hexdigest()
        # All are compared, so that the time tells nothing about which is near.
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
        return Caller(name=f"tcp {address}", sees="host")
    raise HttpError(
        401,
        "a token is needed",
        slug="unknown-token",
        hint="send `Authorization: Bearer TOKEN`; its SHA-256 stands in `tcp.tokens`",
    )


AGENT_HINT = "`access.request_bytes` of agent.toml"
_MAX_CALLERS = 4096  # that are remembered; those beyond are the ones that have been quiet longest


class RateLimiter:
    """A token bucket for each peer: it holds what two seconds bring, and a request takes a token."""

    def __init__(
        self,
        per_second: float,
        clock: Callable[[], float] = time.monotonic,
        *,
        hint: str = "`access.requests_per_second` of agent.toml",
    ) -> None:
        self.per_second, self.hint = per_second, hint
        self.most = max(1.0, 2 * per_second)
        self.clock = clock
        self.buckets: dict[
            str, tuple[float, float]
        ] = {}  # peer -> tokens, when; the last to ask is last

    def take(self, name: str) -> None:
        """Count a request of a peer.

        Raises:
            RequestError: `too-many-requests`: it has none left.
        """
        now = self.clock()
        tokens, then = self.buckets.pop(name, (self.most, now))
        tokens = min(self.most, tokens + (now - then) * self.per_second)
        self.buckets[name] = (max(0.0, tokens - 1), now)
        if len(self.buckets) > _MAX_CALLERS:
            del self.buckets[next(iter(self.buckets))]
        if tokens < 1:
            wait = math.ceil((1 - tokens) / self.per_second)
            raise HttpError(
                429,
                f"more than {self.per_second:g} requests a second",
                slug="too-many-requests",
                retry_s=wait,
                hint=self.hint,
            )


class ConnectionLimiter:
    """How many connections there are, in all and of each peer: one peer may have half of them; root
    is not counted.
    """

    def __init__(self, access: Access) -> None:
        self.most = access.connections
        self.of: Counter[str] = Counter()

    def enter(self, peer: Caller) -> None:
        """Count a connection.

        Raises:
            RequestError: `too-many-connections`.
        """
        if not peer.unlimited and (
            self.of.total() >= self.most or self.of[peer.name] >= max(1, self.most // 2)
        ):
            raise HttpError(
                503,
                "too many connections are open",
                slug="too-many-connections",
                retry_s=1,
                hint="`access.connections` of agent.toml; one user may have half of them",
            )
        self.of[peer.name] += not peer.unlimited

    def leave(self, peer: Caller) -> None:
        """Its connection ended."""
        self.of[peer.name] -= not peer.unlimited
        if not self.of[peer.name]:
            del self.of[peer.name]


async def read_limited_body(
    chunks: AsyncIterator[bytes], declared: str, max_bytes: int, hint: str = AGENT_HINT
) -> bytes:
    """The body of a request, no longer than `max_bytes` bytes; `declared` is its Content-Length, or
    "".

    Raises:
        RequestError: `too-large`.
    """
    body = bytearray()  # bytes would be copied with every chunk
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
