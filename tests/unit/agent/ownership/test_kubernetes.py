"""Pods and containers of processes, from a kubelet that is a real gRPC server."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support import kubelet as api
from traceloom.agent.accelerators.backend import Device
from traceloom.agent.collectors.processes import ProcessFacts
from traceloom.agent.config import Config, Owners
from traceloom.agent.ownership.kubernetes import (
    ContainerLocation,
    Kubelet,
    PodContainer,
    decode_containers,
    list_containers,
    match_containers,
)
from traceloom.agent.ownership.model import Owner
from traceloom.agent.ownership.resolver import OwnerResolver

grpc = pytest.importorskip("grpc", reason="gRPC is not installed: the extra `kubernetes`")

UID = "0a1b2c3d-1111-2222-3333-0123456789a"
FIRST, SECOND, THIRD = "a" * 64, "b" * 64, "c" * 64  # ids of containers
GPUS = [
    Device(
        uuid=f"GPU-{number}",
        index=str(number),
        vendor="nvidia",
        model="H100",
        pci=f"00000000:{number}0:00.0",
    )
    for number in range(4)
]
MIG = Device(
    uuid="MIG-x",
    index="3:0",
    vendor="nvidia",
    model="H100",
    parent="GPU-3",
    partition="1g.10gb gi=7 ci=0",
)


@pytest.fixture
def socket_path(tmp_path: Path) -> Path:
    return tmp_path / "kubelet.sock"


@pytest.fixture
def served(socket_path: Path) -> Iterator[api.ServedKubelet]:
    with api.served(socket_path) as kubelet:
        yield kubelet


def _process(
    pid: int, pod: str, container: str, parent: int = 0, **environment: str
) -> ProcessFacts:
    cgroup = f"/kubepods.slice/kubepods-pod{(UID + pod).replace('-', '_')}.slice/cri-containerd-{container}.scope"
    return ProcessFacts(
        key=f"{pid}@1",
        pid=pid,
        start_ticks=pid,
        started_ns=1,
        parent_pid=parent,
        uid=0,
        name="python",
        environment=environment,
        cgroup=cgroup,
        cgroups={"": cgroup},
    )


def _finder(socket: Path, **settings: Any) -> OwnerResolver:
    return OwnerResolver(Config(owners=Owners(kubelet=str(socket)), **settings))


def _owners(
    finder: OwnerResolver,
    processes: list[ProcessFacts],
    used: dict[int, list[str]],
    *,
    ask: bool = True,
) -> dict[int, Owner]:
    """What the agent knows once the kubelet was asked."""
    by_key = {facts.key: facts for facts in processes}
    on = {f"{pid}@1": uuids for pid, uuids in used.items()}
    finder.owners(by_key, [*GPUS, MIG], on)
    if ask:
        finder.kubelet.collect()
    owners = finder.owners(by_key, [*GPUS, MIG], on)
    return {facts.pid: owners[facts.key] for facts in processes}


def test_what_a_kubelet_answers(served: api.ServedKubelet, socket_path: Path) -> None:
    served.answer = (
        api.pod(
            "ml",
            "bert-0",
            api.container(
                "train",
                api.devices("nvidia.com/gpu", "GPU-0", "GPU-1::3"),
                api.devices("rdma/hca", "mlx5_0"),
            ),
            api.container("sidecar"),
        )
        + api.pod(
            "ml",
            "dra",
            api.container(
                "c", api.claim("gpu.nvidia.com", "gpu-2", "k8s.gpu.nvidia.com/claim=1-gpu-2")
            ),
        )
        + api.pod("kube-system", "dns", api.container("dns"))
    )
    assert list_containers(str(socket_path)) == [
        {
            "namespace": "ml",
            "pod": "bert-0",
            "container": "train",
            "devices": ["GPU-0", "GPU-1::3", "mlx5_0"],
        },
        {
            "namespace": "ml",
            "pod": "dra",
            "container": "c",
            "devices": ["k8s.gpu.nvidia.com/claim=1-gpu-2", "gpu.nvidia.com/gpu-2"],
        },
    ]


def test_an_answer_that_is_none() -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        decode_containers(b"\x0a\xff")


def test_names_are_cut() -> None:
    (row,) = decode_containers(api.containers({("n", "p" * 999): {"c": ["d" * 999] * 2000}}))
    assert len(row["pod"]) == 256
    assert len(row["devices"]) == 1024
    assert {len(name) for name in row["devices"]} == {256}


def test_pods_of_processes(served: api.ServedKubelet, socket_path: Path) -> None:
    served.answer = api.containers(
        {
            ("ml", "bert-0"): {"train": ["GPU-0", "GPU-1"], "draw": ["GPU-2"]},
            ("web", "llm"): {"serve": ["MIG-x"]},
        }
    )
    processes = [
        _process(1, "a", FIRST),
        _process(2, "a", FIRST, parent=1),  # a worker, on no device
        _process(3, "a", SECOND),  # of another container
        _process(
            4, "b", THIRD, NVIDIA_VISIBLE_DEVICES="MIG-x", POD_NAME="what-it-claims"
        ),  # does nothing yet
    ]
    owners = _owners(_finder(socket_path), processes, {1: ["GPU-1"], 3: ["GPU-2"]})
    names = {pid: (owner.namespace, owner.pod, owner.container) for pid, owner in owners.items()}
    assert names == {
        1: ("ml", "bert-0", "train"),
        2: ("ml", "bert-0", "train"),
        3: ("ml", "bert-0", "draw"),
        4: ("web", "llm", "serve"),
    }
    assert [owner.job for owner in owners.values()] == [f"pod-{UID}a"] * 3 + [f"pod-{UID}b"]
    assert owners[1].devices == ("GPU-0", "GPU-1")  # whether it uses them or not
    assert (owners[4].devices, owners[4].sources["devices"], owners[4].sources["pod"]) == (
        ("MIG-x",),
        "kubelet",
        "kubelet",
    )


def test_a_process_of_no_pod_gets_none(served: api.ServedKubelet, socket_path: Path) -> None:
    """Whoever is on a device that the kubelet gave to a pod is not therefore in it."""
    served.answer = api.containers({("ml", "bert-0"): {"train": ["GPU-0"]}})
    outside = ProcessFacts(
        key="9@1", pid=9, start_ticks=1, started_ns=1, parent_pid=0, uid=0, name="nvidia-smi"
    )
    owners = _owners(
        _finder(socket_path), [_process(1, "a", FIRST), outside], {1: ["GPU-0"], 9: ["GPU-0"]}
    )
    assert (owners[1].pod, owners[9].pod) == ("bert-0", "")


def test_a_pod_that_watches_all_devices_is_none_of_those_that_hold_them(
    served: api.ServedKubelet, socket_path: Path
) -> None:
    served.answer = api.containers({("a", "one"): {"c": ["GPU-0"]}})
    owners = _owners(_finder(socket_path), [_process(1, "a", FIRST)], {1: ["GPU-0", "GPU-1"]})
    assert (owners[1].pod, owners[1].container) == ("", FIRST[:12])


def test_pods_that_share_a_device(served: api.ServedKubelet, socket_path: Path) -> None:
    """Replicas of one device: only the name of their host tells the pods apart."""
    served.answer = api.containers(
        {("a", "one"): {"c": ["GPU-0::0"]}, ("b", "two"): {"c": ["GPU-0::1"]}}
    )
    used = {1: ["GPU-0"], 2: ["GPU-0"]}
    plain = _owners(_finder(socket_path), [_process(1, "a", FIRST), _process(2, "b", SECOND)], used)
    assert [owner.pod for owner in plain.values()] == ["", ""]
    assert plain[1].job != plain[2].job
    named = _owners(
        _finder(socket_path),
        [_process(1, "a", FIRST, HOSTNAME="one"), _process(2, "b", SECOND, HOSTNAME="two")],
        used,
    )
    assert [(owner.namespace, owner.pod, owner.container) for owner in named.values()] == [
        ("a", "one", "c"),
        ("b", "two", "c"),
    ]


def test_two_pods_are_not_both_one(served: api.ServedKubelet, socket_path: Path) -> None:
    """One of them claims the name of the other's host."""
    served.answer = api.containers(
        {("a", "one"): {"c": ["GPU-0::0"]}, ("b", "two"): {"c": ["GPU-0::1"]}}
    )
    processes = [_process(1, "a", FIRST, HOSTNAME="one"), _process(2, "b", SECOND, HOSTNAME="one")]
    owners = _owners(_finder(socket_path), processes, {1: ["GPU-0"], 2: ["GPU-0"]})
    assert [owner.pod for owner in owners.values()] == ["", ""]


