"""Types of the document of a measured machine."""

from typing import Any, TypedDict

from traceloom.model.notice import NoticeFields
from traceloom.report.documents.calibration import CollectiveGroupFields, FitFields, TransferFitRow
from traceloom.report.documents.head import DocumentHead
from traceloom.report.documents.report import AbsentRow


class MeasuredTimeFields(TypedDict):
    """A time that was measured, beside its fit; `half_width` is of the median's interval, as a part of it."""

    count: int
    median_ns: float
    p10_ns: float
    p90_ns: float
    half_width: float
    fitted_ns: float
    residual: float
    rate: float | None


class MeasuredCollectiveRow(MeasuredTimeFields, CollectiveGroupFields):
    """A collective of one size; its rate is the bus bandwidth, 10^9 B/s."""

    size_bytes: int
    bus_bytes: int


class MeasuredKernelRow(MeasuredTimeFields):
    """A kernel of one size: bytes of a buffer, or rows of a matrix; `amount`: operations, or bytes read and written."""

    kernel: str
    element_type: str
    size: int
    amount: int


class KernelFitRow(FitFields):
    """The times of a kernel in a range of sizes; its rate is 10^9 operations or bytes per second."""

    kernel: str
    element_type: str
    from_size: int
    to_size: int
    rate: float | None


class MeasurementDocument(DocumentHead):
    """What was measured; `machine` is as its file has it: without what is as by default."""

    sentence: str
    machine: dict[str, Any]
    transfers: list[TransferFitRow]
    collectives: list[MeasuredCollectiveRow]
    kernel_fits: list[KernelFitRow]
    kernels: list[MeasuredKernelRow]
    peaks: dict[str, float]
    environment: dict[str, str | int]
    absent: list[AbsentRow]
    notices: list[NoticeFields]
