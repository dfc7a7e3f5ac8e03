"""Names of ranks, devices and kinds of time, and merged notices."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from traceloom.report.document import Cells
from traceloom.system.sanitize import sanitize
from traceloom.system.units import format_ranges

if TYPE_CHECKING:
    from traceloom.report.documents import ReportDocument
    from traceloom.report.documents.report import AccountRow, GpuAccountRow, RankRow, StepRow


_ANONYMOUS = re.compile(r"\(anonymous namespace\)::|_GLOBAL__N__\w*::|\{anonymous\}::")
_LAMBDA = re.compile(r"::\{lambda\([^)]*\)#\d+\}(?:::operator\(\)\(\)(?: const)?)?")
_NAMESPACE = re.compile(r"\b[A-Za-z_]\w*::")
_NUMBERS = re.compile(r"<(?:(?:\d+u?l?|\((?:int|bool)\)\d+|true|false), )+")
_WRAPPER = re.compile(r"\bgpu_kernel_impl\w*<")
_MODULE = "traceloom.module:"  # prefix of the names of modules, where memory is tracked
_MIN_ARGUMENTS_WIDTH = 6
_MAX_NAME_CHARS = 4_000  # characters of a name that are examined
_ELLIPSIS = "…"


def format_rank_name(entry: Mapping[str, Any], position: int) -> str:
    """Returns the name of the rank at a position of the document's `ranks`."""
    return f"trace {position + 1}" if entry.get("rank") is None else f"rank {entry['rank']}"


def is_device_paced(entry: RankRow) -> bool:
    """Whether the host of a rank runs ahead, so that the periods of its device are the steps."""
    times = entry["step_times"]
    return times is not None and times["clock"] == "device"


def get_step_length(entry: RankRow, step: StepRow) -> int:
    """Returns how long a step of a rank takes, by the clock that sets the pace."""
    period_ns = step["device_period_ns"] if is_device_paced(entry) else None
    return step["duration_ns"] if period_ns is None else period_ns


def format_rank(rank: int | None) -> str:
    """Returns `rank 3`; `rank ?` where the file does not state it."""
    return f"rank {'?' if rank is None else rank}"


def format_memory_name(row: Mapping[str, Any]) -> str:
    kind = str(row["device_type"])
    return (
        kind
        if kind.startswith("cpu") or row.get("device") in (None, -1)
        else f"{kind} {row['device']}"
    )


def clean_name(name: str) -> str:
    """Returns a sanitized name without the prefix of modules."""
    return sanitize(name).removeprefix(_MODULE)


def fit_name(name: str, width: int) -> str:
    """Returns a sanitized name of at most `width` characters that still distinguishes kernels.

    From a name that is too long the following are removed until it fits: a leading `void ` and the
    parameter list; namespaces; numbers and wrappers at the beginning of its template arguments; the
    end of these arguments; finally its middle.
    """
    name = clean_name(name[:_MAX_NAME_CHARS])
    if len(name) <= width:
        return name
    # Without `void `, the parameter list after a C++ function, and unnamed namespaces
    name = _ANONYMOUS.sub("", name.removeprefix("void "))
    if name.endswith((")", ") const")):
        depth = opening = 0
        function = name.removesuffix(" const")
        for position in range(len(function) - 1, -1, -1):
            depth += {")": 1, "(": -1}.get(function[position], 0)
            if depth == 0:  # the bracket that the last character closes was opened here
                opening = position
                break
        if opening > 0 and name[opening - 1] not in " :":
            name = name[:opening]
    if len(name) > width:
        name = _NAMESPACE.sub("", _LAMBDA.sub("", name))
    if len(name) > width:  # tile sizes and wrappers, with which template arguments often begin
        name = _NUMBERS.sub("<", _WRAPPER.sub("", name))
    if len(name) <= width:
        return name
    head, bracket, arguments = name.partition("<")
    width_left = width - len(head) - 3  # for `<`, `…` and `>`
    if bracket and width_left >= _MIN_ARGUMENTS_WIDTH:
        return f"{head}<{arguments[:width_left]}{_ELLIPSIS}>"
    if bracket and len(head) + 3 <= width:
        return f"{head}<{_ELLIPSIS}>"
    name = head if bracket else name
    if len(name) <= width:
        return name
    if width <= 1:
        return _ELLIPSIS[:width]
    front = (width - 1) * 2 // 3
    back = width - 1 - front
    return name[:front] + _ELLIPSIS + (name[-back:] if back else "")


