"""The verdict of a check: its document, which every view shows, and baselines to hold runs against."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from traceloom import __version__
from traceloom.analyze.gate import RunSummary, Verdict
from traceloom.analyze.gate.power import power
from traceloom.model.frames import rows

if TYPE_CHECKING:
    from traceloom.report.documents.comparison import ComparisonDocument
    from traceloom.report.documents.verdict import JudgedRunRow, JudgedSideValue, VerdictDocument

__all__ = ["build"]
FORMAT = "traceloom-verdict"
VERSION = 1


def build(
    verdict: Verdict,
    base: tuple[str, Sequence[RunSummary]],
    new: tuple[str, Sequence[RunSummary]],
    *,
    strict: bool,
    comparison: ComparisonDocument | None = None,
    effect: float | None = None,
) -> VerdictDocument:
    """The verdict as one JSON object. Keys: docs/how-to/gate.md.

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
        "verdict": verdict.verdict,
        "sentence": verdict.sentence,
        "comparable": verdict.comparable,
        "checks": rows(verdict.checks),
        "conditions": rows(verdict.conditions),
        "causes": rows(verdict.causes),
        "power": [] if effect is None else rows(power(verdict.checks, effect)),
        "comparison": comparison,
    }


def _side(name: str, runs: Sequence[RunSummary]) -> JudgedSideValue:
    entries: list[JudgedRunRow] = [
        {
            "name": run.name,
            "recorded_steps": len(run.steps),
            "undisturbed_steps": None if run.wall_ns is None else len(run.wall_ns),
        }
        for run in runs
    ]
    return {"name": name, "runs": entries}
