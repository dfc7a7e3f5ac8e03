"""Types of the document of a job at another scale."""

from typing import TypedDict

from traceloom.report.documents.head import DocumentHead
from traceloom.trace.notice import NoticeFields


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
