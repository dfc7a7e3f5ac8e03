"""Packages that import their public names on first use."""

import importlib
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any


class _LazyPackage(ModuleType):
    """A package that imports its names on first use. A submodule with the same name as one of them
    does not hide it.
    """

    _homes: Mapping[str, str | None]

    def __setattr__(self, name: str, value: object) -> None:
        if not (self._homes.get(name) and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name not in self._homes:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        module_name = self._homes[name]
        if module_name is None:
            return importlib.import_module(f"{self.__name__}.{name}")
        value = getattr(importlib.import_module(module_name, self.__name__), name)
        super().__setattr__(name, value)
        return value

    def __dir__(self) -> list[str]:
        return sorted(self._homes)


def lazy(package: str, homes: Mapping[str, str | None]) -> None:
    """Make a package import names on first use; they become its `__all__` if it has none.

    Args:
        package: Its `__name__`.
        homes: Name -> module that defines it, relative to the package (`.kineto`) or absolute; None
            for a submodule.

    Example:
        >>> lazy(__name__, {"load": ".loading"})  # doctest: +SKIP
    """
    module = sys.modules[package]
    module.__dict__["_homes"] = dict(homes)
    module.__dict__.setdefault("__all__", sorted(homes))
    module.__class__ = _LazyPackage
