"""Fetches and analyses dumps of PyTorch's flight recorder.

A record is untrusted: pickled by `ProcessGroupNCCL` and `_dump_fr_trace`, or JSON of
`_dump_fr_trace_json`. Pickles may hold plain values only: any opcode that could import or call
something is refused before anything is loaded.

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
import io
import os
import pickle
import pickletools
import pwd
import re
import socket
import stat
import struct
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, NoReturn

import msgspec

from traceloom.agent.hangs.stacks import format_ranges
from traceloom.agent.ownership.environment import DUMP_FILES, DUMP_PIPE, WORKER_SERVER
from traceloom.agent.ownership.model import Process

MAX_BYTES = 16 << 20  # 2,000 collectives with their stacks are about 2 MB
_MAX_OPERATIONS = 4_000_000
_MAX_ENTRIES = 20_000
_MAX_RANKS = 65_536
_MAX_CHARS = 200
# Opcodes that torch's and Python's picklers write for plain values: no imports, calls or persistent
# objects.
_PLAIN_OPCODES = frozenset(
    {
        "PROTO",
        "FRAME",
        "STOP",
        "MARK",
        "NONE",
        "NEWTRUE",
        "NEWFALSE",
        "BININT",
        "BININT1",
        "BININT2",
        "LONG1",
        "BINFLOAT",
        "BINUNICODE",
        "SHORT_BINUNICODE",
        "EMPTY_LIST",
        "APPEND",
        "APPENDS",
        "EMPTY_DICT",
        "SETITEM",
        "SETITEMS",
        "EMPTY_TUPLE",
        "TUPLE",
        "TUPLE1",
        "TUPLE2",
        "TUPLE3",
        "BINPUT",
        "LONG_BINPUT",
        "MEMOIZE",
        "BINGET",
        "LONG_BINGET",
    }
)
_PARTNERS = re.compile(r"(\d+)(<-|->)(\d+)")

Kind = Literal["behind", "mismatch", "cycle", "device", "all-in", "nothing"]


class FlightEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A collective of a rank.

    `sequence` counts those of a group, or the messages between two ranks (`partner`).
    """

    group: str
    operation: str
    sequence: int
    done: bool
    started: bool  # on the device
    created_ns: int
    is_message: bool = False
    # (rank in the group, `<-` or `->`, rank in the group).
    partner: tuple[int, str, int] | None = None


class FlightGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A process group as one rank sees it: the last collective that it has queued, and its members
    if recorded.
    """

    title: str
    queued: int
    members: tuple[int, ...] = ()


class FlightRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The record of one rank: its groups, and entries, oldest first."""

    rank: int
    groups: dict[str, FlightGroup]
    entries: tuple[FlightEntry, ...]

    def pending(self, group: str) -> FlightEntry | None:
        """Returns the oldest unfinished collective of a group."""
        pending = (
            entry
            for entry in self.entries
            if entry.group == group and not (entry.done or entry.is_message)
        )
        return min(pending, key=lambda entry: entry.sequence, default=None)

    def at(self, group: str, sequence: int) -> FlightEntry | None:
        """Returns the collective with a sequence number; None if it is not recorded."""
        for entry in reversed(self.entries):
            if (entry.group, entry.sequence, entry.is_message) == (group, sequence, False):
                return entry
        return None


class FlightVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """The conclusion from the records of several ranks.

    `ranks` are those that the others wait for; `waits`: rank -> the collective that it waits in.
    """

    kind: Kind
    sentence: str
    ranks: tuple[int, ...] = ()
    waits: dict[int, str] = {}
    group: str = ""
    operation: str = ""
    sequence: int | None = None


