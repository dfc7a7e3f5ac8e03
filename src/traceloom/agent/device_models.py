"""What the data sheet of a device says: peaks, multiprocessors, clock, architecture; and FLOP per clock of each.

The peaks are those of `traceloom.analyze`, read as a file: that package brings arrays, which the agent's loop does not
import.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import msgspec

PEAKS = Path(__file__).parents[1] / "analyze" / "peaks.json"
FLOP_PER_CLOCK = Path(__file__).with_name("flop_per_clock.json")
_COMPARED = ("bf16", "fp16", "fp32")  # in this order: what devices are compared in


class DeviceModel(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of a data sheet. FLOP/s by element type, dense; clocks in Hz; None or "": not known."""

    name: str
    flops: dict[str, float]
    multiprocessors: int | None
    architecture: str
    highest_clock_hz: float | None
    matrix_clock_hz: float | None  # at which the peaks of the matrix units are stated


@cache
def flop_per_clock() -> dict[str, dict[str, int]]:
    """Architecture -> unit (`fp32`, `bf16_matrix`) -> FLOP per clock of one multiprocessor."""
    tables: dict[str, dict[str, int]] = json.loads(FLOP_PER_CLOCK.read_text(encoding="utf-8"))["architectures"]
    return tables


@cache
def _models() -> dict[str, DeviceModel]:
    clocks = json.loads(FLOP_PER_CLOCK.read_text(encoding="utf-8"))["models"]
    models: dict[str, DeviceModel] = {}
    for entry in json.loads(PEAKS.read_text(encoding="utf-8"))["devices"]:
        clock = clocks.get(entry["name"], {})
        model = DeviceModel(
            name=entry["name"], flops=entry["flops"], multiprocessors=entry["multiprocessors"],
            architecture=clock.get("architecture", ""),
            highest_clock_hz=clock["vector_mhz"] * 1e6 if clock else None,
            matrix_clock_hz=clock["matrix_mhz"] * 1e6 if clock else None,
        )  # fmt: skip
        models |= {_plain(name): model for name in (entry["name"], *entry["aliases"])}
    return models


def _plain(name: str) -> str:
    return re.sub(r"\s+", " ", name).strip().lower()


def device_model(name: str) -> DeviceModel | None:
    """The data sheet of a device by its whole name; capitals and blanks do not count."""
    return _models().get(_plain(name))


def relative_peak(model: DeviceModel | None, reference: DeviceModel | None) -> float | None:
    """How much faster a device is than another at most; None where either is not known.

    Compared is the rate of BF16, else FP16, else FP32: the first that both data sheets have.
    """
    if model is None or reference is None:
        return None
    return next(
        (
            model.flops[kind] / reference.flops[kind]
            for kind in _COMPARED
            if {kind} <= model.flops.keys() & reference.flops
        ),
        None,
    )
