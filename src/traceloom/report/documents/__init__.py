"""Types of the documents: dictionaries with the keys that the commands write as JSON.

`...Row` is an object of a list, `...Value` another object. The types of documents with a published
schema (report, memory, simulation, replay) are generated from it by `scripts/report_schema.py`.
They are not needed at run time: import them for type checking, or to decode a file into checked
values, for example with `msgspec.json.decode(text, type=ReportDocument)`.
"""

from traceloom.report.documents.comparison import ComparisonDocument
from traceloom.report.documents.graph import GraphDocument, NodeDocument, WorkloadSummaryDocument
from traceloom.report.documents.memory import MemoryDocument
from traceloom.report.documents.predictions import (
    CalibrationDocument,
    ScaledDocument,
    SweepDocument,
    WhatIfDocument,
)
from traceloom.report.documents.replay import ReplayDocument
from traceloom.report.documents.report import ReportDocument
from traceloom.report.documents.simulation import SimulationDocument
from traceloom.report.documents.verdict import BaselinesDocument, VerdictDocument

__all__ = [
    "BaselinesDocument",
    "CalibrationDocument",
    "ComparisonDocument",
    "GraphDocument",
    "MemoryDocument",
    "NodeDocument",
    "ReplayDocument",
    "ReportDocument",
    "ScaledDocument",
    "SimulationDocument",
    "SweepDocument",
    "VerdictDocument",
    "WhatIfDocument",
    "WorkloadSummaryDocument",
]
