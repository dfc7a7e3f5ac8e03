"""Writes docs/reference/fleet-tables.md from the schemas; with --check, says whether it is up to
date.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import polars as pl
from made_page import write_or_check

from traceloom.fleet.store.schema import SCHEMAS, VERSION, TableSchema

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "fleet-tables.md"
_INTRODUCTION = f"""\
# Tables of the fleet

<!-- Written by scripts/fleet_tables_page.py from src/traceloom/fleet/store/schema.py; do not edit. -->

What the fleet's service keeps for months, in `tables/` of its store: Delta tables, which Polars, Spark, Trino or others
read. Each is partitioned by `day`. Times are int64 nanoseconds, instants Unix time; what is not known is null.
This is version {VERSION}; a service refuses tables of another version.
[How regressions and device hours are worked out](../concepts/fleet.md).

```python
import polars as pl

pl.scan_delta("STORE/tables/kernels").group_by("kernel").agg(pl.col("total_ns").sum()).collect()
```
"""
_TYPES = {pl.Date(): "date", pl.String(): "text", pl.Int64(): "int64", pl.Float64(): "float64"}


def page() -> str:
    """The whole page."""
    return "\n".join(
        [_INTRODUCTION, *(line for table in SCHEMAS.values() for line in _part(table))]
    )


def _part(table: TableSchema) -> Iterator[str]:
    yield f"## {table.name}\n"
    kept = "" if table.keep_days is None else f" Rows are kept for {table.keep_days} days."
    yield f"A row is {table.meaning}.{kept}\n"
    yield "| column | type | meaning | null where |"
    yield "|---|---|---|---|"
    for name, declared in table.columns.items():
        kind = _TYPES.get(table.types[name], "list of texts")
        yield f"| `{name}` | {kind} | {declared.meaning} | {declared.unknown} |"
    yield ""


if __name__ == "__main__":
    sys.exit(write_or_check(PAGE, page()))
