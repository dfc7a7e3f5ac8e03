"""Types of the documents: dictionaries as the commands write them as JSON, key by key.

`...Row` is an object of a list, `...Value` another object. Keys that the published schemas do not require, because
files of earlier versions lack them, are required here. Nothing at run time needs these types: import them where types
are checked, or to decode a file into checked values (`msgspec.json.decode(text, type=ReportDocument)`).
"""

from traceloom.report.documents.memory import MemoryDocument
from traceloom.report.documents.replay import ReplayDocument
from traceloom.report.documents.report import ReportDocument
from traceloom.report.documents.simulation import SimulationDocument

__all__ = ["MemoryDocument", "ReplayDocument", "ReportDocument", "SimulationDocument"]
