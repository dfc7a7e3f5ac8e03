"""The bytes of libkineto's datagrams: 40 bytes of metadata, then the payload; in the order of bytes of this host."""

from __future__ import annotations

import struct

import msgspec

MOST_BYTES = 4096  # of a datagram of a client; the longest that there is has 100
MOST_ANCESTORS = 64
EVENTS, ACTIVITIES = 1, 2  # bits of a poll's mask: what its process would take now
_METADATA = struct.Struct("=Q32s")
_HELLO = struct.Struct("=iiq")
_POLL = struct.Struct("=iiq")
_NUMBER = struct.Struct("=i")


class MalformedDatagramError(ValueError):
    """What came is no datagram of libkineto."""


class Hello(msgspec.Struct, frozen=True):
    """A process announces itself; stock PyTorch never does."""

    device: int
    pid: int
    job: int


class Poll(msgspec.Struct, frozen=True):
    """A process asks for a configuration.

    `pids` are the process and its ancestors as its own pid namespace numbers them; `job` is its SLURM_JOB_ID or 0.
    """

    mask: int
    job: int
    pids: tuple[int, ...]

    @property
    def busy(self) -> bool:
        """Whether its profiler is at work: a request of ours, or the program's own."""
        return not self.mask & ACTIVITIES


def decode(datagram: bytes) -> Hello | Poll:
    """Read what a client sent.

    Raises:
        MalformedDatagramError: It is nothing that libkineto sends.
    """
    if len(datagram) < _METADATA.size:
        raise MalformedDatagramError("it is shorter than its metadata")
    size, name = _METADATA.unpack_from(datagram)
    payload = datagram[_METADATA.size :]
    if size != len(payload):
        raise MalformedDatagramError(f"it announces {size} bytes and has {len(payload)}")
    match name.rstrip(b"\0"):
        case b"ctxt" if len(payload) == _HELLO.size:
            return Hello(*_HELLO.unpack(payload))
        case b"req" if len(payload) >= _POLL.size:
            mask, number, job = _POLL.unpack_from(payload)
            if not 0 < number <= MOST_ANCESTORS or len(payload) != _POLL.size + 4 * number:
                raise MalformedDatagramError(f"{number} process ids in {len(payload)} bytes")
            return Poll(mask, job, struct.unpack_from(f"={number}i", payload, _POLL.size))
    raise MalformedDatagramError("it is neither `ctxt` nor `req`, or of another length")


def configuration_reply(text: str) -> bytes:
    """The answer to a poll; "" where there is nothing to do."""
    payload = text.encode("ascii")
    return _METADATA.pack(len(payload), b"req") + payload


def instances_reply(number: int) -> bytes:
    """The answer to a hello: how many processes have announced themselves."""
    return _METADATA.pack(_NUMBER.size, b"ctxt") + _NUMBER.pack(number)
