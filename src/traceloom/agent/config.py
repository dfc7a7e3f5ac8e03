"""The settings of agent.toml with their defaults, and the locations of the agent's files."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

import msgspec

from traceloom.agent.metrics import METRICS, PREFIX
from traceloom.agent.traces.requests import ProfilerName
from traceloom.errors import InputError, nearest, unreadable
from traceloom.server.settings import Access, ConfigTable, Tcp
from traceloom.system.text import NAME, describe_validation_error

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SYSTEM_SOCKET = Path("/run/traceloom/agent.sock")

Positive = Annotated[float, msgspec.Meta(gt=0, le=1e12)]
Seconds = Positive
PositiveInt = Annotated[int, msgspec.Meta(ge=1, le=2**53)]


class Paths(ConfigTable, frozen=True):
    """Locations of the agent's files; "" means the default: of the system for root, else of the
    user (XDG).
    """

    root: str = ""  # directory of all that is not named below, of a second agent of a user
    socket: str = ""
    history: str = ""
    audit: str = ""
    kineto: str = ""  # directory of libkineto's sockets; a short name
    requests: str = ""
    hangs: str = ""  # file of the known hangs, for the next start
    traces: str = ""  # the only directory that profilers write into


class Collect(ConfigTable, frozen=True):
    """Collectors that run, their periods and time-outs.

    `periods`, `timeouts`: collector -> seconds.
    """

    period: Seconds = 10.0
    periods: dict[str, Seconds] = {}
    timeout: Seconds = 2.0
    timeouts: dict[str, Seconds] = {}
    off: tuple[str, ...] = ()  # disabled collectors
    proc: str = "/proc"  # where the host's /proc and /sys are mounted in a container
    sys: str = "/sys"


class Accelerators(ConfigTable, frozen=True):
    """Back ends, in order of priority; empty: all that find devices. `scrape`: addresses of
    exporters.
    """

    backends: tuple[str, ...] = ()
    scrape: tuple[str, ...] = ()
    recorded: str = ""  # file of samples to replay
    simulated: int = 0  # number of simulated devices
    reference: str = "A100 SXM 80GB"  # unit of reference-device seconds


class Owners(ConfigTable, frozen=True):
    """Sources of ownership in addition to the environment of processes."""

    kubelet: str = "/var/lib/kubelet/pod-resources/kubelet.sock"
    # Directory with one file per GPU, as dcgm-exporter's --hpc-job-mapping-dir.
    job_mapping: str = ""
    # Variable of the environment -> field of Owner, or `labels.NAME`.
    variables: dict[str, str] = {}


class HistorySettings(ConfigTable, frozen=True):
    """How long values are kept."""

    interval: Seconds = 10.0
    hours: Positive = 24.0
    max_mb: Positive = 200.0
    recent_seconds: PositiveInt = 600


class Probes(ConfigTable, frozen=True):
    """Probes of functions in processes, where the kernel and the agent's rights allow them."""

    steps: bool = True  # steps and loader waits of PyTorch processes that do not report them


class Traces(ConfigTable, frozen=True):
    """Traces on demand: limits of their cost and of what is kept."""

    abstract: bool = False  # also answer at dynolog's abstract name, where any user reaches any other's processes
    attach: bool = False  # also trace processes that were not prepared: their main thread is stopped, and runs our text
    poll: PositiveInt = 1  # seconds between polls of processes that `agent env` prepares
    max_seconds: Seconds = 60.0
    max_steps: PositiveInt = 1000
    wait: Seconds = 120.0  # for a process to be ready: to register, to step, to end its own profile
    max_file_mb: Positive = 2000.0
    max_mb_per_user: Positive = 10_000.0
    max_requests_per_user: Annotated[int, msgspec.Meta(ge=0)] = 16  # that run concurrently
    keep_days: Positive = 7.0


class FleetLink(ConfigTable, frozen=True):
    """The fleet service of this host; none without `server`.

    Beyond loopback it needs https.
    """

    server: str = ""  # https://fleet.example:8443
    ca: str = ""  # certificates to trust instead of the system's
    token_file: str = ""  # the token of enrolment, needed once; else TRACELOOM_FLEET_TOKEN
    heartbeat: Seconds = 10.0


