"""Reading and writing `machine.toml`, with changes by `--set`."""

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import msgspec

from traceloom.analyze.placed_calls import Peak, find, parse_peak
from traceloom.errors import InputError, UsageError, nearest, other_version, unreadable
from traceloom.system.files import read_small, remember_input
from traceloom.system.text import encode_json
from traceloom.workload.simulate.machine import (
    Algorithm,
    AlgorithmRule,
    Collective,
    Count,
    Dimension,
    Machine,
    MeasuredTransfer,
    Member,
    Nic,
    Span,
    SpeedFactor,
    Topology,
)

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover - the tests run on newer ones
    import tomli as tomllib

FORMAT = "traceloom-machine"
VERSION = 1
MAX_BYTES = 1 << 24
_PRESETS = files("traceloom.workload.simulate") / "presets"


@dataclass(frozen=True)
class _RanksTable:
    order: tuple[Member, ...] = ()
    per_host: Count | None = None


@dataclass(frozen=True)
class _DeviceTable:
    name: str = ""
    peaks: dict[str, float] | None = None

    def peak(self) -> Peak:
        if self.peaks is None:
            return parse_peak(self.name)
        peak = parse_peak(self.peaks)
        return Peak(self.name or peak.name, peak.flops, peak.memory)

    def __post_init__(self) -> None:
        self.peak()


@dataclass(frozen=True)
class _MachineDocument:
    network: tuple[Dimension, ...] = ()
    format: Literal["traceloom-machine"] = FORMAT  # type: ignore[assignment]
    version: Literal[1] = VERSION  # type: ignore[assignment]
    name: str = ""
    source: str = ""
    price_per_hour: Annotated[float, msgspec.Meta(ge=0)] | None = None
    nic: Nic | None = None
    ranks: _RanksTable = _RanksTable()
    algorithm: tuple[AlgorithmRule, ...] = ()
    device: _DeviceTable | None = None
    slow: tuple[SpeedFactor, ...] = ()
    transfer: tuple[MeasuredTransfer, ...] = ()

    def machine(self) -> Machine:
        return Machine(
            dimensions=self.network,
            name=self.name,
            source=self.source,
            nic=self.nic,
            order=self.ranks.order,
            per_host=self.ranks.per_host,
            algorithms=self.algorithm,
            device=None if self.device is None else self.device.peak(),
            slow=self.slow,
            transfers=self.transfer,
            price_per_hour=self.price_per_hour,
        )


# Type of each table, so that the error for an unknown key names its place.
_TABLES: dict[str, type] = {
    "network": Dimension,
    "nic": Nic,
    "ranks": _RanksTable,
    "algorithm": AlgorithmRule,
    "device": _DeviceTable,
    "slow": SpeedFactor,
    "transfer": MeasuredTransfer,
}
_LISTS = ("network", "algorithm", "slow", "transfer")
_CHOICES: dict[str, tuple[Any, ...]] = {
    "format": (FORMAT,),
    "version": (VERSION,),
    "topology": get_args(Topology),
    "collective": get_args(Collective),
    "use": get_args(Algorithm),
    "span": get_args(Span),
    "of": ("outer", "all"),
}

_TYPE_NAMES = {
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "array": "a list",
    "object": "a table",
}


def presets() -> tuple[str, ...]:
    """Names of the machines that come with Traceloom."""
    return tuple(
        sorted(
            entry.name.removesuffix(".toml")
            for entry in _PRESETS.iterdir()
            if entry.name.endswith(".toml")
        )
    )


