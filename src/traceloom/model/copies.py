"""Which way a copy goes, and between which kinds of memory, by the names and arguments of all vendors."""

from __future__ import annotations

import re

_ARROW = re.compile(r"\((.+?)\s*->\s*(.+?)\)")
_SHORT = re.compile(r"\b([HDPM])(?:to|2)([HDPM])\b", re.IGNORECASE)
_LONG = re.compile(r"(host|device|peer|memory)_?to_?(host|device|peer|memory)", re.IGNORECASE)
_LETTER = {"h": "H", "d": "D", "p": "P", "m": "H"}  # XPU calls the host's side "memory"
_CUPTI_KINDS = {"1": "HtoD", "2": "DtoH", "8": "DtoD", "9": "HtoH", "10": "PtoP"}
_CUPTI_MEMORY = {"1": "pageable", "2": "pinned", "3": "device", "4": "array", "5": "managed"}


def copy_kind(name: str, argument: str | None = None) -> str:
    """HtoD, DtoH, DtoD, PtoP, HtoH, `fill` or `unknown`, from the event's name or its `copy kind` argument.

    Example:
        >>> copy_kind("Memcpy DtoH (Device -> Pinned)"), copy_kind("Memcpy", "8")
        ('DtoH', 'DtoD')
    """
    for text in (argument or "", name):
        if text in _CUPTI_KINDS:
            return _CUPTI_KINDS[text]
        match = _SHORT.search(text) or _LONG.search(text)
        if match:
            return f"{_LETTER[match.group(1)[0].lower()]}to{_LETTER[match.group(2)[0].lower()]}"
    if re.search(r"memset|fill", name, re.IGNORECASE):
        return "fill"
    return "DtoD" if "__amd_rocclr_copyBuffer" in name else "unknown"


def memory_kinds(name: str, source: str | None = None, target: str | None = None) -> tuple[str | None, str | None]:
    """The kinds of memory a copy reads and writes: pageable, pinned, device ...; None where it is not said."""
    arrow = _ARROW.search(name)
    if arrow:
        return arrow.group(1).lower(), arrow.group(2).lower()
    return _memory(source), _memory(target)


def _memory(argument: str | None) -> str | None:
    if argument is None:
        return None
    return _CUPTI_MEMORY.get(argument, argument.lower() if not argument.isdigit() else None)
