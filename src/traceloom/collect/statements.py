"""What jobs say of themselves goes into the table `jobs`."""

from __future__ import annotations

import json

import polars as pl

from traceloom.store.schemas import SCHEMAS, day_of
from traceloom.store.state import State
from traceloom.store.tables import Tables


def commit_statements(state: State, tables: Tables, term: str) -> int:
    """Put a batch of statements into the table `jobs`, exactly once; how many there were.

    `term`: by which this service leads.
    """
    batch = state.open_statements(term)
    if batch is None:
        return 0
    number, statements = batch
    rows = [
        {
            "day": day_of(statement.said_ns), "job": statement.job, "valid_from_ns": statement.said_ns,
            **json.loads(statement.document),
        }
        for statement in statements
    ]  # fmt: skip
    frame = pl.DataFrame(rows, schema_overrides=SCHEMAS["jobs"].types, infer_schema_length=None)
    tables.commit(f"statements {state.identity}", number, {"jobs": frame})
    state.close_statements(number, term)
    return len(statements)
