"""What the agent is told: `agent.toml`. Every key has a default; unknown ones are refused, with the nearest name."""

from __future__ import annotations

import os
import re
import socket
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import msgspec

from traceloom.errors import InputError, nearest, unreadable

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


SYSTEM_SOCKET = Path("/run/traceloom/agent.sock")


Seconds = Annotated[float, msgspec.Meta(gt=0)]


class ConfigTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table of the file."""


class Paths(ConfigTable, frozen=True):
    """Where the agent keeps things; "" takes the usual one: of the system for root, else of the user (XDG)."""

    socket: str = ""
    history: str = ""
    audit: str = ""
    kineto: str = ""  # directory of libkineto's sockets; a short name
    requests: str = ""
    traces: str = ""  # directory that profilers write below, and nowhere else


class Collect(ConfigTable, frozen=True):
    """What is looked at, how often, and when it is given up. `periods`, `timeouts`: collector -> seconds."""

    period: Seconds = 10.0
    periods: dict[str, Seconds] = {}
    timeout: Seconds = 2.0
    timeouts: dict[str, Seconds] = {}
    off: tuple[str, ...] = ()  # collectors that do not run
    proc: str = "/proc"  # where the host's are mounted in a container
    sys: str = "/sys"


class Accelerators(ConfigTable, frozen=True):
    """Back ends, in order; empty: those that find devices. `scrape` are addresses of exporters."""

    backends: tuple[str, ...] = ()
    scrape: tuple[str, ...] = ()
    recorded: str = ""  # a file of samples
    simulated: int = 0  # devices to make up
    reference: str = "A100 SXM 80GB"  # device that reference-device seconds are counted in


class Owners(ConfigTable, frozen=True):
    """Where ownership is read, beside the environment of processes."""

    kubelet: str = "/var/lib/kubelet/pod-resources/kubelet.sock"
    job_mapping: str = ""  # directory with one file per GPU, as dcgm-exporter's --hpc-job-mapping-dir
    variables: dict[str, str] = {}  # variable of the environment -> field of Owner, or `labels.NAME`


class HistorySettings(ConfigTable, frozen=True):
    """How long what was is kept."""

    interval: float = 10.0
    hours: float = 24.0
    most_mb: float = 200.0
    recent_seconds: int = 600


class Token(ConfigTable, frozen=True):
    """Who may come over TCP: the SHA-256 of the token in hex, and what it may do: `read` or `all`."""

    sha256: str
    name: str
    may: str = "read"


class Probes(ConfigTable, frozen=True):
    """Probes of functions in processes, where the kernel and the agent's rights allow them."""

    steps: bool = True  # steps and loader waits of PyTorch processes that do not report them


class Tcp(ConfigTable, frozen=True):
    """The TCP listener: none without `address`. Beyond loopback it needs TLS, and tokens or client certificates."""

    address: str = ""  # 127.0.0.1:9465
    certificate: str = ""
    key: str = ""
    client_ca: str = ""
    tokens: tuple[Token, ...] = ()


class Access(ConfigTable, frozen=True):
    """Who may see what over the unix socket, and how much."""

    group: str = ""  # sees all, as root does
    requests_per_second: float = 200.0  # of one peer
    connections: int = 256
    request_bytes: int = 1 << 20
    seconds: float = 10.0  # for a client to send its request and take the answer


class Dynolog(ConfigTable, frozen=True):
    """dynolog's RPC: no authentication, therefore off unless an address is given."""

    address: str = ""  # 127.0.0.1:1778


class Traces(ConfigTable, frozen=True):
    """Traces on demand: what one may cost, and how much is kept."""

    abstract: bool = False  # also answer at dynolog's abstract name, where any user reaches any other's processes
    attach: bool = False  # also trace processes that were not prepared: their main thread is stopped, and runs our text
    poll: int = 1  # seconds between polls of processes that `agent env` prepares
    most_seconds: float = 60.0
    most_steps: int = 1000
    wait: float = 120.0  # for a process to be ready: to register, to step, to end its own profile
    most_file_mb: float = 2000.0
    most_mb_per_user: float = 10_000.0
    most_requests_per_user: int = 16  # that run at a time
    keep_days: float = 7.0


class Otlp(ConfigTable, frozen=True):
    """An OTLP/HTTP receiver for metrics."""

    endpoint: str = ""
    period: float = 60.0
    headers: dict[str, str] = {}
    timeout: float = 10.0