class Hangs(ConfigTable, frozen=True):
    """Jobs that stop making steps: when that is a hang, and what is kept of one."""

    watch: bool = True
    bundles: bool = True  # keep stacks, collectives, devices and telemetry of a job that hangs
    steps: Positive = 10.0  # no step for so many of the process's median steps
    least: Seconds = 60.0  # and at least for so long
    # A job that works without steps (checkpoint, evaluation) does not hang for so long.
    busy: Seconds = 1800.0
    every: Seconds = 3600.0  # between two bundles of a job
    max_mb: Positive = 100.0  # of a bundle
    max_bundles_per_user: Annotated[int, msgspec.Meta(ge=0)] = 16


class Otlp(ConfigTable, frozen=True):
    """An OTLP/HTTP receiver for metrics."""

    endpoint: str = ""
    period: Seconds = 60.0
    headers: dict[str, str] = {}
    timeout: Seconds = 10.0


# Labels of a process's owner, by which every rule can be filtered in addition to the labels of its
# metric.
OWNER_LABELS = ("job", "rank", "user", "account", "namespace", "pod", "framework")


class TriggerRule(ConfigTable, frozen=True, kw_only=True, tag_field="on"):
    """Settings common to all rules: filter (`where`), traced processes (`target`), profilers,
    window and limits.

    `slowest-and-median`: of the ranks of the job on this host the slowest and a median one, by
    `ranks_by`: the time of their steps, or their waits for the data loader. Without `steps` and
    `duration` it is three steps.
    """

    name: Annotated[str, msgspec.Meta(pattern=NAME)]
    where: dict[str, str] = {}
    target: Literal["process", "job", "slowest-and-median"] = "job"
    ranks_by: Literal["steps", "waits"] = "steps"
    profilers: Annotated[tuple[ProfilerName, ...], msgspec.Meta(min_length=1, max_length=7)] = (
        "timeline",
    )
    steps: Annotated[int, msgspec.Meta(ge=1)] | None = None
    duration: Seconds | None = None
    shapes: bool = False
    stacks: bool = False
    cooldown: Annotated[float, msgspec.Meta(gt=0, le=7 * 86_400)] = (
        900.0  # of the rule and a target
    )

    def __post_init__(self) -> None:
        if self.steps is not None and self.duration is not None:
            raise ValueError(f"`{self.name}` has both `steps` and `duration`")
        for label in self.where:
            if label not in (labels := self.labels()):
                raise ValueError(
                    f"`{self.name}` has `where.{label}`, and there is no such label; {nearest(label, labels)}"
                    f"it has {', '.join(labels)}"
                )

    def labels(self) -> tuple[str, ...]:
        """The labels that `where` may name."""
        return OWNER_LABELS


class MetricRule(TriggerRule, frozen=True, kw_only=True, tag="metric"):
    """A series is `above` or `below` a value `for` so long; has `changed` by so much `within` so
    long; or is `absent` for so long while those whom it was of are still there. A counter counts
    as its rate per second.
    """

    metric: str
    above: float | None = None
    below: float | None = None
    changed: Annotated[float, msgspec.Meta(gt=0)] | None = None
    absent: Seconds | None = None
    within: Annotated[float, msgspec.Meta(gt=0, le=86_400)] | None = None
    for_seconds: Annotated[float, msgspec.Meta(ge=0)] = msgspec.field(default=0.0, name="for")

    def __post_init__(self) -> None:
        declared = METRICS.get(self.metric.removeprefix(PREFIX))
        if declared is None:
            raise ValueError(
                f"`{self.name}` is on `{self.metric}`, and there is no such metric; "
                f"{nearest(self.metric.removeprefix(PREFIX), METRICS)}`traceloom agent query` lists them"
            )
        if declared.kind in ("histogram", "info"):
            instead = (
                '; `on = "step-regression"` looks at steps'
                if declared.name == "step_seconds"
                else ""
            )
            raise ValueError(
                f"`{self.name}` is on `{self.metric}`, which has no single value{instead}"
            )
        conditions = [self.above, self.below, self.changed, self.absent]
        if sum(condition is not None for condition in conditions) != 1:
            raise ValueError(f"`{self.name}` needs one of `above`, `below`, `changed`, `absent`")
        if (self.changed is None) != (self.within is None):
            raise ValueError(f"`{self.name}`: `changed` and `within` go together")
        if self.for_seconds and self.above is None and self.below is None:
            raise ValueError(f"`{self.name}`: `for` goes with `above` or `below`")
        super().__post_init__()

    def labels(self) -> tuple[str, ...]:
        """The labels of the metric, and of owners."""
        return tuple(
            dict.fromkeys((*METRICS[self.metric.removeprefix(PREFIX)].labels, *OWNER_LABELS))
        )


