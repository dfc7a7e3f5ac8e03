"""Types of the documents of a linked graph, of a workload and of one of its nodes."""

from __future__ import annotations

from typing import Literal, TypedDict

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


class WorkloadRankRow(TypedDict):
    """Times of a rank: waiting, computing and sending; null where the files have none."""

    rank: int
    nodes: int
    edges: int
    compute_ns: int
    sent_bytes: int | None
    start_ns: int | None
    end_ns: int | None


class WorkloadKindRow(TypedDict):
    """Sums over the nodes of a kind."""

    kind: str
    count: int
    time_ns: int
    longest_ns: int | None
    bytes: int | None


class WorkloadNameRow(WorkloadKindRow):
    """Sums over the nodes of a kind and name."""

    name: str | None


class WorkloadCommunicationRow(TypedDict):
    """Communication of a kind in a group."""

    what: str
    group: str | None
    count: int
    ranks: int
    bytes: int | None
    time_ns: int


class DependencyKindRow(TypedDict):
    """The number of dependencies of a kind; Chakra files have no evidence."""

    kind: str
    evidence: str | None
    count: int


class WorkloadSummaryDocument(TypedDict):
    """A summary of a graph or a set of Chakra files."""

    format: Literal["traceloom-workload-summary"]
    version: int
    name: str
    form: str
    facts: list[str]
    nodes: int
    edges: int
    dangling: int
    first_nodes: int
    last_nodes: int
    window_ns: int | None
    ranks: list[WorkloadRankRow]
    kinds: list[WorkloadKindRow]
    communication: list[WorkloadCommunicationRow]
    dependencies: list[DependencyKindRow]
    names: list[WorkloadNameRow]
    notices: list[NoticeFields]


class WorkloadNodeFields(TypedDict):
    """A node; `id` as the user knows it."""

    id: int | None
    rank: int | None
    kind: str
    name: str | None
    time_ns: int | None
    start_ns: int | None
    bytes: int | None


class ShownNodeValue(WorkloadNodeFields, total=False):
    """The displayed node; with kind and group if it is communication."""

    what: str
    group: str | None


class NeighbourRow(WorkloadNodeFields):
    """A node that it waits for, or that waits for it, and the dependency."""

    edge: str
    evidence: str | None


class NodeDocument(TypedDict):
    """One node, its predecessors, its successors, and further attributes from its file."""

    format: Literal["traceloom-node"]
    version: int
    node: ShownNodeValue
    before: list[NeighbourRow]
    after: list[NeighbourRow]
    attributes: dict[str, str]