def read_machine(path: str | Path, overrides: Sequence[str] = ()) -> Machine:
    """Returns the machine in a `machine.toml`, or a preset by its name.

    Args:
        path: The file, or the name of a preset. A file of that name takes precedence.
        overrides: Values of `--set`: `network.0.bandwidth=100`, `network.nvlink.latency=500`,
            `nic.bandwidth=25`.

    Raises:
        InputError: slugs `bad-machine`, `unreadable`: the file is not a machine; `other-version`.
        UsageError: slugs `no-such-machine`, `bad-override`.
    """
    if str(path) in presets() and not Path(path).exists():
        content, location = (_PRESETS / f"{path}.toml").read_bytes(), str(path)
    else:
        if not Path(path).exists() and Path(path).suffix != ".toml":
            raise UsageError(
                f"there is no file and no preset `{path}`",
                slug="no-such-machine",
                hint=nearest(str(path), presets()) + f"the presets are {', '.join(presets())}",
            )
        try:
            content, location = read_small(path, MAX_BYTES), str(path)
        except OSError as error:
            raise unreadable(path, error) from error
        remember_input(path)
    try:
        document = tomllib.loads(content.decode("utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise InputError(
            f"the machine is no TOML: {error}", slug="bad-machine", where=location
        ) from error
    version = document.get("version", VERSION)
    if isinstance(version, int) and version != VERSION:
        raise other_version("machine", version, VERSION, location)
    return apply_overrides(build_machine(document, location), overrides)


def apply_overrides(machine: Machine, overrides: Iterable[str]) -> Machine:
    """Returns the machine with the values of `--set`.

    Args:
        machine: The original.
        overrides: `PATH=VALUE` each, with the keys of the file: `network.0.bandwidth=100`. A table
            of a list is given by its index (from 0) or its name.

    Raises:
        UsageError: slug `bad-override`: unknown path, or the machine would be invalid.
    """
    overrides = tuple(overrides)
    if not overrides:
        return machine
    document = build_document(machine)
    for override in overrides:
        path, equals, text = override.partition("=")
        if not equals or not path.strip():
            raise _make_override_error(
                f"expected PATH=VALUE, got `{override}`",
                "write for example network.0.bandwidth=100",
            )
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except (tomllib.TOMLDecodeError, RecursionError):
            value = text.strip()  # words need no quotes
        _set(document, path.strip().split("."), value, override)
    try:
        return build_machine(document, f"--set {' '.join(overrides)}")
    except InputError as error:
        raise UsageError(
            error.message, slug="bad-override", where=error.where, hint=error.hint
        ) from error


def _make_override_error(message: str, hint: str) -> UsageError:
    return UsageError(message, slug="bad-override", hint=hint)


def _set(document: dict[str, Any], keys: list[str], value: Any, override: str) -> None:
    table: Any = document
    for depth, key in enumerate(keys[:-1]):
        if isinstance(table, list) and all(isinstance(entry, dict) for entry in table):
            names = [str(entry.get("name", "")) for entry in table]
            index = (
                names.index(key) if key in names else int(key) if key.isdecimal() else len(table)
            )
            if index >= len(table):
                path = ".".join(keys[:depth])
                entries = f"{len(table)} entries" if len(table) != 1 else "1 entry"
                raise _make_override_error(
                    f"`{path}` has no `{key}` in `{override}`", f"it has {entries}, counted from 0"
                )
            table = table[index]
        elif depth == 0 and key not in _TABLES:
            raise _make_override_error(
                f"a machine has no table `{key}` in `{override}`",
                nearest(key, _TABLES) + f"the tables are {', '.join(_TABLES)}",
            )
        elif isinstance(table, dict):
            table = table.setdefault(key, [] if key in _LISTS else {})
    if not isinstance(table, dict):
        raise _make_override_error(
            f"`{override}` names no key", "write for example network.0.bandwidth=100"
        )
    table[keys[-1]] = value


def build_machine(document: dict[str, Any], location: str) -> Machine:
    """Returns the machine that a document describes.

    Raises:
        InputError: slug `bad-machine`.
    """
    try:
        for path, table, kind in _iterate_tables(document):
            names = [field.name for field in fields(kind)]
            unknown = next((key for key in table if key not in names), None)
            if unknown is not None:
                hint = nearest(unknown, names) + f"{path or 'a machine'} has {', '.join(names)}"
                raise InputError(
                    f"`{unknown}` is no key of {path or 'a machine'}",
                    slug="bad-machine",
                    where=location,
                    hint=hint,
                )
        return msgspec.convert(document, _MachineDocument).machine()
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        path = path.rstrip("`").lstrip(".")
        value, hint = _get_value(document, path), ""
        key = path.rpartition(".")[2]
        if message.startswith("Invalid enum value"):
            hint = nearest(str(value), map(str, _CHOICES[key]))
            message = f"expected one of {', '.join(map(str, _CHOICES[key]))}, got {value!r}"
        elif message.startswith("Expected"):
            expected = message.partition(", got")[0]
            for name, type_text in _TYPE_NAMES.items():
                expected = expected.replace(f"`{name}`", type_text)
            message = f"{expected}, got {value!r}"
        elif message.startswith("Object missing"):
            message = message.replace("Object missing required field", "there is no key", 1)
        message = message[:1].lower() + message[1:]
        raise InputError(
            message, slug="bad-machine", where=", ".join(filter(None, (location, path))), hint=hint
        ) from error
    except UsageError as error:
        raise InputError(
            error.message, slug="bad-machine", where=location, hint=error.hint
        ) from error


def _get_value(document: Any, path: str) -> Any:
    """Returns the value at a path such as `network[0].size`; None if there is none."""
    value = document
    for key in re.findall(r"[^.\[\]]+", path):
        if isinstance(value, list) and key.isdecimal():
            value = value[int(key)]
        else:
            value = value.get(key) if isinstance(value, dict) else None
    return value


def _iterate_tables(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], type]]:
    yield "", document, _MachineDocument
    for key, kind in _TABLES.items():
        value = document.get(key)
        if isinstance(value, dict):
            yield f"`{key}`", value, kind
        elif isinstance(value, list):
            yield from (
                (f"`{key}[{n}]`", entry, kind)
                for n, entry in enumerate(value)
                if isinstance(entry, dict)
            )


