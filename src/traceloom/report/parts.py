"""The kinds of time that bars are made of: one order, one name and one colour group for every view."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class TimeKind(NamedTuple):
    """One kind of time: its key in the document, how bars and columns call it, its colour group."""

    key: str
    label: str
    title: str
    group: str
    hint: str = ""


DEVICE = (
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
"""Of a device's window, which they add up to."""

PHASES = (
    TimeKind("loading", "loading", "Loading", "loading"),
    TimeKind("forward", "forward", "Forward", "forward"),
    TimeKind("backward", "backward", "Backward", "backward"),
    TimeKind("optimizer", "optimizer", "Optimizer", "optimizer"),
    TimeKind("communication", "communication", "Comm.", "communication"),
    TimeKind("other", "other", "Other", "other"),
)
"""Of a host thread's window, by the outermost region."""

ACTIVITIES = (
    TimeKind("op", "operators", "Operators", "op"),
    TimeKind("launch", "launch calls", "Launch calls", "launch"),
    TimeKind("blocking_call", "blocking calls", "Blocking calls", "blocking"),
    TimeKind("python", "Python", "Python", "python"),
    TimeKind("unobserved", "unobserved", "Unobserved", "idle"),
)
"""Of a host thread's window, by the innermost event."""

_GROUPS = {part.group: part.group for part in DEVICE} | {part.key: part.group for part in (*PHASES, *ACTIVITIES)}


def group(kind: str) -> str:
    """The colour group of a kind of time; what this version does not know is `other`."""
    return _GROUPS.get(kind, "other")


_ORDER = ("compute", "loading", "forward", "backward", "optimizer", "communication", "memory", "other", "idle")
_PHASES = frozenset(part.key for part in PHASES)


def order(group_name: str) -> int:
    """Where a colour group stands in the bar of an answer: useful time first, idle time last, phases in their order."""
    return _ORDER.index(group_name) if group_name in _ORDER else 0


def of_answer(answer: Mapping[str, Any]) -> list[tuple[str, str, int]]:
    """The parts of an answer for a `Bar`, in its order: (label, colour group, nanoseconds)."""
    parts = []
    for part in answer.get("parts") or []:
        label = str(part["label"])
        # Parts of the host account are called `phase: activity`; the phase tells more, so it gives the colour.
        phase, colon, _ = label.partition(":")
        parts.append((label, group(phase if colon and phase in _PHASES else str(part["kind"])), int(part["ns"])))
    return sorted(parts, key=lambda part: (order(part[1]), -part[2]))


def named(parts: tuple[TimeKind, ...], times: Mapping[str, Any]) -> list[tuple[str, str, int]]:
    """The parts of one stretch for a `Bar`: (label, colour group, nanoseconds)."""
    return [(part.label, part.group, times.get(part.key) or 0) for part in parts]
