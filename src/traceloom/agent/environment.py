"""The variables that prepare a job for the agent, without a change of its code."""

from __future__ import annotations

from traceloom.agent.config import Locations
from traceloom.agent.ipc.sockets import SETTINGS


def variables(locations: Locations, uid: int) -> dict[str, str]:
    """Name -> value, for jobs of a user.

    PyTorch's profiler polls a daemon whose socket lies in the directory; where there is none, it fails at once and
    costs nothing. The directory is the user's own: nobody else can reach what listens there. The file in it says how
    often to poll.
    """
    directory = locations.kineto / str(uid)
    return {
        "KINETO_USE_DAEMON": "1",
        "KINETO_IPC_SOCKET_DIR": str(directory),
        "KINETO_CONFIG": str(directory / SETTINGS),
        "TRACELOOM_AGENT": str(locations.socket),
    }