def build_document(machine: Machine) -> dict[str, Any]:
    """Returns the machine as the tables of its file, without default values."""
    device = machine.device
    is_known = device is not None and find(device.name) == device
    ranks = {"order": list(machine.order), "per_host": machine.per_host}
    document = {
        "format": FORMAT,
        "version": VERSION,
        "name": machine.name,
        "source": machine.source,
        "price_per_hour": machine.price_per_hour,
        "network": [_build_table(dimension) for dimension in machine.dimensions],
        "nic": machine.nic and _build_table(machine.nic),
        "ranks": {key: value for key, value in ranks.items() if value},
        "algorithm": [_build_table(rule) for rule in machine.algorithms],
        "device": device and {"name": device.name},
        "slow": [_build_table(factor) for factor in machine.slow],
        "transfer": [_build_table(transfer) for transfer in machine.transfers],
    }
    if device is not None and not is_known:
        memory = {} if device.memory is None else {"memory": device.memory}
        document["device"] = {"name": device.name, "peaks": {**device.flops, **memory}}
    return {key: value for key, value in document.items() if value not in (None, "", [], {})}


def _build_table(part: Any) -> dict[str, Any]:
    values = {
        field.name: getattr(part, field.name)
        for field in fields(part)
        if getattr(part, field.name) != field.default
    }
    return dict(msgspec.to_builtins(values))


def machine_text(machine: Machine) -> str:
    """Returns the machine as the text of a `machine.toml`."""
    document = build_document(machine)
    for table, dimension in zip(document.get("network", ()), machine.dimensions, strict=True):
        if (
            dimension.links
        ):  # TOML lists have no gaps: if a link only has its own latency, both are written
            table["links"] = [
                wire._replace(bandwidth=dimension.bandwidth)
                if wire[2] is None and wire[3] is not None
                else wire
                for wire in dimension.links
            ]
    lines = [
        f"{key} = {_format_toml(value)}" for key, value in document.items() if key not in _TABLES
    ]
    for key, value in document.items():
        for table in value if isinstance(value, list) else [value] if key in _TABLES else []:
            lines += ["", f"[[{key}]]" if isinstance(value, list) else f"[{key}]"]
            lines += [f"{name} = {_format_toml(inner)}" for name, inner in table.items()]
    return "\n".join(lines) + "\n"


def _format_toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str):
        return (
            encode_json(value).decode().replace("\x7f", "\\u007f")
        )  # JSON strings are TOML strings, except for DEL
    if isinstance(value, dict):
        return (
            "{ "
            + ", ".join(f"{key} = {_format_toml(inner)}" for key, inner in value.items())
            + " }"
        )
    return "[" + ", ".join(map(_format_toml, (inner for inner in value if inner is not None))) + "]"
