"""Peaks: how fast a device could be, so that what it did can be compared with that."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from msgspec import Struct

from traceloom.errors import UsageError
from traceloom.model import Trace

_MATRIX = {"fp64": ("fp64_matrix", "fp64"), "fp32": ("fp32_matrix", "fp32")}
TYPES = ("fp64", "fp64_matrix", "fp32", "fp32_matrix", "tf32", "bf16", "fp16", "fp8", "int8", "fp4")
"""What `flops` of a peak may hold."""


class Peak(Struct, frozen=True):
    """Dense peaks of one device.

    Attributes:
        name: What to call it.
        flops: FLOP/s (integer operations for int8) by element type; `fp32_matrix` and `fp64_matrix` where matrix units
            differ from vector units.
        memory: Bytes/s of the device memory; None where unknown.
    """

    name: str
    flops: Mapping[str, float]
    memory: float | None

    def rate(self, dtype: str, *, matrix: bool) -> float | None:
        """FLOP/s of this element type, or None.

        Vector units compute 16-bit floats, integers and comparisons at the rate of fp32 at best.
        """
        if matrix:
            return next((self.flops[key] for key in _MATRIX.get(dtype, (dtype,)) if key in self.flops), None)
        return self.flops.get("fp64" if dtype in ("fp64", "complex128") else "fp32")


@cache
def _table() -> dict[str, tuple[Peak, int | None]]:
    """Peaks and number of multiprocessors by each name of a device, all as `_plain` gives it."""
    text = resources.files("traceloom.analyze").joinpath("peaks.json").read_text(encoding="utf-8")
    return {
        _plain(name): (Peak(entry["name"], entry["flops"], entry["memory"]), entry["multiprocessors"])
        for entry in json.loads(text)["devices"]
        for name in (entry["name"], *entry["aliases"])
    }


def _plain(name: str) -> str:
    """Capitals and blanks do not tell devices apart; everything else does."""
    return re.sub(r"\s+", " ", name).strip().lower()


def known_devices() -> tuple[str, ...]:
    """The devices whose peaks come with Traceloom."""
    return tuple(dict.fromkeys(peak.name for peak, _ in _table().values()))


def find(name: str | None, multiprocessors: int | None = None) -> Peak | str:
    """The peaks of a device by its name as it stands in a trace, or the reason why there are none.

    Only whole names match: a part of a name can be another device. Where the number of multiprocessors is told and is
    another one, the device is a part of the known one (MIG, partitions) or something else.
    """
    if not name:
        return "the trace does not name the device"
    entry = _table().get(_plain(name))
    if entry is None:
        return f"the peaks of {name!r} are not known"
    peak, expected = entry
    if multiprocessors and expected and multiprocessors != expected:
        return f"{name} has {expected} multiprocessors, this one {multiprocessors}: it is a part of one, or another"
    return peak


def peak_of(spec: Peak | str | Mapping[str, float]) -> Peak:
    """The peaks that a user gives: themselves, a device's name, or numbers.

    Args:
        spec: `H100 SXM`, or `bf16=989e12,memory=3.35e12`, or the same as a mapping.

    Raises:
        UsageError: slugs `no-such-device`, `bad-peak`.
    """
    if isinstance(spec, Peak):
        return spec
    if isinstance(spec, str) and "=" not in spec:
        peak = find(spec)
        if isinstance(peak, str):
            hint = f"use one of {', '.join(known_devices())}, or give numbers such as bf16=989e12,memory=3.35e12"
            raise UsageError(f"there are no peaks for a device called {spec!r}", slug="no-such-device", hint=hint)
        return peak
    numbers: dict[str, Any] = {}
    for part in spec.split(",") if isinstance(spec, str) else ():
        key, _, value = part.partition("=")
        try:
            numbers[key.strip()] = float(value)
        except ValueError:
            raise _bad(f"`{part.strip()}` is no pair of a name and a number") from None
    if not isinstance(spec, str):
        numbers = {str(key): spec[key] for key in spec}
    for key, value in numbers.items():
        if key not in (*TYPES, "memory"):
            raise _bad(f"`{key}` is none of {', '.join((*TYPES, 'memory'))}")
        if not isinstance(value, (int, float)) or not 0 < value < 1e300:
            raise _bad(f"`{key}` is not a number above 0")
    rates = {key: float(value) for key, value in numbers.items() if key != "memory"}
    return Peak("given", rates, float(numbers["memory"]) if "memory" in numbers else None)


def _bad(message: str) -> UsageError:
    return UsageError(message, slug="bad-peak", hint="give FLOP/s and bytes/s: bf16=989e12,memory=3.35e12")


def peaks(trace: Trace, chosen: Peak | None = None) -> dict[int, Peak | str]:
    """The peaks of every device with GPU work, or the reason why they are unknown.

    A device that the file does not describe takes the name that all devices it describes share: a process that sees one
    device of many may number it differently.
    """
    rows = trace.devices[["device", "name", "multiprocessors", "used"]].rows()
    used = [(int(device), name, processors) for device, name, processors, is_used in rows if is_used]
    if chosen is not None:
        return {device: chosen for device, _, _ in used}
    described = {(name, processors) for _, name, processors, _ in rows if name is not None}
    shared: tuple[Any, Any] = described.pop() if len(described) == 1 else (None, None)
    return {
        device: find(name, processors) if name or processors else find(*shared) for device, name, processors in used
    }
