"""Types of the document of a verdict, and of the list of baselines."""

from typing import TypedDict

from traceloom.report.documents.comparison import ComparisonDocument, ConditionRow
from traceloom.report.documents.head import DocumentHead


class JudgedRunRow(TypedDict):
    """A run of one side."""

    name: str
    recorded_steps: int
    undisturbed_steps: int | None


class JudgedSideValue(TypedDict):
    """One side."""

    name: str
    runs: list[JudgedRunRow]


class CheckRow(TypedDict):
    """A condition and its result."""

    condition: str
    verdict: str
    reason: str
    metric: str
    measure: str
    base: float | None
    new: float | None
    change: float | None
    low: float | None
    high: float | None
    limit: float
    relative: bool
    effect_size: float | None
    scatter: float | None
    sample: str
    source: str
    base_runs: int
    new_runs: int
    base_steps: int
    new_steps: int


class CauseRow(TypedDict):
    """A named difference."""

    what: str
    name: str
    base_ns: int
    new_ns: int
    difference_ns: int


class PowerRow(TypedDict):
    """The number of runs that would show a change."""

    condition: str
    effect: float
    scatter: float | None
    runs: int | None
    reason: str | None


class VerdictDocument(DocumentHead):
    """Whether the new side is worse."""

    passed: bool
    strict: bool
    base: JudgedSideValue
    new: JudgedSideValue
    verdict: str
    sentence: str
    comparable: bool
    checks: list[CheckRow]
    conditions: list[ConditionRow]
    causes: list[CauseRow]
    power: list[PowerRow]
    comparison: ComparisonDocument | None


class BaselineRow(TypedDict):
    """A row of the list of baselines."""

    name: str
    saved_unix_s: int
    runs: int
    steps: int
    step_ns: int | None
    device: str
    traceloom: str


class BaselinesDocument(TypedDict):
    """The baselines of a store."""

    store: str
    baselines: list[BaselineRow]
