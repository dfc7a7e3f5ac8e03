"""What if, and where else? A linked graph evaluated with changes, or on another machine."""

from traceloom.simulate.calibrate import Calibration, calibrate
from traceloom.simulate.changes import Change, parse
from traceloom.simulate.device import DeviceAccount, Rescaled, rescale
from traceloom.simulate.limits import most_saved_ns
from traceloom.simulate.native import run
from traceloom.simulate.recording import unrecorded_saving_ns
from traceloom.simulate.scenario import Scenario
from traceloom.simulate.selection import Selection
from traceloom.simulate.simulation import Simulation
from traceloom.simulate.whatif import (
    Sweep,
    WhatIf,
    changed_graph,
    changed_nodes,
    evaluations,
    scenario_of,
    sweep,
    whatif,
    whatif_many,
)

__all__ = [
    "Calibration",
    "Change",
    "DeviceAccount",
    "Rescaled",
    "Scenario",
    "Selection",
    "Simulation",
    "Sweep",
    "WhatIf",
    "calibrate",
    "changed_graph",
    "changed_nodes",
    "evaluations",
    "most_saved_ns",
    "parse",
    "rescale",
    "run",
    "scenario_of",
    "sweep",
    "unrecorded_saving_ns",
    "whatif",
    "whatif_many",
]
