"""The beginning of documents."""

from typing import TypedDict


class DocumentHead(TypedDict):
    """What every document begins with."""

    format: str
    version: int
    traceloom: str


class ReportHead(DocumentHead):
    """What the document of a report begins with."""

    name: str
    epoch_ns: str
