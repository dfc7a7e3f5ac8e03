"""Native simulation: the workload's own streams, threads and delays, with the transfers of another network."""

from traceloom.simulate.native.running import run

__all__ = ["run"]
