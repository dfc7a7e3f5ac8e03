"""The variables that prepare a job for the agent, without a change of its code."""

from __future__ import annotations

import os

from traceloom.agent.config import Locations


def variables(locations: Locations) -> dict[str, str]:
    """Name -> value.

    PyTorch's profiler polls a daemon whose socket lies in the directory; where there is none, it fails at once and
    costs nothing. The directory is the user's own: nobody else can reach what listens there.
    """
    return {
        "KINETO_USE_DAEMON": "1",
        "KINETO_IPC_SOCKET_DIR": str(locations.kineto / str(os.geteuid())),
        "TRACELOOM_AGENT": str(locations.socket),
    }
