"""The tables of a replay, declared once for every view."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from traceloom.report.replayed import on_gpu
from traceloom.report.sections.section import Columns, table
from traceloom.report.table import Cells, Col, Table, yes_or_no

if TYPE_CHECKING:
    from traceloom.report.documents import ReplayDocument

_WHOLE_MORE: Columns = ["+recorded_ops_ns", "+replayed_ops_ns", "+ops_ratio", "+peak_bytes"]
_WHOLE: Columns = [
    "?rank", "recorded_ns", "replayed_ns", "ratio", "recorded_cpu_ns", "replayed_cpu_ns", "cpu_ratio",
    *_WHOLE_MORE,
]  # fmt: skip
_OP = Col("op", "Op and shapes", "name", "shapes of the tensors that it takes")
_TABLES: tuple[tuple[str, str, str, Columns], ...] = (
    ("whole", "The whole", "A recorded step against a pass of the replay; medians.", _WHOLE),
    (
        "simulated", "Beside its simulation",
        "A pass against the recorded steps on the machine that was named: the same ops of the same ranks.",
        ["?rank", "step_count", "replayed_ns", "simulated_ns", "difference"],
    ),
    (
        "coverage", "Coverage", "What became of the recorded ops; shares of a rank add up.",
        ["?rank", "outcome", "reason", "count", "count_share", "recorded_ns", "time_share"],
    ),
    (
        "not_run", "Did not run as recorded", "Most recorded time first.",
        ["?rank", "outcome", "reason", "count", "recorded_ns", "name", "+text"],
    ),
    (
        "holes", "Compiled code", "Time that no host trace shows, and no replay.",
        ["?rank", "recorded_ns", "count", "name"],
    ),
    (
        "ops", "Ops", "By name and shapes, over all ranks: where most time was lost or won comes first.",
        ["lost_ns", "recorded_ns", "replayed_ns", "ratio", "+p10_ratio", "+p50_ratio", "+p90_ratio", "calls",
         _OP],
    ),
    (
        "collectives", "Collectives", "Of one each; the call and the wait for it.",
        ["?rank", "kind", "+group", "group_size", "size_bytes", "count", "recorded_ns", "replayed_ns", "ratio",
         "recorded_gb_per_s", "replayed_gb_per_s", "+asynchronous"],
    ),
    (
        "contents", "Contents", "What tensors from outside held, and how that is known.",
        ["?rank", "content", "evidence", "count", "bytes"],
    ),
)  # fmt: skip


# Where GPU work was measured, ops are held against each other by it: a host clock sees their launches alone.
_ON_GPU: dict[str, tuple[str, Columns]] = {
    "whole": (
        "A recorded step against a pass of the replay; medians.",
        ["?rank", "recorded_ns", "replayed_ns", "ratio", "+recorded_cpu_ns", "+replayed_cpu_ns", "cpu_ratio",
         "recorded_gpu_ns", "replayed_gpu_ns", "gpu_ratio", *_WHOLE_MORE],
    ),
    "coverage": (
        "What became of the recorded ops; shares of a rank add up.",
        ["?rank", "outcome", "reason", "count", "count_share", "recorded_ns", "time_share", "+recorded_gpu_ns",
         "gpu_share"],
    ),
    "collectives": (
        "Of one each: its GPU work where both sides know that, else the call and the wait for it.",
        ["?rank", "kind", "+group", "group_size", "size_bytes", "count", "on_gpu", "recorded_ns", "replayed_ns",
         "ratio", "recorded_gb_per_s", "replayed_gb_per_s", "+asynchronous"],
    ),
    "ops": (
        "GPU work that ops launched, by their name and shapes, over all ranks: where most was lost or won comes first.",
        ["gpu_lost_ns", "recorded_gpu_ns", "replayed_gpu_ns", "gpu_ratio", "+recorded_ns", "+replayed_ns", "calls",
         _OP],
    ),
}  # fmt: skip
_TABLES_ON_GPU = tuple((key, title, *_ON_GPU.get(key, (note, columns))) for key, title, note, columns in _TABLES)


def tables(document: ReplayDocument) -> Iterator[Table]:
    """The tables that have rows."""
    rows_of: dict[str, Sequence[Cells]] = {
        "whole": document["whole"],
        "simulated": document["simulated"],
        "coverage": document["coverage"],
        "not_run": document["not_run"],
        "holes": document["holes"],
        "ops": [{**row, "op": f"{row['name']} {row['shapes']}"} for row in document["ops"]],
        "collectives": [
            {**row, "on_gpu": yes_or_no(row["on_gpu"]), "asynchronous": yes_or_no(row["asynchronous"])}
            for row in document["collectives"]
        ],
        "contents": document["contents"],
    }
    for key, title, note, columns in _TABLES_ON_GPU if on_gpu(document["whole"]) else _TABLES:
        if rows := rows_of[key]:
            yield replace(table(f"replay_json.{key}", title, columns, rows, note, key=f"replay-{key}"), path="")
