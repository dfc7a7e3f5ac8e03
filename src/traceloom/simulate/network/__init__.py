"""Networks: the links of a machine, and when messages over them arrive."""

from traceloom.simulate.network.alpha_beta import finish_times
from traceloom.simulate.network.topology import MachineNetwork, Routes
from traceloom.simulate.network.use import LinkUse

__all__ = ["LinkUse", "MachineNetwork", "Routes", "finish_times"]
