"""Gets the flight record of PyTorch's collectives from a process that runs, without a change of its code.

Three ways, of which each works where the process was started for it:

- its control server (`torch.distributed.elastic.control_plane`), at the socket that TORCH_WORKER_SERVER_SOCKET names;
- its pipe: `ProcessGroupNCCL` makes `TORCH_NCCL_DEBUG_INFO_PIPE_FILE` + rank + `.pipe`, and writes a dump when it reads
  something there;
- a dump that its watchdog has written already, when a collective took longer than its time-out.

All of it is the user's: sockets count where the process itself is at the other end, pipes where the process has them
open, files where they are its user's, small, and no links.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import pwd
import socket
import stat
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from traceloom.agent.flight_records import MOST_BYTES, plain_values
from traceloom.agent.owners import Process
from traceloom.agent.owners.environment import DUMP_FILES, DUMP_PIPE, WORKER_SERVER

_ANSWER_S = 10.0
_DUMP_S = 20.0  # it looks at its pipe once a second, and may wait for the interpreter to tell stacks
_MOST_DESCRIPTORS = 65_536
_USUAL = ("/tmp/nccl_trace_rank_", "{home}/.cache/torch/comm_lib_trace_rank_")  # noqa: S108  (torch's own, old and new)


class FlightDump(NamedTuple):
    """A record as it came, plain values alone: a pickle, or JSON; and how it was had."""

    data: bytes
    kind: Literal["pickle", "json"]
    how: str


class NoFlightDumpError(Exception):
    """There is no record to be had; the message says why."""


def fetch(process: Process, since_ns: int, proc: str = "/proc") -> FlightDump:
    """The record of a rank; blocks for up to half a minute, so it is called in a thread.

    Args:
        process: A rank.
        since_ns: Files that are older tell of another time.
        proc: Where the kernel's `/proc` is.

    Raises:
        NoFlightDumpError: None could be had.
    """
    rank = process.owner.rank
    if rank is None:
        raise NoFlightDumpError("it has no rank")
    reasons: list[str] = []
    for way in (_asked, _piped, _written):
        try:
            data, how = way(process, rank, since_ns, proc)
            plain_values(data)  # what names or calls anything is not passed on either
        except (NoFlightDumpError, ValueError, OSError, http.client.HTTPException) as error:  # noqa: PERF203  (three)
            reasons.append(str(error))
        else:
            return FlightDump(data, "json" if data[:1] == b"{" else "pickle", how)
    raise NoFlightDumpError("; ".join(filter(None, dict.fromkeys(reasons))) or "it was not started for that")


def _asked(process: Process, rank: int, since_ns: int, proc: str) -> tuple[bytes, str]:
    del rank, since_ns
    path = process.declared.get(WORKER_SERVER, "")
    if not path.startswith("/"):
        raise NoFlightDumpError("")
    with socket.socket(socket.AF_UNIX) as plug:
        plug.settimeout(_ANSWER_S)
        plug.connect(f"{proc}/{process.pid}/root{path}")
        (pid,) = struct.unpack("i", plug.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)[:4])
        if pid != process.pid:
            raise NoFlightDumpError("another process listens at its socket")
        connection = http.client.HTTPConnection("rank", timeout=_ANSWER_S)
        connection.sock = plug
        connection.request("POST", "/handler/fr_trace_json")
        answer, end = connection.getresponse(), time.monotonic() + _ANSWER_S
        if answer.status != http.HTTPStatus.OK:
            raise NoFlightDumpError(f"its control server answers {answer.status}")
        data = bytearray()
        while piece := answer.read1(1 << 16):  # one that drips never ends
            data += piece
            if len(data) > MOST_BYTES or time.monotonic() > end:
                raise NoFlightDumpError("its control server does not come to an end")
    return bytes(data), "asked its control server"


def _piped(process: Process, rank: int, since_ns: int, proc: str) -> tuple[bytes, str]:
    del since_ns
    stem = process.declared.get(DUMP_PIPE, "")
    if not stem:
        raise NoFlightDumpError("")
    descriptors = Path(proc, str(process.pid), "fd")
    with os.scandir(descriptors) as entries:
        names = [entry.name for entry, _ in zip(entries, range(_MOST_DESCRIPTORS), strict=False)]
    for name in names:
        # What the process has open itself, whatever lies under the name by now and in whichever container it runs.
        with contextlib.suppress(FileNotFoundError):
            path = descriptors / name
            if str(path.readlink()) == f"{stem}{rank}.pipe" and stat.S_ISFIFO(path.stat().st_mode):
                break
    else:
        raise NoFlightDumpError("it has not opened the pipe for dumps: no NCCL, or its recorder is off")
    before = dict(_candidates(process, rank, proc))
    handle = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        os.write(handle, b"1\n")
    finally:
        os.close(handle)
    end, sizes = time.monotonic() + _DUMP_S, dict[str, int]()
    while time.monotonic() < end:
        time.sleep(0.25)
        for name, status in _candidates(process, rank, proc):
            changed = name not in before or status.st_mtime_ns != before[name].st_mtime_ns
            if changed and status.st_size and sizes.get(name) == status.st_size:
                data = _read(name, process)
                with contextlib.suppress(ValueError):  # it is still written
                    plain_values(data)
                    return data, "asked by its pipe"
            sizes[name] = status.st_size if changed else -1
    raise NoFlightDumpError(f"it has not written a dump within {_DUMP_S:g} s")


def _written(process: Process, rank: int, since_ns: int, proc: str) -> tuple[bytes, str]:
    for name, status in _candidates(process, rank, proc):
        if status.st_mtime_ns >= since_ns:
            return _read(name, process), "its watchdog has written it"
    raise NoFlightDumpError("")


def _candidates(process: Process, rank: int, proc: str) -> Iterator[tuple[str, os.stat_result]]:
    """Files that a dump of the process may be in, as it sees the file system."""
    stems = [process.declared.get(name, "") for name in DUMP_FILES]
    with contextlib.suppress(KeyError):
        stems += [stem.format(home=pwd.getpwuid(process.uid).pw_dir) for stem in _USUAL]
    for stem in stems:
        name = f"{proc}/{process.pid}/root{stem}{rank}"
        if stem.startswith("/"):
            with contextlib.suppress(OSError, ValueError):
                yield name, Path(name).lstat()


def _read(name: str, process: Process) -> bytes:
    """A file of the process's user.

    Raises:
        NoFlightDumpError: It is something else, or too large.
        OSError: It cannot be read.
    """
    handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(handle, "rb") as file:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != process.uid or status.st_nlink != 1:
            raise NoFlightDumpError("its dump is no file of its user")
        if status.st_size > MOST_BYTES:
            raise NoFlightDumpError(f"its dump is larger than {MOST_BYTES >> 20} MB")
        return file.read(MOST_BYTES)
