"""Reads the top-level entries of a Kineto file: rank, devices, groups, versions, settings; none of
them is trusted.
"""

import json
import re
from pathlib import Path
from typing import Any

import polars as pl

from traceloom.formats.kineto_columns import parse_integer
from traceloom.formats.kineto_fields import NULL
from traceloom.trace.notice import Notice
from traceloom.trace.trace import SCHEMAS

_SETTING_KEYS = ("record_shapes", "with_stack", "profile_memory", "with_flops", "with_modules")
_VERSION_KEY = re.compile(r"version$", re.IGNORECASE)
_MAX_BASE_NS = 3 * 2**60  # the year 2079; see `times`
_MAX_OFFSET_NS = 2**60  # 36 years: a clock that was never set
_JOB_LABEL_KEY = re.compile(
    r"^(PT_PROFILER_JOB_\w+|trace_id|group_trace_id|traceName|tw_job|mast_job_name|job_id|username)$"
)
_RANK_IN_FILE_NAME = re.compile(r"(?:^|[^a-z])(?:rank|worker)[-_ ]?(\d{1,7})(?!\d)", re.IGNORECASE)


def parse_whole_number(value: Any) -> int | None:
    """Returns an integer, also from quotes; None for anything else."""
    if isinstance(value, bool):
        return None
    parsed = parse_integer(value)
    return None if parsed == NULL else parsed


def compute_time_offset_ns(
    metadata: dict[str, Any], capture_entry: dict[str, Any] | None = None
) -> int:
    """Returns the offset to add to every time of the file, in ns; `capture_entry` is this rank's
    part of capture.json.
    """
    value = parse_whole_number(metadata.get("baseTimeNanoseconds"))
    base = value if value is not None and 0 <= value < _MAX_BASE_NS else 0
    return base + get_clock_offset_ns(capture_entry)


def get_clock_offset_ns(capture_entry: dict[str, Any] | None) -> int:
    """Returns the offset to add to host times of a rank where a capture joins several hosts; 0
    elsewhere.
    """
    clock = (capture_entry or {}).get("clock") or {}
    offset = parse_whole_number(clock.get("offset_ns"))
    return offset if offset is not None and abs(offset) < _MAX_OFFSET_NS else 0


def get_distributed_info(metadata: dict[str, Any]) -> dict[str, Any]:
    info = metadata.get("distributedInfo")
    return info if isinstance(info, dict) else {}


def find_rank(
    metadata: dict[str, Any], collective_rank: int | None, path: str, capture: dict[str, Any] | None
) -> tuple[int | None, str | None, list[Notice]]:
    """Returns the rank, its source, and notices about it.

    Evidence in order: capture.json, `distributedInfo`, the `Rank` argument of collectives, the
    file's name.
    """
    for value, source in (
        ((capture or {}).get("rank"), "capture"),
        (get_distributed_info(metadata).get("rank"), "distributedInfo"),
        (collective_rank, "arguments"),
    ):
        rank = parse_whole_number(value)
        if rank is not None and 0 <= rank < 2**31:
            return rank, source, []
    match = _RANK_IN_FILE_NAME.search(Path(path).name)
    if match:
        rank = int(match.group(1))
        text = f"the file does not say its rank; {rank} is taken from the file name"
        return (
            rank,
            "file name",
            [Notice("rank-from-name", "info", text, rank=rank, where=Path(path).name)],
        )
    return None, None, []


def build_device_frame(metadata: dict[str, Any], used_devices: set[int]) -> pl.DataFrame:
    """Builds the `devices` frame: the visible devices, and used ones that are not listed."""
    rows: dict[int, dict[str, Any]] = {}
    properties = metadata.get("deviceProperties")
    for item in properties if isinstance(properties, list) else []:
        index = parse_whole_number(item.get("id")) if isinstance(item, dict) else None
        if index is None or not -(2**31) <= index < 2**31:
            continue
        major, minor = (
            parse_whole_number(item.get("computeMajor")),
            parse_whole_number(item.get("computeMinor")),
        )
        name = item.get("name")
        rows[index] = {
            "device": index,
            "name": name if isinstance(name, str) and name.strip() else None,
            "memory_bytes": parse_whole_number(item.get("totalGlobalMem")),
            "multiprocessors": _filter_positive_int32(parse_whole_number(item.get("numSms"))),
            "compute_capability": f"{major}.{minor}"
            if major is not None and minor is not None
            else None,
            "used": index in used_devices,
        }
    for index in sorted(used_devices - set(rows)):
        rows[index] = {"device": index, "used": True}
    return pl.DataFrame([rows[index] for index in sorted(rows)], schema=SCHEMAS["devices"])


