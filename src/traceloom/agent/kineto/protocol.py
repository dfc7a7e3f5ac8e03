"""Encoding and decoding of libkineto's datagrams and configuration text.

The protocol is dynolog's `ipcfabric`, as implemented by the libkineto of stock PyTorch.

A line without exactly one `=` makes libkineto schedule half a configuration, which kills the
process at its end. So every value with characters outside a small set is refused.
"""

from __future__ import annotations

import re
import struct

import msgspec

from traceloom.errors import UsageError

MAX_BYTES = 4096  # of a client's datagram; the longest known one has 100
MAX_ANCESTORS = 64
EVENTS, ACTIVITIES = 1, 2  # bits of a poll's mask: configurations that its process accepts now
_METADATA = struct.Struct("=Q32s")
_HELLO = struct.Struct("=iiq")
_POLL = struct.Struct("=iiq")
_NUMBER = struct.Struct("=i")


class MalformedDatagramError(ValueError):
    """It is not a datagram of libkineto."""


class Hello(msgspec.Struct, frozen=True):
    """A process registers; stock PyTorch never does."""

    device: int
    pid: int
    job: int


class Poll(msgspec.Struct, frozen=True):
    """A process polls for a configuration.

    `pids` are the process and its ancestors in its own pid namespace; `job` is its SLURM_JOB_ID or
    0.
    """

    mask: int
    job: int
    pids: tuple[int, ...]

    @property
    def busy(self) -> bool:
        """Whether its profiler is active: for a request of ours, or for the program itself."""
        return not self.mask & ACTIVITIES


def decode(datagram: bytes) -> Hello | Poll:
    """Decode a client's datagram.

    Raises:
        MalformedDatagramError: It is not a datagram of libkineto.
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
            if not 0 < number <= MAX_ANCESTORS or len(payload) != _POLL.size + 4 * number:
                raise MalformedDatagramError(f"{number} process ids in {len(payload)} bytes")
            return Poll(mask, job, struct.unpack_from(f"={number}i", payload, _POLL.size))
    raise MalformedDatagramError("it is neither `ctxt` nor `req`, or of another length")


def encode_configuration_reply(text: str) -> bytes:
    """Returns the reply to a poll; "" means that there is nothing to do."""
    payload = text.encode("ascii")
    return _METADATA.pack(len(payload), b"req") + payload


def encode_instances_reply(number: int) -> bytes:
    """Returns the reply to a hello: the number of registered processes."""
    return _METADATA.pack(_NUMBER.size, b"ctxt") + _NUMBER.pack(number)


# Excludes `=`, `#`, white space and control characters.
_PATH = re.compile(r"/[A-Za-z0-9._/@+-]{1,3000}")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")


class TraceConfiguration(msgspec.Struct, frozen=True, kw_only=True):
    """One trace of one process. Either `duration_ms` or `steps`; `start_ms` (since the epoch) 0: at
    once.

    `fallback_ms`: duration of a trace by steps if the process has not stepped yet: libkineto then
    records by time. `start_step`: by the process's own count of steps; one that has passed means
    the next. `round_up`: steps start at a multiple of it, so that ranks that get it at different
    steps start at the same one. There is no key for memory snapshots: on a CPU they make libkineto
    spin until the process ends.
    """

    path: str
    trace_id: str
    group_id: str
    duration_ms: int = 0
    steps: int = 0
    fallback_ms: int = 0
    round_up: int = 1
    start_ms: int = 0
    start_step: int = 0
    warmup_s: int = 0
    shapes: bool = False
    stacks: bool = False
    flops: bool = False
    modules: bool = False

    def text(self) -> str:
        """Returns the lines of `KEY=VALUE`.

        Raises:
            UsageError: `unsafe-value`: a value could break it.
        """
        for value, allowed in ((self.path, _PATH), (self.trace_id, _NAME), (self.group_id, _NAME)):
            if not allowed.fullmatch(value) or ".." in value:
                raise UsageError(
                    f"`{value}` cannot be told to PyTorch's profiler",
                    slug="unsafe-value",
                    hint="paths and names need letters, digits and `._/@+-` alone",
                )
        if (self.duration_ms > 0) == (self.steps > 0) or min(
            self.duration_ms, self.steps, self.start_ms
        ) < 0:
            raise UsageError(
                "a trace has either a duration or a number of steps", slug="unsafe-value"
            )
        lines = {
            "ACTIVITIES_LOG_FILE": self.path,
            "REQUEST_TRACE_ID": self.trace_id,
            "REQUEST_GROUP_TRACE_ID": self.group_id,
            "ACTIVITIES_WARMUP_PERIOD_SECS": str(int(self.warmup_s)),
        }
        if self.steps:
            lines |= {
                "PROFILE_START_ITERATION": str(max(0, int(self.start_step))),
                "PROFILE_START_ITERATION_ROUNDUP": str(max(1, int(self.round_up))),
                "ACTIVITIES_ITERATIONS": str(int(self.steps)),
            }
            if self.fallback_ms:
                lines["ACTIVITIES_DURATION_MSECS"] = str(int(self.fallback_ms))
        else:
            lines["ACTIVITIES_DURATION_MSECS"] = str(int(self.duration_ms))
            if self.start_ms:
                lines["PROFILE_START_TIME"] = str(int(self.start_ms))
        flags = {
            "PROFILE_REPORT_INPUT_SHAPES": self.shapes,
            "PROFILE_WITH_STACK": self.stacks,
            "PROFILE_WITH_FLOPS": self.flops,
            "PROFILE_WITH_MODULES": self.modules,
        }
        lines |= {key: "true" for key, value in flags.items() if value}
        return "".join(f"{key}={value}\n" for key, value in lines.items())
