"""Types of the short report on a terminal, as cached beside an unchanged recording."""

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
    """The part of a rank that the short report shows."""

    rank: int | None
    world_size: int | None
    event_count: int
    start_ns: int
    window_ns: int


class ShortReport(TypedDict):
    """The data of the short report; `summaries` has title and sentence of each section."""

    name: str
    answer: AnswerValue
    inputs: list[InputRow]
    findings: list[FindingRow]
    findings_ground: FindingsGroundValue | None
    notices: list[NoticeRow]
    runs: list[RunRow]
    ranks: list[ShortRank]
    summaries: list[tuple[str, str]]
