"""What the columns of the documents are: unit, heading, meaning; each declared once.

Tables take their headings and units from here, pages what is shown on hover, the published schemas and
docs/reference/report-columns.md the descriptions. A key is the name of a column; where the column of one table means
something else, the path of its rows in the document and the name (`copies.kinds.bytes_per_s`).
"""

from __future__ import annotations

from traceloom.model.columns import devices, document, everywhere, hosts, jobs, memory, replay, simulation
from traceloom.model.columns.declared import UNITS as UNITS
from traceloom.model.columns.declared import Column as Column

COLUMNS: dict[str, Column] = {
    **everywhere.IDENTITY,
    **everywhere.TIMES,
    **everywhere.COUNTS,
    **everywhere.AMOUNTS,
    **document.HEAD,
    **document.RANKS,
    **document.CORE,
    **document.FINDINGS,
    **devices.WORK,
    **devices.PATH,
    **devices.LAUNCHES,
    **devices.ROOFLINE,
    **hosts.HOST,
    **hosts.SERVING,
    **jobs.COLLECTIVE,
    **jobs.ACROSS,
    **memory.MEMORY,
    **replay.REPLAY,
    **simulation.SIMULATION,
}


def column(name: str, path: str = "") -> Column:
    """The declaration of a column: the most specific one, of the rows at `path` or of those around them, else of all.

    Raises:
        KeyError: there is none.
    """
    at = path
    while at and f"{at}.{name}" not in COLUMNS:
        at = at.rpartition(".")[0]
    declared = COLUMNS.get(f"{at}.{name}" if at else name)
    if declared is None:
        raise KeyError(f"no column `{name}` of `{path}` is declared in traceloom.model.columns")
    return declared
