"""Which pod and container a process is in: its control group, and to whom the kubelet gave the devices it is on.

The kubelet tells names and devices, the control group the pod's uid and the container's id, and nothing tells both:
they are joined by devices.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import msgspec

from traceloom.agent import worker
from traceloom.agent.config import Config
from traceloom.agent.metrics import Reading
from traceloom.agent.owners.pod_resources import LIMIT_S
from traceloom.errors import TraceloomError

# The kubelet is asked when a container appears, and then at growing intervals: one that starts anew answers in part or
# not at all.
FIRST_S, LAST_S = 10.0, 300.0


class PodContainer(msgspec.Struct, frozen=True):
    """A container that holds devices, as the kubelet names them."""

    namespace: str
    pod: str
    container: str
    devices: tuple[str, ...]


class ContainerPlace(msgspec.Struct, frozen=True):
    """Where a process is: what its control group calls the pod and the container."""

    pod: str
    container: str


class KubeletAnswer(msgspec.Struct, frozen=True):
    """What the kubelet said when these containers were there already; of later ones it tells nothing."""

    containers: tuple[PodContainer, ...] = ()
    places: frozenset[ContainerPlace] = frozenset()


class Kubelet:
    """A collector without series: it asks the kubelet, in a process of its own, while there are pods' processes.

    `places` is for whoever knows where processes are to set; `answer` is replaced whole.
    """

    name = "kubelet"

    def __init__(self, config: Config) -> None:
        self.period_s = config.collect.periods.get(self.name, config.collect.period)
        self.timeout_s = config.collect.timeouts.get(self.name, 3 * LIMIT_S)
        self.places: frozenset[ContainerPlace] = frozenset()
        self.answer = KubeletAnswer()
        self._socket = Path(config.owners.kubelet) if config.owners.kubelet else None
        self._asked: frozenset[ContainerPlace] = frozenset()  # when it was asked last
        self._error = ""  # why it did not answer then
        self._next = 0.0  # on the monotonic clock
        self._wait_s = FIRST_S

    def collect(self) -> list[Reading]:
        """Ask, where there is somebody to ask about and somebody to ask.

        Raises:
            OSError: The kubelet did not answer when it was asked last, or not in time.
        """
        places = self.places
        if not places or self._socket is None or not self._socket.exists():
            self.answer = KubeletAnswer()
            return []
        appeared = not places <= self._asked
        if appeared or time.monotonic() >= self._next:
            self._asked = places
            self._wait_s = FIRST_S if appeared else min(2 * self._wait_s, LAST_S)
            try:
                rows = worker.run("pod-resources", timeout_s=2 * LIMIT_S, socket=str(self._socket))
                self.answer, self._error = KubeletAnswer(tuple(msgspec.convert(rows, list[PodContainer])), places), ""
            except TraceloomError as error:
                self._error = error.message
            self._next = time.monotonic() + self._wait_s
        if self._error:
            raise OSError(self._error)
        return []

    def trouble(self) -> list[str]:
        """Nothing beyond what `collect` raises."""
        return []


def joined(
    held: Mapping[PodContainer, frozenset[str]],
    evidence: Mapping[ContainerPlace, frozenset[str]],
    hosts: Mapping[ContainerPlace, str],
) -> tuple[dict[str, tuple[str, str]], dict[ContainerPlace, str]]:
    """Which pods and containers there are behind control groups; those that cannot be told apart are left out.

    Args:
        held: Containers -> devices (uuids) that the kubelet gave them.
        evidence: Places -> devices that their processes are on or were given.
        hosts: Places -> the name of the host that their processes see, which is that of the pod: it tells apart those
            that share a device.

    Returns:
        Control group's pod -> (namespace, pod), and location -> name of the container.
    """
    possible: dict[str, set[tuple[str, str]]] = {}
    for location, devices in evidence.items():
        matches = {(c.namespace, c.pod) for c, uuids in held.items() if devices and devices <= uuids}
        by_host = {match for match in matches if match[1] == hosts.get(location)}
        if matches:
            possible[location.pod] = possible.get(location.pod, matches) & (by_host or matches)
    pods = {pod: next(iter(names)) for pod, names in possible.items() if len(names) == 1}
    bearers = Counter(pods.values())  # two pods of one name are not both it
    pods = {pod: name for pod, name in pods.items() if bearers[name] == 1}
    containers: dict[ContainerPlace, str] = {}
    for location, devices in evidence.items():
        names = [c.container for c, uuids in held.items()
                 if (c.namespace, c.pod) == pods.get(location.pod) and devices and devices <= uuids]  # fmt: skip
        if len(names) == 1:
            containers[location] = names[0]
    return pods, containers
