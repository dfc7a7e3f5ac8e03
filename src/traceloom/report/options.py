"""What a report is about, and how much of it is shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from traceloom.analyze.kind_rules import KindRule
    from traceloom.report.table import Table


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """Choices of `traceloom report`.

    Attributes:
        ranks: Only these ranks; None for all.
        steps: Only the work of the steps from the first to the last of these numbers, both included.
        by_shape: Operators are counted apart by the shapes of their inputs.
        top: How many rows a table shows on a terminal or in Markdown. The document always has all.
        full: On a terminal, without `only`: the tables of the core and a line for each other section, instead of the
            answer, what to fix, and where to look.
        sort: What shown tables are sorted by: a key of `SORT_KEYS`; None for each table's own order.
        only: Which sections are made beyond the core (`core` alone: none); on a terminal, what is shown in full. None:
            all are made, and the terminal is short, or `full`.
        peak: Peaks to compare with instead of those of the devices' names: a device's name (`H100 SXM`) or numbers
            (`bf16=989e12,memory=3.35e12`).
        link_peak: Peak of the link of one device in one direction, 10^9 bytes per second, for groups of every kind;
            None for that of the device's name where a group stays inside a host.
        graph_capture: File with the recording of the graphs' capture, or of the same model without graphs: from it the
            operators of graph replays are known.
        cache: Whether that file may come from the cache of read traces, and go there.
        tokens_per_step: Tokens that a step makes, where the user says so.
        samples_per_step: Samples that a step takes, where the user says so.
        kind_rules: The user's rules for kinds of kernels; they come before ours.
    """

    ranks: tuple[int, ...] | None = None
    steps: tuple[int, int] | None = None
    by_shape: bool = False
    top: int = 10
    full: bool = False
    sort: str | None = None
    only: tuple[str, ...] | None = None
    peak: str | None = None
    link_peak: float | None = None
    graph_capture: str | None = None
    cache: bool = True
    tokens_per_step: int | None = None
    samples_per_step: int | None = None
    kind_rules: tuple[KindRule, ...] = ()

    def wants(self, section: str) -> bool:
        """Whether a section is asked for: all are, where none is named."""
        return self.only is None or section in self.only


# Key of --sort -> the columns it means, the first one a table has.
SORT_KEYS = {
    "self": ("self_ns", "total_ns"),
    "total": ("total_ns",),
    "device": ("device_ns", "total_ns"),
    "mean": ("mean_ns",),
    "max": ("max_ns", "total_ns"),
    "count": ("count",),
    "name": ("name",),
}


def ordered(table: Table, options: ReportOptions) -> Sequence[Mapping[str, Any]]:
    """The rows a table shows: sorted by `sort` where it has that column, the first (or heaviest) `top` of them."""
    rows = table.rows
    columns = SORT_KEYS[options.sort] if options.sort else ()
    column = next((name for name in columns if rows and name in rows[0]), None)
    if column == "name":
        rows = sorted(rows, key=lambda row: str(row["name"]))
    elif column is not None:
        rows = sorted(rows, key=lambda row: -(row[column] or 0))
    elif table.weight and len(rows) > options.top:
        heaviest = sorted(range(len(rows)), key=lambda i: -rows[i][table.weight])[: options.top]
        return [rows[i] for i in sorted(heaviest)]
    return rows[: options.top]
