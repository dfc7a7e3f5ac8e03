"""What if, and where else? A linked graph evaluated with changes, or on another machine."""

from traceloom.simulate.calibrate import Calibration, calibrate
from traceloom.simulate.changes import Change, parse
from traceloom.simulate.device import DeviceAccount, Rescaled, rescale
from traceloom.simulate.limits import most_saved_ns
from traceloom.simulate.machine import Machine, machine_text, presets, read_machine
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
    "Machine",
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
    "machine_text",
    "most_saved_ns",
    "parse",
    "presets",
    "read_machine",
    "rescale",
    "run",
    "scenario_of",
    "sweep",
    "unrecorded_saving_ns",
    "whatif",
    "whatif_many",
]
