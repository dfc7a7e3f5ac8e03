"""Parses and validates the fleet's rule documents: owners.toml, prices.toml and triggers.toml."""

from __future__ import annotations

import re
import sys
from datetime import date, datetime, timezone
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from traceloom.agent.config import parse_document
from traceloom.agent.fleet_link.protocol import HostProcess
from traceloom.agent.traces.requests import ProfilerName, TraceSpec
from traceloom.errors import InputError, nearest, unreadable
from traceloom.fleet.store.schema import DIMENSIONS
from traceloom.server.settings import ConfigTable
from traceloom.system.files import read_small
from traceloom.system.text import NAME

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover - the tests run on newer ones
    import tomli as tomllib

MAX_BYTES = 1 << 22
_MATCHABLE_FIELDS = ("job", "scheduler", *DIMENSIONS)
_LABEL_KEY = re.compile(r"label\.[A-Za-z0-9_./-]{1,100}")
_Amount = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
_Text = Annotated[str, msgspec.Meta(min_length=1, max_length=500)]


class OwnerRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"first": "from"}):
    """`[[rule]]`: sets the owners of matching jobs.

    Attributes:
        match: `job`, `scheduler`, a dimension or `label.NAME` -> pattern with `*` and `?`. All must
            match the job's own statement; an empty `match` matches every job.
        set: Dimension -> value.
        first: First day (UTC) on which it applies, `from` in the file; None: always.
        until: First day on which it no longer applies; None: never.
    """

    set: dict[str, _Text]
    match: dict[str, _Text] = {}
    first: date | None = None
    until: date | None = None

    def __post_init__(self) -> None:
        if unknown := sorted(
            name
            for name in self.match
            if name not in _MATCHABLE_FIELDS and not _LABEL_KEY.fullmatch(name)
        ):
            raise ValueError(
                f"no job is matched by `{unknown[0]}`, but by {', '.join(_MATCHABLE_FIELDS)}, label.NAME"
            )
        if unknown := sorted(set(self.set) - set(DIMENSIONS)):
            raise ValueError(f"`{unknown[0]}` is not what a rule sets: {', '.join(DIMENSIONS)}")
        if self.from_ns >= self.until_ns:
            raise ValueError("it ends before it begins")

    @property
    def from_ns(self) -> int:
        """Start in Unix time, ns."""
        return EARLIEST if self.first is None else _convert_to_ns(self.first)

    @property
    def until_ns(self) -> int:
        """End in Unix time, ns."""
        return LATEST if self.until is None else _convert_to_ns(self.until)


