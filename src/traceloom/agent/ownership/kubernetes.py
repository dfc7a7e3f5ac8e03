"""Pods and containers from the kubelet's pod-resources API.

`list_containers` is a task of `traceloom.agent.worker`: gRPC takes 20 MB, which the agent does not
keep for an occasional request. Messages are declared here, in a descriptor pool of their own, as
far as they are read, so that they do not conflict with generated modules.

The kubelet reports names and devices, the control group has the pod's uid and the container's id,
and no source has both: they are joined by devices.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from traceloom.agent import worker
from traceloom.agent.config import Config
from traceloom.agent.metrics import Reading
from traceloom.errors import TraceloomError

KUBELET_TIMEOUT_S = 5.0
MAX_BYTES = 16 << 20  # the kubelet's own limit
MAX_CONTAINERS = 4096
MAX_DEVICES = 1024  # per container
MAX_CHARS = 256

# Message -> its fields: (name, number, nested message or "" for text, whether it is repeated).
_MESSAGES: dict[str, tuple[tuple[str, int, str, bool], ...]] = {
    "ListPodResourcesResponse": (("pod_resources", 1, "PodResources", True),),
    "PodResources": (
        ("name", 1, "", False),
        ("namespace", 2, "", False),
        ("containers", 3, "ContainerResources", True),
    ),
    "ContainerResources": (
        ("name", 1, "", False),
        ("devices", 2, "ContainerDevices", True),
        ("dynamic_resources", 5, "DynamicResource", True),
    ),
    "ContainerDevices": (("resource_name", 1, "", False), ("device_ids", 2, "", True)),
    "DynamicResource": (("claim_resources", 4, "ClaimResource", True),),
    "ClaimResource": (
        ("cdi_devices", 1, "CDIDevice", True),
        ("driver_name", 2, "", False),
        ("device_name", 4, "", False),
    ),
    "CDIDevice": (("name", 1, "", False),),
}


def list_containers(socket: str) -> list[dict[str, Any]]:
    """Returns the containers with devices: `namespace`, `pod`, `container`, and `devices`, as the
    kubelet names them.

    Names are those of device plugins (`GPU-...`, `GPU-...::3` of a shared one, a PCI address), of
    CDI (`nvidia.com/gpu=...`), and of DRA (`driver/device`).

    Raises:
        OSError: gRPC is not installed, or the kubelet did not respond, and why.
        ValueError: The response is something else.
    """
    try:
        import grpc
    except ImportError as error:
        raise OSError("gRPC is not installed: pip install 'traceloom[kubernetes]'") from error
    # Python's gRPC would send the socket's path as the authority, which the kubelet's refuses.
    options = [
        ("grpc.max_receive_message_length", MAX_BYTES),
        ("grpc.default_authority", "localhost"),
    ]
    with grpc.insecure_channel(f"unix:{Path(socket).absolute()}", options=options) as channel:
        call = channel.unary_unary("/v1.PodResourcesLister/List")
        try:
            answer: bytes = call(b"", timeout=KUBELET_TIMEOUT_S)
        except grpc.RpcError as error:
            reason = f"{error.code().name.lower()}: {error.details()}"[:MAX_CHARS]
            raise OSError(f"the kubelet did not answer at {socket}: {reason}") from error
    return decode_containers(answer)


def decode_containers(answer: bytes) -> list[dict[str, Any]]:
    """Returns the containers of the bytes of a ListPodResourcesResponse, see `list_containers`.

    Raises:
        ValueError: They are not such a response.
    """
    from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory

    file = descriptor_pb2.FileDescriptorProto(
        name="podresources.proto", package="v1", syntax="proto3"
    )
    for name, fields in _MESSAGES.items():
        described = file.message_type.add(name=name)
        for field, number, item_type, repeated in fields:
            described.field.add(
                name=field,
                number=number,
                label=descriptor_pb2.FieldDescriptorProto.LABEL_REPEATED
                if repeated
                else descriptor_pb2.FieldDescriptorProto.LABEL_OPTIONAL,
                type=descriptor_pb2.FieldDescriptorProto.TYPE_MESSAGE
                if item_type
                else descriptor_pb2.FieldDescriptorProto.TYPE_STRING,
                type_name=f".v1.{item_type}" if item_type else None,
            )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    response: Any = message_factory.GetMessageClass(
        pool.FindMessageTypeByName("v1.ListPodResourcesResponse")
    )()
    try:
        response.ParseFromString(answer)
    except message.DecodeError as error:
        raise ValueError(f"the kubelet's answer cannot be read: {error}") from error
    rows = []
    for pod in response.pod_resources:
        for container in pod.containers:
            names = [name for devices in container.devices for name in devices.device_ids]
            for resource in container.dynamic_resources:
                for claim in resource.claim_resources:
                    names += [device.name for device in claim.cdi_devices]
                    names.append(f"{claim.driver_name}/{claim.device_name}")
            if names:
                rows.append(
                    {
                        "namespace": pod.namespace[:MAX_CHARS],
                        "pod": pod.name[:MAX_CHARS],
                        "container": container.name[:MAX_CHARS],
                        "devices": [name[:MAX_CHARS] for name in names[:MAX_DEVICES]],
                    }
                )
    return rows[:MAX_CONTAINERS]


# The kubelet is queried when a container appears, and then at growing intervals: one that just
# started responds incompletely or not at all.
FIRST_S, LAST_S = 10.0, 300.0


class PodContainer(msgspec.Struct, frozen=True):
    """A container with devices, as the kubelet names them."""

    namespace: str
    pod: str
    container: str
    devices: tuple[str, ...]


class ContainerLocation(msgspec.Struct, frozen=True):
    """The pod and the container of a process, as its control group names them."""

    pod: str
    container: str


class KubeletResponse(msgspec.Struct, frozen=True):
    """The kubelet's response while these containers existed; it has no information about later
    ones.
    """

    containers: tuple[PodContainer, ...] = ()
    places: frozenset[ContainerLocation] = frozenset()


class Kubelet:
    """A collector without series: queries the kubelet in a worker process, while there are
    processes in pods.

    `places`, the locations of processes, is set by the caller; `answer` is replaced as a whole.
    """

    name = "kubelet"

    def __init__(self, config: Config) -> None:
        self.period_s = config.collect.periods.get(self.name, config.collect.period)
        self.timeout_s = config.collect.timeouts.get(self.name, 3 * KUBELET_TIMEOUT_S)
        self.places: frozenset[ContainerLocation] = frozenset()
        self.answer = KubeletResponse()
        self._socket = Path(config.owners.kubelet) if config.owners.kubelet else None
        self._asked: frozenset[ContainerLocation] = frozenset()  # locations at the last query
        self._error = ""  # why that query failed
        self._next = 0.0  # on the monotonic clock
        self._wait_s = FIRST_S

    def collect(self) -> list[Reading]:
        """Query the kubelet, if there are processes in pods and a query is due.

        Raises:
            OSError: The kubelet did not respond to the last query, or not in time.
        """
        locations = self.places
        if not locations or self._socket is None or not self._socket.exists():
            self.answer = KubeletResponse()
            return []
        appeared = not locations <= self._asked
        if appeared or time.monotonic() >= self._next:
            self._asked = locations
            self._wait_s = FIRST_S if appeared else min(2 * self._wait_s, LAST_S)
            try:
                rows = worker.run(
                    "pod-resources", timeout_s=2 * KUBELET_TIMEOUT_S, socket=str(self._socket)
                )
                self.answer, self._error = (
                    KubeletResponse(tuple(msgspec.convert(rows, list[PodContainer])), locations),
                    "",
                )
            except TraceloomError as error:
                self._error = error.message
            self._next = time.monotonic() + self._wait_s
        if self._error:
            raise OSError(self._error)
        return []

    def list_problems(self) -> list[str]:
        """Always empty: `collect` raises the errors."""
        return []


def match_containers(
    container_devices: Mapping[PodContainer, frozenset[str]],
    evidence: Mapping[ContainerLocation, frozenset[str]],
    hosts: Mapping[ContainerLocation, str],
) -> tuple[dict[str, tuple[str, str]], dict[ContainerLocation, str]]:
    """Returns the pods and containers of control groups, without those that are ambiguous.

    Args:
        container_devices: Containers -> devices (uuids) that the kubelet assigned to them.
        evidence: Locations -> devices that their processes use or were assigned.
        hosts: Locations -> the host name that their processes see, which is that of the pod: it
            distinguishes pods that share a device.

    Returns:
        Control group's pod -> (namespace, pod), and location -> name of the container.
    """
    possible: dict[str, set[tuple[str, str]]] = {}
    for location, devices in evidence.items():
        matches = {
            (c.namespace, c.pod)
            for c, uuids in container_devices.items()
            if devices and devices <= uuids
        }
        host_matches = {match for match in matches if match[1] == hosts.get(location)}
        if matches:
            possible[location.pod] = possible.get(location.pod, matches) & (host_matches or matches)
    pods = {pod: next(iter(names)) for pod, names in possible.items() if len(names) == 1}
    pod_counts = Counter(pods.values())  # a name matched by two pods is ambiguous
    pods = {pod: name for pod, name in pods.items() if pod_counts[name] == 1}
    containers: dict[ContainerLocation, str] = {}
    for location, devices in evidence.items():
        names = [
            c.container
            for c, uuids in container_devices.items()
            if (c.namespace, c.pod) == pods.get(location.pod) and devices and devices <= uuids
        ]
        if len(names) == 1:
            containers[location] = names[0]
    return pods, containers
