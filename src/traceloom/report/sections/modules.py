"""Which part of the model the time belongs to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from traceloom.report.absent import Absent
from traceloom.report.icicle import figure
from traceloom.report.measure import Measured
from traceloom.report.names import rank_name
from traceloom.report.sections.section import CoreSection, Study
from traceloom.report.table import Cells, Col, Table

if TYPE_CHECKING:
    from traceloom.report.documents import ReportDocument
    from traceloom.report.documents.report import ModuleRow

_MOST_NODES = 4_000  # of one rank's tree in the page


class ModulesSection(CoreSection):
    """Which part of the model the time belongs to."""

    key, title = "modules", "Modules"
    note = "Which part of the model the time belongs to."

    def build(self, study: Study[Measured], absent: Absent) -> list[ModuleRow]:
        """The module trees, one after the other; `rank` says whose it is."""
        return absent.listed(study.concat(lambda rank: rank.modules.tree), "modules")

    def tables(self, document: ReportDocument) -> Iterator[Table]:
        """The tree of every rank as an icicle and a table, forward, backward and repeated time apart."""
        several = len(document["ranks"]) > 1
        trees: dict[int | None, list[ModuleRow]] = {}
        for row in document.get("modules") or []:
            trees.setdefault(row["rank"], []).append(row)
        for position, rank in enumerate(document["ranks"]):
            tree = trees.get(rank["rank"], [])[:_MOST_NODES]
            if not tree:
                continue
            gpu = any(_all(row, "device_ns") for row in tree)
            index_of_node: dict[int | None, int] = {row["node"]: k for k, row in enumerate(tree)}
            nodes = [
                (
                    index_of_node.get(row["parent"]),
                    row["name"],
                    row["count"],
                    _all(row, "host_ns"),
                    _all(row, "device_ns"),
                )
                for row in tree
            ]
            yield Table(
                f"module-table-{position}",
                f"Modules of {rank_name(rank, position)}" if several else "Modules",
                _columns(tree, gpu=gpu),
                [
                    {
                        **row,
                        "name": "\u2003" * row["depth"] + row["name"],
                        "all_ns": _all(row, "device_ns" if gpu else "host_ns"),
                    }
                    for row in tree
                ],
                "modules",
                position=position,
                picture=figure(nodes, label="Module tree by time"),
                weight="all_ns",
                brief=position == 0,
            )


def _all(row: Cells, name: str) -> int:
    """Forward, backward and repeated time together."""
    return sum(row.get(f"{part}{name}") or 0 for part in ("", "backward_", "recompute_"))


def _columns(tree: list[ModuleRow], *, gpu: bool) -> list[Col]:
    backward = any(row.get("backward_host_ns") for row in tree)
    again = any(row.get("recompute_host_ns") for row in tree)
    columns = [
        Col("name", "Module", "name"),
        Col("kind", "Kind", narrow=False),
        Col("count", "Calls", "count"),
        Col("host_ns", "Host", "time", "time in it outside the backward pass", scale="host"),
        Col("self_host_ns", "self", "time", "outside child rows", narrow=False, scale="host"),
        *(
            [Col("backward_host_ns", "backward", "time", "of the nodes its operators made", not gpu, scale="host")]
            * backward
        ),
        *(
            [Col("recompute_host_ns", "repeated", "time", "forward run again by checkpoints", not gpu, scale="host")]
            * again
        ),
    ]
    if gpu:
        columns += [
            Col("device_ns", "GPU", "time", "GPU work launched in it", scale="gpu"),
            Col("self_device_ns", "self", "time", "launched outside child rows", narrow=False, scale="gpu"),
            *([Col("backward_device_ns", "backward", "time", "of its backward", scale="gpu")] * backward),
            *([Col("recompute_device_ns", "repeated", "time", "GPU work run again", scale="gpu")] * again),
            Col("kernel_count", "Kernels", "count", "launched in it outside the backward pass", narrow=False),
        ]
    if any(row.get("mean_all_host_ns") is not None for row in tree):
        what, title = ("device", "GPU") if gpu else ("host", "Host")
        hint = "forward, backward and repeated together, mean over the whole steps"
        columns += [
            Col(f"mean_all_{what}_ns", f"{title} per step", "time", hint, narrow=False, scale="step"),
            Col(f"min_all_{what}_ns", "min", "time", "min over the whole steps", narrow=False, scale="step"),
            Col(f"max_all_{what}_ns", "max", "time", "max over the whole steps", narrow=False, scale="step"),
        ]
    return columns


SECTION = ModulesSection()