class OomKillRule(TriggerRule, frozen=True, kw_only=True, tag="oom-kill"):
    """A process of a control group was killed for want of memory; what is left of its job is
    traced.
    """


class XidRule(TriggerRule, frozen=True, kw_only=True, tag="xid"):
    """A device had an Xid error: one of `codes`, or any where there are none."""

    codes: tuple[int, ...] = ()


class HangRule(TriggerRule, frozen=True, kw_only=True, tag="hang"):
    """A process has stopped to step."""


class StepRegressionRule(TriggerRule, frozen=True, kw_only=True, tag="step-regression"):
    """The median of the `last` steps of a process is above that of its steps before by this share."""

    by: Annotated[float, msgspec.Meta(gt=0)] = 0.2
    last: Annotated[int, msgspec.Meta(ge=30, le=10_000)] = 100


class CadenceRule(TriggerRule, frozen=True, kw_only=True, tag="cadence"):
    """Every so often, at instants that differ from host to host."""

    every: Annotated[float, msgspec.Meta(ge=1)]
    cooldown: Annotated[float, msgspec.Meta(gt=0, le=7 * 86_400)] = 1.0


AnyRule = MetricRule | OomKillRule | XidRule | HangRule | StepRegressionRule | CadenceRule


class TriggerBudget(ConfigTable, frozen=True):
    """Limits of all triggered traces together, in any 24 hours."""

    share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.01  # of a process's time
    mb_per_day: Annotated[float, msgspec.Meta(gt=0)] = 5000.0  # for the whole host
    mb_per_trace: Annotated[float, msgspec.Meta(gt=0)] = (
        200.0  # reserved for each file until its size is known
    )


class Config(ConfigTable, frozen=True):
    """All of `agent.toml`."""

    host: str = ""  # "": the name of this host
    paths: Paths = Paths()
    collect: Collect = Collect()
    accelerators: Accelerators = Accelerators()
    owners: Owners = Owners()
    history: HistorySettings = HistorySettings()
    probes: Probes = Probes()
    tcp: Tcp = Tcp()
    access: Access = Access()
    traces: Traces = Traces()
    fleet: FleetLink = FleetLink()
    hangs: Hangs = Hangs()
    triggers: tuple[AnyRule, ...] = ()
    trigger_budget: TriggerBudget = TriggerBudget()
    otlp: Otlp = Otlp()
    compat: tuple[str, ...] = ()  # `dcgm`: also under the names of dcgm-exporter

    def __post_init__(self) -> None:
        names = [rule.name for rule in self.triggers]
        if duplicates := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"two triggers have the name `{duplicates[0]}`")

    @property
    def host_name(self) -> str:
        """The name of this host in everything published."""
        return self.host or socket.gethostname()


Document = TypeVar("Document", bound=ConfigTable)


