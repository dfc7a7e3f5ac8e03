"""Types of the sweep document."""

from typing import TypedDict

from traceloom.report.documents.head import DocumentHead


class SweepAnswerFields(TypedDict):
    """The keys of every point, besides a value for each parameter; `ranks` as requested if it is a
    parameter.
    """

    ranks: float | str | None
    samples: float | None
    p10_ns: int | None
    p90_ns: int | None
    cost: float | None
    memory_bytes: int | None
    flags: str | None
    reason: str | None
    pareto: bool


class SweepPointRow(SweepAnswerFields):
    """A point; `reason` explains why it has no time."""

    time_ns: int | None


class AnsweredPointRow(SweepAnswerFields):
    """A point that has a time."""

    time_ns: int


class SensitivityRow(TypedDict):
    """The change of the time in percent per percent of a parameter."""

    parameter: str
    median: float
    low: float
    high: float
    pairs: int


class SweepDocument(DocumentHead):
    """The results of a sweep over many points."""

    name: str
    keys: list[str]
    points: list[SweepPointRow]
    sensitivities: list[SensitivityRow]
