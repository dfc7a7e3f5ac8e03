"""Which back ends run: those that the configuration names, else all that are installed and need no setting."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

from traceloom.agent.accelerators import Accelerator
from traceloom.agent.accelerators.watched import Watched
from traceloom.agent.config import Config
from traceloom.errors import InputError, nearest

GROUP = "traceloom.accelerators"
_HERE = "traceloom.agent.accelerators"
# In this order: of two that see the same device, the earlier has its say first. pyproject.toml declares the same.
OURS = {
    "nvml": f"{_HERE}.nvml:NvmlAccelerator",
    "amd": f"{_HERE}.amd:AmdAccelerator",
    "scrape": f"{_HERE}.scrape:ScrapedAccelerator",
    "simulated": f"{_HERE}.simulated:SimulatedAccelerator",
    "recorded": f"{_HERE}.recorded:RecordedAccelerator",
}


def back_ends(config: Config) -> list[Watched]:
    """The back ends, each behind a thread; nothing of them is imported before its first sample.

    Raises:
        InputError: `wrong-config`: the configuration names a back end that is not installed.
    """
    points = {name: EntryPoint(name, value, GROUP) for name, value in OURS.items()}
    for point in entry_points(group=GROUP):
        points.setdefault(point.name, point)
    settings = config.accelerators
    unset = {"scrape": not settings.scrape, "simulated": not settings.simulated, "recorded": not settings.recorded}
    names = settings.backends or tuple(name for name in points if not unset.get(name))
    for name in names:
        if name not in points:
            raise InputError(
                f"there is no back end `{name}`", slug="wrong-config", where="accelerators.backends",
                hint=nearest(name, points) + f"installed are {', '.join(points)}",
            )  # fmt: skip
    watched = []
    for name in names:

        def make(point: EntryPoint = points[name]) -> Accelerator:
            accelerator: Accelerator = point.load()(config)
            return accelerator

        watched.append(Watched(name, make))
    return watched
