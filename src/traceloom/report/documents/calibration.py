"""Types of the document of a calibration."""

from typing import Any, Literal, TypedDict

from traceloom.model.notice import NoticeFields
from traceloom.report.documents.head import DocumentHead


class FitFields(TypedDict):
    """How well times are explained by a latency and a rate."""

    size_count: int
    count: int
    form: str
    alpha_ns: float
    residual_p10: float
    residual_p50: float
    residual_p90: float


class CollectiveGroupFields(TypedDict):
    """A kind of collective, and how many ranks take part: in a host, or in several."""

    collective: str
    span: Literal["inside", "between"]
    ranks: int


class TransferFitRow(FitFields, CollectiveGroupFields):
    """The transfers of a group in a range of sizes; a bandwidth of null: bytes make no difference."""

    from_bytes: int
    to_bytes: int
    bandwidth: float | None
    whole: bool


class CalibrationDocument(DocumentHead):
    """How long a run's own collectives take; `machine` is as its file has it: without what is as by default."""

    sentence: str
    transfers: list[TransferFitRow]
    machine: dict[str, Any]
    notices: list[NoticeFields]
