"""Trace requests with their targets and states, and the leases of resources.

database.py stores them, runner.py runs them with profilers/, and files.py verifies and compresses
the results in a worker.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

State = Literal[
    "queued", "delivered", "accepted", "written", "verified", "kept", "failed", "cancelled"
]
ENDED_STATES = frozenset({"kept", "failed", "cancelled"})
ProfilerName = Literal[
    "timeline", "stacks", "dump", "allocations", "launches", "memory", "telemetry"
]
Pid = Annotated[int, Meta(ge=1, le=2**22)]


class TraceSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is asked for: of which processes, by which profilers, for how long.

    Targets are those of `pids` (a launcher's chooses its children), of `job`, of `ranks`, or all
    that poll on `host`; together they narrow each other. Either `steps` or `duration_s`. `at_ns`:
    when to begin, 0 at once. `attach`: also attach to those that do not poll.
    """

    pids: Annotated[tuple[Pid, ...], Meta(max_length=1024)] = ()
    job: Annotated[str, Meta(max_length=256)] = ""
    ranks: Annotated[
        tuple[Annotated[int, Meta(ge=0, le=2**31 - 1)], ...], Meta(max_length=65536)
    ] = ()
    host: Annotated[str, Meta(max_length=256)] = ""
    profilers: Annotated[tuple[ProfilerName, ...], Meta(min_length=1, max_length=7)] = ("timeline",)
    steps: Annotated[int, Meta(ge=1, le=2**53)] | None = None
    duration_s: Annotated[float, Meta(gt=0, le=1e9)] | None = None
    at_ns: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    shapes: bool = False
    stacks: bool = False
    flops: bool = False
    modules: bool = False
    attach: bool = False
    max_processes: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None  # of those that match


class TraceTarget(msgspec.Struct, kw_only=True):
    """One profiler of one process, and how far it is. `since_ns`: when it came into this state.

    `reason` is the slug of why it failed, or of what it waits for; `detail` the sentence.
    `start_ns`: when it was to begin, where all begin at one instant; `skew_ns`: how much later its
    window began. `pause_ns`: how long the main thread was stopped to attach, at `attached_ns`;
    `held_ns`: how long beginning, ending and writing took in the process. None: not known, or not
    so.
    """

    request: str
    process: str  # PID@START
    profiler: str
    pid: int
    uid: int
    rank: int | None = None
    stem: str
    state: State = "queued"
    since_ns: int = 0
    reason: str = ""
    detail: str = ""
    attempt: int = 1
    start_ns: int | None = None
    skew_ns: int | None = None
    file: str = ""
    bytes: int | None = None
    sha256: str = ""
    window_start_ns: int | None = None
    window_end_ns: int | None = None
    operators: int | None = None
    steps: int | None = None
    attached_ns: int | None = None
    pause_ns: int | None = None
    held_ns: int | None = None

    @property
    def ended(self) -> bool:
        return self.state in ENDED_STATES


class TriggerCause(msgspec.Struct, frozen=True, kw_only=True):
    """What made a request that nobody asked for: a rule of agent.toml, what it is about (a job or
    process), and why.
    """

    rule: str
    target: str
    what: str


class TraceRequest(msgspec.Struct, kw_only=True):
    """A request. `uid`: user of the processes; `files`: content of its directory.

    `trigger`: None if it was requested by a caller; `max_bytes`: max size of each kept file, None:
    as configured. `at_step`: the first step to trace of each process, by its own count; 0: as
    `spec.at_ns` says.
    """

    id: str
    who: str
    uid: int
    asked_ns: int
    boot_id: str
    spec: TraceSpec
    targets: list[TraceTarget] = []
    files: list[str] = []
    trigger: TriggerCause | None = None
    max_bytes: int | None = None
    at_step: int = 0
    done: bool = False  # all targets have ended, and capture.json is written

    @property
    def ended(self) -> bool:
        return self.done


class LeaseTable:
    """Holders of exclusive resources such as `ptrace:123` or `kineto:123`."""

    def __init__(self) -> None:
        self._holders: dict[str, str] = {}

    def take(self, holder: str, resources: Iterable[str]) -> str:
        """Take all of them or none.

        Returns:
            "" on success, else the first conflicting resource and its holder.
        """
        requested = sorted(set(resources))
        for resource in requested:
            if self._holders.get(resource, holder) != holder:
                return f"{resource} is in use by {self._holders[resource]}"
        self._holders |= dict.fromkeys(requested, holder)
        return ""

    def give_back(self, holder: str) -> None:
        self._holders = {
            resource: name for resource, name in self._holders.items() if name != holder
        }
