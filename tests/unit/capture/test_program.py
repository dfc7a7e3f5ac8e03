"""What the recorder puts into PyTorch: annotations that are counted, hooks that are there whole or not at all."""

from __future__ import annotations

import importlib
import runpy
import sys
import sysconfig
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch._C import _profiler as home  # noqa: E402

from traceloom.capture import session  # noqa: E402
from traceloom.capture.program import FastAnnotations, OpenAnnotations, ProgramHooks  # noqa: E402

ORIGINAL = home._RecordFunctionFast


@pytest.fixture
def closed() -> list[int]:
    return []


@pytest.fixture
def fast(closed: list[int]) -> Iterator[FastAnnotations]:
    annotations = FastAnnotations(lambda: closed.append(1))
    yield annotations
    annotations.remove()


def profiled(body: Any) -> list[str]:
    """Names of the annotations that a profiler sees, each with how it ended."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        body()
    return [event.name for event in profiler.events()]


def test_open_fast_annotations_are_counted_and_their_last_end_is_told(
    fast: FastAnnotations, closed: list[int]
) -> None:
    assert home._RecordFunctionFast is not ORIGINAL
    with home._RecordFunctionFast("outer"):
        assert len(fast.open) == 1
        with home._RecordFunctionFast("inner", (torch.ones(2), 3), {"stream": 0}):
            assert len(fast.open) == 2
        assert closed == []
    assert (len(fast.open), closed) == (0, [1])


def test_a_fast_annotation_is_what_it_was(fast: FastAnnotations) -> None:
    def body() -> None:
        for _ in range(2):  # one may be used again
            with again:
                torch.ones(2)
        with pytest.raises(KeyError), home._RecordFunctionFast("raises"):
            raise KeyError

    again = home._RecordFunctionFast("again")
    seen = profiled(body)
    assert (seen.count("again"), seen.count("raises")) == (2, 1)
    with pytest.raises(TypeError):
        home._RecordFunctionFast()
    assert home._RecordFunctionFast.__name__ == "_RecordFunctionFast"


def test_an_annotation_that_is_forgotten_is_open_no_more(fast: FastAnnotations) -> None:
    annotation = home._RecordFunctionFast("forgotten")
    annotation.__enter__()
    assert len(fast.open) == 1
    del annotation
    assert len(fast.open) == 0


def test_all_open_ones_can_be_ended_and_their_own_ends_do_nothing_then(
    fast: FastAnnotations,
) -> None:
    def body() -> None:
        with home._RecordFunctionFast("one"), home._RecordFunctionFast("two"):
            fast.close()
            assert len(fast.open) == 0

    seen = profiled(body)
    assert (seen.count("one"), seen.count("two")) == (1, 1)


def test_pytorchs_own_class_is_put_back_unless_somebody_else_has_replaced_it() -> None:
    annotations = FastAnnotations(lambda: None)
    annotations.remove()
    assert home._RecordFunctionFast is ORIGINAL
    annotations = FastAnnotations(lambda: None)
    ours = home._RecordFunctionFast
    theirs = type("Theirs", (), {})
    home._RecordFunctionFast = theirs
    annotations.remove()
    assert home._RecordFunctionFast is theirs
    home._RecordFunctionFast = ORIGINAL
    with ours("still works"):
        pass


@pytest.fixture
def opened() -> Iterator[OpenAnnotations]:
    annotations = OpenAnnotations()
    yield annotations
    annotations.remove()


class Timed(torch.profiler.record_function):  # type: ignore[name-defined,misc]
    """An annotation as programs derive it."""


@pytest.mark.parametrize("kind", [torch.profiler.record_function, Timed])
def test_open_annotations_are_counted_and_can_be_ended(opened: OpenAnnotations, kind: Any) -> None:
    def body() -> None:
        with kind("outer"):
            with kind("inner"):
                assert len(opened) == 2
            assert len(opened) == 1
            with kind("ended"):
                opened.close()
                assert len(opened) == 0
                torch.ones(1)

    seen = profiled(body)
    assert [seen.count(name) for name in ("outer", "inner", "ended")] == [1, 1, 1]


def test_an_annotation_passes_errors_and_is_open_no_more(opened: OpenAnnotations) -> None:
    with pytest.raises(KeyError), torch.profiler.record_function("raises"):
        raise KeyError
    assert len(opened) == 0
    first = torch.profiler.record_function("first").__enter__()
    second = torch.profiler.record_function("second").__enter__()
    first.__exit__(None, None, None)  # not in their order
    assert len(opened) == 1
    second.__exit__(None, None, None)


def test_annotations_are_pytorchs_own_afterwards() -> None:
    kind = torch.autograd.profiler.record_function
    before = (kind.__enter__, kind.__exit__)
    annotations = OpenAnnotations()
    with kind("open meanwhile"):
        assert kind.__enter__ is not before[0]
        annotations.remove()
    assert (kind.__enter__, kind.__exit__) == before


class Nobody:
    """A listener that counts what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *_: self.told.append(name)


