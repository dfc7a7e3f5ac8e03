"""Times as ASTRA-sim computes them, to the nanosecond, and its own configuration."""

from traceloom.simulate.astra_sim.inputs import AstraSimNetwork, AstraSimSystem, machine_of, read_network, read_system
from traceloom.simulate.astra_sim.simulating import simulate

__all__ = ["AstraSimNetwork", "AstraSimSystem", "machine_of", "read_network", "read_system", "simulate"]
