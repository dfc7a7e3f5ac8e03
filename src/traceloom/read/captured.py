"""What capture.json knows that the trace does not: which group a collective used, how large it was."""

from __future__ import annotations

from typing import Any

import polars as pl

from traceloom.model.notice import Notice
from traceloom.model.schema import SCHEMAS
from traceloom.read.metadata import whole

_FILLED = ("group", "group_size", "element_type", "in_bytes", "out_bytes", "sequence", "peer")


def with_captured(
    collectives: pl.DataFrame, events: pl.DataFrame, capture: dict[str, Any] | None
) -> tuple[pl.DataFrame, list[Notice]]:
    """Fill in what is unknown about collectives from the calls that the recorder saw.

    The calls of a kind inside the window and the collectives of that kind in the trace are matched in order, for ops,
    annotations and kernels each, where their numbers agree; else they stay as they are and a notice says so.
    """
    calls = _calls(capture, events)
    if not calls.height or not collectives.height:
        return collectives, []
    category = events["category"].cast(pl.String).gather(collectives["event"])
    numbered = collectives.with_columns(
        category.alias("category"), pl.int_range(pl.len()).over(category, "kind").alias("nth")
    )
    counts = calls["kind"].value_counts(name="calls")
    sizes = numbered.group_by("category", "kind").len().join(counts, on="kind")
    agree = sizes.filter(pl.col("len") == pl.col("calls")).select("category", "kind")
    unmatched = sizes.filter(pl.col("len") != pl.col("calls"))
    matched = calls.join(agree, on="kind").with_columns(pl.int_range(pl.len()).over("category", "kind").alias("nth"))
    joined = numbered.join(matched, on=["category", "kind", "nth"], how="left", suffix="_known", maintain_order="left")
    filled = joined.with_columns(pl.col(name).fill_null(pl.col(f"{name}_known")) for name in _FILLED)
    notices = []
    if unmatched.height:
        kinds = ", ".join(sorted(set(unmatched["kind"].to_list())))
        text = f"the recorder saw another number of collectives ({kinds}) than the trace holds; they are not joined"
        notices.append(Notice("collectives-unmatched", "info", text, int(unmatched["len"].sum())))
    return filled.select(list(SCHEMAS["collectives"])).cast(SCHEMAS["collectives"]), notices


def _calls(capture: dict[str, Any] | None, events: pl.DataFrame) -> pl.DataFrame:
    """The calls of capture.json inside the window, in order, with the columns that they can fill."""
    listed = (capture or {}).get("collectives")
    if not isinstance(listed, dict) or not events.height:
        return pl.DataFrame()
    columns = {
        key: listed.get(key)
        for key in ("group", "kind", "type", "sequence", "bytes_in", "bytes_out", "peer", "start_ns")
    }
    starts = columns["start_ns"]
    if not isinstance(starts, list) or any(not isinstance(v, list) or len(v) != len(starts) for v in columns.values()):
        return pl.DataFrame()
    sizes: dict[str | None, int] = {
        str(group.get("name")): len(group["ranks"])
        for group in (capture or {}).get("groups") or []
        if isinstance(group, dict) and isinstance(group.get("ranks"), list)
    }
    names = {"kind": _names(listed, "kinds"), "type": _names(listed, "types"), "group": _names(listed, "groups")}
    rows = []
    for at in range(len(starts)):
        value = {key: column[at] for key, column in columns.items() if isinstance(column, list)}
        group = _named(names["group"], value["group"])
        rows.append(
            {
                "kind": _named(names["kind"], value["kind"]),
                "group": group,
                "group_size": sizes.get(group),
                "element_type": _named(names["type"], value["type"]),
                "in_bytes": whole(value["bytes_in"]),
                "out_bytes": whole(value["bytes_out"]),
                "sequence": whole(value["sequence"]),
                "peer": whole(value["peer"]),
                "start_ns": whole(value["start_ns"]),
            }
        )
    types = {name: SCHEMAS["collectives"][name] for name in ("kind", *_FILLED)}
    calls = pl.DataFrame(rows, schema={**types, "start_ns": pl.Int64})
    first, last = events["start_ns"][0], events["nested_end_ns"].max()
    inside = pl.col("start_ns").is_null() | pl.col("start_ns").is_between(first, last)
    return calls.filter(inside & pl.col("kind").is_not_null()).sort("start_ns", maintain_order=True).drop("start_ns")


def _names(listed: dict[str, Any], key: str) -> list[Any]:
    names = listed.get(key)
    return names if isinstance(names, list) else []


def _named(names: list[Any], code: Any) -> str | None:
    if isinstance(code, int) and 0 <= code < len(names) and names[code] is not None:
        return str(names[code])
    return None
