"""How a run was recorded: the command, what recording cost, and the wall time of every step of the run.

`capture.json` comes from a file that others may have touched: whatever is missing or of another kind is left out.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

from rich.text import Text

from traceloom.harmless import harmless
from traceloom.model import units
from traceloom.report.names import short
from traceloom.report.views.terminal.bars import sparkline
from traceloom.report.views.terminal.columns import heading
from traceloom.report.views.terminal.look import DIM

_WIDEST_SPARKLINE = 40


def recording(document: dict[str, Any], width: int) -> Iterator[Text]:
    """The recording as the first rank saw it; nothing where the run was not recorded by traceloom."""
    ranks = _at(document["capture"], list, "ranks") or []
    first = ranks[0] if ranks and isinstance(ranks[0], dict) else None
    if first is None:
        return
    versions = _at(first, dict, "versions") or {}
    note = ", ".join(harmless(f"{name} {version}") for name, version in sorted(versions.items()))
    yield from heading("Recording", note if len(note) < width - 12 else "", width)
    command = _at(document["capture"], list, "run", "command")
    if command:
        yield Text(" " + short(shlex.join(map(str, command)), width - 2))
    first_step, count = _at(first, int, "window", "first_step"), _at(first, int, "window", "step_count")
    steps = _at(first, list, "steps", "duration_ns") or []
    facts = []
    if first_step is not None and count:
        window = f"step {first_step}" if count == 1 else f"steps {first_step} to {first_step + count - 1}"
        facts.append(f"recorded {window}" + (f" of {len(steps)}" if steps else ""))
    ratio = _at(first, (int, float), "overhead", "ratio")
    if ratio is not None:
        facts.append(f"a recorded step took {ratio:.2f} × an unrecorded one")
    if facts:
        yield Text(" " + short("; ".join(facts), width - 2))
    durations = [ns for ns in steps if isinstance(ns, int) and ns >= 0]
    if len(durations) > 1:
        spark = sparkline(durations, _WIDEST_SPARKLINE)
        longest = units.duration(max(durations))
        yield Text.assemble(" every step of the run  ", (spark, DIM), f"  up to {longest}")


def _at(value: Any, kind: Any, *keys: str) -> Any:
    """What stands below these keys, if it is there and of this kind."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, kind) and not isinstance(value, bool) else None
