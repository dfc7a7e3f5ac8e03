"""What traces of the fleet's rules have cost and may still cost: traces and bytes per day, steps of a job."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from traceloom.agent.triggers.targets import TriggerRefusal
from traceloom.collect.trigger_rules import FleetBudget
from traceloom.model.units import size

DAY_NS = 86_400 * 10**9


class FleetCharge(msgspec.Struct, kw_only=True):
    """What a request of a rule costs: steps that are traced and bytes that are kept; until it is `settled`, at most."""

    request: str
    rule: str
    job: str
    at_ns: int
    steps: int
    bytes: int
    settled: bool = False


class FleetLedger:
    """All charges that still count. A charge of the last 24 hours counts, and one whose request has not ended.

    Args:
        budget: What may be spent.
    """

    def __init__(self, budget: FleetBudget) -> None:
        self.budget = budget
        self.charges: dict[str, FleetCharge] = {}  # by request
        self._fired: dict[tuple[str, str], int] = {}  # rule and job -> when last

    def add(self, charges: Iterable[FleetCharge], now_ns: int) -> None:
        """Take charges; those of the future, as a clock that was set back leaves them, are of now."""
        for charge in charges:
            charge.at_ns = min(charge.at_ns, now_ns)
            self.charges[charge.request] = charge
            key = (charge.rule, charge.job)
            self._fired[key] = max(charge.at_ns, self._fired.get(key, 0))

    def forget(self, before_ns: int) -> list[str]:
        """Drop settled charges of before an instant; their requests."""
        gone = [name for name, charge in self.charges.items() if charge.settled and charge.at_ns < before_ns]
        for name in gone:
            del self.charges[name]
        if gone:
            self._fired = {key: at_ns for key, at_ns in self._fired.items() if at_ns >= before_ns}
        return gone

    def fired_ns(self, rule: str, job: str) -> int | None:
        """When the rule last traced the job, as far as that is remembered."""
        return self._fired.get((rule, job))

    def cooling(self, rule: str, job: str, cooldown_s: float, now_ns: int) -> float:
        """Seconds until the rule may trace the job again; 0.0 where it may."""
        fired_ns = self.fired_ns(rule, job)
        return 0.0 if fired_ns is None else max(0.0, cooldown_s - (now_ns - fired_ns) / 1e9)

    def refusal(self, job: str, steps: int, made: int, files: int, now_ns: int) -> TriggerRefusal | None:
        """Why a job cannot be traced for so many steps; None where it can.

        Args:
            job: Its name.
            steps: To be traced.
            made: That it made in the last day.
            files: To be kept.
            now_ns: Now.
        """
        counting, budget = list(self._counting(now_ns)), self.budget
        if len(counting) + 1 > budget.traces_per_day:
            return TriggerRefusal("budget-traces", f"the {budget.traces_per_day} of `budget.traces_per_day` were made")
        wanted, left = self.reserve(files), self.bytes_left(now_ns)
        if wanted > left:
            return TriggerRefusal(
                "budget-bytes",
                f"{size(wanted)} are to be set aside, and {size(max(left, 0))} of `budget.mb_per_day` are left",
            )
        spent = sum(charge.steps for charge in counting if charge.job == job)
        if spent + steps > budget.share * made:
            return TriggerRefusal(
                "budget-share",
                f"{spent} of the {made} steps that the job made in a day were traced, and {steps} more are above what "
                "`budget.share` allows",
            )
        return None

    def reserve(self, files: int) -> int:
        """Bytes that so many files have at most."""
        return files * int(self.budget.mb_per_trace * 1e6)

    def traces_left(self, now_ns: int) -> int:
        """How many traces may be made now."""
        return max(self.budget.traces_per_day - len(list(self._counting(now_ns))), 0)

    def bytes_left(self, now_ns: int) -> int:
        """What may be kept now; what runs counts with what it may have."""
        return int(self.budget.mb_per_day * 1e6) - sum(charge.bytes for charge in self._counting(now_ns))

    def _counting(self, now_ns: int) -> Iterable[FleetCharge]:
        return (
            charge for charge in self.charges.values() if charge.at_ns > now_ns - DAY_NS or not charge.settled
        )  # fmt: skip