class FlightFindings(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict of files, and why some could not be read, by name; `bad` ones are not flight
    records.
    """

    verdict: FlightVerdict
    bad: dict[str, str]


class _PlainUnpickler(pickle.Unpickler):
    """Loads plain values only, as a second line of defence behind the check of opcodes."""

    def find_class(self, module_name: str, global_name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it names {module_name[:80]}.{global_name[:80]}")


def decode_plain_values(data: bytes) -> object:
    """Returns the content of a pickle or a JSON text.

    Raises:
        ValueError: It is neither, is incomplete, too large, or a pickle that holds more than plain
            values.
    """
    if len(data) > MAX_BYTES:
        raise ValueError(f"it is larger than {MAX_BYTES >> 20} MB")
    try:
        if data[:1] == b"{":
            return msgspec.json.decode(data)
        if data[:1] != b"\x80":
            raise ValueError("it is neither a pickle nor JSON")
        for number, (operation, argument, _) in enumerate(pickletools.genops(data)):
            if operation.name not in _PLAIN_OPCODES:
                raise ValueError(f"it holds more than plain values: {operation.name}")
            # The memo is as long as its highest index: a large one in a small file would exhaust
            # memory.
            if operation.name.endswith("PUT") and isinstance(argument, int) and argument > number:
                raise ValueError("its table has gaps")
            if number >= _MAX_OPERATIONS:
                raise ValueError(f"it has more than {_MAX_OPERATIONS:,} values")
        return _PlainUnpickler(io.BytesIO(data)).load()
    except (
        msgspec.DecodeError,
        pickle.UnpicklingError,
        EOFError,
        LookupError,
        TypeError,
        AttributeError,
        OverflowError,
        RecursionError,
        UnicodeError,
    ) as error:
        raise ValueError(f"it is damaged: {str(error)[:_MAX_CHARS]}") from error


def parse_flight_record(document: object, rank: int) -> FlightRecord:
    """Returns the record in a document, without the parts that are not understood.

    Raises:
        ValueError: It is not a flight record.
    """
    root = _ensure_mapping(document)
    listed = root.get("entries", ())
    if "version" not in root or not isinstance(listed, list | tuple):
        raise ValueError("it is no flight record")
    rows = [
        row
        for row in (_ensure_mapping(item) for item in listed[-_MAX_ENTRIES:])
        if _get_group(row)[0]
    ]
    entries = [_parse_entry(row) for row in rows]
    titles, numbers_of = {}, {}
    for row in rows:
        name, title = _get_group(row)
        titles[name] = title if title not in ("", "undefined") else f"group {name}"
        numbers_of[str(row.get("pg_id", ""))[:_MAX_CHARS]] = name
    queued: Counter[str] = Counter()
    for entry in entries:
        if not entry.is_message:
            queued[entry.group] = max(queued[entry.group], entry.sequence)
    for number, status in _ensure_mapping(root.get("pg_status")).items():
        name = numbers_of.get(str(number)[:_MAX_CHARS], "")
        if name:
            queued[name] = max(
                queued[name],
                _parse_integer(_ensure_mapping(status).get("last_enqueued_collective")),
            )
    members = {}
    for group, config in list(_ensure_mapping(root.get("pg_config")).items())[:_MAX_ENTRIES]:
        text = str(_ensure_mapping(config).get("ranks", ""))[: 8 * _MAX_RANKS]
        members[str(group)[:_MAX_CHARS]] = tuple(
            int(member) for member in re.findall(r"\d{1,9}", text)[:_MAX_RANKS]
        )
    return FlightRecord(
        rank=rank,
        entries=tuple(entries),
        groups={
            name: FlightGroup(title=title, queued=queued[name], members=members.get(name, ()))
            for name, title in titles.items()
        },
    )


def _parse_entry(row: Mapping[object, object]) -> FlightEntry:
    operation = str(row.get("profiling_name", ""))[:_MAX_CHARS].partition(":")[2] or "a collective"
    is_message = bool(row.get("is_p2p"))
    state = row.get("state")
    done = (
        bool(row.get("retired"))
        or state == "completed"
        or bool(_parse_integer(row.get("time_discovered_completed_ns")))
    )
    match = _PARTNERS.search(operation) if is_message else None
    return FlightEntry(
        group=_get_group(row)[0],
        operation=operation.partition(" ")[0],
        sequence=_parse_integer(row.get("p2p_seq_id" if is_message else "collective_seq_id")),
        done=done,
        started=state == "started" or bool(_parse_integer(row.get("time_discovered_started_ns"))),
        created_ns=_parse_integer(row.get("time_created_ns")),
        is_message=is_message,
        partner=(int(match[1]), match[2], int(match[3])) if match else None,
    )


def _get_group(row: Mapping[object, object]) -> tuple[str, str]:
    """Returns the name and description of the group of an entry; ("", "") if it has none."""
    pair = row.get("process_group")
    if not isinstance(pair, list | tuple) or len(pair) != 2:
        return "", ""
    return str(pair[0])[:_MAX_CHARS], str(pair[1])[:_MAX_CHARS]


def _ensure_mapping(value: object) -> Mapping[object, object]:
    return value if isinstance(value, dict) else {}


def _parse_integer(value: object) -> int:
    """Returns a number, which may be written as text; 0 for anything else."""
    if isinstance(value, str) and re.fullmatch(r"-?\d{1,19}", value):
        return int(value)
    return value if isinstance(value, int) and abs(value) < 1 << 63 else 0


def find_late_ranks(records: Sequence[FlightRecord]) -> FlightVerdict:
    """Finds the ranks that the others wait for.

    In the oldest unfinished collective that some rank has queued, these are the ranks that have not
    queued it. A rank that has not queued it but waits in another group itself is not to blame; if
    all missing ranks wait, they wait for each other.
    """
    records_by_rank = {record.rank: record for record in records}
    waits: dict[int, FlightEntry] = {}
    stalls: list[_BlockedCollective] = []
    for group in dict.fromkeys(name for record in records for name in record.groups):
        pending = {
            rank: entry
            for rank, record in records_by_rank.items()
            if (entry := record.pending(group))
        }
        if not pending:
            continue
        first = min(pending.values(), key=lambda entry: (entry.sequence, entry.created_ns))
        waiting = {
            rank: entry for rank, entry in pending.items() if entry.sequence == first.sequence
        }
        # Members among the ranks with a record: all for the default group, else those that the
        # group lists or that have used it.
        using = {rank for rank, record in records_by_rank.items() if group in record.groups}
        listed = {rank for user in using for rank in records_by_rank[user].groups[group].members}
        is_of_all = any(records_by_rank[rank].groups[group].title == "default_pg" for rank in using)
        members = tuple(
            sorted(records_by_rank if is_of_all else (listed & records_by_rank.keys()) | using)
        )
        queued = {
            rank: records_by_rank[rank].groups[group].queued
            if group in records_by_rank[rank].groups
            else 0
            for rank in members
        }
        missing = {rank: number for rank, number in queued.items() if number < first.sequence}
        title = next(
            records_by_rank[rank].groups[group].title for rank in records_by_rank if rank in using
        )
        stalls.append(_BlockedCollective(group, title, first, waiting, missing, members))
        for rank, entry in waiting.items():
            waits.setdefault(rank, entry)
    for rank, record in records_by_rank.items():
        for entry in record.entries:
            if entry.is_message and not entry.done and entry.partner:
                waits.setdefault(rank, entry)
    names = {rank: entry.operation for rank, entry in waits.items()}
    # Independent of the order of records.
    stalls.sort(key=lambda stall: (stall.first.created_ns, stall.group))
    for stall in stalls:
        late_ranks = sorted(rank for rank in stall.missing if rank not in waits)
        if late_ranks:
            last = {stall.missing[rank] for rank in late_ranks}
            before = (
                f"; {'its' if len(late_ranks) == 1 else 'their'} last was number {last.pop()}"
                if len(last) == 1
                else ""
            )
            return FlightVerdict(
                kind="behind",
                ranks=tuple(late_ranks),
                waits=names,
                group=stall.group,
                operation=stall.first.operation,
                sequence=stall.first.sequence,
                sentence=f"{_format_ranks(late_ranks)} {'has' if len(late_ranks) == 1 else 'have'} not queued {stall.name}, in which "
                f"{_format_ranks(stall.inside)} {'waits' if len(stall.inside) == 1 else 'wait'}{before}",
            )
    if not stalls:
        messages = []
        for rank, entry in sorted(waits.items()):
            assert entry.partner is not None
            # The peer's global rank if the group lists its members.
            groups, other = records_by_rank[rank].groups, entry.partner[2]
            group_members = groups[entry.group].members if entry.group in groups else ()
            other = group_members[other] if other < len(group_members) else other
            messages.append(f"rank {rank} waits in `{entry.operation}` with rank {other}")
        text = "; ".join(messages) or "no rank waits in a collective that is recorded"
        return FlightVerdict(kind="nothing", sentence=text, waits=names)
    for stall in stalls:
        if not stall.missing and (verdict := _find_inner_fault(stall, records_by_rank, names)):
            return verdict
    stuck = [stall for stall in stalls if stall.missing]
    if stuck:
        parts = [f"{_format_ranks(stall.inside)} in {stall.name}" for stall in stuck]
        involved_ranks = sorted(
            {rank for stall in stuck for rank in (*stall.inside, *stall.missing)}
        )
        text = f"{_format_ranks(involved_ranks)} wait for each other: {'; '.join(parts)}"
        return FlightVerdict(kind="cycle", sentence=text, ranks=tuple(involved_ranks), waits=names)
    stall = stalls[0]
    has = "has" if len(stall.members) == 1 else "have"
    return FlightVerdict(
        kind="all-in",
        waits=names,
        group=stall.group,
        operation=stall.first.operation,
        sequence=stall.first.sequence,
        sentence=f"{_format_ranks(stall.members)} {has} queued {stall.name}, and it does not end",
    )


class _BlockedCollective(NamedTuple):
    """An unfinished collective: the ranks in it, and its members on this host that have not queued
    it (-> last one queued).
    """

    group: str
    title: str
    first: FlightEntry
    inside: dict[int, FlightEntry]
    missing: dict[int, int]
    members: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"`{self.first.operation}` number {self.first.sequence} of {self.title}"


def _find_inner_fault(
    stall: _BlockedCollective, records_by_rank: Mapping[int, FlightRecord], waits: dict[int, str]
) -> FlightVerdict | None:
    """If all members are in it: finds ranks with another operation under the same number, or whose
    device has not started it.
    """
    entries = {
        rank: records_by_rank[rank].at(stall.group, stall.first.sequence) for rank in stall.members
    }
    operations = Counter(entry.operation for entry in entries.values() if entry)
    if len(operations) > 1:
        ranks_by_operation = {
            name: [rank for rank, entry in entries.items() if entry and entry.operation == name]
            for name in operations
        }
        parts = [
            f"{_format_ranks(ranks)} in `{name}`"
            for name, ranks in sorted(ranks_by_operation.items())
        ]
        (common_operation, number), (_, second) = operations.most_common(2)
        differing_ranks = (
            [
                rank
                for rank, entry in entries.items()
                if entry and entry.operation != common_operation
            ]
            if number > second
            else []
        )
        return FlightVerdict(
            kind="mismatch",
            ranks=tuple(differing_ranks),
            waits=waits,
            group=stall.group,
            sequence=stall.first.sequence,
            sentence=f"under number {stall.first.sequence} of {stall.title} ranks do not do the same: "
            + ", ".join(parts),
        )
    late = [rank for rank, entry in stall.inside.items() if not entry.started]
    if not late or len(late) == len(stall.inside):
        return None
    text = f"{_format_ranks(late)} {'has' if len(late) == 1 else 'have'} queued {stall.name}, but the device "
    return FlightVerdict(
        kind="device",
        ranks=tuple(late),
        waits=waits,
        group=stall.group,
        operation=stall.first.operation,
        sequence=stall.first.sequence,
        sentence=text + "has not begun it, as those of the others have",
    )


def _format_ranks(ranks: Iterable[int]) -> str:
    listed = sorted(ranks)
    return f"rank{'' if len(listed) == 1 else 's'} {format_ranges(listed)}"


def analyse_flight_files(files: Mapping[str, str]) -> dict[str, object]:
    """Worker task: returns the verdict of files, rank (as text) -> path; see `FlightFindings`."""
    records, errors = [], {}
    for rank, path in files.items():
        try:
            with Path(path).open("rb") as file:
                records.append(
                    parse_flight_record(decode_plain_values(file.read(MAX_BYTES + 1)), int(rank))
                )
        except (OSError, ValueError) as error:  # noqa: PERF203  (one that is bad costs the others nothing)
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
            decode_plain_values(data)  # refuse records with imports or calls before passing them on
        except (NoFlightDumpError, ValueError, OSError, http.client.HTTPException) as error:  # noqa: PERF203  (three)
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
    with socket.socket(socket.AF_UNIX) as unix_socket:
        unix_socket.settimeout(_SERVER_TIMEOUT_S)
        unix_socket.connect(f"{proc}/{process.pid}/root{path}")
        (pid,) = struct.unpack(
            "i", unix_socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)[:4]
        )
        if pid != process.pid:
            raise NoFlightDumpError("another process listens at its socket")
        connection = http.client.HTTPConnection("rank", timeout=_SERVER_TIMEOUT_S)
        connection.sock = unix_socket
        connection.request("POST", "/handler/fr_trace_json")
        answer, end = connection.getresponse(), time.monotonic() + _SERVER_TIMEOUT_S
        if answer.status != http.HTTPStatus.OK:
            raise NoFlightDumpError(f"its control server answers {answer.status}")
        data = bytearray()
        while chunk := answer.read1(1 << 16):  # bounded reads, as a malicious peer may never end
            data += chunk
            if len(data) > MAX_BYTES or time.monotonic() > end:
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
            if str(path.readlink()) == f"{stem}{rank}.pipe" and stat.S_ISFIFO(path.stat().st_mode):
                break
    else:
        raise NoFlightDumpError(
            "it has not opened the pipe for dumps: no NCCL, or its recorder is off"
        )
    before = dict(_iterate_dump_files(process, rank, proc))
    handle = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
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
                with contextlib.suppress(ValueError):  # it is not complete yet
                    decode_plain_values(data)
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
        NoFlightDumpError: It is something else, or too large.
        OSError: It cannot be read.
    """
    handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(handle, "rb") as file:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != process.uid or status.st_nlink != 1:
            raise NoFlightDumpError("its dump is no file of its user")
        if status.st_size > MAX_BYTES:
            raise NoFlightDumpError(f"its dump is larger than {MAX_BYTES >> 20} MB")
        return file.read(MAX_BYTES)
