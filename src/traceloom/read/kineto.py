"""First version of the Kineto reader: whole file, well-formed input."""

from __future__ import annotations

import gzip
import json
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from traceloom.model import Meta, Trace
from traceloom.model import category as cat
from traceloom.model.schema import SCHEMAS, empty
from traceloom.read.nesting import nest

_STEP = re.compile(r"^(?:ProfilerStep|traceloom\.step)#?\s*(\d+)$")


def _int(value: Any) -> int | None:
    try:
        return int(value)
    except (TypeError, ValueError):
        return None


def _ns(value: Any) -> int:
    return int((Decimal(value) * 1000).to_integral_value()) if value is not None else 0


def read_kineto(path: str | Path) -> Trace:
    """Read one Kineto trace."""
    path = Path(path)
    raw = path.read_bytes()
    text = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
    doc = json.loads(text, parse_float=str, strict=False)
    if isinstance(doc, list):
        doc = {"traceEvents": doc}
    base = int(doc.get("baseTimeNanoseconds") or 0)
    spans = [e for e in doc["traceEvents"] if e.get("ph") == "X"]
    n = len(spans)
    args = [e.get("args") or {} for e in spans]
    category = [cat.FROM_KINETO.get(str(e.get("cat", "")).lower(), cat.OTHER) for e in spans]
    # decimal micros, both ends rounded: duration = round(end) - round(start)
    start = np.array([_ns(e.get("ts")) for e in spans], dtype=np.int64)
    end = np.array(
        [_ns(Decimal(e.get("ts", 0)) + Decimal(e.get("dur") or 0)) for e in spans], dtype=np.int64
    )
    duration = end - start
    order = np.lexsort((np.arange(n), -duration, start))

    def col(f: Any) -> list[Any]:
        return [f(i) for i in order]

    def arg(i: int, *keys: str) -> int | None:
        for k in keys:
            if k in args[i]:
                return _int(args[i][k])
        return None

    gpu_side = {cat.KERNEL, cat.COPY, cat.FILL, cat.GPU_ANNOTATION, cat.SYNC, cat.GPU_EVENT, cat.COMMAND}

    def device(i: int) -> int | None:
        if category[i] not in gpu_side:
            return None
        d = arg(i, "device")
        return d if d is not None else _int(spans[i].get("pid"))

    def stream(i: int) -> int | None:
        if category[i] not in gpu_side:
            return None
        s = arg(i, "stream")
        return s if s is not None else _int(spans[i].get("tid"))

    frame = pl.DataFrame(
        {
            "name": col(lambda i: str(spans[i].get("name", ""))),
            "category": pl.Series(col(lambda i: category[i]), dtype=cat.CategoryType),
            "start_ns": start[order] + base,
            "duration_ns": duration[order],
            "process": col(lambda i: None if category[i] in gpu_side else _int(spans[i].get("pid"))),
            "thread": col(lambda i: None if category[i] in gpu_side else _int(spans[i].get("tid"))),
            "device": pl.Series(col(device), dtype=pl.Int32),
            "stream": pl.Series(col(stream), dtype=pl.Int64),
            "correlation": pl.Series(col(lambda i: arg(i, "correlation")), dtype=pl.Int64),
            "external_id": pl.Series(col(lambda i: arg(i, "External id", "external id")), dtype=pl.Int64),
            "record_function_id": pl.Series(col(lambda i: arg(i, "Record function id") or None), dtype=pl.Int64),
            "sequence": pl.Series(col(lambda i: arg(i, "Sequence number")), dtype=pl.Int64),
            "forward_thread": pl.Series(col(lambda i: arg(i, "Fwd thread id")), dtype=pl.Int64),
        }
    ).with_row_index("event")

    def kind(c: str) -> str:
        if c in (cat.KERNEL, cat.COPY, cat.FILL, cat.COMMAND):
            return "device"
        if c == cat.GPU_ANNOTATION:
            return "device_annotation"
        if c in (cat.SYNC, cat.GPU_EVENT):
            return "device_sync"
        return "host" if c in cat.HOST_WORK else "other"

    keys: dict[tuple[Any, ...], int] = {}
    lane_rows: list[dict[str, Any]] = []
    lane = np.zeros(n, dtype=np.int64)
    for j, i in enumerate(order):
        e = spans[i]
        key = (kind(category[i]), str(e.get("pid")), str(e.get("tid")))
        if key not in keys:
            keys[key] = len(keys)
            lane_rows.append(
                {
                    "lane": keys[key], "kind": key[0], "process": key[1], "thread": key[2],
                    "device": device(i), "stream": stream(i),
                    "name": f"stream {stream(i)}" if key[0].startswith("device") else f"thread {key[2]}",
                }
            )
        lane[j] = keys[key]
    s = start[order] + base
    e_ns = s + np.maximum(duration[order], 0)
    kinds = np.array([r["kind"] for r in lane_rows] or ["host"])
    nests = np.isin(kinds[lane], ["host", "other"]) if n else np.zeros(0, bool)
    nesting = nest(lane, s, e_ns, nests)
    frame = frame.with_columns(
        pl.Series("nested_end_ns", nesting.nested_end_ns),
        pl.Series("lane", lane).cast(pl.UInt32),
        pl.Series("parent", nesting.parent).replace(-1, None).cast(pl.UInt32),
        pl.Series("depth", nesting.depth).cast(pl.UInt16),
    )
    is_op = (frame["category"] == "op").to_numpy()
    op = _nearest(nesting.parent, is_op)
    is_launch = frame["category"].is_in(["runtime", "driver"]).to_numpy()
    work = frame["category"].is_in(list(cat.GPU_WORK)).to_numpy()
    corr = frame["correlation"]
    launches = (
        frame.filter(pl.Series(is_launch) & corr.is_not_null())
        .unique("correlation", keep="first").select("correlation", launch="event")
    )
    joined = frame.select("event", "correlation").join(launches, on="correlation", how="left", maintain_order="left")
    launch = joined["launch"].fill_null(2**32 - 1).to_numpy().astype(np.int64)
    launch = np.where(work & (launch < 2**32 - 1), launch, -1)
    op_out = np.where(is_launch, op, -1)
    op_out = np.where(launch >= 0, op[launch], op_out)
    steps = _steps(frame)
    step = _step_of(steps, s)
    step = np.where(work, np.where(launch >= 0, step[launch], -(2**31)), step) if n else step
    frame = frame.with_columns(
        pl.Series("op", op_out).replace(-1, None).cast(pl.UInt32),
        pl.Series("launch", launch).replace(-1, None).cast(pl.UInt32),
        pl.Series("step", step).replace(-(2**31), None).cast(pl.Int32),
    ).select(list(SCHEMAS["events"])).cast(dict(SCHEMAS["events"]))
    lanes = pl.DataFrame(lane_rows, schema={k: v for k, v in SCHEMAS["lanes"].items() if k not in ("events", "busy_ns")})
    self_ns = nesting.nested_end_ns - s
    child = np.flatnonzero(nesting.parent >= 0)
    np.subtract.at(self_ns, nesting.parent[child], (nesting.nested_end_ns - s)[child])
    lanes = lanes.join(
        pl.DataFrame({"lane": lane, "self_ns": self_ns}).with_columns(pl.col("lane").cast(pl.UInt32))
        .group_by("lane").agg(pl.len().cast(pl.UInt32).alias("events"), pl.col("self_ns").sum().alias("busy_ns")),
        on="lane", how="left",
    ).sort("lane")
    used = set(frame.filter(pl.col("category").is_in(cat.GPU_WORK))["device"].unique().drop_nulls().to_list())
    devices = pl.DataFrame(
        [
            {
                "device": d.get("id"), "name": d.get("name") or None, "memory_bytes": _int(d.get("totalGlobalMem")),
                "multiprocessors": _int(d.get("numSms")),
                "compute_capability": f"{d.get('computeMajor')}.{d.get('computeMinor')}", "used": d.get("id") in used,
            }
            for d in doc.get("deviceProperties") or []
        ],
        schema=SCHEMAS["devices"],
    )
    info = doc.get("distributedInfo") or {}
    meta = Meta(
        path=str(path), rank=_int(info.get("rank")), rank_evidence="distributedInfo" if "rank" in info else None,
        world_size=_int(info.get("world_size")), host=doc.get("host_name"), base_ns=base,
        backend=info.get("backend"), event_count=len(doc["traceEvents"]), file_bytes=len(text),
        settings={k: bool(doc[k]) for k in ("record_shapes", "with_stack", "profile_memory", "with_modules") if k in doc},
    )
    position = {int(i): j for j, i in enumerate(order)}
    tensors = pl.DataFrame(
        [
            {
                "event": position[i], "shapes": json.dumps(a.get("Input Dims", a.get("Input dims"))),
                "types": json.dumps(a.get("Input type")), "strides": json.dumps(a.get("Input Strides")),
                "concrete": json.dumps(a.get("Concrete Inputs")),
            }
            for i, a in enumerate(args)
            if "Input Dims" in a or "Input dims" in a
        ],
        schema=SCHEMAS["tensors"],
    ).sort("event")
    python = pl.DataFrame(
        [
            {
                "event": position[i], "python_id": _int(a.get("Python id")),
                "python_parent": _int(a.get("Python parent id")), "module_id": _int(a.get("Python module id")),
            }
            for i, a in enumerate(args)
            if "Python id" in a
        ],
        schema=SCHEMAS["python"],
    ).sort("event")
    copies = pl.DataFrame(
        [
            {"event": position[i], "kind": spans[i]["name"].split()[1] if " " in spans[i]["name"] else "unknown",
             "bytes": _int(args[i].get("bytes")), "source_memory": None, "target_memory": None}
            for i in range(n)
            if category[i] in (cat.COPY, cat.FILL)
        ],
        schema=SCHEMAS["copies"],
    ).sort("event")
    collectives = pl.DataFrame(
        [
            {"event": position[i], "kind": a["Collective name"], "group": str(a.get("Process Group Name")),
             "group_size": _int(a.get("Group size")), "ranks": a.get("Process Group Ranks"),
             "element_type": a.get("dtype"), "in_elements": _int(a.get("In msg nelems")),
             "out_elements": _int(a.get("Out msg nelems")), "sequence": _int(a.get("Seq"))}
            for i, a in enumerate(args)
            if "Collective name" in a
        ],
        schema=SCHEMAS["collectives"],
    ).sort("event")
    memory = [e for e in doc["traceEvents"] if e.get("ph") == "i" and e.get("name") == "[memory]"]
    allocations = pl.DataFrame(
        [
            {"time_ns": _ns(e["ts"]) + base, "address": int(e["args"]["Addr"]), "bytes": int(e["args"]["Bytes"]),
             "device_type": {0: "cpu", 1: "cuda"}.get(_int(e["args"]["Device Type"]) or 0, "other"),
             "device": _int(e["args"]["Device Id"]), "allocated_bytes": _int(e["args"].get("Total Allocated")),
             "reserved_bytes": _int(e["args"].get("Total Reserved")), "process": _int(e.get("pid")),
             "thread": _int(e.get("tid"))}
            for e in memory
        ],
        schema=SCHEMAS["allocations"],
    ).sort("time_ns", maintain_order=True)
    rest = {k: empty(k) for k in ("groups", "syncs", "flows", "counters", "marks", "sources")}
    return Trace(
        meta=meta, events=frame, lanes=lanes.select(list(SCHEMAS["lanes"])), devices=devices, steps=steps,
        tensors=tensors, python=python, copies=copies, collectives=collectives, allocations=allocations, **rest,
    )


