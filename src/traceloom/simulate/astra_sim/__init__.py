"""Times as ASTRA-sim computes them, to the nanosecond, and its own configuration."""

from traceloom.simulate.astra_sim.inputs import AstraSimNetwork, AstraSimSystem, machine_of, read_network, read_system
from traceloom.simulate.astra_sim.simulating import FAR, measured_ends, recorded_ends, simulate

__all__ = [
    "FAR",
    "AstraSimNetwork",
    "AstraSimSystem",
    "machine_of",
    "measured_ends",
    "read_network",
    "read_system",
    "recorded_ends",
    "simulate",
]
