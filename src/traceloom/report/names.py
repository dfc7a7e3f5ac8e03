"""How ranks and devices are called, and names of strangers made fit to be shown: long C++ names get short."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from traceloom.harmless import harmless

_ANONYMOUS = re.compile(r"\(anonymous namespace\)::|_GLOBAL__N__\w*::|\{anonymous\}::")
_LAMBDA = re.compile(r"::\{lambda\([^)]*\)#\d+\}(?:::operator\(\)\(\)(?: const)?)?")
_NAMESPACE = re.compile(r"\b[A-Za-z_]\w*::")
_NUMBERS = re.compile(r"<(?:(?:\d+u?l?|\((?:int|bool)\)\d+|true|false), )+")
_WRAPPER = re.compile(r"\bgpu_kernel_impl\w*<")
_MODULE = "traceloom.module:"  # in front of the names of modules, where memory is followed
_LEAST_ARGUMENTS = 6
_LONGEST = 4_000  # characters of a name that are looked at
_ELLIPSIS = "…"


def rank_name(entry: Mapping[str, Any], position: int) -> str:
    """How a rank is called that stands at a position of the document's `ranks`."""
    return f"trace {position + 1}" if entry.get("rank") is None else f"rank {entry['rank']}"


def rank_label(rank: int | None) -> str:
    """`rank 3`; `rank ?` where the file does not say."""
    return f"rank {'?' if rank is None else rank}"


def allocator(row: Mapping[str, Any]) -> str:
    """How the memory of a device is called."""
    kind = str(row["device_type"])
    return kind if kind.startswith("cpu") or row.get("device") in (None, -1) else f"{kind} {row['device']}"


def label(name: str) -> str:
    """A harmless name without what only says that it is a module."""
    return harmless(name).removeprefix(_MODULE)


def short(name: str, width: int) -> str:
    """A harmless name of at most `width` characters that still tells two kernels apart.

    A name that is too long loses, until it fits: `void ` in front and the parameter list behind; namespaces; numbers
    and wrappers at the head of its template arguments; the end of these arguments; at last its middle.
    """
    name = label(name[:_LONGEST])
    if len(name) <= width:
        return name
    # Without `void `, the parameter list behind a C++ function and unnamed namespaces
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
    room = width - len(head) - 3  # for `<`, `…` and `>`
    if bracket and room >= _LEAST_ARGUMENTS:
        return f"{head}<{arguments[:room]}{_ELLIPSIS}>"
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
