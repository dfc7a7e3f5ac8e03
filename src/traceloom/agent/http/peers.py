"""Who is at the other end, and what they may see.

Devices and the host are for everybody. Processes, jobs, cgroups and their series are for whose they are: over the unix
socket the kernel says who asks; root, the user of the agent and the configured group see all of them. Over TCP a token
`read` sees all but command lines and changes nothing; `all` sees and does all; who shows none sees the host, and that
only over loopback.
"""

from __future__ import annotations

import grp
import hashlib
import hmac
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from traceloom.agent.accelerators import Device, DeviceProcess
from traceloom.agent.board import Board
from traceloom.agent.config import Token
from traceloom.agent.http.answers import RequestError, Sees
from traceloom.agent.metrics import METRICS, Histogram, Series

_SO_PEERGROUPS = 59  # supplementary groups of a peer, since Linux 4.13; not in Python's socket module
_OWNED = frozenset({"process", "job", "cgroup"})  # labels that say whose a series is


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """The one who asks. `name` is for limits and the audit log; `uid` and `pid` are None over TCP."""

    name: str
    sees: Sees
    uid: int | None = None
    pid: int | None = None
    acts: bool = False  # may pause counters and the like
    commands: bool = False  # sees command lines of others

    @property
    def unlimited(self) -> bool:
        """Whether limits of requests and connections do not hold: they protect root from others."""
        return self.uid == 0


def unix_peer(connection: socket.socket | Any, group: str) -> Peer:
    """Who is at the other end of a unix socket, as the kernel says.

    Args:
        connection: A connected socket, or asyncio's view of it.
        group: Its members see everything, as root does; may be empty.
    """
    pid, uid, gid = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    privileged = uid in (0, os.geteuid()) or (group and _is_member(connection, gid, group))
    return Peer(
        name=f"uid {uid}",
        uid=uid,
        pid=pid,
        sees="all" if privileged else "own",
        acts=bool(privileged),
        commands=bool(privileged),
    )


def _is_member(connection: socket.socket | Any, gid: int, group: str) -> bool:
    try:
        wanted = grp.getgrnam(group).gr_gid
        groups = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 4 * 65_536)
    except (KeyError, OSError):  # no such group; a kernel that does not say: then the first group alone counts
        return False
    return wanted == gid or wanted in struct.unpack(f"{len(groups) // 4}I", groups)


def tcp_peer(address: str, authorization: str, tokens: Sequence[Token], *, loopback: bool, certified: str) -> Peer:
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
            raise RequestError(
                401, "this token is none of ours", slug="unknown-token", hint="`tcp.tokens` of agent.toml"
            )
        token = matching[0]
        return Peer(
            name=f"token {token.name}",
            sees="all",
            acts=token.may == "all",
            commands=token.may == "all",
        )
    if certified and not tokens:
        return Peer(name=f"certificate {certified}", sees="all")
    if loopback:
        return Peer(name=f"tcp {address}", sees="host")
    raise RequestError(
        401,
        "a token is needed",
        slug="unknown-token",
        hint="send `Authorization: Bearer TOKEN`; its SHA-256 stands in `tcp.tokens`",
    )


class View:
    """The board as a peer may see it: the same questions, fewer answers."""

    def __init__(self, board: Board, peer: Peer) -> None:
        self.board, self.peer = board, peer
        self.devices: dict[str, Device] = board.devices
        self.processes = {
            key: p if peer.commands or p.uid == peer.uid else msgspec.structs.replace(p, command="", declared={})
            for key, p in board.processes.items()
            if self._sees(p.uid)
        }
        self.device_processes: list[DeviceProcess] = board.device_processes
        self.jobs = {p.owner.job for p in self.processes.values() if p.owner.job}
        others = {p.cgroup for key, p in board.processes.items() if key not in self.processes}
        self._cgroups = {p.cgroup for p in self.processes.values()} - others | {""}
        self.oom_kills = [kill for kill in board.oom_kills if self._sees(kill.uid)]

    def _sees(self, uid: int | None) -> bool:
        return self.peer.sees == "all" or (self.peer.sees == "own" and uid is not None and uid == self.peer.uid)

    def shows(self, series: Series) -> bool:
        """Whether the peer may see a series."""
        if self.peer.sees == "all":
            return True
        name, labels = series
        names = METRICS[name].labels
        for label, value in zip(names, labels, strict=True):
            # The job of a process or cgroup only describes it: who has it, or all processes in the group, may see it.
            if label not in _OWNED or (label == "job" and not {"process", "cgroup"}.isdisjoint(names)):
                continue
            seen = {"process": self.processes.keys(), "job": self.jobs, "cgroup": self._cgroups}[label]
            if value not in seen:
                return False
        return True

    def seen_as(self, series: Series) -> Series | None:
        """A series with the labels that the peer may see: command lines of others have none; None: not at all."""
        if not self.shows(series):
            return None
        name, labels = series
        if name == "process_info" and not self.peer.commands:
            names = METRICS[name].labels
            process = self.processes.get(labels[names.index("process")])
            if process is None or not process.command:
                labels = tuple("" if label == "command" else text for label, text in zip(names, labels, strict=True))
        return name, labels

    def values(self) -> Iterator[tuple[Series, float, int]]:
        """Every series that the peer may see, with its value and its time."""
        for series, value, at_ns in self.board.values():
            if (seen := self.seen_as(series)) is not None:
                yield seen, value, at_ns

    def histograms(self) -> Iterator[tuple[Histogram, int]]:
        """Every histogram that the peer may see, with its time."""
        for histogram, at_ns in self.board.histograms():
            if self.shows((histogram.metric, histogram.labels)):
                yield histogram, at_ns
