"""Changes that a graph can be asked about: how each is written, and what it assumes.

A change is written as `[rank N[,M]] TARGET [~ REGEX] ACTION`, for example `kernels ~ gemm * 0.5`, `copies async`,
`syncs ~ cudaDeviceSynchronize remove`, `rank 7 delay remove`, `network * 2`, `idle remove`. What each assumes is said
in `ASSUMES`, and in docs/concepts/what-if.md.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from traceloom.errors import UsageError
from traceloom.simulate.selection import DEVICE_TARGETS, TARGETS, Chosen, Selection

ASSUMES = {
    "scale": "the work chosen takes so many times as long; everything else as long as it took",
    "remove": "the work chosen takes no time; what waited for it waits for nothing longer",
    "async": "the calls of these copies return at once; what uses the data is ordered on the device as before",
    "drop": "these calls no longer wait for the device; what they themselves cost stays",
    "overlap": "this runs beside what comes behind it: nothing before the optimizer needs its result, and it slows no "
    "kernel down; what other kernels covered already is not saved again",
    "network": "the transfer of every communication is so many times as fast; waiting for late ranks stays",
    "delay": "this rank begins no later and works no slower than the middle one of the others, step by step and name "
    "by name; what most others do not do takes no time",
    "idle": "work is always launched in time: host and launches cost nothing, what the device does stays in order",
    "fuse": "kernels that follow each other on a stream become one: their pauses and all launches but the first go, "
    "their work stays",
    "graph": "one launch submits all that a rank does in a step: the calls that launch and the operators around them "
    "cost nothing but the first",
    "balance": "kernels of each name take as long on every rank as on the mean one, step by step",
    "workers": "so many processes make batches beside the step; the step waits only for what they cannot keep up with",
}
_ACTIONS = ("remove", "async", "overlap", "fuse", "graph", "balance")  # without a number
_OF_DEVICE = ("async", "overlap", "fuse", "graph")  # of what the device does
_TEXT = re.compile(
    r"^\s*(?:ranks?\s+(?P<ranks>\d+(?:\s*,\s*\d+)*)\s+)?(?P<target>[a-z]+)(?:\s*~\s*(?P<pattern>.+?))?"
    r"\s+(?:(?P<sign>[*x×])\s*(?P<factor>\d+(?:\.\d+)?)|(?P<action>[a-z]+)(?:\s+(?P<number>\d+))?)\s*$"
)
EXAMPLES = "`kernels ~ gemm * 0.5`, `copies async`, `rank 7 delay remove`, `network * 2`, `loading workers 4`"


@dataclass(frozen=True, slots=True)
class Change:
    """One change.

    Attributes:
        action: A key of `ASSUMES`.
        selection: What it is about.
        factor: Of `scale` (times as long), `network` (times as fast) and `workers` (how many); 1 else.
    """

    action: str
    selection: Selection | Chosen
    factor: float = 1.0

    def __str__(self) -> str:
        number = plain_number(self.factor)
        words = {
            "scale": f"{self.selection} * {number}",
            "network": f"{self.selection} * {number}",
            "workers": f"{self.selection} workers {number}",
            "delay": f"{self.selection} remove",
            "idle": f"{self.selection} remove",
            "drop": f"{self.selection} remove",
        }
        special = {"network": "network", "delay": "delay", "idle": "idle"}.get(self.action)
        text = words.get(self.action, f"{self.selection} {self.action}")
        return text.replace(self.selection.target, special, 1) if special else text


def plain_number(factor: float) -> str:
    """A factor as a change is written with it: all its digits, no exponent."""
    return np.format_float_positional(factor, trim="-")


def parse(text: str) -> Change:
    """Read a change.

    Raises:
        UsageError: slug `bad-change`, with what is understood.
    """
    match = _TEXT.match(text)
    if match is None:
        raise _bad(text, "write it as TARGET [~ REGEX] ACTION")
    ranks = tuple(int(part) for part in (match["ranks"] or "").split(",") if part.strip())
    target, pattern, action = match["target"], match["pattern"] or "", match["action"]
    factor = float(match["factor"]) if match["factor"] else 1.0
    scaled = match["sign"] is not None
    if match["number"] and action != "workers":
        raise _bad(text, f"`{action}` takes no number")
    if target == "network" and scaled and factor > 0:
        return Change("network", Selection("collectives", pattern, ranks), factor)
    if target in {"delay", "idle"} and pattern:
        raise _bad(text, f"`{target}` takes no `~`: it is of all that the host does")
    if target == "delay" and action == "remove":
        if not ranks:
            raise _bad(text, "say whose delay, as in `rank 7 delay remove`")
        return Change("delay", Selection("host", pattern, ranks))
    if target == "idle" and action == "remove":
        return Change("idle", Selection("host", pattern, ranks))
    if target not in TARGETS:
        raise _bad(text, f"`{target}` is none of {', '.join([*TARGETS, 'network', 'delay', 'idle'])}")
    chosen = Selection(target, pattern, ranks)
    if scaled:
        return Change("scale", chosen, factor)
    if action == "workers" and target == "loading" and int(match["number"] or 0):
        return Change("workers", chosen, float(match["number"]))
    if action in {"remove", "drop"} and target == "syncs":
        return Change("drop", chosen)
    if action not in _ACTIONS:
        raise _bad(text, f"`{action}` is none of * FACTOR, {', '.join(_ACTIONS)}, workers N")
    if action in _OF_DEVICE and target not in DEVICE_TARGETS:
        raise _bad(text, f"`{action}` is of what the device does: {', '.join(DEVICE_TARGETS)}")
    return Change(action, chosen)


def _bad(text: str, why: str) -> UsageError:
    return UsageError(f"`{text}` is no change: {why}", slug="bad-change", hint=f"examples: {EXAMPLES}")
