"""Asks the kubelet which devices it gave to which container: its pod-resources API, v1.

A task of `traceloom.agent.worker`: gRPC takes 20 MB, which the agent does not keep for an answer now and then. Messages
are described here, in a pool of their own, as far as they are read: nobody's generated modules are in the way.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

LIMIT_S = 5.0
MOST_BYTES = 16 << 20  # as kubelets themselves allow
MOST_CONTAINERS = 4096
MOST_DEVICES = 1024  # of a container
MOST_LETTERS = 256

# Message -> its fields: (name, number, message it holds or "" for text, whether it is repeated).
_MESSAGES: dict[str, tuple[tuple[str, int, str, bool], ...]] = {
    "ListPodResourcesResponse": (("pod_resources", 1, "PodResources", True),),
    "PodResources": (
        ("name", 1, "", False), ("namespace", 2, "", False), ("containers", 3, "ContainerResources", True),
    ),
    "ContainerResources": (
        ("name", 1, "", False), ("devices", 2, "ContainerDevices", True),
        ("dynamic_resources", 5, "DynamicResource", True),
    ),
    "ContainerDevices": (("resource_name", 1, "", False), ("device_ids", 2, "", True)),
    "DynamicResource": (("claim_resources", 4, "ClaimResource", True),),
    "ClaimResource": (
        ("cdi_devices", 1, "CDIDevice", True), ("driver_name", 2, "", False), ("device_name", 4, "", False),
    ),
    "CDIDevice": (("name", 1, "", False),),
}  # fmt: skip


def containers(socket: str) -> list[dict[str, Any]]:
    """The containers that hold devices: `namespace`, `pod`, `container`, and `devices`, as the kubelet names them.

    Names are those of device plugins (`GPU-...`, `GPU-...::3` of a shared one, a PCI address), of CDI
    (`nvidia.com/gpu=...`), and of DRA (`driver/device`).

    Raises:
        OSError: gRPC is not installed, or the kubelet did not answer, and why.
        ValueError: It answered with something else.
    """
    try:
        import grpc
    except ImportError as error:
        raise OSError("gRPC is not installed: pip install 'traceloom[kubernetes]'") from error
    # gRPC of Python would name the socket's path as the server's authority, which the kubelet's does not take.
    options = [("grpc.max_receive_message_length", MOST_BYTES), ("grpc.default_authority", "localhost")]
    with grpc.insecure_channel(f"unix:{Path(socket).absolute()}", options=options) as channel:
        call = channel.unary_unary("/v1.PodResourcesLister/List")
        try:
            answer: bytes = call(b"", timeout=LIMIT_S)
        except grpc.RpcError as error:
            reason = f"{error.code().name.lower()}: {error.details()}"[:MOST_LETTERS]
            raise OSError(f"the kubelet did not answer at {socket}: {reason}") from error
    return decoded(answer)


def decoded(answer: bytes) -> list[dict[str, Any]]:
    """What `containers` gives, of the bytes of a ListPodResourcesResponse.

    Raises:
        ValueError: They are none.
    """
    from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="podresources.proto", package="v1", syntax="proto3")
    for name, fields in _MESSAGES.items():
        described = file.message_type.add(name=name)
        for field, number, holds, repeated in fields:
            described.field.add(
                name=field, number=number,
                label=descriptor_pb2.FieldDescriptorProto.LABEL_REPEATED if repeated
                else descriptor_pb2.FieldDescriptorProto.LABEL_OPTIONAL,
                type=descriptor_pb2.FieldDescriptorProto.TYPE_MESSAGE if holds
                else descriptor_pb2.FieldDescriptorProto.TYPE_STRING,
                type_name=f".v1.{holds}" if holds else None,
            )  # fmt: skip
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    response: Any = message_factory.GetMessageClass(pool.FindMessageTypeByName("v1.ListPodResourcesResponse"))()
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
                rows.append({
                    "namespace": pod.namespace[:MOST_LETTERS], "pod": pod.name[:MOST_LETTERS],
                    "container": container.name[:MOST_LETTERS],
                    "devices": [name[:MOST_LETTERS] for name in names[:MOST_DEVICES]],
                })  # fmt: skip
    return rows[:MOST_CONTAINERS]
