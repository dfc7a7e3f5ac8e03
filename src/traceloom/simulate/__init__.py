"""What if, and where else? A linked graph evaluated with changes, or on another machine.

Names are loaded when they are first used: what-ifs need no machine, and ASTRA-sim's mode no graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from traceloom.lazy import lazy

if TYPE_CHECKING:
    from traceloom.simulate.calibrate import Calibration as Calibration
    from traceloom.simulate.calibrate import calibrate as calibrate
    from traceloom.simulate.changes import Change as Change
    from traceloom.simulate.changes import parse as parse
    from traceloom.simulate.device import DeviceChange as DeviceChange
    from traceloom.simulate.device import Rescaled as Rescaled
    from traceloom.simulate.device import rescale as rescale
    from traceloom.simulate.limits import most_saved_ns as most_saved_ns
    from traceloom.simulate.machine import Machine as Machine
    from traceloom.simulate.machine import machine_text as machine_text
    from traceloom.simulate.machine import presets as presets  # type: ignore[no-redef]  # a folder, too
    from traceloom.simulate.machine import read_machine as read_machine
    from traceloom.simulate.native import run as run
    from traceloom.simulate.recording import unrecorded_saving_ns as unrecorded_saving_ns
    from traceloom.simulate.scenario import Scenario as Scenario
    from traceloom.simulate.selection import Selection as Selection
    from traceloom.simulate.simulation import Simulation as Simulation
    from traceloom.simulate.whatif import Sweep as Sweep
    from traceloom.simulate.whatif import WhatIf as WhatIf
    from traceloom.simulate.whatif import changed_graph as changed_graph
    from traceloom.simulate.whatif import changed_nodes as changed_nodes
    from traceloom.simulate.whatif import evaluations as evaluations
    from traceloom.simulate.whatif import scenario_of as scenario_of
    from traceloom.simulate.whatif import sweep as sweep
    from traceloom.simulate.whatif import whatif as whatif
    from traceloom.simulate.whatif import whatif_many as whatif_many

lazy(
    __name__,
    {
        "Calibration": ".calibrate",
        "Change": ".changes",
        "DeviceChange": ".device",
        "Machine": ".machine",
        "Rescaled": ".device",
        "Scenario": ".scenario",
        "Selection": ".selection",
        "Simulation": ".simulation",
        "Sweep": ".whatif",
        "WhatIf": ".whatif",
        "calibrate": ".calibrate",
        "changed_graph": ".whatif",
        "changed_nodes": ".whatif",
        "evaluations": ".whatif",
        "machine_text": ".machine",
        "most_saved_ns": ".limits",
        "parse": ".changes",
        "presets": ".machine",
        "read_machine": ".machine",
        "rescale": ".device",
        "run": ".native",
        "scenario_of": ".whatif",
        "sweep": ".whatif",
        "unrecorded_saving_ns": ".recording",
        "whatif": ".whatif",
        "whatif_many": ".whatif",
    },
)
