"""Names of kernels and operators as they stand in a sentence."""

from __future__ import annotations

import re

_ANONYMOUS = re.compile(r"\(anonymous namespace\)::|<unnamed>::")
_NAMESPACES = re.compile(r"\b(?:[A-Za-z_]\w*::)+")
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_OUTERMOST = re.compile(r"^(aten|torch|autograd|c10d|prims|quantized)::")
_WIDEST = 60
_LONGEST = 2_000  # characters that are looked at


def brief(name: str) -> str:
    """A name without what only a compiler needs: arguments, templates, namespaces; at most 60 characters."""
    name = _ADDRESS.sub("", name[:_LONGEST])
    if not _OUTERMOST.match(name) and ("::" in name or "<" in name[1:]) and not name.startswith("<"):
        name = _ANONYMOUS.sub("", name.removeprefix("void "))
        head, bracket, rest = name.partition("<")
        head = _NAMESPACES.sub("", head.split("(", 1)[0])
        name = f"{head}<…>" if bracket and rest else head
    return name if len(name) <= _WIDEST else f"{name[: _WIDEST - 1]}…"


def place(path: str) -> str:
    """The outermost of nested operators."""
    return brief(path.split(" > ", 1)[0])
