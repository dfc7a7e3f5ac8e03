"""The store of the demo: filled once in a test run, however many tests and processes ask for it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from support.once import alone, shared_folder
from traceloom.fleet.demo import build_recipe, fill_demo, open_demo_directory
from traceloom.fleet.store.captures import ServiceState
from traceloom.fleet.store.objects import ObjectStore
from traceloom.fleet.store.tables import Tables
from traceloom.testing.fleet_weeks import WeeksRecipe

DAYS = 6  # fewer than the demo has


def demo_store(factory: pytest.TempPathFactory) -> tuple[Path, WeeksRecipe, int]:
    """Its directory, which is to be left as it is, what it was made of, and when its weeks end, Unix time in ns."""
    folder = shared_folder(factory)
    end = folder / "demo-ends"
    with alone(folder / "demo"), open_demo_directory(str(folder / "demo-store")) as directory:
        if not directory.full:
            now_ns = time.time_ns()
            end.write_text(str(now_ns))
            tables, state = (
                Tables(str(directory.path)),
                ServiceState(str(directory.path / "state.db")),
            )
            tables.create()
            fill_demo(
                state,
                ObjectStore(str(directory.path)),
                tables,
                build_recipe(now_ns, DAYS),
                now_ns,
            )
            state.close()
            directory.filled()
    now_ns = int(end.read_text())
    return directory.path, build_recipe(now_ns, DAYS), now_ns