def test_an_old_answer_says_nothing_of_new_containers(
    served: api.ServedKubelet, socket_path: Path
) -> None:
    """The device of a pod that ended is given to the next one before the kubelet is asked again."""
    served.answer = api.containers({("ml", "old"): {"c": ["GPU-0"]}})
    finder = _finder(socket_path)
    assert _owners(finder, [_process(1, "a", FIRST)], {1: ["GPU-0"]})[1].pod == "old"
    served.answer = api.containers({("ml", "new"): {"c": ["GPU-0"]}})
    later = [_process(2, "b", SECOND)]
    assert _owners(finder, later, {2: ["GPU-0"]}, ask=False)[2].pod == ""
    assert _owners(finder, later, {2: ["GPU-0"]})[2].pod == "new"


def test_it_is_asked_when_a_container_appears_and_not_before(
    served: api.ServedKubelet, socket_path: Path
) -> None:
    kubelet = Kubelet(Config(owners=Owners(kubelet=str(socket_path))))
    kubelet.collect()
    assert served.asked == 0
    kubelet.places = frozenset({ContainerLocation("p", "c")})
    kubelet.collect()
    kubelet.collect()
    assert served.asked == 1
    kubelet.places |= {ContainerLocation("p", "d")}
    kubelet.collect()
    assert served.asked == 2


