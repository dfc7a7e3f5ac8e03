"""Types of the document of a comparison."""

from typing import TypedDict

from traceloom.report.documents.head import DocumentHead
from traceloom.trace.notice import NoticeFields


class ComparedInputRow(TypedDict):
    """A trace of one side."""

    path: str
    rank: int | None
    world_size: int | None
    events: int


class ComparedRunValue(TypedDict):
    """One side."""

    name: str
    inputs: list[ComparedInputRow]
    notices: list[NoticeFields]


class ConditionRow(TypedDict):
    """The values of one condition on both sides."""

    condition: str
    base: str
    new: str
    same: bool
    weight: str


class StepPartRow(TypedDict):
    """A part of the typical step."""

    part: str
    meaning: str
    base_ns: int
    new_ns: int
    difference_ns: int
    change: float | None
    of_step: float


class ComparedKernelRow(TypedDict):
    """Matched GPU work of both sides."""

    status: str
    operator: str
    path: str
    kind: str
    base_kernel: str | None
    new_kernel: str | None
    base_count: float
    new_count: float
    base_duration_ns: int
    new_duration_ns: int
    base_ns: int
    new_ns: int
    difference_ns: int
    change: float | None
    of_step: float


class ComparedOperatorRow(TypedDict):
    """An operator at its place, with its shapes."""

    status: str
    operator: str
    path: str
    base_shapes: str | None
    new_shapes: str | None
    base_count: float
    new_count: float
    base_duration_ns: int
    new_duration_ns: int
    duration_difference_ns: int
    base_device_ns: int
    new_device_ns: int
    device_difference_ns: int
    base_host_ns: int
    new_host_ns: int
    host_difference_ns: int
    host_status: str
    duration_change: float | None
    duration_of_step: float
    host_change: float | None
    host_of_step: float


class ComparedBoxRow(TypedDict):
    """A box of the call tree, including everything below it."""

    parent: int | None
    name: str
    base_count: float
    new_count: float
    base_duration_ns: int
    new_duration_ns: int
    base_host_ns: int
    new_host_ns: int


class ComparedStepRow(TypedDict):
    """A step that was compared."""

    side: str
    rank: int | None
    step: int | None
    duration_ns: int
    host_ns: int


class ComparisonDocument(DocumentHead):
    """A comparison of two runs."""

    base: ComparedRunValue
    new: ComparedRunValue
    sentence: str
    comparable: bool
    account: str
    base_ns: int
    new_ns: int
    difference_ns: int
    change: float
    conditions: list[ConditionRow]
    breakdown: list[StepPartRow]
    kernels: list[ComparedKernelRow]
    operators: list[ComparedOperatorRow]
    tree: list[ComparedBoxRow]
    steps: list[ComparedStepRow]
