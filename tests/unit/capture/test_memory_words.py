"""What is told of memory: what was asked for in vain, what is alive on which device, and whose it is."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
from traceloom.capture.memory import (  # noqa: E402
    count_live_bytes,
    is_out_of_memory,
    list_live_storages,
    parse_requested_bytes,
)
from traceloom.capture.modules import ModuleScopes  # noqa: E402
from traceloom.capture.scope import scope  # noqa: E402


@pytest.mark.parametrize(
    ("message", "ran_out", "asked"),
    [
        (
            "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes. Error code 12",
            True,
            4096,
        ),
        ("DefaultCPUAllocator: not enough memory: you tried to allocate 17 bytes.", True, 17),
        (
            "CUDA out of memory. Tried to allocate 20.50 MiB. GPU 0 has a total capacity of 79.11 GiB",
            False,
            round(20.5 * 2**20),
        ),
        ("Tried to allocate 2 GiB", False, 2 * 2**30),
        ("Tried to allocate 512 bytes", False, 512),
        ("no such file", False, None),
        ("", False, None),
    ],
)
def test_what_was_asked_for_in_vain_is_in_the_message(
    message: str, ran_out: bool, asked: int | None
) -> None:
    assert parse_requested_bytes(RuntimeError(message)) == asked
    assert is_out_of_memory(RuntimeError(message)) == ran_out
    own = type("OutOfMemoryError", (RuntimeError,), {})
    assert is_out_of_memory(own(message))
    assert not is_out_of_memory(None)


def test_live_bytes_add_up_by_device() -> None:
    columns = {
        "bytes": [10, 5, 7, 100],
        "device_type": ["cuda", "cpu", "cuda", "cuda"],
        "device": [0, -1, 0, 1],
    }
    assert count_live_bytes(columns) == {"cuda:0": 17, "cpu": 5, "cuda:1": 100}
    assert count_live_bytes({"bytes": [], "device_type": [], "device": []}) == {}


class Block(torch.nn.Module):  # type: ignore[name-defined,misc]
    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(3, 5)
        self.register_buffer("scale", torch.ones(7, dtype=torch.float64))
        self.seen = seen

    def forward(self, value: Any) -> Any:
        with scope("here") as region:
            self.seen.append(region.path)
        return self.inner(value) * 2


class Net(torch.nn.Module):  # type: ignore[name-defined,misc]
    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block(seen), Block(seen)])

    def forward(self, value: Any) -> Any:
        return sum(block(value).sum() for block in self.blocks)


def of_owner(owner: str, part: str) -> dict[str, int]:
    """Names of an owner's storages that hold some text, with their bytes."""
    columns = list_live_storages()
    rows = zip(columns["owner"], columns["name"], columns["bytes"], strict=True)
    return {name: size for of, name, size in rows if of == owner and part in name}


def test_a_census_counts_parameters_buffers_gradients_and_states_to_the_byte() -> None:
    net = Net([])
    optimizer = torch.optim.Adam(net.parameters())
    assert of_owner("parameter", "Net.") == {
        f"Net.blocks.{number}.inner.{name}": size
        for number in (0, 1)
        for name, size in (("weight", 60), ("bias", 20))
    }
    assert of_owner("buffer", "Net.") == {f"Net.blocks.{number}.scale": 56 for number in (0, 1)}
    assert of_owner("gradient", "Net.") == {}
    net(torch.ones(2, 3)).backward()
    assert of_owner("gradient", "Net.") == {
        f"Net.blocks.{number}.inner.{name}.grad": size
        for number in (0, 1)
        for name, size in (("weight", 60), ("bias", 20))
    }
    for parameter in net.parameters():  # as a step would leave it
        optimizer.state[parameter]["exp_avg"] = torch.zeros_like(parameter)
    states = of_owner("optimizer_state", "of Net.")
    assert {name: size for name, size in states.items() if "exp_avg of" in name} == {
        f"Adam.exp_avg of Net.blocks.{number}.inner.{name}": size
        for number in (0, 1)
        for name, size in (("weight", 60), ("bias", 20))
    }


def test_a_storage_that_many_share_counts_once() -> None:
    whole = torch.zeros(1000, dtype=torch.float64)
    views = [whole[number:] for number in range(5)]
    columns = list_live_storages()
    addresses = [
        (kind, address)
        for kind, address in zip(columns["device_type"], columns["address"], strict=True)
        if address
    ]
    assert len(addresses) == len(set(addresses))
    at = columns["address"].index(whole.untyped_storage().data_ptr())
    assert columns["bytes"][at] == 8000
    assert len(views) == 5


def test_what_a_forward_pass_keeps_is_an_activation_until_its_backward() -> None:
    value = torch.ones(64, 64, requires_grad=True)
    out = (value.exp() * 2).sum()  # exp keeps its result
    kept = of_owner("activation", "ExpBackward")
    assert list(kept.values()) == [64 * 64 * 4]
    out.backward()
    assert of_owner("activation", "ExpBackward") == {}


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("path", ["Net.blocks.0.here", "Net.blocks.1.here"]),
        ("class", ["Net.Block.here", "Net.Block.here"]),
    ],
)
def test_modules_are_scopes_by_their_path_or_their_class_and_only_while_asked_for(
    names: str, expected: list[str]
) -> None:
    seen: list[str] = []
    net = Net(seen)
    scopes = ModuleScopes(names)
    handles = scopes.install()
    try:
        scopes.start()
        with scope("ignored"):
            pass
        net(torch.ones(1, 3))
        scopes.stop()
        during = list(seen)
        net(torch.ones(1, 3))
    finally:
        for handle in handles:
            handle.remove()
    assert during == expected
    assert [path.rpartition(".")[2] for path in seen[2:]] == ["here", "here"]
    assert not any("Net" in path for path in seen[2:])
