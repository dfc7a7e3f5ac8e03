"""Is the new run worse than the base, or is it chance? Verdicts with intervals, on one run or on several of each side.

Exact definitions: docs/concepts/verdicts.md.

Names are loaded when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from traceloom.lazy import lazy

if TYPE_CHECKING:
    from traceloom.analyze.gate.condition import DEFAULT as DEFAULT
    from traceloom.analyze.gate.condition import Condition as Condition
    from traceloom.analyze.gate.condition import parse as parse
    from traceloom.analyze.gate.measure import summarise as summarise
    from traceloom.analyze.gate.summary import RunSummary as RunSummary
    from traceloom.analyze.gate.verdict import FAIL as FAIL
    from traceloom.analyze.gate.verdict import INCONCLUSIVE as INCONCLUSIVE
    from traceloom.analyze.gate.verdict import PASS as PASS
    from traceloom.analyze.gate.verdict import Verdict as Verdict
    from traceloom.analyze.gate.verdict import judge as judge

lazy(
    __name__,
    {
        "Condition": ".condition",
        "DEFAULT": ".condition",
        "FAIL": ".verdict",
        "INCONCLUSIVE": ".verdict",
        "PASS": ".verdict",
        "RunSummary": ".summary",
        "Verdict": ".verdict",
        "judge": ".verdict",
        "parse": ".condition",
        "summarise": ".measure",
    },
)
