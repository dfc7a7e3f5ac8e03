"""Types of the documents of a what-if, a sweep, a job at another scale and a calibration."""

from __future__ import annotations

from typing import Any, Literal, TypedDict

from traceloom.report.documents.head import DocumentHead
from traceloom.trace.notice import NoticeFields


class AssumedChangeRow(TypedDict):
    """A change, and its assumptions."""

    change: str
    assumes: str


class ChangedRankRow(TypedDict):
    """The duration of a rank."""

    rank: int
    before_ns: int
    after_ns: int
    saved_ns: int


class PathPart(TypedDict):
    """A part of a critical path."""

    what: str
    kind: str


class PathPartRow(PathPart):
    """A kind of time on the critical path."""

    before_ns: int
    after_ns: int


class TrustValue(TypedDict):
    """The errors of the graph, which limit the trust in the answer."""

    sentence: str
    holds: bool
    honest_error: float
    point_error: float
    residual_share: float


class WhatIfDocument(DocumentHead):
    """The effect of changes."""

    name: str
    step: int | None
    sentence: str
    changes: list[AssumedChangeRow]
    before_ns: int
    after_ns: int
    saved_ns: int
    saved_fraction: float
    host_ratio: float | None
    rescaled_saved_ns: int
    ranks: list[ChangedRankRow]
    path: list[PathPartRow]
    law: TrustValue
    trusted: bool
    lower_bound: bool
    upper_bound: bool
    chance_ns: int


class StepQuantileRow(TypedDict):
    """The duration that a percentage of the steps does not exceed."""

    percent: int
    time_ns: int


class ScaledCollectiveRow(TypedDict):
    """The scaled values of a kind of collective."""

    kind: str | None
    copies: int
    calls: int
    ranks_before: int
    ranks_after: int
    in_bytes_before: int | None
    in_bytes_after: int | None
    transfer_before_ns: int
    transfer_after_ns: int
    waiting_before_ns: int
    waiting_after_ns: int


class ScaledDocument(DocumentHead):
    """A job of many ranks, from a few recorded ones."""

    name: str
    machine: str
    sentence: str
    identity: str
    ranks_before: int
    ranks: int
    data_parallel_before: int
    data_parallel: int
    recorded: int
    before_ns: int
    measured: bool
    identity_ns: int
    identity_error: float
    equal_ns: int
    after_ns: int
    p10_ns: int
    p90_ns: int
    quantiles: list[StepQuantileRow]
    collectives: list[ScaledCollectiveRow]
    draws: int
    seed: int
    notices: list[NoticeFields]


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


class TransferFitRow(TypedDict):
    """The transfers of a group of ranks in a range of sizes; bandwidth null means independent of
    bytes.
    """

    collective: str
    span: Literal["inside", "between"]
    ranks: int
    from_bytes: int
    to_bytes: int
    size_count: int
    count: int
    form: str
    alpha_ns: float
    bandwidth: float | None
    residual_p10: float
    residual_p50: float
    residual_p90: float
    whole: bool


class CalibrationDocument(DocumentHead):
    """The durations of collectives; `machine` is as in its file: without default values."""

    sentence: str
    transfers: list[TransferFitRow]
    machine: dict[str, Any]
    notices: list[NoticeFields]
