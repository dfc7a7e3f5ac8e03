"""Whose each process is: its environment, control group, pod, ancestors and reports, put together."""

from __future__ import annotations

import pwd
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from traceloom.agent.accelerators import Device
from traceloom.agent.config import Config
from traceloom.agent.owners import Owner
from traceloom.agent.owners.cgroup import of_paths
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
        _inherit_jobs(processes, stated)
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
        for field, value in of_paths(facts.cgroups.values()).items():
            stated.setdefault(field, (value, "cgroup"))
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


def _inherit_jobs(processes: Mapping[str, ProcessFacts], stated: Mapping[str, Statements]) -> None:
    """Give a process of no job that of its nearest ancestor that has one: workers whose environment was rewritten.

    A rank is never inherited: of a rank and its children only one is the rank.
    """
    by_pid = {facts.pid: facts for facts in processes.values()}
    for key, facts in processes.items():
        if "job" in stated[key]:
            continue
        ancestor, seen = by_pid.get(facts.parent_pid), {facts.pid}
        while ancestor is not None and ancestor.pid not in seen and "job" not in stated[ancestor.key]:
            seen.add(ancestor.pid)
            ancestor = by_pid.get(ancestor.parent_pid)
        if ancestor is not None and "job" in stated[ancestor.key]:
            job, source = stated[ancestor.key]["job"]
            stated[key]["job"] = (job, source if source.startswith("process ") else f"process {ancestor.pid}")
