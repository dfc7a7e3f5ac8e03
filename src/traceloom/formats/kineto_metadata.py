"""The top-level entries of a file: rank, devices, groups, versions, settings; nothing in them is trusted."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import polars as pl

from traceloom.formats.kineto_columns import number
from traceloom.formats.kineto_fields import NULL
from traceloom.trace.notice import Notice
from traceloom.trace.trace import SCHEMAS

_SETTINGS = ("record_shapes", "with_stack", "profile_memory", "with_flops", "with_modules")
_VERSION = re.compile(r"version$", re.IGNORECASE)
_MOST_BASE_NS = 3 * 2**60  # the year 2079; see `times`
_MOST_OFFSET_NS = 2**60  # 36 years: a clock that was never set
_JOB = re.compile(r"^(PT_PROFILER_JOB_\w+|trace_id|group_trace_id|traceName|tw_job|mast_job_name|job_id|username)$")
_RANK_IN_NAME = re.compile(r"(?:^|[^a-z])(?:rank|worker)[-_ ]?(\d{1,7})(?!\d)", re.IGNORECASE)


def whole(value: Any) -> int | None:
    """A whole number, also in quotes; None for anything else."""
    if isinstance(value, bool):
        return None
    parsed = number(value)
    return None if parsed == NULL else parsed


def base_ns(metadata: dict[str, Any], entry: dict[str, Any] | None = None) -> int:
    """What is to be added to every time of the file, in ns; `entry` is this rank's part of capture.json."""
    value = whole(metadata.get("baseTimeNanoseconds"))
    base = value if value is not None and 0 <= value < _MOST_BASE_NS else 0
    return base + clock_offset_ns(entry)


def clock_offset_ns(entry: dict[str, Any] | None) -> int:
    """What is added to times of the host of a rank, where a capture joins several hosts; 0 elsewhere."""
    clock = (entry or {}).get("clock") or {}
    offset = whole(clock.get("offset_ns"))
    return offset if offset is not None and abs(offset) < _MOST_OFFSET_NS else 0


def distributed(metadata: dict[str, Any]) -> dict[str, Any]:
    """`distributedInfo`, or an empty dict."""
    info = metadata.get("distributedInfo")
    return info if isinstance(info, dict) else {}


def find_rank(
    metadata: dict[str, Any], arguments: int | None, path: str, capture: dict[str, Any] | None
) -> tuple[int | None, str | None, list[Notice]]:
    """The rank, where it comes from, and notices about it.

    Evidence in order: capture.json, `distributedInfo`, the `Rank` argument of collectives, the file's name.
    """
    for value, evidence in (
        ((capture or {}).get("rank"), "capture"),
        (distributed(metadata).get("rank"), "distributedInfo"),
        (arguments, "arguments"),
    ):
        rank = whole(value)
        if rank is not None and 0 <= rank < 2**31:
            return rank, evidence, []
    match = _RANK_IN_NAME.search(Path(path).name)
    if match:
        rank = int(match.group(1))
        text = f"the file does not say its rank; {rank} is taken from the file name"
        return rank, "file name", [Notice("rank-from-name", "info", text, rank=rank, where=Path(path).name)]
    return None, None, []


def device_frame(metadata: dict[str, Any], used: set[int]) -> pl.DataFrame:
    """The `devices` frame: the visible ones, and those in use that are not listed."""
    rows: dict[int, dict[str, Any]] = {}
    listed = metadata.get("deviceProperties")
    for item in listed if isinstance(listed, list) else []:
        index = whole(item.get("id")) if isinstance(item, dict) else None
        if index is None or not -(2**31) <= index < 2**31:
            continue
        major, minor = whole(item.get("computeMajor")), whole(item.get("computeMinor"))
        name = item.get("name")
        rows[index] = {
            "device": index,
            "name": name if isinstance(name, str) and name.strip() else None,
            "memory_bytes": whole(item.get("totalGlobalMem")),
            "multiprocessors": _small(whole(item.get("numSms"))),
            "compute_capability": f"{major}.{minor}" if major is not None and minor is not None else None,
            "used": index in used,
        }
    for index in sorted(used - set(rows)):
        rows[index] = {"device": index, "used": True}
    return pl.DataFrame([rows[index] for index in sorted(rows)], schema=SCHEMAS["devices"])


def _small(value: int | None) -> int | None:
    return value if value is not None and 0 < value < 2**31 else None


def add_group(
    rows: dict[str, dict[str, Any]], name: str, words: tuple[Any, Any], size: int | None, members: list[Any] | None
) -> None:
    """Add what an entry says of a group (`words`: its description and back end) to what earlier ones said."""
    before = rows.get(name, {})
    description, backend = (word if isinstance(word, str) else None for word in words)
    rows[name] = {
        "group": name,
        "description": description or before.get("description"),
        "backend": backend or before.get("backend"),
        "size": size or before.get("size"),
        "ranks": members or before.get("ranks"),
    }


def group_frame(metadata: dict[str, Any], capture: dict[str, Any] | None) -> pl.DataFrame:
    """The `groups` frame, from `pg_config` and from capture.json (which knows the members of every group)."""
    listed = distributed(metadata).get("pg_config")
    if isinstance(listed, str):
        listed = _parsed(listed)
    named = [  # name, description, backend, the whole entry
        (item["pg_name"], item.get("pg_desc"), item.get("backend_config"), item)
        for item in (listed if isinstance(listed, list) else [])
        if isinstance(item, dict) and item.get("pg_name") is not None
    ]
    named += [
        (item.get("name", item.get("group")), item.get("description"), item.get("backend"), item)
        for item in (capture or {}).get("groups") or []
        if isinstance(item, dict) and (item.get("name") or item.get("group")) is not None
    ]
    rows: dict[str, dict[str, Any]] = {}
    for name, description, backend, item in named:
        ranks = item.get("ranks")
        members = ranks if isinstance(ranks, list) else _parsed(ranks) if isinstance(ranks, str) else None
        if not isinstance(members, list) or not all(type(rank) is int and 0 <= rank < 2**31 for rank in members):
            members = None
        size = _small(whole(item.get("pg_size", item.get("size"))))
        if size is None and members:
            size = len(members)
        if members is not None and size is not None and len(members) < size:
            members = None  # cut
        add_group(rows, str(name), (description, backend), size, members)
    return pl.DataFrame(list(rows.values()), schema=SCHEMAS["groups"])


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def versions(metadata: dict[str, Any]) -> dict[str, str]:
    """Versions of the runtime, driver, tracer and communication library."""
    entries = {key: value for key, value in metadata.items() if _VERSION.search(key) and key != "schemaVersion"}
    if "nccl_version" in distributed(metadata):
        entries["nccl_version"] = distributed(metadata)["nccl_version"]
    return {key: str(value) for key, value in entries.items() if isinstance(value, (str, int, float))}


def settings(metadata: dict[str, Any]) -> dict[str, bool]:
    """What the recording was asked for."""
    return {key: bool(metadata[key]) for key in _SETTINGS if key in metadata}


def job(metadata: dict[str, Any]) -> dict[str, str]:
    """What names the job and the recording."""
    return {key: str(value) for key, value in metadata.items() if _JOB.match(key) and isinstance(value, (str, int))}
