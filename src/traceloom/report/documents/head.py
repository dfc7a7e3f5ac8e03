"""The common first keys of documents."""

from typing import TypedDict


class DocumentHead(TypedDict):
    """The first keys of every document."""

    format: str
    version: int
    traceloom: str


class ReportHead(DocumentHead):
    """The first keys of the document of a report."""

    name: str
    epoch_ns: str