class Files(ConfigTable, frozen=True):
    """Metrics as files: JSON lines, rotated; Parquet, one file per hour."""

    json_lines: str = ""
    json_lines_mb: float = 100.0
    parquet: str = ""
    parquet_days: float = 7.0


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
    dynolog: Dynolog = Dynolog()
    traces: Traces = Traces()
    otlp: Otlp = Otlp()
    files: Files = Files()
    compat: tuple[str, ...] = ()  # `dcgm`: also under the names of dcgm-exporter

    @property
    def host_name(self) -> str:
        """What this host is called in everything published."""
        return self.host or socket.gethostname()


def load(path: str | os.PathLike[str]) -> Config:
    """Read `agent.toml`.

    Raises:
        InputError: `unreadable`; `wrong-config`: not TOML, an unknown key or a value of another type, with its path.
    """
    try:
        document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(path, error, "configuration") from error
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"the configuration is not TOML: {error}", slug="wrong-config", where=str(path)) from error
    _refuse_unknown(document, Config, "", str(path))
    try:
        return msgspec.convert(document, Config)
    except msgspec.ValidationError as error:
        message, _, where = str(error).partition(" - at `$.")
        raise InputError(
            f"the configuration is wrong: {message[:1].lower()}{message[1:]}",
            slug="wrong-config", where=f"{path}: {where.rstrip('`')}" if where else str(path),
        ) from error  # fmt: skip


def _refuse_unknown(table: dict[str, Any], kind: type[msgspec.Struct], above: str, path: str) -> None:
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    for key, value in table.items():
        if key not in fields:
            raise InputError(
                f"the configuration has no key `{above}{key}`", slug="wrong-config", where=path,
                hint=nearest(key, fields) + f"`{above.rstrip('.') or 'it'}` has {', '.join(fields)}",
            )  # fmt: skip
        inner = fields[key].type
        if isinstance(value, dict) and isinstance(inner, type) and issubclass(inner, msgspec.Struct):
            _refuse_unknown(value, inner, f"{above}{key}.", path)


class Locations(msgspec.Struct, frozen=True):
    """Where the agent of this user keeps its files, and the directories of libkineto's sockets and of traces."""

    socket: Path
    history: Path
    audit: Path
    kineto: Path
    requests: Path
    traces: Path


def locations(config: Config) -> Locations:
    """The locations of an agent of this user: the system's for root, else XDG's.

    What is not named lies beside the socket or the history that is, so that two agents do not share it.
    """
    if os.geteuid() == 0:
        run, state, log = Path("/run/traceloom"), Path("/var/lib/traceloom"), Path("/var/log/traceloom")
    else:
        runtime = os.environ.get("XDG_RUNTIME_DIR")
        run = Path(runtime, "traceloom") if runtime else Path(tempfile.gettempdir(), f"traceloom-{os.geteuid()}")
        state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state", "traceloom")
        log = state
    run = Path(config.paths.socket).parent if config.paths.socket else run
    state = Path(config.paths.history).parent if config.paths.history else state
    return Locations(
        Path(config.paths.socket or run / "agent.sock"),
        Path(config.paths.history or state / "agent.db"),
        Path(config.paths.audit or log / "audit.jsonl"),
        Path(config.paths.kineto or run / "kineto"),
        Path(config.paths.requests or state / "requests.db"),
        Path(config.paths.traces or state / "traces"),
    )


def usual_path() -> Path:
    """Where `agent.toml` is looked for when none is named."""
    if os.geteuid() == 0:
        return Path("/etc/traceloom/agent.toml")
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config", "traceloom", "agent.toml")


_ADDRESS = re.compile(r"(?:\[(?P<six>[0-9A-Fa-f:]+)\]|(?P<name>[^:\[\]]+)):(?P<port>\d{1,5})")


def host_and_port(text: str) -> tuple[str, int]:
    """`127.0.0.1:9465` or `[::1]:9465`.

    Raises:
        InputError: `wrong-config`: it is neither.
    """
    match = _ADDRESS.fullmatch(text)
    if match is None or int(match["port"]) > 65535:
        raise InputError(f"`{text}` is no address, as 127.0.0.1:9465", slug="wrong-config")
    return match["six"] or match["name"], int(match["port"])
