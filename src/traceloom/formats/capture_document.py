"""Validates capture.json: values of the wrong type are removed and reported with their location."""

import json
from typing import Annotated, Any, get_type_hints

import msgspec
from msgspec import Meta, Struct

from traceloom.errors import other_version
from traceloom.system.text import replace_json_surrogates
from traceloom.trace.notice import Notice

FORMAT, VERSION = "traceloom-capture", 1
BoundedInt = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Texts = dict[str, Any]


class CapturedGroup(Struct, kw_only=True):
    name: str | None = None
    group: str | None = None
    description: str | None = None
    backend: str | None = None
    ranks: list[BoundedInt] | str | None = None
    size: BoundedInt | None = None


class CapturedWindow(Struct, kw_only=True):
    file: str | None = None
    kind: str | None = None
    first_step: BoundedInt | None = None
    step_count: BoundedInt | None = None
    start_ns: BoundedInt | None = None
    end_ns: BoundedInt | None = None


class GraphStep(Struct, kw_only=True):
    step: BoundedInt | None = None
    duration_ns: BoundedInt | None = None
    file: str | None = None
    host_file: str | None = None
    sources: list[str] | None = None


class CapturedClock(Struct, kw_only=True):
    offset_ns: BoundedInt | None = None
    error_ns: BoundedInt | None = None


class Rank(Struct, kw_only=True):
    """One of `ranks`, as documented in docs/reference/capture-json.md."""

    rank: BoundedInt | None = None
    world_size: BoundedInt | None = None
    local_rank: BoundedInt | None = None
    job: str | None = None
    name: str | None = None
    host: str | None = None
    clock: CapturedClock | None = None
    process: BoundedInt | None = None
    command: list[str] | None = None
    platform: str | None = None
    processor: str | None = None
    logical_cpus: BoundedInt | None = None
    usable_cpus: BoundedInt | None = None
    torch_threads: BoundedInt | None = None
    devices: list[Texts] | None = None
    versions: dict[str, str | None] | None = None
    settings: Texts | None = None
    groups: list[CapturedGroup] | None = None
    created_ns: BoundedInt | None = None
    written_ns: BoundedInt | None = None
    ended: str | None = None
    replay_of: str | None = None
    window: CapturedWindow | None = None
    windows: list[CapturedWindow] | None = None
    graph_step: GraphStep | None = None
    step_source: str | None = None
    steps: Texts | None = None
    incidental: bool | None = None
    collectives: Texts | None = None
    thread_cpu: Texts | None = None
    stack_samples: Texts | None = None
    live_bytes_at_start: dict[str, BoundedInt] | None = None
    live_storages_at_start: Texts | None = None
    live_storages_at_end: Texts | None = None
    allocators_at_end: list[Texts] | None = None
    out_of_memory: Texts | None = None
    overhead: Texts | None = None
    notices: list[Texts] | None = None


class Run(Struct, kw_only=True):
    command: list[str] | None = None
    exit_code: BoundedInt | None = None
    signal: str | int | None = None
    started_ns: BoundedInt | None = None
    ended_ns: BoundedInt | None = None


_RANK, _RUN = (get_type_hints(kind, include_extras=True) for kind in (Rank, Run))


def decode(text: bytes, location: object) -> tuple[dict[str, Any], list[Notice]] | None:
    """Returns the document without invalid values, and a notice of what was removed; None if it is
    no capture document.

    Raises:
        InputError: `other-version`.
    """
    try:
        document = json.loads(text.decode("utf-8", "replace"))
        document, replaced = replace_json_surrogates(document)
    except (ValueError, RecursionError):
        return None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        return None
    if document.get("version") != VERSION:
        raise other_version("capture", document.get("version"), VERSION, location)
    if not isinstance(document.get("ranks"), list):
        return None
    unexpected: list[str] = []
    document["ranks"] = [
        _select_valid_values(entry, _RANK, f"$.ranks[{index}]", unexpected)
        for index, entry in enumerate(document["ranks"])
    ]
    document["ranks"] = [entry for entry in document["ranks"] if entry is not None]
    document["run"] = _select_valid_values(document.get("run", {}), _RUN, "$.run", unexpected) or {}
    notices = []
    if unexpected:
        message = f"values of capture.json of an unexpected type, left out: {len(unexpected):,} (first {unexpected[0]})"
        notices.append(
            Notice(
                "odd-capture",
                "warning",
                message,
                len(unexpected),
                where=unexpected[0].partition(":")[0],
            )
        )
    if replaced:
        message = f"texts of capture.json that hold halves of surrogate pairs, replaced by U+FFFD: {replaced:,}"
        notices.append(Notice("replaced-text", "warning", message, replaced))
    return document, notices


def _select_valid_values(
    entry: Any, types: dict[str, Any], path: str, unexpected: list[str]
) -> dict[str, Any] | None:
    """Returns the entry without invalid values; None where it is not an object."""
    if not isinstance(entry, dict):
        unexpected.append(f"{path}: expected an object")
        return None
    fitting = {}
    for key, value in entry.items():
        kind = types.get(key)
        fitting[key] = value
        if kind is None or _find_fault(value, kind) is None:
            continue
        members = (
            [_find_fault(value[index : index + 1], kind) for index in range(len(value))]
            if isinstance(value, list)
            else []
        )
        if None in members:  # of a list keep the valid members
            unexpected.extend(
                f"{path}.{key}[{index}]: {fault}"
                for index, fault in enumerate(members)
                if fault is not None
            )
            fitting[key] = [
                item for item, fault in zip(value, members, strict=True) if fault is None
            ]
        else:
            unexpected.append(f"{path}.{key}: {_find_fault(value, kind)}")
            fitting[key] = None
    return fitting


def _find_fault(value: Any, kind: Any) -> str | None:
    try:
        msgspec.convert(value, kind, strict=True)
    except (msgspec.ValidationError, RecursionError) as error:
        return str(error)
    return None
