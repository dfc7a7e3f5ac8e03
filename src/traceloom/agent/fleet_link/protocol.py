"""Messages between an agent and the fleet service, which the routes of the service take and return.

Everything is a state, not an event: work is offered until the host reports its end, reports contain
the whole progress, minutes of usage are sent until they are acknowledged. So nothing is lost or
duplicated if either side restarts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from traceloom.agent.traces.requests import TraceSpec, TraceTarget
from traceloom.system.text import HOST, IDENTITY, SHA256, describe_validation_error

MAX_MINUTES = 60  # of usage per heartbeat
MAX_PROCESSES = 4096  # per host
MAX_NAME_CHARS = 256
_MAX_ROW_BYTES = 8 << 20  # of all rows of a kind

Name = Annotated[str, Meta(max_length=MAX_NAME_CHARS)]
NonNegativeInt = Annotated[int, Meta(ge=0, le=2**63 - 1)]

# The next step of a host for a request, and its progress.
WorkStep = Literal["arm", "start"]
StartBy = Literal["instant", "step"]
HostState = Literal["armed", "running", "uploading", "uploaded", "failed", "cancelled"]
ENDED_HOST_STATES = frozenset({"uploaded", "failed", "cancelled"})
# A device was held by a job that used it, by a job that did not, by nobody; or could not be read.
UsageState = Literal["busy", "idle-allocated", "unallocated", "unreachable"]


class FleetMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all messages.

    The route names the version, `/api/v1/`; unknown fields are refused.
    """


class Enrolment(FleetMessage, frozen=True, kw_only=True):
    """A host that wants to belong to the fleet, with a token that works once."""

    token: Annotated[str, Meta(max_length=512)]
    host: Annotated[str, Meta(min_length=1, max_length=253, pattern=HOST)]
    boot_id: Name = ""
    version: Name = ""


class HostCredentials(FleetMessage, frozen=True, kw_only=True):
    """What the host shows from now on."""

    host: str
    credential: str


class ClockOffset(FleetMessage, frozen=True, kw_only=True):
    """`service = host + offset_ns`, at most `error_ns` beside it; from the best of the last
    `round_trips`.
    """

    offset_ns: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
    error_ns: NonNegativeInt
    round_trips: Annotated[int, Meta(ge=1)]


class HostDevice(FleetMessage, frozen=True, kw_only=True):
    """A device of the host. `values`: metric -> the latest; `stale`: why it cannot be read now."""

    uuid: Name
    index: Name = ""
    model: Name = ""
    stale: Name = ""
    values: Annotated[dict[Name, float], Meta(max_length=1000)] = {}


class HostProcess(FleetMessage, frozen=True, kw_only=True):
    """A process that matters; "" and null: not known. `polls`: it is prepared for traces on demand.

    `scheduled`: its group of processes is that of its job, as its scheduler made it. `steps`: that it
    made since its agent heard of it. `hung`: processes of its job there make no
    steps any more.
    """

    key: Name
    pid: NonNegativeInt
    uid: NonNegativeInt
    job: Name = ""
    job_name: Name = ""
    scheduler: Name = ""
    scheduled: bool = False
    rank: NonNegativeInt | None = None
    world_size: NonNegativeInt | None = None
    user: Name = ""
    account: Name = ""
    framework: Name = ""
    labels: Annotated[dict[Name, Name], Meta(max_length=100)] = {}
    devices: Annotated[tuple[Name, ...], Meta(max_length=1024)] = ()
    steps_per_second: float | None = None
    steps: NonNegativeInt | None = None
    polls: bool = False
    hung: bool = False


class UsageRow(FleetMessage, frozen=True, kw_only=True):
    """A share of a device in one minute.

    Rows of a device and minute add up to at most 60,000 ms.
    """

    minute: NonNegativeInt  # minutes since 1970, on the service's clock
    device: Name
    device_model: Name = ""
    job: Name = ""
    state: UsageState
    device_ms: Annotated[int, Meta(ge=0, le=60_000)]
    busy_ms: Annotated[int, Meta(ge=0, le=60_000)] = 0
    energy_mj: NonNegativeInt | None = None
    flops_low: float | None = None
    flops_high: float | None = None
    input_bytes: NonNegativeInt | None = None


class Heartbeat(FleetMessage, frozen=True, kw_only=True):
    """The current state of a host.

    `usage`: whole minutes, oldest first; all rows of a minute are sent together.
    """

    sent_ns: NonNegativeInt
    boot_id: Name
    version: Name
    clock: ClockOffset | None = None
    devices: Annotated[list[HostDevice], Meta(max_length=1024)] = []
    processes: Annotated[list[HostProcess], Meta(max_length=MAX_PROCESSES)] = []
    usage: Annotated[list[UsageRow], Meta(max_length=100_000)] = []
    collector_errors: Annotated[
        dict[Name, Name], Meta(max_length=256)
    ] = {}  # collector -> why it gives nothing


