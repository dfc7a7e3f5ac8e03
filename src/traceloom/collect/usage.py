"""Minutes that hosts sent go into the tables: `usage_minute`, and added up `usage_hour`."""

from __future__ import annotations

import msgspec
import polars as pl

from traceloom.agent.uplink.messages import UsageRow
from traceloom.store.schemas import MINUTE_MS
from traceloom.store.state import State
from traceloom.store.tables import Tables
from traceloom.store.usage import hours, minutes

MOST_IN_BATCH = 20_000  # minutes of hosts
_MOST_SILENT = 7 * 1440  # minutes of a host that was away, which are told to be unreachable
_MINUTE_NS = MINUTE_MS * 1_000_000
_SEEN = {
    "time_ns": pl.Int64, "host": pl.String, "device": pl.String, "device_model": pl.String, "job": pl.String,
    "state": pl.String, "device_ms": pl.Int64, "busy_ms": pl.Int64, "energy_mj": pl.Int64, "flops_low": pl.Float64,
    "flops_high": pl.Float64, "input_bytes": pl.Int64,
}  # fmt: skip


def commit_usage(state: State, tables: Tables, term: str) -> int:
    """Put a batch of minutes into the tables, exactly once; how many there were. `term`: by which this service leads.

    A host sends its minutes in order, so those that it left out it will never send: its devices were unreachable then.
    """
    batch = state.open_usage(MOST_IN_BATCH, term)
    if batch is None:
        return 0
    number, waiting = batch
    seen, silent = [], []
    for of_host in waiting:
        rows = msgspec.json.decode(of_host.document, type=list[UsageRow])
        seen += [
            (
                of_host.minute * _MINUTE_NS, of_host.host, row.device, row.device_model or None, row.job or None,
                row.state, row.device_ms, row.busy_ms, row.energy_mj, row.flops_low, row.flops_high, row.input_bytes,
            )
            for row in rows
        ]  # fmt: skip
        devices = {row.device: row.device_model or None for row in rows}
        silent += [
            (minute * _MINUTE_NS, of_host.host, device, model)
            for minute in range(max(of_host.since, of_host.minute - _MOST_SILENT), of_host.minute)
            for device, model in devices.items()
        ]
    due = pl.DataFrame(silent, schema=dict(list(_SEEN.items())[:4]), orient="row")
    of_minutes = minutes(pl.DataFrame(seen, schema=_SEEN, orient="row"), due)
    tables.commit(f"usage {state.identity}", number, {"usage_minute": of_minutes, "usage_hour": hours(of_minutes)})
    state.close_usage(number, term)
    return len(waiting)
