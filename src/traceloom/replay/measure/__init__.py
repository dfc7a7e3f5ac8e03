"""Measure the collectives and a few kernels of this machine, and fit a machine for `simulate` to them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from traceloom.lazy import lazy

if TYPE_CHECKING:
    from traceloom.replay.measure.fitting import fit_machine as fit_machine
    from traceloom.replay.measure.measuring import measure as measure
    from traceloom.replay.measure.task import Task as Task

lazy(__name__, {"Task": ".task", "fit_machine": ".fitting", "measure": ".measuring"})
