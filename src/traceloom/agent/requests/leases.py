"""What excludes each other: two profilers that need the same thing of a process or a device take turns."""

from __future__ import annotations

from collections.abc import Iterable


class Leases:
    """Who has which resource, as `ptrace:123` or `kineto:123`."""

    def __init__(self) -> None:
        self._holders: dict[str, str] = {}

    def take(self, holder: str, resources: Iterable[str]) -> str:
        """Take all of them or none.

        Returns:
            "" where they are taken, else the resource and who has it.
        """
        wanted = sorted(set(resources))
        for resource in wanted:
            if self._holders.get(resource, holder) != holder:
                return f"{resource} is in use by {self._holders[resource]}"
        self._holders |= dict.fromkeys(wanted, holder)
        return ""

    def give_back(self, holder: str) -> None:
        """Free all that it has."""
        self._holders = {resource: name for resource, name in self._holders.items() if name != holder}
