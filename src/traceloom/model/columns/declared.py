"""How a column is declared, and what many declarations share."""

from __future__ import annotations

from dataclasses import dataclass

UNITS = ("text", "name", "time", "bytes", "count", "share", "change", "number", "flops", "flop_rate", "byte_rate")
"""Text; name (long, may be cut); time in ns; bytes; count; share from 0 to 1; change (0.25: a quarter more); number;
FLOPs; FLOP/s; B/s."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a document.

    Attributes:
        unit: One of `UNITS`.
        title: Heading in tables.
        meaning: What it says, or what is counted over what: the fragment of a sentence.
        unknown: Why it can be null, where there is one reason whatever the table.
    """

    unit: str
    title: str
    meaning: str
    unknown: str = ""


def per_step(name: str, unit: str, what: str, title: str = "Per step", unknown: str = "") -> dict[str, Column]:
    """`mean_`, `min_` and `max_` of a column over the whole steps."""
    mean_unit = "number" if unit == "count" else unit
    path, _, key = name.rpartition(".")
    at = f"{path}." if path else ""
    return {
        f"{at}mean_{key}": Column(mean_unit, title, f"{what}, mean over the whole steps", unknown),
        f"{at}min_{key}": Column(unit, "Min", f"{what}, min over the whole steps", unknown),
        f"{at}max_{key}": Column(unit, "Max", f"{what}, max over the whole steps", unknown),
    }


def times(name: str, title: str, what: str) -> dict[str, Column]:
    """Median, 95th percentile and maximum of a time."""
    return {
        f"{name}_median_ns": Column("time", title, f"{what}, median"),
        f"{name}_p95_ns": Column("time", "95 %", f"{what}, 95th percentile"),
        f"{name}_max_ns": Column("time", "Max", f"{what}, longest"),
    }


NO_RANK = "the file does not say its rank"
NO_DEVICE = "the file does not number the device"
NO_STEP = "it is outside all steps"
NO_GROUP = "the recording does not say which group communicates"
NO_SIZE = "the recording does not say how many ranks communicate"
NO_KIND = "neither the arguments nor the name of the kernel say what it does"
NO_MESSAGE = "the recording does not say how much is sent"
