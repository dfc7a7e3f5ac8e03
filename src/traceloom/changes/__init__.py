"""What changes would save: changes, scenarios, bounds.

Names are loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from traceloom.system.lazy_import import lazy

if TYPE_CHECKING:
    from traceloom.changes.bounds import (
        max_saved_ns as max_saved_ns,
        unrecorded_saving_ns as unrecorded_saving_ns,
    )
    from traceloom.changes.changes import Change as Change, Selection as Selection, parse as parse
    from traceloom.changes.scenario import Scenario as Scenario
    from traceloom.changes.whatif import (
        Sweep as Sweep,
        WhatIf as WhatIf,
        changed_graph as changed_graph,
        changed_nodes as changed_nodes,
        evaluations as evaluations,
        scenario_of as scenario_of,
        sweep as sweep,
        whatif as whatif,
        whatif_many as whatif_many,
    )

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
        "max_saved_ns": ".bounds",
        "parse": ".changes",
        "scenario_of": ".whatif",
        "sweep": ".whatif",
        "unrecorded_saving_ns": ".bounds",
        "whatif": ".whatif",
        "whatif_many": ".whatif",
    },
)