def _nearest(parent: np.ndarray[Any, Any], wanted: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Nearest proper ancestor that is wanted, -1 where none: pointer jumping over unwanted ancestors."""
    up = parent.copy()
    while True:
        rows = np.flatnonzero(up >= 0)
        rows = rows[~wanted[up[rows]]]
        if not rows.size:
            return up
        up[rows] = up[up[rows]]


def _steps(frame: pl.DataFrame) -> pl.DataFrame:
    marks = frame.filter((pl.col("category") == "annotation") & pl.col("name").str.starts_with("ProfilerStep"))
    evidence = "profiler-step"
    if not marks.height:
        marks = frame.filter(pl.col("name").str.starts_with("traceloom.step#"))
        evidence = "mark"
    if not marks.height:
        return empty("steps")
    out = marks.select(
        pl.col("name").str.extract(r"(\d+)$").cast(pl.Int32).alias("step"), "name", "start_ns",
        end_ns=pl.col("start_ns").shift(-1).fill_null(pl.col("start_ns") + pl.col("duration_ns")),
    )
    if evidence == "mark":
        out = out.head(-1)
    return out.with_columns(
        pl.lit(evidence).cast(SCHEMAS["steps"]["evidence"]).alias("evidence"), pl.lit(True).alias("complete")
    ).cast(dict(SCHEMAS["steps"]))


def _step_of(steps: pl.DataFrame, start: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    none = -(2**31)
    if not steps.height:
        return np.full(len(start), none, dtype=np.int64)
    at = np.searchsorted(steps["start_ns"].to_numpy(), start, side="right") - 1
    inside = (at >= 0) & (start < steps["end_ns"].to_numpy()[np.maximum(at, 0)])
    return np.where(inside, steps["step"].to_numpy().astype(np.int64)[np.maximum(at, 0)], none)
