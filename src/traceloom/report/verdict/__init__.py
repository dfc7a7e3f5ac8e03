"""The verdict of a check: its document, which every view shows, and baselines to hold runs against."""

from collections.abc import Sequence
from typing import Any

from traceloom import __version__
from traceloom.analyze.gate import RunSummary, Verdict
from traceloom.analyze.gate.power import power

__all__ = ["build"]
FORMAT = "traceloom-verdict"
VERSION = 1


def build(
    verdict: Verdict,
    base: tuple[str, Sequence[RunSummary]],
    new: tuple[str, Sequence[RunSummary]],
    *,
    strict: bool,
    comparison: dict[str, Any] | None = None,
    effect: float | None = None,
) -> dict[str, Any]:
    """The verdict as one JSON object. Keys: docs/how-to/gate.md; version 1 only gains keys.

    Args:
        verdict: The verdict.
        base: Name of the base, and its runs.
        new: The same of the new side.
        strict: Whether `inconclusive` fails the check.
        comparison: Of `traceloom.report.comparison.build`, where both sides' traces are at hand.
        effect: A change, as a fraction of the base: how many runs would show it is told, too.
    """
    return {
        "format": FORMAT,
        "version": VERSION,
        "traceloom": __version__,
        "passed": verdict.verdict == "pass" or (verdict.verdict == "inconclusive" and not strict),
        "strict": strict,
        "base": _side(*base),
        "new": _side(*new),
        **verdict.to_dict(),
        "power": [] if effect is None else power(verdict.checks, effect).to_dicts(),
        "comparison": comparison,
    }


def _side(name: str, runs: Sequence[RunSummary]) -> dict[str, Any]:
    entries = [
        {
            "name": run.name,
            "recorded_steps": len(run.steps),
            "undisturbed_steps": None if run.wall_ns is None else len(run.wall_ns),
        }
        for run in runs
    ]
    return {"name": name, "runs": entries}
