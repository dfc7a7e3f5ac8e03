"""Scopes that `nn.Module` calls open by themselves while allocations are recorded.

The hooks stand from the beginning to the end, and a flag switches them: hooks that come and go make `torch.compile`
compile anew.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, NamedTuple

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from traceloom.capture.scope import MODULE_PREFIX, scope
from traceloom.capture.wrappers import class_name, named_parts, unwrapped


class module_scope(scope):  # noqa: N801  (as its base)
    """A scope opened for a module call; told apart in the trace by its prefix."""

    __slots__ = ()
    prefix = MODULE_PREFIX


class _Call(NamedTuple):
    """A module call that is going on; `inner` is the module itself, or what it stands around as a wrapper."""

    module: torch.nn.Module
    inner: torch.nn.Module
    opened: module_scope


class ModuleScopes:
    """Opens a scope around every module call between `start` and `stop`.

    A wrapper and what it stands around are one scope, called as without the wrapper.

    Args:
        names: `path`: modules are called by their attribute path from the outermost module that was called, which is
            called by its class (`GPT.blocks.0.attn`); `class`: each by its class (`GPT.Block.Attention`).
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
        """From now on module calls are scopes."""
        self._on = True

    def stop(self) -> None:
        """Modules are called as they were; scopes that are open end with their calls."""
        self._on = False
        while self._stack():
            self._stack().pop().opened.__exit__(None, None, None)

    def _before(self, module: torch.nn.Module, _args: Any) -> None:
        # Compiled code has no modules of its own. Asked first, so that the compiler never sees the flag.
        if torch.compiler.is_compiling() or not self._on or isinstance(module, torch.fx.GraphModule):
            return
        stack, inner = self._stack(), unwrapped(module)
        around = stack[-1] if stack else None
        if around is not None and around.inner is inner and around.module is not inner:
            return  # the wrapper around it has opened its scope
        name = self._paths.get(inner) if self._by_path else class_name(inner)
        if name is None:  # nobody above has named it
            for path, part in named_parts(inner):
                if part not in self._paths:
                    self._paths[part] = path
            name = self._paths.get(inner, class_name(inner))
        outer = self._paths.get(around.inner) if self._by_path and around is not None else None
        if outer is not None and name.startswith(f"{outer}."):  # inside the scope of the module around it
            name = name[len(outer) + 1 :]
        opened = module_scope(name)
        opened.__enter__()
        stack.append(_Call(module, inner, opened))

    def _after(self, module: torch.nn.Module, _args: Any, _output: Any) -> None:
        if torch.compiler.is_compiling() or not self._on:
            return
        stack = self._stack()
        if stack and any(module is entered.module for entered in stack):  # not one that was entered before we began
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
