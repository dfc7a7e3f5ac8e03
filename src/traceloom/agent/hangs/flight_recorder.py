"""Fetches dumps of PyTorch's flight recorder from processes.

There are three sources, each of which the process must have been started for:
- its control server (`torch.distributed.elastic.control_plane`), at the socket that
  TORCH_WORKER_SERVER_SOCKET names;
- its pipe: `ProcessGroupNCCL` creates `TORCH_NCCL_DEBUG_INFO_PIPE_FILE` + rank + `.pipe`, and
  writes a dump when it reads something from it;
- a dump that its watchdog has already written, because a collective exceeded its time-out.

All of these belong to the user: a socket is used only if the process itself is its peer, a pipe
only if the process has it open, a file only if it belongs to the user, is small and is not a link.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import pwd
import socket
import stat
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from traceloom.agent.ownership.environment import DUMP_FILES, DUMP_PIPE, WORKER_SERVER
from traceloom.agent.ownership.model import Process
from traceloom.analyze.stuck_jobs import FlightVerdict, find_late_ranks
from traceloom.errors import InputError
from traceloom.formats.flight_recorder import MAX_BYTES, decode_document, read_flight_record
from traceloom.system.files import open_own


class FlightFindings(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict of files, and why some could not be read, by name; `bad` ones are not flight
    records.
    """

    verdict: FlightVerdict
    bad: dict[str, str]


def analyse_flight_files(files: Mapping[str, str]) -> dict[str, object]:
    """Worker task: returns the verdict of files, rank (as text) -> path; see `FlightFindings`."""
    records, errors = [], {}
    for rank, path in files.items():
        try:
            with Path(path).open("rb") as file:
                records.append(read_flight_record(file.read(MAX_BYTES + 1), int(rank), path))
        except (OSError, InputError) as error:  # noqa: PERF203  (one that is bad costs the others nothing)
            errors[rank] = str(error)
    findings: dict[str, object] = msgspec.to_builtins(
        FlightFindings(verdict=find_late_ranks(records), bad=errors), str_keys=True
    )
    return findings


_SERVER_TIMEOUT_S = 10.0
# It polls its pipe once a second, and may wait for the GIL to collect stacks.
_DUMP_TIMEOUT_S = 20.0
_MAX_DESCRIPTORS = 65_536
_DEFAULT_STEMS = ("/tmp/nccl_trace_rank_", "{home}/.cache/torch/comm_lib_trace_rank_")  # noqa: S108  (torch's own, old and new)


class FlightDump(NamedTuple):
    """A raw record with plain values only, pickle or JSON, and its source."""

    data: bytes
    kind: Literal["pickle", "json"]
    how: str


class NoFlightDumpError(Exception):
    """No record is available; the message says why."""


def fetch_flight_record(process: Process, since_ns: int, proc: str = "/proc") -> FlightDump:
    """Returns the record of a rank; blocks for up to half a minute, so it is called in a thread.

    Args:
        process: A rank.
        since_ns: Older files are ignored.
        proc: Mount point of `/proc`.

    Raises:
        NoFlightDumpError: None is available.
    """
    rank = process.owner.rank
    if rank is None:
        raise NoFlightDumpError("it has no rank")
    reasons: list[str] = []
    for fetch in (_fetch_from_server, _fetch_from_pipe, _fetch_from_file):
        try:
            data, method = fetch(process, rank, since_ns, proc)
            decode_document(data)  # refuse records with imports or calls before passing them on
        except (NoFlightDumpError, InputError, OSError, http.client.HTTPException) as error:  # noqa: PERF203  (three)
            reasons.append(str(error))
        else:
            return FlightDump(data, "json" if data[:1] == b"{" else "pickle", method)
    raise NoFlightDumpError(
        "; ".join(filter(None, dict.fromkeys(reasons))) or "it was not started for that"
    )


