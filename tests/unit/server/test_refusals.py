"""Refusals that are repeated have an entry a minute, which says how many they were."""

from __future__ import annotations

from traceloom.server.access import RefusalCounter


def test_the_first_has_an_entry_and_later_ones_one_a_minute_with_their_number() -> None:
    now = 1000.0
    counter = RefusalCounter(lambda: now)
    entries = []
    for second in range(150):
        now = 1000.0 + second
        entries.append(counter.count("token a", "/tokens"))
    assert {second: n for second, n in enumerate(entries) if n} == {0: 1, 60: 60, 120: 60}
    assert counter.count("token b", "/tokens") == 1
    assert counter.count("token a", "/audit") == 1


def test_what_is_made_up_without_end_takes_bounded_memory() -> None:
    counter = RefusalCounter(lambda: 5.0)
    for number in range(10_000):
        counter.count("token a", f"/{number}")
    assert len(counter._counts) < 5_000
