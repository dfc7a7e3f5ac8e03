"""Copies and fills: how much, in which direction, how fast, for whom."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from traceloom import analyze
from traceloom.analyze.copies import KIND_SCHEMA, OP_SCHEMA
from traceloom.analyze.per_step import spread_schema
from traceloom.model import Trace, units
from traceloom.model.frames import as_declared, schema
from traceloom.report.absent import Absent
from traceloom.report.options import ReportOptions
from traceloom.report.sections.section import Frames, Section, Study, table
from traceloom.report.sections.shapes import Part
from traceloom.report.table import Table, yes_or_no

if TYPE_CHECKING:
    from traceloom.report.documents.sections import CopiesValue

_OPS = 50  # of each rank
_USUAL = schema("device kind", spread_schema("call_count", "copied_bytes", "total_ns"))
_NONE = "no copies or fills were recorded"
_NO_BYTES = "the recording does not say how much is copied"
_NO_RATE = "no such copy has both a size and a duration"
_NOT_PINNED = {"pageable": "the recording does not say whether the host's memory is pinned", "bytes": _NO_BYTES}


class CopiesSection(Section[Frames, "CopiesValue"]):
    """Copies and fills of GPU memory."""

    key, title = "copies", "Copies"
    note = "How much is copied and filled, in which direction, how fast and for whom."
    what = "copies and fills of GPU memory"
    parts = {
        "kinds": Part(
            KIND_SCHEMA,
            "copies and fills by device, direction and kinds of memory",
            {
                "source_memory": "a fill has no source, or the recording does not say which memory it is",
                "target_memory": "the recording does not say which memory it is",
                **_NOT_PINNED,
                **dict.fromkeys(("bytes_per_s", "min_bytes_per_s", "max_bytes_per_s"), _NO_RATE),
            },
            ("device",),
            _NONE,
        ),
        "operators": Part(
            OP_SCHEMA, "copies and fills by the operator that launched them", _NOT_PINNED, ("op",), _NONE
        ),
        "per_step": Part(
            _USUAL,
            "copies and fills of a usual step, by direction",
            {f"{how}_copied_bytes": _NO_BYTES for how in ("mean", "min", "max")},
            ("device",),
            "the trace holds no whole step with copies",
        ),
    }

    def measure(self, trace: Trace, options: ReportOptions) -> Frames:
        copies = analyze.copies(trace)
        per_step = copies.per_step.pipe(as_declared, _USUAL)
        return {"kinds": copies.kinds, "operators": copies.ops.head(_OPS), "per_step": per_step}

    def build(self, study: Study[Frames], absent: Absent) -> CopiesValue:
        return self.lists(study.frames(self.parts), absent)

    def tables(self, value: CopiesValue) -> Iterator[Table]:
        kinds = value["kinds"]
        if not kinds:
            return
        columns = ["?rank", "?device", "kind", "+source_memory", "+target_memory", "+pageable", "bytes", "count",
                   "total_ns", "bytes_per_s", "+min_bytes_per_s", "+max_bytes_per_s", "+instant_count"]  # fmt: skip
        rows = [{**row, "pageable": yes_or_no(row["pageable"])} for row in kinds]
        yield table("copies.kinds", "Copies by direction", columns, rows)
        columns = ["?rank", "kind", "bytes", "count", "total_ns", "op"]
        yield table("copies.operators", "Copies by operator", columns, value["operators"], among=kinds)
        if value["per_step"]:
            columns = ["?rank", "?device", "kind", "mean_call_count", "mean_copied_bytes", "mean_total_ns",
                       "min_total_ns", "max_total_ns"]  # fmt: skip
            yield table("copies.per_step", "Copies of a usual step", columns, value["per_step"], among=kinds)

    def summary(self, value: CopiesValue) -> str | None:
        rows = [row for row in value["kinds"] if row["kind"] != "fill"]
        if not rows:
            return None
        sizes = [size for row in rows if (size := row["bytes"]) is not None]
        amount = f"{units.size(sum(sizes))} in " if sizes else ""
        count = sum(row["count"] for row in rows)
        pageable = sum(row["count"] for row in rows if row["pageable"])
        held = f", {units.count(pageable)} of them from or to pageable memory" if pageable else ""
        time = units.duration(sum(row["total_ns"] for row in rows))
        return f"{amount}{units.count(count)} {'copy' if count == 1 else 'copies'} took {time}{held}"


SECTION = CopiesSection()
