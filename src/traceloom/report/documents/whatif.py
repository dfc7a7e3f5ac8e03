"""Types of the document of a what-if."""

from typing import TypedDict

from traceloom.report.documents.head import DocumentHead


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
