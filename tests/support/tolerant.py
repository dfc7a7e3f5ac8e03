"""A slow, simple reader of damaged traces, to judge the fast one by, and generated damages."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any

_DECODER = json.JSONDecoder(strict=False)
_SIGNS = b'"{}[],:\\'
_ODD_NUMBERS = [b"-", b"NaN", b"1e999", b"0x10", b"{}", b"9" * 40]
Damaged = tuple[str, bytes]


def is_event(value: dict[str, Any]) -> bool:
    """An entry of `traceEvents`."""
    return "ph" in value and ("ts" in value or value["ph"] == "M")


def is_node(value: dict[str, Any]) -> bool:
    """An entry of `nodes`."""
    return "id" in value and "name" in value and ("ctrl_deps" in value or "parent" in value)


def whole_objects(
    text: bytes, wanted: Callable[[dict[str, Any]], bool] = is_event, key: str = "traceEvents"
) -> list[dict[str, Any]]:
    """Every wanted object that is whole: tried from each opening bracket on, one after the other."""
    letters = text.decode("utf-8", "replace")
    start = re.search(rf'"{key}"\s*:\s*\[', letters)
    at = start.end() if start else 0
    out: list[dict[str, Any]] = []
    while (at := letters.find("{", at)) >= 0:
        try:
            value, end = _DECODER.raw_decode(letters, at)
        except (ValueError, RecursionError):
            at += 1
            continue
        if wanted(value):
            out.append(value)
            at = end
        else:
            at += 1
    return out


def damaged(text: bytes, chance: random.Random, times: int = 1) -> Damaged:
    """The text with so many damages of random kinds at random places, and what was done."""
    names = []
    for _ in range(times):
        kind = chance.choice(list(_KINDS))
        at = chance.randrange(max(1, len(text)))
        text = _KINDS[kind](text, at, chance)
        names.append(f"{kind} at {at}")
    return ", ".join(names), text


def _deleted(text: bytes, at: int, chance: random.Random) -> bytes:
    return text[:at] + text[at + chance.choice([1, 1, 1, 2, 7]) :]


def _inserted(text: bytes, at: int, chance: random.Random) -> bytes:
    return text[:at] + bytes([chance.randrange(256)]) + text[at:]


def _flipped(text: bytes, at: int, chance: random.Random) -> bytes:
    return (
        text[:at] + bytes([text[at] ^ 1 << chance.randrange(8)]) + text[at + 1 :] if text else text
    )


def _stray(text: bytes, at: int, chance: random.Random) -> bytes:
    return text[:at] + bytes([chance.choice(_SIGNS)]) + text[at:]


def _sign_gone(text: bytes, at: int, chance: random.Random) -> bytes:
    sign = bytes([chance.choice(_SIGNS)])
    position = text.find(sign, at)
    return text if position < 0 else text[:position] + text[position + 1 :]


def _odd_number(text: bytes, at: int, chance: random.Random) -> bytes:
    match = re.compile(rb"\d+(?:\.\d+)?(?=\s*[,}\]])").search(text, at)
    if not match:
        return text
    number = match[0]
    odd = chance.choice([number + b'"', b'"' + number, number + b".", *_ODD_NUMBERS])
    return text[: match.start()] + odd + text[match.end() :]


def _cut(text: bytes, at: int, chance: random.Random) -> bytes:
    return text[:at] if chance.random() < 0.5 else text[:at] + text[at + chance.randrange(200) :]


def _overwritten(text: bytes, at: int, chance: random.Random) -> bytes:
    return text[:at] + chance.randbytes(chance.randrange(1, 30)) + text[at + chance.randrange(30) :]


_KINDS: dict[str, Callable[[bytes, int, random.Random], bytes]] = {
    "deleted": _deleted,
    "inserted": _inserted,
    "flipped": _flipped,
    "stray": _stray,
    "sign gone": _sign_gone,
    "odd number": _odd_number,
    "cut": _cut,
    "overwritten": _overwritten,
}
