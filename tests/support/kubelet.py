"""A kubelet's pod-resources service: a real gRPC server, whose messages are written by hand from the published fields."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

METHOD = "/v1.PodResourcesLister/List"


def field(number: int, value: str | bytes | int) -> bytes:
    """A field of a message: text or a message with its length, or a number."""
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    data = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint(number: int) -> bytes:
    low, rest = number & 0x7F, number >> 7
    return bytes([low | 0x80]) + _varint(rest) if rest else bytes([low])


def devices(resource: str, *names: str) -> bytes:
    """ContainerDevices, with the topology that kubelets add."""
    topology = field(3, field(1, field(1, 1)))
    return field(2, field(1, resource) + b"".join(field(2, name) for name in names) + topology)


def claim(driver: str, device: str, *cdi: str) -> bytes:
    """A DynamicResource of one claimed device."""
    claimed = (
        b"".join(field(1, field(1, name)) for name in cdi)
        + field(2, driver)
        + field(3, "node-1")
        + field(4, device)
    )
    return field(5, field(2, "claim") + field(3, "default") + field(4, claimed))


def container(name: str, *resources: bytes) -> bytes:
    """ContainerResources, with processors of its own."""
    return field(3, field(1, name) + b"".join(resources) + field(3, b"\x00\x01"))


def pod(namespace: str, name: str, *containers: bytes) -> bytes:
    """PodResources in the response."""
    return field(1, field(1, name) + field(2, namespace) + b"".join(containers))


def containers(pods: Mapping[tuple[str, str], Mapping[str, Sequence[str]]]) -> bytes:
    """A response: (namespace, pod) -> container -> its devices."""
    return b"".join(
        pod(
            *names,
            *(container(name, devices("nvidia.com/gpu", *uuids)) for name, uuids in held.items()),
        )
        for names, held in pods.items()
    )


class ServedKubelet:
    """What the service answers with, and how often it was asked."""

    def __init__(self, answer: bytes) -> None:
        self.answer: bytes | Callable[[Any], bytes] = answer  # a function gets the call's context
        self.asked = 0
        self.ended = threading.Event()

    def list(self, request: bytes, context: Any) -> bytes:
        self.asked += 1
        assert request == b""
        return self.answer if isinstance(self.answer, bytes) else self.answer(context)

    def hang(self, context: Any) -> Any:
        self.ended.wait(120)
        context.cancel()  # an answer after all would be believed
        return b""


@contextmanager
def served(socket: Path, answer: bytes = b"") -> Iterator[ServedKubelet]:
    """Serve at a socket."""
    import grpc

    kubelet = ServedKubelet(answer)

    class Handler(grpc.GenericRpcHandler):  # type: ignore[misc]
        def service(self, call: Any) -> Any:
            return (
                grpc.unary_unary_rpc_method_handler(kubelet.list) if call.method == METHOD else None
            )

    server = grpc.server(ThreadPoolExecutor(4), handlers=(Handler(),))
    server.add_insecure_port(f"unix:{socket}")
    server.start()
    try:
        yield kubelet
    finally:
        kubelet.ended.set()
        server.stop(None).wait(30)
