"""The variables that prepare a job for the agent, without a change of its code."""

from __future__ import annotations

from traceloom.agent.config import Locations
from traceloom.agent.ipc.sockets import SETTINGS
from traceloom.agent.owners.environment import POLLED_DIRECTORY, POLLS


def variables(locations: Locations, uid: int) -> dict[str, str]:
    """Name -> value, for jobs of a user.

    PyTorch's profiler polls a daemon whose socket lies in the directory; where there is none, it fails at once and
    costs nothing. The directory is the user's own: nobody else can reach what listens there. The file in it says how
    often to poll.
    """
    directory = locations.kineto / str(uid)
    return {
        POLLS: "1",
        POLLED_DIRECTORY: str(directory),
        "KINETO_CONFIG": str(directory / SETTINGS),
        "TRACELOOM_AGENT": str(locations.socket),
    }
