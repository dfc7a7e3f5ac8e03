"""A rule on the clock: every so often, at an instant that is this host's and this rule's own."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from traceloom.agent.config import CadenceRule
from traceloom.agent.triggers import Firing
from traceloom.model.units import duration


class CadenceWatch:
    """Fires when the next stretch of time begins; in the one in which the agent started it does not.

    Args:
        rule: How often.
        host: Whose; hosts of a fleet are not traced at one instant.
        now_ns: When the agent starts.
    """

    def __init__(self, rule: CadenceRule, host: str, now_ns: int) -> None:
        self._name, self._every_ns = rule.name, int(rule.every * 1e9)
        digest = hashlib.sha256(f"{host}\0{rule.name}".encode()).digest()
        self.phase_ns = int.from_bytes(digest[:8], "big") % self._every_ns
        self._first = (now_ns - self.phase_ns) // self._every_ns

    def look(self, now_ns: int) -> Iterator[Firing]:
        """The stretch that is now."""
        stretch = (now_ns - self.phase_ns) // self._every_ns
        if stretch != self._first:
            yield Firing({}, f"{self._name}#{stretch}", f"every {duration(self._every_ns)}")

    def trouble(self) -> str:
        """A clock always goes on."""
        return ""
