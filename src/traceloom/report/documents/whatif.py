"""Types of the document of a what-if."""

from typing import TypedDict

from traceloom.report.documents.head import DocumentHead


class AssumedChangeRow(TypedDict):
    """A change, and what it assumes."""

    change: str
    assumes: str


class ChangedRankRow(TypedDict):
    """How long a rank takes."""

    rank: int
    before_ns: int
    after_ns: int
    saved_ns: int


class PathPart(TypedDict):
    """What a part of a critical path is."""

    what: str
    kind: str


class PathPartRow(PathPart):
    """A kind of time on the critical path."""

    before_ns: int
    after_ns: int


class TrustValue(TypedDict):
    """What the law says of the graph."""

    sentence: str
    holds: bool
    honest_error: float
    point_error: float
    residual_share: float


class WhatIfDocument(DocumentHead):
    """What some changes would do."""

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