class Prices(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`prices.toml`: prices of device hours and energy.

    Attributes:
        currency: Such as EUR.
        per_kwh: Price of a kilowatt hour on top of the device hour; None: included in the device
            hour.
        co2_g_per_kwh: Grams of CO2 per kilowatt hour; None: unknown.
        device_hour: Device model, or `default`, -> price of an hour.
    """

    currency: _Text
    per_kwh: _Amount | None = None
    co2_g_per_kwh: _Amount | None = None
    device_hour: dict[str, _Amount] = {}

    @property
    def of_models(self) -> dict[str, float]:
        """Returns prices of explicitly named device models."""
        return {name: price for name, price in self.device_hour.items() if name != "default"}


class _OwnersDocument(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    rule: Annotated[tuple[OwnerRule, ...], msgspec.Meta(max_length=1_000)] = ()


EARLIEST, LATEST = -(1 << 62), 1 << 62
"""Before and after all valid times, ns."""
_Kind = TypeVar("_Kind", _OwnersDocument, Prices)


def read_rules(path: Path) -> tuple[OwnerRule, ...]:
    """Reads the rules of `owners.toml`; for each dimension the first matching rule that sets it
    counts.

    Raises:
        InputError: `unreadable`, `bad-owners`.
    """
    return parse_rules(_read_file(path), str(path))


def parse_rules(text: str | bytes, location: str = "") -> tuple[OwnerRule, ...]:
    """Parses the text of `owners.toml`; errors name `location`.

    Raises:
        InputError: `bad-owners`.
    """
    return _parse_toml(text, _OwnersDocument, slug="bad-owners", location=location).rule


def read_prices(path: Path) -> Prices:
    """Reads the prices of `prices.toml`.

    Raises:
        InputError: `unreadable`, `bad-prices`.
    """
    return parse_prices(_read_file(path), str(path))


def parse_prices(text: str | bytes, location: str = "") -> Prices:
    """Parses the text of `prices.toml`; errors name `location`.

    Raises:
        InputError: `bad-prices`.
    """
    return _parse_toml(text, Prices, slug="bad-prices", location=location)


def _read_file(path: Path) -> bytes:
    try:
        return read_small(path, MAX_BYTES)
    except OSError as error:
        raise unreadable(path, error) from error


def _parse_toml(text: str | bytes, kind: type[_Kind], *, slug: str, location: str) -> _Kind:
    try:
        return msgspec.convert(
            tomllib.loads(text if isinstance(text, str) else text.decode()), kind
        )
    except (ValueError, RecursionError) as error:  # not TOML, not UTF-8, or a wrong key
        raise InputError(
            f"the file is not what it should be: {error}", slug=slug, where=location
        ) from error


def _convert_to_ns(day: date) -> int:
    return (
        int(datetime(day.year, day.month, day.day, tzinfo=timezone.utc).timestamp()) * 1_000_000_000
    )


DEFAULT_STEPS = 3
MATCHED_LABELS = ("job", "user", "account", "scheduler", "framework")
_DAY_S = 86_400.0
_MAX_RULES = 100
Share: TypeAlias = Annotated[float, Meta(gt=0, le=1)]


class FleetRule(ConfigTable, frozen=True, kw_only=True, tag_field="on"):
    """Settings of every rule: jobs (`where`, with * and ?), ranks, what to trace, and how often at
    most.

    `target`: all ranks of the job, or the slowest and a median one by the step rates that hosts
    report; `ranks` and `hosts`: only these. Without `steps` and `duration`, three steps are traced.
    `cooldown`: seconds, per rule and job.
    """

    name: Annotated[str, Meta(pattern=NAME)]
    where: dict[str, str] = msgspec.field(default_factory=dict)
    target: Literal["job", "slowest-and-median"] = "job"
    ranks: Annotated[tuple[Annotated[int, Meta(ge=0)], ...], Meta(max_length=1024)] = ()
    hosts: Annotated[tuple[str, ...], Meta(max_length=1024)] = ()
    profilers: Annotated[tuple[ProfilerName, ...], Meta(min_length=1, max_length=7)] = ("timeline",)
    steps: Annotated[int, Meta(ge=1, le=1000)] | None = None
    duration: Annotated[float, Meta(gt=0, le=60)] | None = None
    shapes: bool = False
    stacks: bool = False
    cooldown: Annotated[float, Meta(gt=0, le=7 * _DAY_S)] = 3600.0

    def __post_init__(self) -> None:
        if self.steps is not None and self.duration is not None:
            raise ValueError(f"`{self.name}` has both `steps` and `duration`")
        for label in self.where:
            if label not in MATCHED_LABELS:
                hint = nearest(label, MATCHED_LABELS)
                raise ValueError(
                    f"`{self.name}` has `where.{label}`; {hint}it may have {', '.join(MATCHED_LABELS)}"
                )

    def takes(self, process: HostProcess) -> bool:
        """Returns whether a process belongs to a job that the rule covers."""
        return all(
            fnmatchcase(getattr(process, label), pattern) for label, pattern in self.where.items()
        )

    def make_spec(self, job: str) -> TraceSpec:
        return TraceSpec(
            job=job,
            ranks=self.ranks,
            profilers=self.profilers,
            steps=DEFAULT_STEPS if self.steps is None and self.duration is None else self.steps,
            duration_s=self.duration,
            shapes=self.shapes,
            stacks=self.stacks,
        )


class FleetCadenceRule(FleetRule, frozen=True, kw_only=True, tag="cadence"):
    """Each day (UTC) traces a share of the jobs, once each, within their first hour of the day."""

    share: Share


class UsageRule(FleetRule, frozen=True, kw_only=True, tag="usage"):
    """A job's busy share of device time is below a threshold in the last whole reported minutes."""

    busy_below: Share
    minutes: Annotated[int, Meta(ge=1, le=1440)] = 15


class FindingTriggerRule(FleetRule, frozen=True, kw_only=True, tag="finding"):
    """A capture of a job, not requested by a rule, has a finding that saves at least a share of the
    step.
    """

    slug: Annotated[str, Meta(min_length=1, max_length=100)]
    saving: Annotated[float, Meta(ge=0, le=1)] = 0.0
    cooldown: Annotated[float, Meta(gt=0, le=7 * _DAY_S)] = _DAY_S


class RegressionRule(FleetRule, frozen=True, kw_only=True, tag="regression"):
    """A kernel newly became slower by at least this share: a job that shows it is traced."""

    by: Annotated[float, Meta(gt=0)] = 0.05


AnyFleetRule: TypeAlias = FleetCadenceRule | UsageRule | FindingTriggerRule | RegressionRule


class FleetBudget(ConfigTable, frozen=True):
    """Budget of all traces of rules together, in any 24 hours."""

    traces_per_day: Annotated[int, Meta(ge=1)] = 50
    mb_per_day: Annotated[float, Meta(gt=0)] = 20_000.0
    mb_per_trace: Annotated[float, Meta(gt=0)] = (
        200.0  # of each process and profiler; set aside until it is measured
    )
    share: Share = 0.01  # of the steps of a job


class FleetRules(ConfigTable, frozen=True):
    """All rules, and the budget that they share."""

    triggers: tuple[AnyFleetRule, ...] = ()
    budget: FleetBudget = FleetBudget()

    def __post_init__(self) -> None:
        if len(self.triggers) > _MAX_RULES:
            raise ValueError(f"there are more than {_MAX_RULES} triggers")
        names = [rule.name for rule in self.triggers]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"two triggers have the name `{twice[0]}`")

    @classmethod
    def of(cls, text: str) -> FleetRules:
        """Parses a document.

        Raises:
            InputError: `wrong-config`.
        """
        return parse_document(text, cls, "the rules")


def get_rule_kind(rule: FleetRule) -> str:
    """Returns the kind of a rule, as `on` names it."""
    return str(rule.__struct_config__.tag)
