"""What traces of triggers have cost, and what they may still cost: cooldowns, a share of time, bytes per day."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from traceloom.agent.config import TriggerBudget
from traceloom.agent.owners import Process
from traceloom.agent.triggers.targets import TriggerRefusal
from traceloom.model.units import duration, size

DAY_NS = 86_400 * 10**9
_YOUNG_NS = 3600 * 10**9  # a process that is younger may be traced as long as one of this age


class Charge(msgspec.Struct, kw_only=True):
    """What a request of a rule costs a process: seconds traced and bytes kept; until it is `settled`, at most."""

    request: str
    process: str
    rule: str
    uid: int
    target: str
    at_ns: int
    seconds: float
    bytes: int
    settled: bool = False


class TriggerLedger:
    """All charges that still count.

    Args:
        budget: What may be spent.
    """

    def __init__(self, budget: TriggerBudget) -> None:
        self._budget = budget
        self.charges: list[Charge] = []  # oldest first
        self._fired: dict[tuple[str, int, str], int] = {}  # rule, user and target -> when last

    def add(self, charges: Iterable[Charge], now_ns: int) -> None:
        """Take charges; those of the future, as a clock that was set back leaves them, are of now."""
        for charge in charges:
            charge.at_ns = min(charge.at_ns, now_ns)
            self.charges.append(charge)
            key = (charge.rule, charge.uid, charge.target)
            self._fired[key] = max(charge.at_ns, self._fired.get(key, 0))
        self.charges.sort(key=lambda charge: charge.at_ns)

    def forget(self, before_ns: int) -> list[Charge]:
        """Drop settled charges of before an instant, at least a day ago; those that were dropped."""
        gone = [charge for charge in self.charges if charge.settled and charge.at_ns < before_ns]
        if gone:
            self.charges = [charge for charge in self.charges if not charge.settled or charge.at_ns >= before_ns]
            self._fired = {key: at_ns for key, at_ns in self._fired.items() if at_ns >= before_ns}
        return gone

    def cooling(self, rule: str, uid: int, target: str, cooldown_s: float, now_ns: int) -> float:
        """Seconds until the rule may trace the target of a user again; 0.0 where it may."""
        fired_ns = self._fired.get((rule, uid, target))
        return 0.0 if fired_ns is None else max(0.0, cooldown_s - (now_ns - fired_ns) / 1e9)

    def refusal(
        self, processes: Sequence[Process], seconds: Mapping[str, float], files: int, now_ns: int
    ) -> TriggerRefusal | None:
        """Why processes cannot be traced for so long (by key), with so many files each; None where they can."""
        for process in processes:
            more = seconds[process.key]
            spent = sum(charge.seconds for charge in self._counting(now_ns) if charge.process == process.key)
            age_ns = min(max(now_ns - process.started_ns, _YOUNG_NS), DAY_NS)
            allowed = self._budget.share * age_ns / 1e9
            if spent + more > allowed:
                return TriggerRefusal(
                    "budget-share",
                    f"process {process.pid} was traced for {_text(spent)} of the last day, and {_text(more)} more "
                    f"are above the {_text(allowed)} that `trigger_budget.share` allows",
                )  # fmt: skip
        wanted, left = self.reserve(len(processes) * files), self.bytes_left(now_ns)
        if wanted > left:
            return TriggerRefusal(
                "budget-bytes",
                f"{size(wanted)} are to be set aside, and {size(max(left, 0))} of `trigger_budget.mb_per_day` are left",
            )
        return None

    def reserve(self, files: int) -> int:
        """Bytes that so many files have at most."""
        return files * int(self._budget.mb_per_trace * 1e6)

    def bytes_left(self, now_ns: int) -> int:
        """What may be kept now; what runs counts with what it may have."""
        return int(self._budget.mb_per_day * 1e6) - sum(charge.bytes for charge in self._counting(now_ns))

    def _counting(self, now_ns: int) -> Iterable[Charge]:
        return (charge for charge in self.charges if charge.at_ns > now_ns - DAY_NS or not charge.settled)


def _text(seconds: float) -> str:
    return duration(int(seconds * 1e9))
