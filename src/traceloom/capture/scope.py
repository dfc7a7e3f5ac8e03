"""`traceloom.scope("name")`: a named region that appears in the device trace and in the host trace.

In the traces a scope is a user annotation called `traceloom.scope:` and its name; nested names are
joined by dots. While nothing records, entering and leaving one costs a fraction of a microsecond,
and without torch nothing happens.
"""

# ruff: noqa: SLF001  (PyTorch offers these things by private names only)
from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Generator
from contextvars import ContextVar
from types import TracebackType
from typing import Any, TypeVar

from traceloom.errors import UsageError

PREFIX = "traceloom.scope:"
MODULE_PREFIX = "traceloom.module:"
MAXIMUM_LENGTH = 200

_F = TypeVar("_F", bound=Callable[..., Any])
_inner: ContextVar[scope | None] = ContextVar("traceloom_scope", default=None)
_profiler: Any = None  # torch.autograd.profiler, once torch is there
_is_compiling: Callable[[], bool] = bool  # torch.compiler.is_compiling, once torch is there


class scope:  # noqa: N801  (used like a function)
    """Name a region: `with traceloom.scope("loss"):` or `@traceloom.scope("loss")` above a
    function.

    Works on plain, generator and coroutine functions; there the region covers what runs between two
    suspensions, so that regions of different tasks on one thread never cross. One object can be
    entered again after it was left.

    Args:
        name: Any text. Quotes, backslashes and control characters are escaped, because PyTorch writes names into
            JSON as they are; what exceeds 200 characters is cut.

    Raises:
        UsageError: slug `bad-scope`, if the name is no text, or an open scope is entered again.
    """

    __slots__ = ("_annotation", "_open", "_outer", "name")
    prefix = PREFIX

    def __init__(self, name: str) -> None:
        if type(name) is not str:
            raise UsageError(
                f"a scope's name must be text, got {type(name).__name__}", slug="bad-scope"
            )
        self.name = name
        self._open = False
        self._annotation: Any = None
        self._outer: scope | None = None

    def __enter__(self) -> scope:  # noqa: PYI034  (a scope is never subclassed)
        if self._open:
            raise UsageError(
                f"scope `{self.name}` is open already", slug="bad-scope", hint="make a new one"
            )
        self._open = True
        self._outer = _inner.get()
        _inner.set(self)
        profiler = _profiler or _find_profiler()
        # Compiled code has no scopes: asked first, so that the compiler never looks at what changes
        # with recording.
        if profiler is not None and not _is_compiling() and profiler._is_profiler_enabled:
            from traceloom.capture.session import annotate

            self._annotation = annotate(self.prefix + self.path)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        if self._annotation is not None:
            self._annotation.__exit__(kind, error, where)
            self._annotation = None
        _inner.set(self._outer)
        self._outer = None
        self._open = False

    @property
    def path(self) -> str:
        """The names of this scope and of those around it, joined by dots, as the trace shows them."""
        names: list[str] = []
        at: scope | None = self
        while at is not None:
            names.append(at.name)
            at = at._outer
        return _escape_name(".".join(reversed(names)))

    def __call__(self, function: _F) -> _F:
        """Put a scope of this name around every call of `function`."""
        name = self.name
        if inspect.isasyncgenfunction(function):
            raise UsageError(
                "a scope cannot be put above an asynchronous generator",
                slug="bad-scope",
                hint="use it inside",
            )
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def coroutine(*args: Any, **kwargs: Any) -> Any:
                return await _ScopedAwaitable(name, function(*args, **kwargs).__await__())

            return coroutine  # type: ignore[return-value]
        if inspect.isgeneratorfunction(function):

            @functools.wraps(function)
            def generator(*args: Any, **kwargs: Any) -> Any:
                return (yield from _run_in_slices(name, function(*args, **kwargs)))

            return generator  # type: ignore[return-value]

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with scope(name):
                return function(*args, **kwargs)

        return call  # type: ignore[return-value]


class _ScopedAwaitable:
    """An awaitable that runs another one within a scope, slice by slice."""

    def __init__(self, name: str, inner: Any) -> None:
        self._name, self._inner = name, inner

    def __await__(self) -> Generator[Any, Any, Any]:
        return _run_in_slices(self._name, self._inner)


def _run_in_slices(name: str, inner: Any) -> Generator[Any, Any, Any]:
    """Drive a generator so that each of its slices is one region; the scope is closed while it is
    suspended.
    """
    resume: Callable[[], Any] = functools.partial(next, inner)
    while True:
        try:
            with scope(name):
                value = resume()
        except StopIteration as end:
            return end.value
        try:
            sent = yield value
        except GeneratorExit:
            inner.close()
            raise
        except BaseException as error:  # noqa: BLE001  (it belongs to the generator)
            resume = functools.partial(inner.throw, error)
        else:
            resume = (
                functools.partial(inner.send, sent)
                if sent is not None
                else functools.partial(next, inner)
            )


def _find_profiler() -> Any:
    global _profiler, _is_compiling
    torch = sys.modules.get("torch")
    autograd = getattr(torch, "autograd", None)  # None while torch is being imported
    _is_compiling = getattr(getattr(torch, "compiler", None), "is_compiling", bool)
    _profiler = getattr(autograd, "profiler", None)
    return _profiler


@functools.lru_cache(maxsize=1024)
def _escape_name(name: str) -> str:
    safe = []
    for letter in name[:MAXIMUM_LENGTH]:
        if letter in '"\\' or not letter.isprintable():
            safe.append(f"%{ord(letter):02X}")
        else:
            safe.append(letter)
    return "".join(safe)
