"""Who owns the memory that exists already: the live tensor storages when a recording with allocations begins.

PyTorch tells nothing of blocks from before the window, so that a memory record opens with this count.
"""

# ruff: noqa: SLF001  (PyTorch offers these things by private names only)
from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import torch

OWNERS = ("parameter", "buffer", "gradient", "optimizer_state", "other")
COLUMNS = ("address", "bytes", "device_type", "device", "owner", "name")
MOST_ROWS = 10_000
_SAVED = "_raw_saved_"

Row = tuple[int, int, str, int, str, str]


def census() -> dict[str, list[Any]]:
    """All live storages that Python can reach, as columns (`COLUMNS`), the largest first; a storage counts once.

    Beyond `MOST_ROWS` the small ones are added up, with address 0.

    Parameters, buffers, gradients and optimizer state are named by the module that holds them (`GPT.blocks.0.weight`);
    other tensors by their type and shape. What autograd alone keeps for a backward pass is found by following the graph
    of the tensors that are reachable.
    """
    things = [thing for thing in gc.get_objects() if _is_known(thing)]
    rows: dict[tuple[str, int], Row] = {}
    for owner, name, tensor in _owned(things):
        row = _row(owner, name, tensor)
        if row is not None:
            rows.setdefault((row[2], row[0]), row)
    ordered = sorted(rows.values(), key=lambda row: -row[1])
    kept = ordered[:MOST_ROWS] + list(_summed(ordered[MOST_ROWS:]))
    return {name: [row[k] for row in kept] for k, name in enumerate(COLUMNS)}


def _summed(rows: list[Row]) -> Iterator[Row]:
    """The smallest storages of a great many, added up by device and owner; their address is 0."""
    total: dict[tuple[str, int, str], list[int]] = {}
    for _, size, kind, device, owner, _ in rows:
        entry = total.setdefault((kind, device, owner), [0, 0])
        entry[0] += size
        entry[1] += 1
    for (kind, device, owner), (size, count) in total.items():
        yield 0, size, kind, device, owner, f"({count} smaller ones)"


def live_bytes(found: dict[str, list[Any]]) -> dict[str, int]:
    """Bytes of a census by device, as `cpu` or `cuda:0`."""
    total: dict[str, int] = {}
    for size, kind, number in zip(found["bytes"], found["device_type"], found["device"], strict=True):
        device = kind if number < 0 else f"{kind}:{number}"
        total[device] = total.get(device, 0) + size
    return total


def _is_known(thing: object) -> bool:
    kind = type(thing)
    return issubclass(kind, (torch.Tensor, torch.nn.Module, torch.optim.Optimizer))


def _owned(things: list[Any]) -> Iterator[tuple[str, str, torch.Tensor]]:
    """(owner, name, tensor), the surest owner first."""
    modules = [thing for thing in things if isinstance(thing, torch.nn.Module)]
    inner = {id(child) for module in modules for child in _children(module)}
    roots = [module for module in modules if id(module) not in inner]
    names: dict[int, str] = {}
    gradients: list[tuple[str, torch.Tensor]] = []
    for root in roots:
        for path, module in root.named_modules(prefix=type(root).__name__):
            for name, tensor in module._parameters.items():
                if tensor is None:
                    continue
                names.setdefault(id(tensor), f"{path}.{name}")
                yield "parameter", f"{path}.{name}", tensor
                if tensor.grad is not None:
                    gradients.append((f"{path}.{name}.grad", tensor.grad))
    for root in roots:
        for path, module in root.named_modules(prefix=type(root).__name__):
            for name, tensor in module._buffers.items():
                if tensor is not None:
                    yield "buffer", f"{path}.{name}", tensor
    for name, tensor in gradients:
        yield "gradient", name, tensor
    yield from _of_optimizers([thing for thing in things if isinstance(thing, torch.optim.Optimizer)], names)
    tensors = [thing for thing in things if isinstance(thing, torch.Tensor)]
    for tensor in tensors:
        if isinstance(tensor, torch.nn.Parameter):
            yield "parameter", "(no module)", tensor
        if tensor.is_leaf and tensor.grad is not None:
            yield "gradient", "(no module)", tensor.grad
    for tensor in tensors:
        yield "other", f"{type(tensor).__name__} {list(tensor.shape)}", tensor
    for name, tensor in _kept_by_autograd(tensors):
        yield "other", f"kept for backward by {name}", tensor


def _children(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    return (child for child in module._modules.values() if child is not None)


def _of_optimizers(
    optimizers: list[torch.optim.Optimizer], names: dict[int, str]
) -> Iterator[tuple[str, str, torch.Tensor]]:
    for optimizer in optimizers:
        for parameter, state in list(optimizer.state.items()):
            if not isinstance(state, dict):
                continue
            of = names.get(id(parameter), "(no module)")
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    yield "optimizer_state", f"{type(optimizer).__name__}.{key} of {of}", value


def _kept_by_autograd(tensors: list[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that only the graph of a forward pass holds."""
    todo = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen: set[Any] = set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        todo.extend(following for following, _ in node.next_functions)
        for name in dir(node):
            if name.startswith(_SAVED):
                for tensor in _unpacked(node, name):
                    yield node.name(), tensor


def _unpacked(node: Any, name: str) -> Iterator[torch.Tensor]:
    """The tensors in a saved variable; none where it was freed already or was packed by hooks of the user."""
    try:
        value = getattr(node, name)
        several = value if isinstance(value, (tuple, list)) else (value,)
        tensors = [one.data for one in several if one is not None and hasattr(one, "data")]
    except (RuntimeError, AttributeError):
        return
    yield from (tensor for tensor in tensors if isinstance(tensor, torch.Tensor))


def _row(owner: str, name: str, tensor: torch.Tensor) -> Row | None:
    try:
        storage = tensor.untyped_storage()
        size, address, device = storage.nbytes(), storage.data_ptr(), storage.device
    except (RuntimeError, NotImplementedError, ReferenceError):
        return None  # no storage: sparse, fake or meta tensors, subclasses that wrap others
    if not size or not address:
        return None
    return address, size, device.type, -1 if device.index is None else device.index, owner, name
