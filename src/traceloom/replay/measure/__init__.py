"""How fast this machine is: its collectives and a few kernels, measured, fitted, and written for `simulate`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from traceloom.lazy import lazy

if TYPE_CHECKING:
    from traceloom.replay.measure.measurement import Measurement as Measurement
    from traceloom.replay.measure.measuring import measure as measure
    from traceloom.replay.measure.task import Task as Task

lazy(__name__, {"Measurement": ".measurement", "Task": ".task", "measure": ".measuring"})
