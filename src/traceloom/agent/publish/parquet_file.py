"""One hour of JSON lines as a Parquet file: run as a process, since Polars is not for the agent's."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec

from traceloom.agent.metrics import METRICS
from traceloom.agent.publish.json_lines import Line


def write_hour(spool: Path, target: Path) -> None:
    """Columns `time` (UTC), `host`, `metric`, every label that a metric can have, `value`; sorted by metric and time.

    A line that was cut off by the end of its process is left out.
    """
    import polars as pl

    labels = [*sorted({label for metric in METRICS.values() for label in metric.labels} - {"host"}), "le"]
    schema: dict[str, pl.DataType | type[pl.DataType]] = {
        "time": pl.String, "host": pl.String, "metric": pl.String,
        "labels": pl.Struct(dict.fromkeys(labels, pl.String)), "value": pl.Float64,
    }  # fmt: skip
    data = spool.read_bytes()
    try:
        frame = pl.read_ndjson(data, schema=schema)
    except pl.exceptions.ComputeError:
        frame = pl.read_ndjson(b"\n".join([line for line in data.split(b"\n") if _is_whole(line)]), schema=schema)
    frame = frame.unnest("labels").with_columns(pl.col("time").str.to_datetime("%+", time_unit="ms", time_zone="UTC"))
    half = target.with_name(f".{target.name}.half")
    frame.sort("metric", "time").select("time", "host", "metric", *labels, "value").write_parquet(half)
    half.replace(target)


def _is_whole(line: bytes) -> bool:
    try:
        msgspec.json.decode(line, type=Line)
    except msgspec.DecodeError:
        return False
    return True


if __name__ == "__main__":
    os.nice(10)
    write_hour(Path(sys.argv[1]), Path(sys.argv[2]))
