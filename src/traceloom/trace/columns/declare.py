"""How a column of a document is declared: its unit, its heading, its meaning."""

from dataclasses import dataclass

UNITS = (
    "text",
    "name",
    "time",
    "bytes",
    "count",
    "share",
    "change",
    "number",
    "flops",
    "flop_rate",
    "byte_rate",
)
"""Text; name (long, may be truncated); time in ns; bytes; count; share from 0 to 1; change (0.25: a
quarter more); number; FLOPs; FLOP/s; B/s.
"""


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a document.

    Attributes:
        unit: One of `UNITS`.
        title: Heading in tables.
        meaning: Description as a sentence fragment; for ratios, what is counted over what.
        unknown: Why it can be null, if the reason is the same in every table.
    """

    unit: str
    title: str
    meaning: str
    unknown: str = ""


def declare_per_step(
    name: str, unit: str, description: str, title: str = "Per step", unknown: str = ""
) -> dict[str, Column]:
    """Declares `mean_`, `min_` and `max_` of a column over the complete steps."""
    mean_unit = "number" if unit == "count" else unit
    path, _, key = name.rpartition(".")
    prefix = f"{path}." if path else ""
    return {
        f"{prefix}mean_{key}": Column(
            mean_unit, title, f"{description}, mean over the whole steps", unknown
        ),
        f"{prefix}min_{key}": Column(
            unit, "Min", f"{description}, min over the whole steps", unknown
        ),
        f"{prefix}max_{key}": Column(
            unit, "Max", f"{description}, max over the whole steps", unknown
        ),
    }


def declare_times(name: str, title: str, description: str) -> dict[str, Column]:
    """Declares the median, 95th percentile and maximum of a time."""
    return {
        f"{name}_median_ns": Column("time", title, f"{description}, median"),
        f"{name}_p95_ns": Column("time", "95 %", f"{description}, 95th percentile"),
        f"{name}_max_ns": Column("time", "Max", f"{description}, longest"),
    }


NO_RANK = "the file does not say its rank"
NO_DEVICE = "the file does not number the device"
NO_STEP = "it is outside all steps"
NO_GROUP = "the recording does not say which group communicates"
NO_SIZE = "the recording does not say how many ranks communicate"
NO_KIND = "neither the arguments nor the name of the kernel say what it does"
NO_MESSAGE = "the recording does not say how much is sent"
