"""Whose each process is: its environment, control group, pod, ancestors and reports, put together."""

from __future__ import annotations

import pwd
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from traceloom.agent.accelerators import Device
from traceloom.agent.config import Config
from traceloom.agent.owners import Owner
from traceloom.agent.owners.environment import Statements, check_variables, owner_of, statements

if TYPE_CHECKING:
    from traceloom.agent.collect.processes import ProcessFacts


class OwnerFinder:
    """Finds owners. `owners` and `refresh` may wait (for the name service, for the kubelet): call them from a thread.

    Raises:
        InputError: `wrong-config`: `owners.variables` names a field that an owner has not.
    """

    def __init__(self, config: Config) -> None:
        check_variables(config.owners.variables)
        self._config = config
        self._names: dict[int, str] = {}

    def owners(
        self,
        processes: Mapping[str, ProcessFacts],
        devices: Sequence[Device] = (),
        used: Mapping[str, Collection[str]] | None = None,
    ) -> dict[str, Owner]:
        """The owner of each process, by its key.

        Args:
            processes: All that matter, by key.
            devices: The devices of this host, in order.
            used: The devices (uuids) that each process is on, by key.
        """
        del devices, used  # not yet
        stated = {key: self._stated(facts) for key, facts in processes.items()}
        return {key: owner_of(stated[key]) for key in processes}

    def refresh(self) -> None:
        """Ask who has to be asked: the kubelet; read the mapping files again."""

    def troubles(self) -> list[str]:
        """What of this does not work here: sentences for the doctor."""
        return []

    def _stated(self, facts: ProcessFacts) -> Statements:
        stated = statements(facts.environment, self._config.owners.variables)
        if facts.frameworks:
            framework = next(iter(facts.frameworks))
            stated["framework"] = (framework, "libraries")
        name = self._user(facts.uid)
        if name and (facts.uid or "user" not in stated):
            stated["user"] = (name, "uid")
        return stated

    def _user(self, uid: int) -> str:
        """The name of a user, "" where it has none; looked up once."""
        if uid not in self._names:
            try:
                self._names[uid] = pwd.getpwuid(uid).pw_name
            except KeyError:
                self._names[uid] = ""
        return self._names[uid]
