"""capture.json as it should be: every value of the type that its key has, or left out and told with its place."""

from __future__ import annotations

import json
from typing import Annotated, Any, get_type_hints

import msgspec
from msgspec import Meta, Struct

from traceloom.errors import other_version
from traceloom.system.text import clean_json
from traceloom.trace.notice import Notice

FORMAT, VERSION = "traceloom-capture", 1
Whole = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Texts = dict[str, Any]


class CapturedGroup(Struct, kw_only=True):
    """One of `groups` of a rank."""

    name: str | None = None
    group: str | None = None
    description: str | None = None
    backend: str | None = None
    ranks: list[Whole] | str | None = None
    size: Whole | None = None


class CapturedWindow(Struct, kw_only=True):
    """`window` of a rank."""

    file: str | None = None
    kind: str | None = None
    first_step: Whole | None = None
    step_count: Whole | None = None
    start_ns: Whole | None = None
    end_ns: Whole | None = None
    before: Texts | None = None


class GraphStep(Struct, kw_only=True):
    """`graph_step` of a rank."""

    step: Whole | None = None
    duration_ns: Whole | None = None
    file: str | None = None
    host_file: str | None = None
    sources: list[str] | None = None


class CapturedClock(Struct, kw_only=True):
    """`clock` of a rank."""

    offset_ns: Whole | None = None
    error_ns: Whole | None = None


class Rank(Struct, kw_only=True):
    """One of `ranks`, as docs/reference/capture-json.md says."""

    rank: Whole | None = None
    world_size: Whole | None = None
    local_rank: Whole | None = None
    job: str | None = None
    name: str | None = None
    host: str | None = None
    clock: CapturedClock | None = None
    process: Whole | None = None
    command: list[str] | None = None
    platform: str | None = None
    processor: str | None = None
    logical_cpus: Whole | None = None
    usable_cpus: Whole | None = None
    torch_threads: Whole | None = None
    devices: list[Texts] | None = None
    versions: dict[str, str | None] | None = None
    settings: Texts | None = None
    groups: list[CapturedGroup] | None = None
    created_ns: Whole | None = None
    written_ns: Whole | None = None
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
    live_bytes_at_start: dict[str, Whole] | None = None
    live_storages_at_start: Texts | None = None
    live_storages_at_end: Texts | None = None
    allocators_at_end: list[Texts] | None = None
    out_of_memory: Texts | None = None
    overhead: Texts | None = None
    notices: list[Texts] | None = None


class Run(Struct, kw_only=True):
    """`run` of the whole capture."""

    command: list[str] | None = None
    exit_code: Whole | None = None
    signal: str | int | None = None
    started_ns: Whole | None = None
    ended_ns: Whole | None = None


_RANK, _RUN = (get_type_hints(kind, include_extras=True) for kind in (Rank, Run))


def decode(text: bytes, where: object) -> tuple[dict[str, Any], list[Notice]] | None:
    """The document without what does not fit, and what was left out; None where it is no such document at all.

    Raises:
        InputError: `other-version`.
    """
    try:
        document = json.loads(text.decode("utf-8", "replace"))
        document, replaced = clean_json(document)
    except (ValueError, RecursionError):
        return None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        return None
    if document.get("version") != VERSION:
        raise other_version("capture", document.get("version"), VERSION, where)
    if not isinstance(document.get("ranks"), list):
        return None
    odd: list[str] = []
    document["ranks"] = [_fitting(entry, _RANK, f"$.ranks[{at}]", odd) for at, entry in enumerate(document["ranks"])]
    document["ranks"] = [entry for entry in document["ranks"] if entry is not None]
    document["run"] = _fitting(document.get("run", {}), _RUN, "$.run", odd) or {}
    notices = []
    if odd:
        sentence = f"values of capture.json of an unexpected type, left out: {len(odd):,} (first {odd[0]})"
        notices.append(Notice("odd-capture", "warning", sentence, len(odd), where=odd[0].partition(":")[0]))
    if replaced:
        sentence = f"texts of capture.json that hold halves of surrogate pairs, replaced by U+FFFD: {replaced:,}"
        notices.append(Notice("replaced-text", "warning", sentence, replaced))
    return document, notices


def _fitting(entry: Any, types: dict[str, Any], path: str, odd: list[str]) -> dict[str, Any] | None:
    """The entry without the values that do not fit; None where it is no object."""
    if not isinstance(entry, dict):
        odd.append(f"{path}: expected an object")
        return None
    fitting = {}
    for key, value in entry.items():
        kind = types.get(key)
        fitting[key] = value
        if kind is None or _fault(value, kind) is None:
            continue
        members = [_fault(value[at : at + 1], kind) for at in range(len(value))] if isinstance(value, list) else []
        if None in members:  # of a list those that fit
            odd.extend(f"{path}.{key}[{at}]: {fault}" for at, fault in enumerate(members) if fault is not None)
            fitting[key] = [item for item, fault in zip(value, members, strict=True) if fault is None]
        else:
            odd.append(f"{path}.{key}: {_fault(value, kind)}")
            fitting[key] = None
    return fitting


def _fault(value: Any, kind: Any) -> str | None:
    try:
        msgspec.convert(value, kind, strict=True)
    except (msgspec.ValidationError, RecursionError) as error:
        return str(error)
    return None