def test_without_a_socket_there_is_nothing_to_say(socket_path: Path) -> None:
    finder = _finder(socket_path)
    owners = _owners(finder, [_process(1, "a", FIRST)], {1: ["GPU-0"]})
    assert (owners[1].pod, owners[1].job, owners[1].container) == ("", f"pod-{UID}a", FIRST[:12])


def test_a_kubelet_that_refuses(served: api.ServedKubelet, socket_path: Path) -> None:
    served.answer = lambda context: context.abort(
        grpc.StatusCode.UNIMPLEMENTED, "the feature gate is off"
    )
    kubelet = Kubelet(Config(owners=Owners(kubelet=str(socket_path))))
    kubelet.places = frozenset({ContainerLocation("p", "c")})
    for _ in range(2):  # it is asked seldom, and the error remains
        with pytest.raises(OSError, match="unimplemented: the feature gate is off"):
            kubelet.collect()
    assert served.asked == 1
    served.answer = api.containers({("n", "p"): {"c": ["GPU-0"]}})
    kubelet.places |= {ContainerLocation("p", "d")}
    assert kubelet.collect() == []


@pytest.mark.parametrize(
    "speaks", [True, False], ids=["a service that hangs", "a socket that says nothing"]
)
def test_a_kubelet_that_hangs(
    socket_path: Path, speaks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("traceloom.agent.ownership.kubernetes.KUBELET_TIMEOUT_S", 0.5)
    if speaks:
        with api.served(socket_path) as served:
            served.answer = served.hang
            with pytest.raises(OSError, match=r"did not answer at .*: deadline_exceeded"):
                list_containers(str(socket_path))
    else:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(socket_path))
            listener.listen()
            with pytest.raises(OSError, match="did not answer at"):
                list_containers(str(socket_path))


def test_devices_that_nobody_knows_are_said(served: api.ServedKubelet, socket_path: Path) -> None:
    served.answer = api.pod(
        "n",
        "p",
        api.container("c", api.devices("nvidia.com/gpu", "GPU-7"), api.devices("rdma", "mlx")),
    )
    finder = _finder(socket_path)
    _owners(finder, [_process(1, "a", FIRST)], {})
    (sentence,) = finder.list_problems()
    assert sentence.startswith(
        "1 devices that the kubelet or job mapping names are not known here, as `GPU-7`"
    )


def test_containers_that_cannot_be_told_apart_have_no_name() -> None:
    place, other = ContainerLocation("p", "c1"), ContainerLocation("p", "c2")
    held = {
        PodContainer("n", "pod", name, ("GPU-0",)): frozenset({"GPU-0"}) for name in ("a", "b")
    }  # two containers of a pod on replicas of one device
    pods, names = match_containers(held, {place: frozenset({"GPU-0"}), other: frozenset()}, {})
    assert (pods, names) == ({"p": ("n", "pod")}, {})
