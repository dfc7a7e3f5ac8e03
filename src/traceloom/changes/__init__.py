"""What changes would save: changes, scenarios, bounds.

Names are loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from traceloom.system.lazy_import import lazy

if TYPE_CHECKING:
    from traceloom.changes.bounds import most_saved_ns as most_saved_ns
    from traceloom.changes.bounds import unrecorded_saving_ns as unrecorded_saving_ns
    from traceloom.changes.changes import Change as Change
    from traceloom.changes.changes import Selection as Selection
    from traceloom.changes.changes import parse as parse
    from traceloom.changes.scenario import Scenario as Scenario
    from traceloom.changes.whatif import Sweep as Sweep
    from traceloom.changes.whatif import WhatIf as WhatIf
    from traceloom.changes.whatif import changed_graph as changed_graph
    from traceloom.changes.whatif import changed_nodes as changed_nodes
    from traceloom.changes.whatif import evaluations as evaluations
    from traceloom.changes.whatif import scenario_of as scenario_of
    from traceloom.changes.whatif import sweep as sweep
    from traceloom.changes.whatif import whatif as whatif
    from traceloom.changes.whatif import whatif_many as whatif_many

lazy(
    __name__,
    {
        "Change": ".changes",
        "Scenario": ".scenario",
        "Selection": ".changes",
        "Sweep": ".whatif",
        "WhatIf": ".whatif",
        "changed_graph": ".whatif",
        "changed_nodes": ".whatif",
        "evaluations": ".whatif",
        "most_saved_ns": ".bounds",
        "parse": ".changes",
        "scenario_of": ".whatif",
        "sweep": ".whatif",
        "unrecorded_saving_ns": ".bounds",
        "whatif": ".whatif",
        "whatif_many": ".whatif",
    },
)