def state() -> list[Any]:
    module, optimizer = torch.nn.modules.module, sys.modules["torch.optim.optimizer"]
    return [
        home._RecordFunctionFast,
        *(vars(kind)[name] for kind, name in session.PROFILERS),
        torch.profiler.profile.step,
        torch.compile,
        module._has_any_global_hook,
        dict(module._global_forward_pre_hooks),
        dict(optimizer._global_optimizer_pre_hooks),
        dict(optimizer._global_optimizer_post_hooks),
        type(torch.autograd),
        torch.autograd.profiler.record_function.__enter__,
    ]


@pytest.mark.parametrize("tracks", [False, True])
def test_hooks_tell_what_happens_and_leave_nothing_behind(tracks: bool) -> None:
    before, nobody = state(), Nobody()
    hooks = ProgramHooks(nobody, module_hooks=[], tracks_annotations=tracks)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    one = ["backward_begins", "quiet_moment", "optimizer_stepped"]
    assert nobody.told == ["called", *one, *one]
    nobody.told.clear()
    with torch.profiler.profile() as profiler:
        profiler.step()
    with torch.autograd.profiler.profile():
        pass
    assert nobody.told == ["profiler_begins", "profiler_stepped", "profiler_begins"]
    hooks.remove()
    assert state() == before
    hooks.remove()
    assert state() == before
    model(torch.ones(1, 2)).sum().backward()
    assert len(nobody.told) == 3


def values_of(module: Any) -> list[Any]:
    return [getattr(module, name) for name in dir(module)]


def test_who_only_goes_through_the_names_of_a_module_begins_no_backward_pass() -> None:
    nobody = Nobody()
    hooks = ProgramHooks(nobody, module_hooks=[], tracks_annotations=False)
    try:
        assert len(values_of(torch.autograd)) > 50
        assert nobody.told == []
        torch.autograd.backward(torch.ones(1, requires_grad=True).sum())
        assert nobody.told == ["backward_begins"]
    finally:
        hooks.remove()


def test_where_one_hook_cannot_be_installed_none_is(monkeypatch: pytest.MonkeyPatch) -> None:
    before = state()

    def fail(self: Any) -> None:
        raise AttributeError("a private name is missing")

    monkeypatch.setattr(ProgramHooks, "_watch_compiler", fail)
    with pytest.raises(AttributeError):
        ProgramHooks(Nobody(), module_hooks=[], tracks_annotations=True)
    assert state() == before


def test_an_error_in_a_backward_pass_holds_no_frame_of_ours() -> None:
    hooks = ProgramHooks(Nobody(), module_hooks=[], tracks_annotations=True)
    try:
        value = torch.ones(3, requires_grad=True)
        out = value * 2
        out.register_hook(lambda _: {}[1])
        with pytest.raises(KeyError) as raised:
            out.sum().backward()
    finally:
        hooks.remove()
    files = [str(frame.path) for frame in raised.traceback]
    assert not [name for name in files if "traceloom" in name]


def test_a_library_that_is_being_imported_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = tmp_path / "library.py"
    seen.write_text("from traceloom.capture.program import is_loading\nloading = is_loading()\n")
    monkeypatch.syspath_prepend(tmp_path)
    # Of this thread alone: what runs the tests may be a library that is being imported.
    monkeypatch.setattr(sys, "_current_frames", lambda: {0: sys._getframe(1)})

    def run(body: Callable[[], Any]) -> Any:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(body).result()

    def imported() -> Any:
        return importlib.import_module("library").loading

    assert not run(imported), "a module of the program may train"
    monkeypatch.delitem(sys.modules, "library")
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    assert run(imported)
    assert not run(lambda: runpy.run_path(str(seen), run_name="__main__")["loading"])
    monkeypatch.delitem(sys.modules, "library")
