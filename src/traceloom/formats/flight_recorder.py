"""Reads dumps of PyTorch's flight recorder: the last collectives of one rank.

A dump is untrusted. It is a pickle of plain values (`ProcessGroupNCCL`, `_dump_fr_trace`), or JSON
(`_dump_fr_trace_json`).
"""

import re
from collections import Counter
from collections.abc import Mapping

import msgspec

from traceloom.errors import InputError
from traceloom.formats import pickles
from traceloom.trace.flight_record import FlightEntry, FlightGroup, FlightRecord

MAX_BYTES = 16 << 20  # 2,000 collectives with their stacks are about 2 MB
_MAX_ENTRIES = 20_000
_MAX_RANKS = 65_536
_MAX_CHARS = 200
_PARTNERS = re.compile(r"(\d+)(<-|->)(\d+)")


def read_flight_record(data: bytes, rank: int, location: str = "") -> FlightRecord:
    """Reads the dump of a rank.

    Raises:
        InputError: `not-a-flight-record`; for pickles as `traceloom.formats.pickles.load_bytes`.
    """
    return parse_flight_record(decode_document(data, location), rank, location)


def decode_document(data: bytes, location: str = "") -> object:
    """Returns the content of a dump; see `read_flight_record`."""
    if len(data) > MAX_BYTES:
        raise _make_error(f"it is larger than {MAX_BYTES >> 20} MB", location)
    if data[:1] == b"\x80":
        return pickles.load_bytes(data, location)[0]
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise _make_error(f"it is no JSON ({str(error)[:_MAX_CHARS]})", location) from error


def _make_error(reason: str, location: str) -> InputError:
    return InputError(
        f"the file is no dump of PyTorch's flight recorder: {reason}",
        slug="not-a-flight-record",
        where=location,
        hint="PyTorch writes one for each rank: torch.distributed._dump_fr_trace, or TORCH_FR_DUMP_TEMP_FILE",
    )


def parse_flight_record(document: object, rank: int, location: str = "") -> FlightRecord:
    """Returns the record in a document, without the parts that are not understood.

    Raises:
        InputError: `not-a-flight-record`.
    """
    root = _ensure_mapping(document)
    listed = root.get("entries", ())
    if "version" not in root or not isinstance(listed, list | tuple):
        raise _make_error("it has no version or no entries", location)
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
        sizes=str(row.get("input_sizes") or "")[:_MAX_CHARS],
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
