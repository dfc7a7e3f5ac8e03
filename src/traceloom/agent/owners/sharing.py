"""Whose the time of a device is that several processes share: parts by what each used, which add up to the whole."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

from traceloom.agent.accelerators import DeviceProcess

PARTS = 1 << 40  # shares are whole numbers of these, so that their sum is 1 exactly, in any order


class Share(NamedTuple):
    """The part of a device that a process has: 0 to 1. `assumed`: it was not measured."""

    part: float
    assumed: bool


def shares(
    processes: Iterable[DeviceProcess], keys: Mapping[int, str], busy: Mapping[str, float] | None = None
) -> dict[tuple[str, str], Share]:
    """The share of each process in each device that it is on; of each device they add up to exactly 1.

    What processes were busy decides. Those of which that is not known share the rest of the device equally, which is
    what the device was busy beyond the others, and this is assumed; nothing about memory says who computed. Where
    nobody was busy, the device is held in equal parts.

    Args:
        processes: Who is on which device.
        keys: Key of a process by its pid. A process that is not in it has the key `PID@`: its part is nobody else's.
        busy: How busy each device was, 0 to 1, where that is known.

    Returns:
        (uuid of the device, key of the process) -> its share.
    """
    used: dict[str, dict[str, list[float | None]]] = {}
    for process in processes:  # one process may be listed several times, once per context
        key = keys.get(process.pid) or f"{process.pid}@"
        used.setdefault(process.device, {}).setdefault(key, []).append(process.busy_ratio)
    divided: dict[tuple[str, str], Share] = {}
    for device, entries in used.items():
        measured = {
            key: sum(ratio for ratio in ratios if ratio is not None)
            for key, ratios in entries.items()
            if None not in ratios
        }
        total = sum(measured.values())
        rest = max((busy or {}).get(device, max(1.0, total)) - total, 0.0)
        others = len(entries) - len(measured)
        weights = [measured[key] if key in measured else rest / others for key in entries]
        idle = not any(weights)
        for key, part in zip(entries, split(PARTS, weights), strict=True):
            divided[device, key] = Share(part / PARTS, idle or key not in measured)
    return divided


def split(total: int, weights: Sequence[float]) -> list[int]:
    """A whole number, as of milliseconds, in whole parts by weights, which add up to it.

    What rounding leaves goes to the largest remainders. Weights that are all 0 mean equal parts; without weights there
    are no parts.

    Raises:
        ValueError: A weight that is negative or not finite.
    """
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights):
        raise ValueError(f"weights must be finite and not negative, got {list(weights)}")
    exact = [Fraction(weight) for weight in weights] if any(weights) else [Fraction(1)] * len(weights)
    whole = sum(exact)
    ideal = [total * weight / whole for weight in exact]
    parts = [math.floor(part) for part in ideal]
    by_remainder = sorted(range(len(parts)), key=lambda at: (parts[at] - ideal[at], at))
    for at in by_remainder[: total - sum(parts)] if parts else ():
        parts[at] += 1
    return parts
