"""Rules of the fleet: which jobs are traced though nobody asks, how, and what that may cost. TOML, as agent.toml."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from traceloom.agent.config import ConfigTable, parsed
from traceloom.agent.requests.model import ProfilerName, Wanted
from traceloom.agent.uplink.messages import HostProcess
from traceloom.allowed_texts import NAME
from traceloom.errors import nearest

USUAL_STEPS = 3
LABELS = ("job", "user", "account", "scheduler", "framework")
_DAY_S = 86_400.0
_MOST_RULES = 100
Share: TypeAlias = Annotated[float, Meta(gt=0, le=1)]


class FleetRule(ConfigTable, frozen=True, kw_only=True, tag_field="on"):
    """What every rule says: of which jobs (`where`, with * and ?), whom of a job, how, and how often at most.

    `target`: all ranks of the job, or the slowest and one in the middle, by the steps that hosts tell of; `ranks` and
    `hosts`: these alone. Without `steps` and `duration` it is three steps. `cooldown`: seconds, of the rule and a job.
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
            if label not in LABELS:
                hint = nearest(label, LABELS)
                raise ValueError(f"`{self.name}` has `where.{label}`; {hint}it may have {', '.join(LABELS)}")

    def takes(self, process: HostProcess) -> bool:
        """Whether a process is of a job that the rule is about."""
        return all(fnmatchcase(getattr(process, label), pattern) for label, pattern in self.where.items())

    def wanted(self, job: str) -> Wanted:
        """What is asked for."""
        steps = USUAL_STEPS if self.steps is None and self.duration is None else self.steps
        return Wanted(
            job=job, ranks=self.ranks, profilers=self.profilers, steps=steps, duration_s=self.duration,
            shapes=self.shapes, stacks=self.stacks,
        )  # fmt: skip


class FleetCadenceRule(FleetRule, frozen=True, kw_only=True, tag="cadence"):
    """Each day (UTC) a share of the jobs, once each, within their first hour of the day."""

    share: Share


class UsageRule(FleetRule, frozen=True, kw_only=True, tag="usage"):
    """A job computes in less than a share of its device time, in the last whole minutes that hosts told of."""

    busy_below: Share
    minutes: Annotated[int, Meta(ge=1, le=1440)] = 15


class FindingTriggerRule(FleetRule, frozen=True, kw_only=True, tag="finding"):
    """A capture of a job, which no rule asked for, has a finding that saves at least a share of the step."""

    slug: Annotated[str, Meta(min_length=1, max_length=100)]
    saving: Annotated[float, Meta(ge=0, le=1)] = 0.0
    cooldown: Annotated[float, Meta(gt=0, le=7 * _DAY_S)] = _DAY_S


class RegressionRule(FleetRule, frozen=True, kw_only=True, tag="regression"):
    """A kernel became slower by at least this share, which was not known before: a job that shows it is traced."""

    by: Annotated[float, Meta(gt=0)] = 0.05


AnyFleetRule: TypeAlias = FleetCadenceRule | UsageRule | FindingTriggerRule | RegressionRule


class FleetBudget(ConfigTable, frozen=True):
    """What all traces of rules may cost together, in any 24 hours."""

    traces_per_day: Annotated[int, Meta(ge=1)] = 50
    mb_per_day: Annotated[float, Meta(gt=0)] = 20_000.0
    mb_per_trace: Annotated[float, Meta(gt=0)] = 200.0  # of each process and profiler; set aside until it is measured
    share: Share = 0.01  # of the steps of a job


class FleetRules(ConfigTable, frozen=True):
    """All rules, and the budget that they share."""

    triggers: tuple[AnyFleetRule, ...] = ()
    budget: FleetBudget = FleetBudget()

    def __post_init__(self) -> None:
        if len(self.triggers) > _MOST_RULES:
            raise ValueError(f"there are more than {_MOST_RULES} triggers")
        names = [rule.name for rule in self.triggers]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"two triggers have the name `{twice[0]}`")

    @classmethod
    def of(cls, text: str) -> FleetRules:
        """Read a document.

        Raises:
            InputError: `wrong-config`.
        """
        return parsed(text, cls, "the rules")


def on(rule: FleetRule) -> str:
    """The kind of a rule, as `on` names it."""
    return str(rule.__struct_config__.tag)
