"""The variables that prepare a job for the agent, without a change of its code."""

from __future__ import annotations

import secrets

from traceloom.agent.config import Locations
from traceloom.agent.ipc.sockets import SETTINGS
from traceloom.agent.owners.environment import DUMP_FILES, DUMP_PIPE, POLLED_DIRECTORY, POLLS


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


def flight_variables() -> dict[str, str]:
    """Name -> value, for jobs whose flight record of collectives can be asked for while they run.

    NCCL's process group makes a pipe per rank, and ends the process where it cannot: therefore in `/tmp`, which is
    there on every host that a launcher takes these variables to, under a name that nobody can take before.
    """
    stem = f"/tmp/traceloom-{secrets.token_hex(8)}"  # noqa: S108  (a name that nobody knows)
    return {"TORCH_FR_BUFFER_SIZE": "2000", DUMP_PIPE: f"{stem}-pipe-", DUMP_FILES[0]: f"{stem}-dump-"}
