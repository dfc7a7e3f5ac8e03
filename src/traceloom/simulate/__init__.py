"""What if? A linked graph evaluated with changes."""

from traceloom.simulate.changes import Change, Scenario, parse
from traceloom.simulate.recording import unrecorded_saving_ns
from traceloom.simulate.selection import Selection
from traceloom.simulate.whatif import (
    Sweep,
    WhatIf,
    changed_graph,
    changed_nodes,
    scenario_of,
    sweep,
    whatif,
    whatif_many,
)

__all__ = [
    "Change",
    "Scenario",
    "Selection",
    "Sweep",
    "WhatIf",
    "changed_graph",
    "changed_nodes",
    "parse",
    "scenario_of",
    "sweep",
    "unrecorded_saving_ns",
    "whatif",
    "whatif_many",
]
