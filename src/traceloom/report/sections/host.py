"""What each host thread did, by innermost activity."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from traceloom.report.names import rank_name
from traceloom.report.parts import ACTIVITIES, named
from traceloom.report.sections.section import CoreSection
from traceloom.report.table import Bar, Cells, Col, Table

if TYPE_CHECKING:
    from traceloom.report.documents import ReportDocument


class HostSection(CoreSection):
    """What each host thread did, by innermost activity."""

    key, title = "host", "Host threads"
    shows_only = True
    note = "What each thread did, by innermost activity."
    path = "ranks[*].host.threads"

    def tables(self, document: ReportDocument) -> Iterator[Table]:
        """The host threads of each rank."""
        for position, rank in enumerate(document["ranks"]):
            host = rank["host"]
            times: Counter[tuple[int, str]] = Counter()  # by lane and activity
            for row in host["account"]:
                times[row["lane"], row["activity"]] += row["ns"]
            rows: list[Cells] = []
            for thread in host["threads"]:
                activities = {part.key: times[thread["lane"], part.key] for part in ACTIVITIES}
                name = thread["name"] or f"thread {thread['thread']}"
                rows.append(
                    {
                        "name": f"{name} (main)" if thread["main"] and "main" not in name else name,
                        **activities,
                        "events": thread["event_count"],
                        "bar": Bar(named(ACTIVITIES, activities), thread["window_ns"]),
                    }
                )
            columns = [
                Col("name", "Thread"),
                *(Col(part.key, part.label, "time", swatch=part.group, scale="activity") for part in ACTIVITIES),
                Col("events", "Events", "count", narrow=False),
                Col("bar", "By activity", "bar"),
            ]
            if rows:
                title = f"Host threads of {rank_name(rank, position)}"
                yield Table(f"host-{position}", title, columns, rows, position=position, brief=False)


SECTION = HostSection()
