"""Request and response Structs of the agent's HTTP API, which clients decode into."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from traceloom.agent.config import AnyRule
from traceloom.agent.hangs.stacks import MissingStack, StackGroup
from traceloom.agent.metrics import MetricKind, SeriesKey
from traceloom.agent.traces.requests import TraceSpec, TraceTarget, TriggerCause
from traceloom.server.access import Visibility
from traceloom.server.problem import HttpResponseBody

Seconds = Annotated[float, Meta(gt=0, le=86_400)]


class Health(HttpResponseBody, frozen=True):
    """Whether the agent lives: its loop answers, and something was collected of late."""

    healthy: bool
    reason: str = ""


class CollectorResponse(HttpResponseBody, frozen=True):
    """How a collector fares.

    `ran_ns`: when it last ran, null: never; `last_error`: why it gave nothing then.
    """

    name: str
    period_seconds: float
    ran_ns: int | None
    seconds: float
    runs: int
    failures: dict[str, int]
    last_error: str = ""


class StatusResponse(HttpResponseBody, frozen=True):
    """The agent and how it fares. `you`: what the one who asks may see."""

    version: str
    host: str
    boot_id: str
    pid: int
    uid: int
    started_ns: int
    now_ns: int
    series: int
    devices: int
    stale_devices: int
    processes: int
    collectors: list[CollectorResponse]
    history: dict[str, float] = {}
    history_error: str = ""  # why nothing is on disk now
    publishers: dict[str, str] = {}  # name -> "" or its last error
    you: Visibility = "host"


class Check(HttpResponseBody, frozen=True):
    """A thing that the doctor looked at.

    `works`: yes, no, or partly; `why` not, and what would `help`.
    """

    area: str
    name: str
    works: Literal["yes", "no", "partly"]
    why: str = ""
    help: str = ""


class DoctorResponse(HttpResponseBody, frozen=True):
    """What works on this host and what does not."""

    checks: list[Check]


class ValueResponse(HttpResponseBody, frozen=True):
    """The latest value of a series, by its labels."""

    metric: str
    labels: dict[str, str]
    value: float
    at_ns: int


class DeviceResponse(HttpResponseBody, frozen=True):
    """A device or a partition of one: what is measured of it now; of who is on it what the one who
    asks may see.
    """

    uuid: str
    index: str
    vendor: str
    model: str
    pci: str
    driver: str
    parent: str
    partition: str
    architecture: str
    memory_bytes: int | None
    multiprocessors: int | None
    highest_clock_hz: float | None
    owner: dict[str, str]  # as its exporter says; for those who see all
    stale: str
    processes: list[str]
    jobs: list[str]
    values: list[ValueResponse]


class DevicesResponse(HttpResponseBody, frozen=True):
    """All devices of the host."""

    devices: list[DeviceResponse]


class OwnerResponse(HttpResponseBody, frozen=True):
    """Whose a process is; "" or null: not known. `sources`: where each was read."""

    job: str
    name: str
    scheduler: str
    rank: int | None
    local_rank: int | None
    world_size: int | None
    user: str
    account: str
    partition: str
    namespace: str
    pod: str
    container: str
    framework: str
    framework_version: str
    devices: tuple[str, ...]
    labels: dict[str, str]
    sources: dict[str, str]


class ProcessResponse(HttpResponseBody, frozen=True):
    """A process that matters. `key` is `PID@START`; `command` has its secrets masked, "" where it
    is not shown.

    `hung_since_ns`: since when it makes no steps, where it is part of a hang.
    """

    key: str
    pid: int
    parent_pid: int
    uid: int
    started_ns: int
    state: str
    command: str
    cgroup: str
    devices: tuple[str, ...]
    steps_per_second: float | None
    hung_since_ns: int | None
    unreadable: str
    owner: OwnerResponse
    values: list[ValueResponse]


class ProcessesResponse(HttpResponseBody, frozen=True):
    """The processes that the one who asks may see; `hidden`: how many there are besides."""

    processes: list[ProcessResponse]
    hidden: int


class JobResponse(HttpResponseBody, frozen=True):
    """A job: its part on this host."""

    job: str
    name: str
    scheduler: str
    user: str
    account: str
    partition: str
    namespace: str
    framework: str
    world_size: int | None
    ranks: list[int]
    processes: list[str]
    devices: list[str]
    steps_per_second: float | None
    values: list[ValueResponse]


class JobsResponse(HttpResponseBody, frozen=True):
    """The jobs that the one who asks may see; `hidden`: how many there are besides."""

    jobs: list[JobResponse]
    hidden: int


class SeriesResponse(HttpResponseBody, frozen=True):
    """One series of a history: times in ns since the epoch, one value for each."""

    labels: dict[str, str]
    times_ns: list[int]
    values: list[float]


class QueryResponse(HttpResponseBody, frozen=True):
    """What a metric was."""

    metric: str
    kind: MetricKind
    unit: str
    since_ns: int
    until_ns: int
    series: list[SeriesResponse]


class EventResponse(HttpResponseBody, frozen=True):
    """What happened, some time in the period before `at_ns`: to a device (xid, ecc, throttle, lost,
    back), or oom-kill.

    `count`: how many processes were killed; `code` is that of an Xid error; "" or null: it has
    none.
    """

    at_ns: int
    kind: str
    text: str
    device: str = ""
    code: int | None = None
    cgroup: str = ""
    job: str = ""
    count: int | None = None


class EventParameters(HttpResponseBody, frozen=True, forbid_unknown_fields=True):
    """From when on: `1h` (ago), seconds since the epoch, or ISO 8601."""

    since: str = "1h"


class EventsResponse(HttpResponseBody, frozen=True):
    """What happened on the host, as far as the one who asks may see it, oldest first; the agent
    keeps the last 1000.
    """

    events: list[EventResponse]


class ClockResponse(HttpResponseBody, frozen=True):
    """The clocks of this host, read one after the other: to measure how far two hosts are apart."""

    wall_ns: int
    monotonic_ns: int
    boot_id: str


class PauseBody(HttpResponseBody, frozen=True, forbid_unknown_fields=True):
    """For how long another profiler needs the hardware counters."""

    seconds: Seconds


class PauseResponse(HttpResponseBody, frozen=True):
    """Back ends that let go of their counters, and until when."""

    paused: list[str]
    until_ns: int


class TraceBody(HttpResponseBody, frozen=True, forbid_unknown_fields=True):
    """A trace or capture of a job of this host: an absolute path."""

    path: Annotated[str, Meta(min_length=1, max_length=4096)]
    job: str


class TraceResponse(HttpResponseBody, frozen=True):
    """What the trace tells of the job, per process and step; null: it does not say."""

    job: str
    flops_per_step: float | None
    dtype_mix: dict[str, float]
    roofline_ratio: float | None
    copied_bytes_per_step: float | None


class StacksParameters(HttpResponseBody, frozen=True, forbid_unknown_fields=True):
    """Of which processes: a job, or one pid.

    `native`: C and C++ too; a process stands still while it is looked at.
    """

    job: str = ""
    pid: Annotated[int, Meta(ge=0)] = 0
    native: bool = False


class StacksResponse(HttpResponseBody, frozen=True):
    """What all threads did at one moment: equal stacks together, those of ranks that are elsewhere
    first.
    """

    at_ns: int
    sentence: str
    groups: tuple[StackGroup, ...]
    unseen: tuple[MissingStack, ...]


class HangParameters(HttpResponseBody, frozen=True, forbid_unknown_fields=True):
    """Of which job; "": of all."""

    job: str = ""


class HangResponse(HttpResponseBody, frozen=True):
    """A job whose processes make, or made, no steps: since when, of which processes (pids), and
    what became of it.

    `state`: hangs, recovered, ended, or unknown: the agent did not run when it ended. `ranks`: whom
    the others wait for. `directory`: the bundle, "" where there is none, and `no_bundle` why; its
    `files`. Who may not see stacks of the job sees no `sentence`, and no bundle.
    """

    id: str
    job: str
    uid: int
    state: Literal["hangs", "recovered", "ended", "unknown"]
    since_ns: int
    seen_ns: int
    over_ns: int | None
    median_step_seconds: float
    pids: list[int]
    sentence: str
    ranks: tuple[int, ...]
    directory: str
    files: tuple[str, ...]
    no_bundle: str


class HangsResponse(HttpResponseBody, frozen=True):
    """The last hangs of jobs of the one who asks, oldest first.

    `watched`: jobs now whose steps are known.
    """

    hangs: list[HangResponse]
    watched: list[str]


class StepsBody(HttpResponseBody, frozen=True, forbid_unknown_fields=True):
    """Steps that a job finished since it last told: durations in seconds, waits for data where it
    knows them.

    `rank` counts where nothing else tells it. `total`: all steps since the process began, these
    among them, as PyTorch counts them (those of its optimizer): traces of several ranks can then
    begin with one step.
    """

    steps: Annotated[list[Annotated[float, Meta(ge=0, le=1e6)]], Meta(max_length=100_000)] = []
    loader_wait_seconds: Annotated[float, Meta(ge=0, le=1e9)] | None = None
    rank: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    total: Annotated[int, Meta(ge=0, le=2**53)] | None = None


class StepsResponse(HttpResponseBody, frozen=True):
    """What was taken."""

    steps: int


class EnvironmentResponse(HttpResponseBody, frozen=True):
    """The variables that prepare a job of the one who asks: PyTorch's profiler then polls this
    agent.
    """

    variables: dict[str, str]


class RequestResponse(HttpResponseBody, frozen=True):
    """A request for traces: its `spec`, how far each target is, and the files that are
    there.

    States: queued, delivered, accepted, written, verified, kept; failed, cancelled. `done`: nothing changes any more.
    `trigger`: the rule that asked, null where somebody did; `max_bytes`: of each file, null: as
    usual; `at_step`: with which step of each process it begins, 0: as `spec` says.
    """

    id: str
    who: str
    uid: int
    asked_ns: int
    boot_id: str
    spec: TraceSpec
    targets: list[TraceTarget]
    files: list[str]
    trigger: TriggerCause | None
    max_bytes: int | None
    at_step: int
    done: bool


class RequestsResponse(HttpResponseBody, frozen=True):
    """The requests about processes of the one who asks, oldest first."""

    requests: list[RequestResponse]


class LastFiringResponse(HttpResponseBody, frozen=True):
    """A request that a rule made: what it is about, a job or a process, and why."""

    at_ns: int
    request: str
    target: str
    what: str


class LastRefusalResponse(HttpResponseBody, frozen=True):
    """Why a rule traced nobody: the name of the reason, and the sentence."""

    at_ns: int
    target: str
    what: str
    reason: str
    detail: str


class TriggerResponse(HttpResponseBody, frozen=True):
    """A rule, and what it has done. `problem`: why it cannot fire as things are; `rule`: as
    agent.toml has it.

    `last`, `last_refusal`: null: never, or about another user's processes; `rule` is null for those
    who do not see all.
    """

    name: str
    on: str
    target: str
    cooldown_seconds: float
    fired: int
    refusals: dict[str, int]
    traced_seconds: float
    kept_bytes: int
    last: LastFiringResponse | None
    last_refusal: LastRefusalResponse | None
    problem: str
    rule: AnyRule | None


class TriggersResponse(HttpResponseBody, frozen=True):
    """Rules of agent.toml by which traces are taken that nobody asked for, and what they may still
    cost.

    `share`: of the time of a process; `bytes_per_day`: of the host, of which `bytes_left` are left
    now, what runs counted with what it may have at most. `last_error`: why it is not on disk.
    """

    rules: list[TriggerResponse]
    share: float
    bytes_per_day: int
    bytes_left: int
    last_error: str


class QueryParameters(HttpResponseBody, frozen=True, forbid_unknown_fields=True):
    """Which history. `since`, `until`: `10m` (ago), seconds since the epoch, or ISO 8601.

    `by`: labels, with commas between, to sum or average over all others; `where`: `label=value`,
    with commas between.
    """

    metric: str
    since: str = "10m"
    until: str = ""
    by: str = ""
    where: str = ""
    raw: bool = False


class HistoryQuery(msgspec.Struct, frozen=True, kw_only=True):
    """A query of the history.

    `seen_as`: maps a series to the labels that the caller may see, None: not visible.
    """

    metric: str
    since_ns: int
    until_ns: int
    by: tuple[str, ...]
    where: dict[str, str]
    seen_as: Callable[[SeriesKey], SeriesKey | None]
    raw: bool = False
