"""Small work stays on one core, and only as long as it lasts."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from traceloom.system.process import MAX_PINNED_EVENTS, pin_to_one_core

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2,
    reason="needs Linux and two cores",
)


@contextmanager
def a_thread() -> Iterator[int]:
    """A thread beside this one, by its number; it waits."""
    end, numbers = threading.Event(), [0]
    begun = threading.Event()

    def wait() -> None:
        numbers[0] = threading.get_native_id()
        begun.set()
        end.wait()

    thread = threading.Thread(target=wait)
    thread.start()
    begun.wait()
    yield numbers[0]
    end.set()
    thread.join()


def test_all_threads_are_kept_on_one_core_and_let_go() -> None:
    before = os.sched_getaffinity(0)
    with a_thread() as other, pin_to_one_core():
        core = os.sched_getaffinity(0)
        assert len(core) == 1
        assert core < before
        assert os.sched_getaffinity(other) == core
        with a_thread() as later:
            assert os.sched_getaffinity(later) == core
    assert os.sched_getaffinity(0) == before


def test_a_thread_that_began_inside_is_let_go_too() -> None:
    before = os.sched_getaffinity(0)
    inside = pin_to_one_core()
    inside.__enter__()
    with a_thread() as later:
        inside.__exit__(None, None, None)
        assert os.sched_getaffinity(later) == before


def test_they_are_let_go_where_what_is_inside_fails() -> None:
    before = os.sched_getaffinity(0)
    with pytest.raises(KeyError), pin_to_one_core():
        raise KeyError
    assert os.sched_getaffinity(0) == before


def test_much_work_has_all_cores() -> None:
    before = os.sched_getaffinity(0)
    with pin_to_one_core(MAX_PINNED_EVENTS + 1):
        assert os.sched_getaffinity(0) == before


def test_what_has_one_core_already_stays_as_it_is() -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {max(before)})
        with pin_to_one_core():
            assert os.sched_getaffinity(0) == {max(before)}
        assert os.sched_getaffinity(0) == {max(before)}
    finally:
        os.sched_setaffinity(0, before)
