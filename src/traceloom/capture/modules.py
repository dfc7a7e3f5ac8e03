"""Module scopes, wrappers, activation checkpointing.

Told by the names of their classes, so that nothing of PyTorch is imported that the program does not
use.

The hooks stand from the beginning to the end, and a flag switches them: hooks that come and go make
`torch.compile` compile anew.

Without stacks nothing else in a trace tells it: the state of chance is copied, hooks and contexts
are made, in Python. Two marks stand around each checkpointed part, one for what comes before it and
one for what comes behind it. Only the way without reentrant autograd is marked; the older one has a
node of its own in every trace.
"""

# ruff: noqa: SLF001  (PyTorch offers these things by private names only)
from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from traceloom.capture.scope import MODULE_PREFIX, scope
from traceloom.capture.session import Replaced, annotate

WRAPPER_ATTRIBUTES = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "OptimizedModule": "_orig_mod",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "OffloadWrapper": "_checkpoint_wrapped_module",
}
"""Classes of PyTorch, and the attribute that holds what they stand around."""


def unwrap_module(module: torch.nn.Module) -> torch.nn.Module:
    """The module that the user wrote, without all wrappers around it."""
    while True:
        inner = _get_wrapped_module(module)
        if inner is None:
            return module
        module = inner


def get_class_name(module: torch.nn.Module) -> str:
    """The name of the class that the user wrote.

    `fully_shard` and `replicate` give a module a class of their own, made of one of PyTorch's and
    that of the user.
    """
    kind = type(unwrap_module(module))
    while len(kind.__bases__) == 2 and all(
        cls.__module__.startswith("torch.distributed.") for cls in (kind, kind.__bases__[0])
    ):
        kind = kind.__bases__[1]
    return kind.__name__


def iterate_modules(root: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """All modules below one with their paths, as `named_modules` gives them: `GPT.blocks.0`, from
    the class's name on.

    Wrappers have the path of what they stand around. Each module comes once, parents before
    children.
    """
    seen: set[int] = set()
    todo = [(get_class_name(root), root)]
    while todo:
        path, module = todo.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield path, module
        inner = _get_wrapped_module(module)
        todo.extend(
            (path if child is inner else f"{path}.{name}", child)
            for name, child in reversed(module._modules.items())
            if child is not None
        )


def _get_wrapped_module(module: torch.nn.Module) -> torch.nn.Module | None:
    for kind in type(module).__mro__:
        if kind.__name__ in WRAPPER_ATTRIBUTES and kind.__module__.startswith("torch."):
            return module._modules.get(WRAPPER_ATTRIBUTES[kind.__name__])
    return None


class module_scope(scope):  # noqa: N801  (as its base)
    """A scope opened for a module call; told apart in the trace by its prefix."""

    __slots__ = ()
    prefix = MODULE_PREFIX


class _Call(NamedTuple):
    """A module call that is going on; `inner` is the module itself, or what it stands around as a
    wrapper.
    """

    module: torch.nn.Module
    inner: torch.nn.Module
    opened: module_scope


class ModuleScopes:
    """Opens a scope around every module call between `start` and `stop`.

    A wrapper and what it stands around are one scope, called as without the wrapper.

    Args:
        names: `path`: modules are called by their attribute path from the outermost module that was called, which is
            called by its class (`GPT.blocks.0.attn`); `class`: each by its class
            (`GPT.Block.Attention`).
    """

    def __init__(self, names: str) -> None:
        self._by_path = names == "path"
        self._paths: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()
        self._open = threading.local()
        self._on = False

    def install(self) -> list[Any]:
        """Put the hooks in place; gives their handles."""
        return [
            register_module_forward_pre_hook(self._before),
            register_module_forward_hook(self._after, always_call=True),
        ]

    def start(self) -> None:
        self._on = True

    def stop(self) -> None:
        """Modules are called as they were; scopes that are open end with their calls."""
        self._on = False
        while self._stack():
            self._stack().pop().opened.__exit__(None, None, None)

    def _before(self, module: torch.nn.Module, _args: Any) -> None:
        # Compiled code has no modules of its own. Asked first, so that the compiler never sees the
        # flag.
        if (
            torch.compiler.is_compiling()
            or not self._on
            or isinstance(module, torch.fx.GraphModule)
        ):
            return
        stack, inner = self._stack(), unwrap_module(module)
        around = stack[-1] if stack else None
        if around is not None and around.inner is inner and around.module is not inner:
            return  # the wrapper around it has opened its scope
        name = self._paths.get(inner) if self._by_path else get_class_name(inner)
        if name is None:  # nobody above has named it
            for path, part in iterate_modules(inner):
                if part not in self._paths:
                    self._paths[part] = path
            name = self._paths.get(inner, get_class_name(inner))
        outer = self._paths.get(around.inner) if self._by_path and around is not None else None
        if outer is not None and name.startswith(
            f"{outer}."
        ):  # inside the scope of the module around it
            name = name[len(outer) + 1 :]
        opened = module_scope(name)
        opened.__enter__()
        stack.append(_Call(module, inner, opened))

    def _after(self, module: torch.nn.Module, _args: Any, _output: Any) -> None:
        if torch.compiler.is_compiling() or not self._on:
            return
        stack = self._stack()
        if stack and any(
            module is entered.module for entered in stack
        ):  # not one that was entered before we began
            while stack:
                call = stack.pop()
                call.opened.__exit__(None, None, None)
                if call.module is module:
                    return

    def _stack(self) -> list[_Call]:
        stack: list[_Call] | None = getattr(self._open, "stack", None)
        if stack is None:
            stack = self._open.stack = []
        return stack


NAME = "traceloom.checkpoint"
# Who holds the function that checkpoints; each calls it by its own name for it.
_CHECKPOINT_MODULES = (
    "torch.utils.checkpoint",
    "torch.distributed._composable.checkpoint_activation",
)
_FUNCTION = "_checkpoint_without_reentrant_generator"
_ORIGINAL = "_traceloom_original"


class CheckpointMarks:
    """Marks checkpoints between `start` and `stop`, where the program has imported them."""

    def __init__(self) -> None:
        self._on = False
        self._replaced: list[Replaced] = []

    def start(self) -> None:
        self._on = True
        for holder in _CHECKPOINT_MODULES:
            module = sys.modules.get(holder)
            function = vars(module).get(_FUNCTION) if module is not None else None
            if function is not None:
                # a module that was imported meanwhile has ours under its own name
                marked = self._marked(getattr(function, _ORIGINAL, function))
                self._replaced.append(Replaced(module, _FUNCTION, marked))

    def stop(self) -> None:
        """Leave PyTorch as it was; a checkpoint that is going on ends as it began."""
        self._on = False
        for replaced in self._replaced:
            replaced.remove()
        self._replaced = []

    def _marked(self, original: Callable[..., Iterator[None]]) -> Callable[..., Iterator[None]]:
        def checkpointing(*args: Any, **kwargs: Any) -> Iterator[None]:
            parts = original(*args, **kwargs)
            return _Parts(parts) if self._on and not torch.compiler.is_compiling() else parts

        checkpointing.__name__ = _FUNCTION
        setattr(checkpointing, _ORIGINAL, original)
        return checkpointing


class _Parts:
    """A generator whose every advance is marked."""

    __slots__ = ("_inner",)

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __iter__(self) -> _Parts:
        return self

    def __next__(self) -> None:
        opened = annotate(NAME)
        try:
            next(self._inner)
        finally:
            opened.__exit__(None, None, None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
