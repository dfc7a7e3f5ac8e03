"""How the run was recorded: the command, the machines, what it cost, and the wall time of every step of the run.

`capture.json` may have been written by hand: whatever is missing or of another kind is left out.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from traceloom.model import units
from traceloom.report.names import rank_name
from traceloom.report.table import Col
from traceloom.report.views.html.absence import Reasons
from traceloom.report.views.html.table import table
from traceloom.report.views.html.text import text

if TYPE_CHECKING:
    from traceloom.report.documents import ReportDocument

_STATES = {
    "recorded": "recorded",
    "graph": "graph step (not used for durations)",
    "unrecorded": "not recorded",
    "early": "not recorded, before the window",
}
_MOST_STEPS = 2_000  # drawn of a run


def capture(document: ReportDocument, reasons: Reasons) -> str:
    """The recording of every rank."""
    recorded = document.get("capture")
    if not isinstance(recorded, dict):
        return reasons.line("capture", "Recording")
    command = _of(recorded, "run", "command")
    line = ""
    if isinstance(command, list):
        line = f"<p>Recorded with <code>{text(shlex.join(map(str, command)))}</code></p>"
    listed = recorded.get("ranks")
    ranks = [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
    pictures = "".join(_in_block(entry, ranks, document) for entry in ranks)
    return f"<h3>Recording</h3>{line}{_machines(ranks)}{pictures}"


def _of(row: Any, *keys: str) -> Any:
    """The value at a path of keys; None where there is none."""
    for key in keys:
        row = row.get(key) if isinstance(row, dict) else None
    return row


def _machines(ranks: list[dict[str, Any]]) -> str:
    if not ranks:
        return ""
    rows = []
    for entry in ranks:
        settings, ratio = entry.get("settings"), _of(entry, "overhead", "ratio")
        switched_on = None
        if isinstance(settings, dict):
            switched_on = ", ".join(key.replace("_", " ") for key, on in settings.items() if on is True) or "none"
        rows.append(
            {
                "rank": entry.get("rank"),
                "host": entry.get("host"),
                "processor": entry.get("processor"),
                "cpus": entry.get("usable_cpus"),
                "threads": entry.get("torch_threads"),
                "torch": _of(entry, "versions", "torch"),
                "python": _of(entry, "versions", "python"),
                "with": switched_on,
                "recorded_ns": _of(entry, "overhead", "recorded_median_ns"),
                "bare_ns": _of(entry, "overhead", "unrecorded_median_ns"),
                "ratio": f"{ratio:.2f} ×" if isinstance(ratio, (int, float)) else None,
            }
        )
    columns = [
        Col("rank", "Rank", "count"),
        Col("host", "Host"),
        Col("processor", "Processor"),
        Col("cpus", "CPUs", "count", "that the process may use"),
        Col("threads", "Threads", "count", "of PyTorch's operators"),
        Col("torch", "PyTorch"),
        Col("python", "Python"),
        Col("with", "With"),
        Col("recorded_ns", "Step", "time", "median of the recorded steps", scale="step"),
        Col("bare_ns", "Bare step", "time", "median of the steps of this run that were not recorded", scale="step"),
        Col("ratio", "Overhead", "text", "recorded by bare step: what recording cost, and chance"),
    ]
    why_unknown = dict.fromkeys(("bare_ns", "ratio"), "no step of this run was left unrecorded after the first ones")
    return table("recording-table", columns, rows, why_unknown, "Recording by rank")


def _in_block(entry: dict[str, Any], ranks: list[dict[str, Any]], document: ReportDocument) -> str:
    """The picture of one rank, shown when this rank is the chosen one."""
    picture = _steps(entry)
    if not picture or len(ranks) == 1:
        return picture
    position = next((k for k, r in enumerate(document["ranks"]) if r.get("rank") == entry.get("rank")), None)
    if position is None:
        return ""
    only = "" if len(document["ranks"]) == 1 else f' data-of-rank="{position}"'
    return f'<div{only}><p class="of">{rank_name(entry, position).capitalize()}</p>{picture}</div>'


def _steps(entry: dict[str, Any]) -> str:
    """Every step of the run as a column as high as its wall time."""
    durations, states = _of(entry, "steps", "duration_ns"), _of(entry, "steps", "state")
    if not isinstance(durations, list) or not isinstance(states, list) or len(durations) < 2:
        return ""
    shown = [(ns, str(state)) for ns, state in zip(durations, states, strict=False) if isinstance(ns, int) and ns >= 0]
    shown = shown[-_MOST_STEPS:]
    longest = max((ns for ns, _ in shown), default=0) or 1
    columns = "".join(
        f'<rect class="s-{state if state in _STATES else "early"}" x="{k + 0.1:.1f}" width="0.8" '
        f'y="{100 - 100 * ns / longest:.2f}" height="{100 * ns / longest:.2f}">'
        f"<title>{units.duration(ns)}, {_STATES.get(state, text(state))}</title></rect>"
        for k, (ns, state) in enumerate(shown)
    )
    caption = f"Wall time of {len(shown)} steps of the run, up to {units.duration(longest)}"
    legend = "".join(
        f'<li><i class="swatch s-{state}"></i>{title}</li>'
        for state, title in _STATES.items()
        if any(state == other for _, other in shown)
    )
    return (
        f'<figure class="columns"><figcaption class="quiet">{caption}</figcaption><svg viewBox="0 0 {len(shown)} 100" '
        f'preserveAspectRatio="none" role="img" aria-label="{caption}">{columns}</svg>'
        f'<ul class="legend">{legend}</ul></figure>'
    )
