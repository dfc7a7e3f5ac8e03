"""Simulation of a graph on another machine.

Names are loaded when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from traceloom.system.lazy_import import lazy

if TYPE_CHECKING:
    from traceloom.workload.simulate.calibrate import (
        Calibration as Calibration,
        calibrate as calibrate,
    )
    from traceloom.workload.simulate.device import (
        DeviceChange as DeviceChange,
        Rescaled as Rescaled,
        rescale as rescale,
    )
    from traceloom.workload.simulate.machine import Machine as Machine
    from traceloom.workload.simulate.machine_file import (
        machine_text as machine_text,
        presets as presets,
        read_machine as read_machine,
    )
    from traceloom.workload.simulate.native import run as run
    from traceloom.workload.simulate.result import Simulation as Simulation

lazy(
    __name__,
    {
        "Calibration": ".calibrate",
        "DeviceChange": ".device",
        "Machine": ".machine",
        "Rescaled": ".device",
        "Simulation": ".result",
        "calibrate": ".calibrate",
        "machine_text": ".machine_file",
        "presets": ".machine_file",
        "read_machine": ".machine_file",
        "rescale": ".device",
        "run": ".native",
    },
)
