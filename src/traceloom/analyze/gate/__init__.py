"""Is the new run worse than the base, or is it chance? Verdicts with intervals, on one run or on several of each side.

Exact definitions: docs/concepts/verdicts.md.
"""

from traceloom.analyze.gate.condition import DEFAULT, Condition, parse
from traceloom.analyze.gate.measure import summarise
from traceloom.analyze.gate.summary import RunSummary
from traceloom.analyze.gate.verdict import FAIL, INCONCLUSIVE, PASS, Verdict, judge

__all__ = [
    "DEFAULT",
    "FAIL",
    "INCONCLUSIVE",
    "PASS",
    "Condition",
    "RunSummary",
    "Verdict",
    "judge",
    "parse",
    "summarise",
]
