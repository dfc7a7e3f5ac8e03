"""One graph of all ranks, host and device: how it is made from traces, and new times for it.

Names are loaded on first use, so that importing a table of this package does not load the linker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from traceloom.system.lazy_import import lazy

if TYPE_CHECKING:
    from traceloom.graph.calibrate import calibrate as calibrate, class_delays as class_delays
    from traceloom.graph.evaluate import ABSENT as ABSENT, Plan as Plan
    from traceloom.graph.graph import Graph as Graph
    from traceloom.graph.law import Law as Law, law as law
    from traceloom.graph.linking import Linked as Linked, link as link, link_session as link_session

lazy(
    __name__,
    {
        "ABSENT": ".evaluate",
        "Graph": ".graph",
        "Law": ".law",
        "Linked": ".linking",
        "Plan": ".evaluate",
        "calibrate": ".calibrate",
        "class_delays": ".calibrate",
        "law": ".law",
        "link": ".linking",
        "link_session": ".linking",
    },
)