_ROWS: dict[str, tuple[type[FleetMessage], int]] = {
    "devices": (HostDevice, 1024),
    "processes": (HostProcess, MAX_PROCESSES),
    "usage": (UsageRow, 100_000),
}
Row = TypeVar("Row")


def keep_valid_rows(name: str, rows: Sequence[Row], refused: Counter[str]) -> list[Row]:
    """Returns the rows of a heartbeat that fit the limits of their type, as sender and receiver
    apply them; counts the others by reason. Programs of users say what is in them.
    """
    kind, most = _ROWS[name]
    kept: list[Any] = []
    size = 0
    for row in rows:
        reason = f"{name}: more than {most:,} rows or {_MAX_ROW_BYTES >> 20} MB"
        try:
            line = msgspec.json.encode(row)
            valid = msgspec.json.decode(line, type=kind)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            reason = f"{name}: {describe_validation_error(str(error))}"
        else:
            size += len(line)
            if len(kept) < most and size <= _MAX_ROW_BYTES:
                kept.append(valid)
                continue
        refused[reason[:MAX_NAME_CHARS]] += 1
    return kept


def decode_heartbeat(body: bytes) -> tuple[Heartbeat, Counter[str]]:
    """Returns a heartbeat without what is beyond the limits, and how much that is by reason: a host
    is never lost by what its programs say.

    Raises:
        msgspec.DecodeError, UnicodeError, RecursionError: It is no heartbeat at all.
    """
    refused: Counter[str] = Counter()
    try:
        return msgspec.json.decode(body, type=Heartbeat), refused
    except msgspec.ValidationError:
        parts = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    for field in msgspec.structs.fields(Heartbeat):
        name = field.name
        try:
            if name in _ROWS and name in parts:
                rows = msgspec.json.decode(parts[name], type=list[msgspec.Raw])
                parts[name] = msgspec.Raw(msgspec.json.encode(keep_valid_rows(name, rows, refused)))
            elif name in parts and not field.required:
                msgspec.json.decode(parts[name], type=field.type)
        except msgspec.ValidationError as error:
            refused[f"{name}: {describe_validation_error(str(error))}"[:MAX_NAME_CHARS]] += 1
            del parts[name]
    return msgspec.json.decode(msgspec.json.encode(parts), type=Heartbeat), refused


class HeartbeatResponse(FleetMessage, frozen=True, kw_only=True):
    """When it came and when this was sent, by the service's clock; `usage_through`: the last minute
    that is kept; `refused`: rows that are not, by reason.
    """

    received_ns: NonNegativeInt
    answered_ns: NonNegativeInt
    usage_through: NonNegativeInt = 0
    refused: dict[str, int] = {}


class HostWork(FleetMessage, frozen=True, kw_only=True):
    """What a host is to do for a request, now.

    `arm`: find the processes and say when they are ready. `start`: begin at `at_ns` (of the host's
    clock; 0: at once), and upload what is kept; or with the step `at_step` of each process, where
    that is not 0. Work that is offered no more is stopped. `spec.at_ns` is not used. `start`:
    with what it is to begin, if that can be.
    """

    request: Annotated[str, Meta(max_length=64, pattern=IDENTITY)]
    step: WorkStep
    spec: TraceSpec
    start: StartBy = "instant"
    at_ns: NonNegativeInt = 0
    at_step: NonNegativeInt = 0


class WorkResponse(FleetMessage, frozen=True, kw_only=True):
    """All work of the host that has not ended; `version` changes with it."""

    version: str
    work: list[HostWork] = []


class ReportResponse(FleetMessage, frozen=True, kw_only=True):
    """What the service has not got yet of the files that were said: to be sent, each under its
    name.
    """

    missing: list[str] = []


class ArmedProcess(FleetMessage, frozen=True, kw_only=True):
    """A process that a request is about. `ready`: it polls; its profiler can begin.

    `steps`: that it made since it began, as it says itself or probes have counted; null: nobody has
    counted all.
    """

    key: Name
    pid: NonNegativeInt
    job: Name = ""
    rank: NonNegativeInt | None = None
    ready: bool = True
    steps_per_second: float | None = None
    steps: NonNegativeInt | None = None


class HostFile(FleetMessage, frozen=True, kw_only=True):
    """A file that the host keeps for a request."""

    name: Annotated[str, Meta(min_length=1, max_length=200)]
    bytes: NonNegativeInt
    sha256: Annotated[str, Meta(pattern=SHA256)]


class HostReport(FleetMessage, frozen=True, kw_only=True):
    """How far a host is with a request.

    `files` stands once it uploads; they come before `uploaded` is said.
    """

    state: HostState
    reason: Name = ""
    detail: Annotated[str, Meta(max_length=2000)] = ""
    processes: Annotated[list[ArmedProcess], Meta(max_length=MAX_PROCESSES)] = []
    targets: Annotated[list[TraceTarget], Meta(max_length=MAX_PROCESSES)] = []
    files: Annotated[list[HostFile], Meta(max_length=20_000)] = []
    clock: ClockOffset | None = None
