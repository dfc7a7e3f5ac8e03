"""Machines: devices and the network that joins them, as `machine.toml` or a preset describes them."""

from traceloom.simulate.machine.document import changed, machine_text, presets, read_machine
from traceloom.simulate.machine.parts import (
    AlgorithmRule,
    Dimension,
    Machine,
    MeasuredTime,
    MeasuredTransfer,
    Nic,
    SpeedFactor,
    Wire,
)

__all__ = [
    "AlgorithmRule",
    "Dimension",
    "Machine",
    "MeasuredTime",
    "MeasuredTransfer",
    "Nic",
    "SpeedFactor",
    "Wire",
    "changed",
    "machine_text",
    "presets",
    "read_machine",
]
