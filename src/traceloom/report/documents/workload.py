"""Types of the documents of a workload and of one of its nodes."""

from typing import Literal, TypedDict

from traceloom.trace.notice import NoticeFields


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
