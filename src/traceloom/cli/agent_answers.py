"""Types of the agent's answers, as they are printed with `--json`: of each the keys that are shown."""

from typing import Literal, TypedDict


class ShownCollector(TypedDict):
    """How a collector fares."""

    name: str
    period_seconds: float
    seconds: float
    runs: int
    failures: dict[str, int]
    trouble: str


class ShownStatus(TypedDict):
    """The agent and how it fares."""

    version: str
    host: str
    pid: int
    started_ns: int
    now_ns: int
    series: int
    devices: int
    stale_devices: int
    processes: int
    collectors: list[ShownCollector]
    history: dict[str, float]
    history_trouble: str
    publishers: dict[str, str]


class ShownValue(TypedDict):
    """The latest value of a series."""

    metric: str
    labels: dict[str, str]
    value: float


class ShownDevice(TypedDict):
    """A device, and what is measured of it now."""

    uuid: str
    index: str
    model: str
    stale: str
    jobs: list[str]
    values: list[ShownValue]


class ShownDevices(TypedDict):
    """All devices of the host."""

    devices: list[ShownDevice]


class ShownOwner(TypedDict):
    """Whose a process is."""

    job: str
    rank: int | None
    world_size: int | None
    user: str
    framework: str
    framework_version: str


class ShownProcess(TypedDict):
    """A process that matters. `hung_since_ns`: null where it does not hang."""

    pid: int
    uid: int
    command: str
    devices: list[str]
    steps_per_second: float | None
    hung_since_ns: int | None
    unreadable: str
    owner: ShownOwner
    values: list[ShownValue]


class ShownProcesses(TypedDict):
    """The processes that the one who asks may see; `hidden`: how many there are besides."""

    processes: list[ShownProcess]
    hidden: int


class NowAnswer(TypedDict):
    """Busy share of the processors; bytes of memory, used and in all. Null: not known."""

    cpu: float | None
    memory: tuple[float, float] | None


class HostPicture(TypedDict):
    """Host, devices and processes as they are now."""

    status: ShownStatus
    devices: ShownDevices
    processes: ShownProcesses
    host: NowAnswer


class ShownEvent(TypedDict):
    """What happened."""

    at_ns: int
    kind: str
    text: str
    device: str
    code: int | None
    job: str


class ShownEvents(TypedDict):
    """What happened on the host, oldest first."""

    events: list[ShownEvent]


class ShownSeries(TypedDict):
    """One series of a history."""

    labels: dict[str, str]
    times_ns: list[int]
    values: list[float]


class ShownHistory(TypedDict):
    """What a metric was."""

    metric: str
    unit: str
    since_ns: int
    until_ns: int
    series: list[ShownSeries]


class ShownTrace(TypedDict):
    """What a trace tells of its job, per process and step."""

    job: str
    flops_per_step: float | None
    dtype_mix: dict[str, float]
    roofline_ratio: float | None
    copied_bytes_per_step: float | None


class ShownStackGroup(TypedDict):
    """Equal stacks of several threads."""

    role: Literal["rank", "thread", "worker"]
    ranks: list[int]
    pids: list[int]
    thread: str
    elsewhere: bool
    frames: list[tuple[str, str, int]]


class ShownStacks(TypedDict):
    """What all threads did at one moment."""

    sentence: str
    groups: list[ShownStackGroup]


class ShownHang(TypedDict):
    """A job whose processes make, or made, no steps."""

    job: str
    state: Literal["hangs", "recovered", "ended", "unknown"]
    since_ns: int
    over_ns: int | None
    sentence: str
    directory: str
    no_bundle: str


class ShownHangs(TypedDict):
    """The last hangs; `watched`: jobs now whose steps are known."""

    hangs: list[ShownHang]
    watched: list[str]


class ShownRequest(TypedDict):
    """A request that a rule made."""

    at_ns: int
    request: str
    target: str
    what: str


class ShownRefusal(TypedDict):
    """Why a rule traced nobody."""

    at_ns: int
    target: str
    reason: str
    detail: str


class ShownRule(TypedDict):
    """A rule, and what it has done."""

    name: str
    on: str
    target: str
    fired: int
    refusals: dict[str, int]
    traced_seconds: float
    kept_bytes: int
    last: ShownRequest | None
    last_refusal: ShownRefusal | None
    trouble: str


class ShownTriggers(TypedDict):
    """Rules, and what they may still cost."""

    rules: list[ShownRule]
    share: float
    bytes_per_day: int
    bytes_left: int
    trouble: str


class ShownCheck(TypedDict):
    """A thing that the doctor looked at."""

    area: str
    name: str
    works: Literal["yes", "no", "partly"]
    why: str
    help: str


class ShownDoctor(TypedDict):
    """What works on this host and what does not."""

    checks: list[ShownCheck]