def _filter_positive_int32(value: int | None) -> int | None:
    return value if value is not None and 0 < value < 2**31 else None


def merge_group_row(
    rows: dict[str, dict[str, Any]],
    name: str,
    description_and_backend: tuple[Any, Any],
    size: int | None,
    members: list[Any] | None,
) -> None:
    """Merges an entry about a group into its row (`description_and_backend`: its description and
    backend).
    """
    earlier_row = rows.get(name, {})
    description, backend = (
        word if isinstance(word, str) else None for word in description_and_backend
    )
    rows[name] = {
        "group": name,
        "description": description or earlier_row.get("description"),
        "backend": backend or earlier_row.get("backend"),
        "size": size or earlier_row.get("size"),
        "ranks": members or earlier_row.get("ranks"),
    }


def build_group_frame(metadata: dict[str, Any], capture: dict[str, Any] | None) -> pl.DataFrame:
    """Builds the `groups` frame, from `pg_config` and from capture.json (which has the members of
    every group).
    """
    group_configs = get_distributed_info(metadata).get("pg_config")
    if isinstance(group_configs, str):
        group_configs = _parse_json(group_configs)
    groups = [  # name, description, backend, the whole entry
        (item["pg_name"], item.get("pg_desc"), item.get("backend_config"), item)
        for item in (group_configs if isinstance(group_configs, list) else [])
        if isinstance(item, dict) and item.get("pg_name") is not None
    ]
    groups += [
        (item.get("name", item.get("group")), item.get("description"), item.get("backend"), item)
        for item in (capture or {}).get("groups") or []
        if isinstance(item, dict) and (item.get("name") or item.get("group")) is not None
    ]
    rows: dict[str, dict[str, Any]] = {}
    for name, description, backend, item in groups:
        ranks = item.get("ranks")
        members = (
            ranks
            if isinstance(ranks, list)
            else _parse_json(ranks)
            if isinstance(ranks, str)
            else None
        )
        if not isinstance(members, list) or not all(
            type(rank) is int and 0 <= rank < 2**31 for rank in members
        ):
            members = None
        size = _filter_positive_int32(parse_whole_number(item.get("pg_size", item.get("size"))))
        if size is None and members:
            size = len(members)
        if members is not None and size is not None and len(members) < size:
            members = None  # cut
        merge_group_row(rows, str(name), (description, backend), size, members)
    return pl.DataFrame(list(rows.values()), schema=SCHEMAS["groups"])


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def collect_versions(metadata: dict[str, Any]) -> dict[str, str]:
    """Returns versions of the runtime, driver, tracer and communication library."""
    entries = {
        key: value
        for key, value in metadata.items()
        if _VERSION_KEY.search(key) and key != "schemaVersion"
    }
    if "nccl_version" in get_distributed_info(metadata):
        entries["nccl_version"] = get_distributed_info(metadata)["nccl_version"]
    return {
        key: str(value) for key, value in entries.items() if isinstance(value, (str, int, float))
    }


def collect_settings(metadata: dict[str, Any]) -> dict[str, bool]:
    """Returns which recording options were enabled."""
    return {key: bool(metadata[key]) for key in _SETTING_KEYS if key in metadata}


def collect_job_labels(metadata: dict[str, Any]) -> dict[str, str]:
    return {
        key: str(value)
        for key, value in metadata.items()
        if _JOB_LABEL_KEY.match(key) and isinstance(value, (str, int))
    }
