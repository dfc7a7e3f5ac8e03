"""Types of the document of a calibration."""

from typing import Any, Literal, TypedDict

from traceloom.report.documents.head import DocumentHead
from traceloom.trace.notice import NoticeFields


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
