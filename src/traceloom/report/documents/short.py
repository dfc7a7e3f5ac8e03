"""Types of the short report on a terminal, as it is kept beside an unchanged recording."""

from typing import TypedDict

from traceloom.report.documents.report import (
    AnswerValue,
    FindingRow,
    FindingsGroundValue,
    InputRow,
    NoticeRow,
    RunRow,
)


class ShortRank(TypedDict):
    """What is told of a rank."""

    rank: int | None
    world_size: int | None
    event_count: int
    start_ns: int
    window_ns: int


class ShortReport(TypedDict):
    """What the short report is drawn from; `summaries` has title and sentence of each section."""

    name: str
    answer: AnswerValue
    inputs: list[InputRow]
    findings: list[FindingRow]
    findings_ground: FindingsGroundValue | None
    notices: list[NoticeRow]
    runs: list[RunRow]
    ranks: list[ShortRank]
    summaries: list[tuple[str, str]]