class TimeKind(NamedTuple):
    """A kind of time: key in the document, label in bars and columns, and colour group."""

    key: str
    label: str
    title: str
    group: str
    hint: str = ""


DEVICE_TIMES = (
    TimeKind("compute_ns", "compute", "Compute", "compute", "kernels that are not communication"),
    TimeKind(
        "exposed_communication_ns",
        "exposed communication",
        "Comm.",
        "communication",
        "communication not overlapped by compute",
    ),
    TimeKind(
        "exposed_memory_ns",
        "exposed copies and fills",
        "Memory",
        "memory",
        "copies and fills not overlapped by other work",
    ),
    TimeKind("idle_ns", "idle", "Idle", "idle", "no stream of the device runs anything"),
)
"""Kinds of time in a device's window, which they add up to."""

PHASES = (
    TimeKind("loading", "loading", "Loading", "loading"),
    TimeKind("forward", "forward", "Forward", "forward"),
    TimeKind("backward", "backward", "Backward", "backward"),
    TimeKind("optimizer", "optimizer", "Optimizer", "optimizer"),
    TimeKind("communication", "communication", "Comm.", "communication"),
    TimeKind("other", "other", "Other", "other"),
)
"""Kinds of time in a host thread's window, by the outermost region."""

ACTIVITIES = (
    TimeKind("op", "operators", "Operators", "op"),
    TimeKind("launch", "launch calls", "Launch calls", "launch"),
    TimeKind("blocking_call", "blocking calls", "Blocking calls", "blocking"),
    TimeKind("python", "Python", "Python", "python"),
    TimeKind("unobserved", "unobserved", "Unobserved", "idle"),
)
"""Kinds of time in a host thread's window, by the innermost event."""

_COLOUR_GROUPS = {part.group: part.group for part in DEVICE_TIMES} | {
    part.key: part.group for part in (*PHASES, *ACTIVITIES)
}


def get_colour_group(kind: str) -> str:
    """Returns the colour group of a kind of time; `other` if this version does not know it."""
    return _COLOUR_GROUPS.get(kind, "other")


_GROUP_ORDER = (
    "compute",
    "loading",
    "forward",
    "backward",
    "optimizer",
    "communication",
    "memory",
    "other",
    "idle",
)
_PHASES = frozenset(part.key for part in PHASES)


def get_group_position(group_name: str) -> int:
    """Returns the position of a colour group in the bar of an answer: useful time first, idle time
    last, phases in their order.
    """
    return _GROUP_ORDER.index(group_name) if group_name in _GROUP_ORDER else 0


def build_answer_parts(answer: Mapping[str, Any]) -> list[tuple[str, str, int]]:
    """Returns the parts of an answer for a `Bar`, in its order: (label, colour group,
    nanoseconds).
    """
    parts = []
    for part in answer.get("parts") or []:
        label = str(part["label"])
        # Parts of the host account are named `phase: activity`; the phase is more informative, so
        # it determines the colour.
        phase, colon, _ = label.partition(":")
        parts.append(
            (
                label,
                get_colour_group(phase if colon and phase in _PHASES else str(part["kind"])),
                int(part["ns"]),
            )
        )
    return sorted(parts, key=lambda part: (get_group_position(part[1]), -part[2]))


def build_time_parts(
    parts: tuple[TimeKind, ...], times: Mapping[str, Any]
) -> list[tuple[str, str, int]]:
    """Returns the parts of one duration for a `Bar`: (label, colour group, nanoseconds)."""
    return [(part.label, part.group, times.get(part.key) or 0) for part in parts]


AT_EDGES = "edges_of_recording"
AT_EDGES_MEANING = "before the first and after the last GPU work of the recording"
_GPU_WORK_WINDOW = "from first to last GPU work"


class IdleCause(NamedTuple):
    """Idle time by cause, of one device or (None) of all; the edges of a recording are not gaps."""

    device: int | None
    cause: str
    idle_ns: int
    gap_count: int | None


def list_gpu_accounts(document: ReportDocument) -> list[tuple[RankRow, GpuAccountRow]]:
    """Returns the ranks that have GPU work, each with its part of the time of the answer."""
    return [(rank, rank["gpu_account"]) for rank in document["ranks"] if rank["gpu_account"]]