def load(path: str | os.PathLike[str]) -> Config:
    """Read `agent.toml`.

    Raises:
        InputError: `unreadable`; `wrong-config`: not TOML, an unknown key or a value of another
            type, with its path.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(path, error, "configuration") from error
    return parse_document(text, Config, str(path))


def parse_document(text: str, kind: type[Document], path: str) -> Document:
    """Parse and validate a TOML document; `path` names it in errors.

    Raises:
        InputError: `wrong-config`: not TOML, an unknown key or a value of another type, with its
            path.
    """
    try:
        document = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise InputError(
            f"the configuration is not TOML: {error}", slug="wrong-config", where=path
        ) from error
    _refuse_unknown(document, kind, "", path)
    try:
        return msgspec.convert(document, kind)
    except msgspec.ValidationError as error:
        message, _, location = str(error).partition(" - at `$.")
        raise InputError(
            f"the configuration is wrong: {describe_validation_error(message)}",
            slug="wrong-config",
            where=f"{path}: {location.rstrip('`')}" if location else path,
        ) from error


def _refuse_unknown(
    table: dict[str, Any], kind: type[msgspec.Struct], prefix: str, path: str
) -> None:
    fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    tag = kind.__struct_config__.tag_field
    for key, value in table.items():
        if key not in fields and key != tag:
            raise InputError(
                f"the configuration has no key `{prefix}{key}`",
                slug="wrong-config",
                where=path,
                hint=nearest(key, fields)
                + f"{f'`{prefix[:-1]}`' if prefix else 'it'} has {', '.join(fields)}",
            )
        for inner, kinds in _iterate_tables(value, fields[key].type) if key in fields else ():
            inner_kind = kinds.get(str(inner.get("on", ""))) or kinds.get("")
            if inner_kind is None:
                raise InputError(
                    f'`{prefix}{key}` has no `on = "{inner.get("on", "")}"`',
                    slug="wrong-config",
                    where=path,
                    hint=nearest(str(inner.get("on", "")), kinds) + f"there are {', '.join(kinds)}",
                )
            _refuse_unknown(inner, inner_kind, f"{prefix}{key}.", path)


def _iterate_tables(
    value: Any, kind: Any
) -> Iterator[tuple[dict[str, Any], dict[str, type[msgspec.Struct]]]]:
    """Yields the tables in a value of a key, each with its possible types by tag; "" if it has
    none.
    """
    inner = value if isinstance(value, list) else [value]
    members = get_args(kind)[0] if isinstance(value, list) and get_args(kind) else kind
    structs = [
        member
        for member in get_args(members) or (members,)
        if isinstance(member, type) and issubclass(member, msgspec.Struct)
    ]
    kinds = {str(member.__struct_config__.tag or ""): member for member in structs}
    yield from ((table, kinds) for table in inner if isinstance(table, dict) and kinds)


class AgentPaths(msgspec.Struct, frozen=True):
    """Locations of this user's agent: its files, and the directories of libkineto's sockets and of
    traces.
    """

    socket: Path
    history: Path
    audit: Path
    kineto: Path
    requests: Path
    traces: Path
    hangs: Path

    @property
    def triggers(self) -> Path:
        """The database of trigger charges, next to that of requests."""
        return self.requests.with_name("triggers.db")


def resolve_paths(config: Config) -> AgentPaths:
    """Returns the locations of this user's agent: the system's for root, else XDG's.

    Unnamed locations are next to a configured socket or history, so that two agents do not share
    them.
    """
    if os.geteuid() == 0:
        run, state, log = (
            Path("/run/traceloom"),
            Path("/var/lib/traceloom"),
            Path("/var/log/traceloom"),
        )
    else:
        runtime = os.environ.get("XDG_RUNTIME_DIR")
        run = (
            Path(runtime, "traceloom")
            if runtime
            else Path(tempfile.gettempdir(), f"traceloom-{os.geteuid()}")
        )
        state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state", "traceloom")
        log = state
    if config.paths.root:
        run = state = log = Path(config.paths.root)
    run = Path(config.paths.socket).parent if config.paths.socket else run
    if config.paths.history:
        state = log = Path(config.paths.history).parent
    return AgentPaths(
        Path(config.paths.socket or run / "agent.sock"),
        Path(config.paths.history or state / "agent.db"),
        Path(config.paths.audit or log / "audit.jsonl"),
        Path(config.paths.kineto or run / "kineto"),
        Path(config.paths.requests or state / "requests.db"),
        Path(config.paths.traces or state / "traces"),
        Path(config.paths.hangs or state / "hangs.json"),
    )


def get_default_path() -> Path:
    """Returns the default location of `agent.toml`."""
    if os.geteuid() == 0:
        return Path("/etc/traceloom/agent.toml")
    return Path(
        os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config", "traceloom", "agent.toml"
    )