def _fetch_from_server(process: Process, rank: int, since_ns: int, proc: str) -> tuple[bytes, str]:
    del rank, since_ns
    path = process.declared.get(WORKER_SERVER, "")
    if not path.startswith("/"):
        raise NoFlightDumpError("")
    with socket.socket(socket.AF_UNIX) as unix_socket, contextlib.ExitStack() as stack:
        unix_socket.settimeout(_SERVER_TIMEOUT_S)
        unix_socket.connect(f"{proc}/{process.pid}/root{path}")
        # Each read has a time-out of its own, so that an answer could drip for ever.
        end = threading.Timer(_SERVER_TIMEOUT_S, unix_socket.shutdown, (socket.SHUT_RDWR,))
        end.daemon = True
        end.start()
        stack.callback(end.cancel)
        (pid,) = struct.unpack(
            "i", unix_socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)[:4]
        )
        if pid != process.pid:
            raise NoFlightDumpError("another process listens at its socket")
        connection = http.client.HTTPConnection("rank", timeout=_SERVER_TIMEOUT_S)
        connection.sock = unix_socket
        connection.request("POST", "/handler/fr_trace_json")
        answer = connection.getresponse()
        if answer.status != http.HTTPStatus.OK:
            raise NoFlightDumpError(f"its control server answers {answer.status}")
        data = bytearray()
        while chunk := answer.read1(1 << 16):  # bounded reads, as a malicious peer may never end
            data += chunk
            if len(data) > MAX_BYTES:
                raise NoFlightDumpError("its control server does not come to an end")
    return bytes(data), "asked its control server"


def _fetch_from_pipe(process: Process, rank: int, since_ns: int, proc: str) -> tuple[bytes, str]:
    del since_ns
    stem = process.declared.get(DUMP_PIPE, "")
    if not stem:
        raise NoFlightDumpError("")
    descriptors = Path(proc, str(process.pid), "fd")
    with os.scandir(descriptors) as entries:
        names = [entry.name for entry, _ in zip(entries, range(_MAX_DESCRIPTORS), strict=False)]
    for name in names:
        # The pipe that the process itself has open, independent of its path and container.
        with contextlib.suppress(FileNotFoundError):
            path = descriptors / name
            if str(path.readlink()) == f"{stem}{rank}.pipe":
                break
    else:
        raise NoFlightDumpError(
            "it has not opened the pipe for dumps: no NCCL, or its recorder is off"
        )
    before = dict(_iterate_dump_files(process, rank, proc))
    handle = open_own(path, process.uid, stat.S_IFIFO, os.O_WRONLY, follow=True)
    try:
        os.write(handle, b"1\n")
    finally:
        os.close(handle)
    end, sizes = time.monotonic() + _DUMP_TIMEOUT_S, dict[str, int]()
    while time.monotonic() < end:
        time.sleep(0.25)
        for name, status in _iterate_dump_files(process, rank, proc):
            changed = name not in before or status.st_mtime_ns != before[name].st_mtime_ns
            if changed and status.st_size and sizes.get(name) == status.st_size:
                data = _read_dump(name, process)
                with contextlib.suppress(InputError):  # it is not complete yet
                    decode_document(data)
                    return data, "asked by its pipe"
            sizes[name] = status.st_size if changed else -1
    raise NoFlightDumpError(f"it has not written a dump within {_DUMP_TIMEOUT_S:g} s")


def _fetch_from_file(process: Process, rank: int, since_ns: int, proc: str) -> tuple[bytes, str]:
    for name, status in _iterate_dump_files(process, rank, proc):
        if status.st_mtime_ns >= since_ns:
            return _read_dump(name, process), "its watchdog has written it"
    raise NoFlightDumpError("")


def _iterate_dump_files(
    process: Process, rank: int, proc: str
) -> Iterator[tuple[str, os.stat_result]]:
    """Yields files that may hold a dump of the process, in its view of the file system."""
    stems = [process.declared.get(name, "") for name in DUMP_FILES]
    with contextlib.suppress(KeyError):
        stems += [stem.format(home=pwd.getpwuid(process.uid).pw_dir) for stem in _DEFAULT_STEMS]
    for stem in stems:
        name = f"{proc}/{process.pid}/root{stem}{rank}"
        if stem.startswith("/"):
            with contextlib.suppress(OSError, ValueError):
                yield name, Path(name).lstat()


def _read_dump(name: str, process: Process) -> bytes:
    """Returns the content of a file of the process's user.

    Raises:
        NoFlightDumpError: It is too large.
        OSError: It is something else, or cannot be read.
    """
    handle = open_own(name, process.uid)
    with os.fdopen(handle, "rb") as file:
        if os.fstat(handle).st_size > MAX_BYTES:
            raise NoFlightDumpError(f"its dump is larger than {MAX_BYTES >> 20} MB")
        return file.read(MAX_BYTES)
