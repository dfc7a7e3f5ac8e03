"""Memory that grows from step to step of a run, against made runs whose growth is known."""

from __future__ import annotations

import random

import pytest

from traceloom.trace.session import RunGrowth, find_run_growth

MB = 1_000_000
SEEDS = range(20)


def grown(held: list[int], recorded: int = 5, *, missing: float = 0.0) -> RunGrowth | None:
    """What is found in a run that records its first steps."""
    states = ["recorded"] * recorded + ["unrecorded"] * (len(held) - recorded)
    known: list[int | None] = [size if random.random() >= missing else None for size in held]
    return find_run_growth(states, known)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_leak_is_found_with_its_size(seed: int) -> None:
    random.seed(seed)
    per_step = random.randint(MB, 30 * MB)
    noise = random.choice((0.0, 0.3, 1.0))
    held = [
        300 * MB + step * per_step + int(random.uniform(-noise, noise) * per_step)
        for step in range(random.randint(45, 200))
    ]
    found = grown(held, missing=random.choice((0.0, 0.4)))
    assert found is not None
    assert found.bytes_per_step == pytest.approx(per_step, rel=0.2)
    assert found.first_bytes < found.last_bytes


@pytest.mark.parametrize("seed", SEEDS)
def test_what_stays_or_fills_up_once_is_no_leak(seed: int) -> None:
    random.seed(seed)
    count = random.randint(20, 200)
    noise = [random.uniform(-20, 20) * MB for _ in range(count)]
    full = random.randint(8, 15)  # steps after which a cache is full
    flat = [300 * MB + int(part) for part in noise]
    cache = [300 * MB + 20 * MB * min(step, full) for step in range(count)]
    saw = [300 * MB + 10 * MB * (step % 10) for step in range(count)]
    assert grown(cache, 0) is None or count < 4 * full
    assert grown(saw) is None or count < 30
    assert grown(flat) is None
    assert grown(sorted(flat, reverse=True)) is None


def test_growth_while_it_is_recorded_is_that_of_the_recorder() -> None:
    held = [300 * MB + 50 * MB * min(step, 20) for step in range(60)]
    assert grown(held, 20) is None


def test_a_run_that_ends_with_its_recording_tells_nothing() -> None:
    assert grown([300 * MB + 50 * MB * step for step in range(12)], 8) is None
