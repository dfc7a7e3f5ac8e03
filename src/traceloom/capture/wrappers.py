"""Modules that stand around others and only pass calls on: names are those of the code without them.

Told by the names of their classes, so that nothing of PyTorch is imported that the program does not use.
"""

# ruff: noqa: SLF001  (PyTorch offers these things by private names only)
from __future__ import annotations

from collections.abc import Iterator

import torch

INNER = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "OptimizedModule": "_orig_mod",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "OffloadWrapper": "_checkpoint_wrapped_module",
}
"""Classes of PyTorch, and the attribute that holds what they stand around."""


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """The module that the user wrote, without all wrappers around it."""
    while True:
        inner = _inner(module)
        if inner is None:
            return module
        module = inner


def class_name(module: torch.nn.Module) -> str:
    """The name of the class that the user wrote.

    `fully_shard` and `replicate` give a module a class of their own, made of one of PyTorch's and that of the user.
    """
    kind = type(unwrapped(module))
    while len(kind.__bases__) == 2 and all(
        cls.__module__.startswith("torch.distributed.") for cls in (kind, kind.__bases__[0])
    ):
        kind = kind.__bases__[1]
    return kind.__name__


def named_parts(root: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """All modules below one with their paths, as `named_modules` gives them: `GPT.blocks.0`, from the class's name on.

    Wrappers have the path of what they stand around. Each module comes once, parents before children.
    """
    seen: set[int] = set()
    todo = [(class_name(root), root)]
    while todo:
        path, module = todo.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield path, module
        inner = _inner(module)
        todo.extend(
            (path if child is inner else f"{path}.{name}", child)
            for name, child in reversed(module._modules.items())
            if child is not None
        )


def _inner(module: torch.nn.Module) -> torch.nn.Module | None:
    for kind in type(module).__mro__:
        if kind.__name__ in INNER and kind.__module__.startswith("torch."):
            return module._modules.get(INNER[kind.__name__])
    return None
