"""Types of the document of a linked graph."""

from typing import TypedDict

from traceloom.report.documents.head import DocumentHead
from traceloom.trace.notice import NoticeFields


class NodeKindRow(TypedDict):
    """The nodes of a kind."""

    kind: str
    count: int
    time_ns: int


class NodesValue(TypedDict):
    """The nodes."""

    count: int
    kinds: list[NodeKindRow]


class EdgeKindRow(TypedDict):
    """The edges of a kind with one kind of evidence."""

    kind: str
    evidence: str
    count: int


class EdgesValue(TypedDict):
    """The edges."""

    count: int
    kinds: list[EdgeKindRow]


class GraphRankRow(TypedDict):
    """A recorded rank and its clock."""

    rank: int
    host: str | None
    process: int | None
    device_trace: str | None
    host_trace: str | None
    window_start_ns: int
    window_end_ns: int
    clock_offset_ns: int
    clock_drift: float
    clock_residual_ns: int | None
    window_ns: int


class CoverageRow(TypedDict):
    """What was matched or not, and the reason."""

    rank: int | None
    subject: str
    outcome: str
    count: int
    time_ns: int | None


class DelayRow(TypedDict):
    """The typical delay of a class of edges."""

    kind: str
    place: str | None
    count: int
    median_ns: int


class LawRankRow(TypedDict):
    """The error of a rank when it is re-timed."""

    rank: int
    window_ns: int
    exact_error_ns: int
    honest_error_ns: int
    honest_error: float


class LawPathRow(TypedDict):
    """A kind of time on the critical path."""

    what: str
    kind: str
    count: int
    time_ns: int


class UnexplainedRow(TypedDict):
    """A residual on the critical path."""

    time_ns: int
    kind: str
    node: int
    name: str | None
    rank: int | None
    start_ns: int


class LawValue(TypedDict):
    """The result of re-timing the graph."""

    sentence: str
    holds: bool
    window_ns: int
    exact_error_ns: int
    honest_error_ns: int
    honest_error: float
    point_error_ns: int
    point_error: float
    points_hold: bool
    residual_ns: int
    residual_share: float
    assumed_ns: int
    assumed_share: float
    pass_ns: int
    ranks: list[LawRankRow]
    path: list[LawPathRow]
    unexplained: list[UnexplainedRow]


class GraphDocument(DocumentHead):
    """A summary of a graph."""

    name: str
    stage: str
    epoch_ns: str
    world_size: int | None
    window_ns: int
    nodes: NodesValue
    edges: EdgesValue
    ranks: list[GraphRankRow]
    coverage: list[CoverageRow]
    delays: list[DelayRow]
    law: LawValue | None
    notices: list[NoticeFields]