def describe_gpu_window(document: ReportDocument) -> str:
    """Describes the time range of the accounts of the devices."""
    windows = {account["window"] for _, account in list_gpu_accounts(document)}
    if windows == {"steps"}:
        return _describe_steps(document)
    return (
        _GPU_WORK_WINDOW
        if windows == {"gpu_work"}
        else f"{_describe_steps(document)}, without steps {_GPU_WORK_WINDOW}"
    )


def list_idle_causes(account: GpuAccountRow) -> Iterator[IdleCause]:
    """Yields the causes of gaps, then the time at the edges of the recording."""
    for row in account["idle"]:
        yield IdleCause(row["device"], row["cause"], row["idle_ns"], row["gap_count"])
    for device in account["devices"]:
        if edge := device["edge_idle_ns"]:
            yield IdleCause(device["device"], AT_EDGES, edge, None)


def get_main_thread_account(rank: RankRow) -> list[AccountRow]:
    """Returns what the main thread of a rank did in its whole steps; without steps, in the whole
    window.
    """
    host = rank.get("host") or {}
    lanes = {thread["lane"] for thread in host.get("threads") or [] if thread["main"]}
    rows = [row for row in host.get("account") or [] if row["lane"] in lanes]
    told = {row["step"] for row in rank["steps"] if row["complete"]}
    told = told or {row["step"] for row in rank["steps"]}
    in_steps = [row for row in rows if row["step"] in told]
    return in_steps if any(row["ns"] for row in in_steps) else rows


def describe_host_window(document: ReportDocument) -> str:
    """Describes the time range of the accounts of the main threads."""
    stepped = any(
        row["step"] is not None
        for rank in document["ranks"]
        for row in get_main_thread_account(rank)
    )
    return _describe_steps(document) if stepped else "in the whole window"


def _describe_steps(document: ReportDocument) -> str:
    if len({row["complete"] for rank in document["ranks"] for row in rank["steps"]}) > 1:
        return "in all whole steps"
    return (
        "in all steps"
        if any(len(rank["steps"]) > 1 for rank in document["ranks"])
        else "in the step"
    )


@dataclass(frozen=True, slots=True)
class MergedNotice:
    """Notices of one kind, merged; `weakens` has the keys of the parts of the report that are less
    certain because of it.
    """

    severity: str
    slug: str
    sentence: str
    weakens: tuple[str, ...] = ()


def merge_notices(notices: Sequence[Cells], ranks: int) -> list[MergedNotice]:
    """Returns the notices of a document in their order; those that differ only by rank or place are
    merged into the first.
    """
    kinds: dict[tuple[str, str], list[Cells]] = {}
    for notice in notices:
        kinds.setdefault((notice["severity"], notice["slug"]), []).append(notice)
    merged = []
    for (severity, slug), alike in kinds.items():
        weakens = tuple(effect["part"].rpartition(".")[2] for effect in alike[0].get("affects", []))
        first = alike[0]
        rank_prefix = f"rank {first['rank']}: " if ranks > 1 and first["rank"] is not None else ""
        mentioned = not first["where"] or first["where"] in first["message"]
        location = "" if mentioned else f" ({first['where']})"
        repeat_note = f" (and {len(alike) - 1} more like this)" if len(alike) > 1 else ""
        merged.append(
            MergedNotice(
                severity, slug, f"{rank_prefix}{first['message']}{location}{repeat_note}", weakens
            )
        )
    return merged


def merge_rank_notices(notices: Sequence[Cells]) -> Iterator[tuple[Cells, str]]:
    """Merges notices of several ranks: yields the first of each kind, and its sentence with all of
    their ranks.
    """
    kinds: dict[tuple[str, str], list[Cells]] = {}
    for notice in notices:
        run_message = notice["message"] if notice["rank"] is None else ""
        kinds.setdefault((notice["slug"], run_message), []).append(notice)
    for alike in kinds.values():
        first, message = alike[0], alike[0]["message"]
        ranks = sorted({notice["rank"] for notice in alike if notice["rank"] is not None})
        if len(ranks) < 2:
            yield first, message
        elif all(notice["message"] == message for notice in alike):
            yield first, f"{message} (ranks {format_ranges(ranks)})"
        else:
            other_ranks = [rank for rank in ranks if rank != first["rank"]]
            yield (
                first,
                f"{message} (rank {first['rank']}; the like on {format_ranges(other_ranks)})",
            )
