"""Clients that speak as libkineto does, written from its protocol: for tests of whoever answers them."""

from __future__ import annotations

import os
import select
import socket
import struct
import uuid
from pathlib import Path


def request(mask: int, job: int, pids: tuple[int, ...]) -> bytes:
    payload = struct.pack(f"=iiq{len(pids)}i", mask, len(pids), job, *pids)
    return struct.pack("=Q32s", len(payload), b"req") + payload


class KinetoClient:
    """One process's profiler: bound in a directory, or abstract where that is None."""

    def __init__(self, directory: Path | None, name: str = "") -> None:
        self.directory = directory
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        name = name or f"dynoconfigclient{uuid.uuid4()}"
        self.address: str | bytes = f"\0{name}\0".encode() if directory is None else str(directory / name)
        self.socket.bind(self.address)
        self.daemon: str | bytes = b"\0dynolog\0" if directory is None else str(directory / "dynolog")

    def poll(self, mask: int = 3, pids: tuple[int, ...] = (), job: int = 0) -> None:
        self.socket.sendto(request(mask, job, pids or (os.getpid(), os.getppid())), self.daemon)

    def answer(self, timeout_s: float = 30.0) -> str | None:
        """The text that it is told; None where no answer comes."""
        if not select.select([self.socket], [], [], timeout_s)[0]:
            return None
        datagram, sender = self.socket.recvfrom(8192)
        # libkineto ends its process where the answer comes from another name than it asked.
        assert sender == self.daemon
        size, kind = struct.unpack_from("=Q32s", datagram)
        assert kind.rstrip(b"\0") == b"req"
        assert size == len(datagram) - 40
        return datagram[40:].decode()

    def close(self) -> None:
        self.socket.close()
