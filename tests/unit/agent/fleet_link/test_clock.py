"""The offset of a host's clock against a simulated one: it lies within the error that is said, whatever the network."""

from __future__ import annotations

from hypothesis import given, strategies as st

from traceloom.agent.fleet_link.link import (
    MAX_CLOCK_DRIFT,
    MAX_ROUND_TRIPS,
    RoundTrip,
    ServiceClock,
)

START = 1_700_000_000_000_000_000
DELAY = st.integers(0, 2_000_000_000)


def trip(at_ns: int, ahead_ns: int, there_ns: int, worked_ns: int, back_ns: int) -> RoundTrip:
    """A round trip that leaves at a true time, from a host whose clock is ahead; the service's clock is true."""
    received = at_ns + there_ns
    returned = received + worked_ns + back_ns
    return RoundTrip(
        at_ns + ahead_ns, received, received + worked_ns, returned + ahead_ns, returned
    )


@given(
    st.integers(-(10**13), 10**13),
    st.lists(st.tuples(DELAY, DELAY, DELAY), min_size=1, max_size=40),
)
def test_the_true_offset_lies_within_the_error(
    ahead_ns: int, delays: list[tuple[int, int, int]]
) -> None:
    clock, at_ns = ServiceClock(), START
    for there, worked, back in delays:
        assert clock.add(trip(at_ns, ahead_ns, there, worked, back))
        at_ns += there + worked + back + 10_000_000_000
        offset = clock.offset(at_ns)
        assert offset is not None
        assert abs(offset.offset_ns + ahead_ns) <= offset.error_ns
    assert offset.round_trips == min(len(delays), MAX_ROUND_TRIPS)


@given(
    st.floats(-MAX_CLOCK_DRIFT, MAX_CLOCK_DRIFT),
    st.lists(st.tuples(DELAY, DELAY), min_size=1, max_size=40),
)
def test_a_clock_that_drifts_stays_within_it_too(
    drift: float, delays: list[tuple[int, int]]
) -> None:
    clock, at_ns = ServiceClock(), 0

    def of_host(true_ns: int) -> int:
        return START + true_ns + int(drift * true_ns)

    for there, back in delays:
        returned = at_ns + there + back
        clock.add(
            RoundTrip(
                of_host(at_ns),
                START + at_ns + there,
                START + at_ns + there,
                of_host(returned),
                returned,
            )
        )
        at_ns = returned + 10_000_000_000
        offset = clock.offset(at_ns)
        assert offset is not None
        # A trip measures drift, too: half of it on each way.
        assert (
            abs(of_host(at_ns) + offset.offset_ns - START - at_ns)
            <= offset.error_ns + MAX_CLOCK_DRIFT * (there + back) + 2
        )


def test_the_quickest_of_the_last_counts() -> None:
    clock = ServiceClock()
    clock.add(trip(START, 500, 1000, 0, 1000))
    for number in range(1, MAX_ROUND_TRIPS):
        clock.add(trip(START + number * 1_000_000, 500, 900_000, 0, 100_000))
    offset = clock.offset(START)
    assert offset is not None
    assert offset.offset_ns == -500
    for number in range(
        MAX_ROUND_TRIPS, 2 * MAX_ROUND_TRIPS
    ):  # the quick one is not among the last any more
        clock.add(trip(START + number * 1_000_000, 500, 900_000, 0, 100_000))
    offset = clock.offset(START + 2 * MAX_ROUND_TRIPS * 1_000_000)
    assert offset is not None
    assert abs(offset.offset_ns + 500) == 400_000
    assert offset.error_ns >= 500_000


def test_a_clock_that_is_set_begins_anew() -> None:
    clock = ServiceClock()
    clock.add(trip(START, 0, 100, 0, 100))
    assert clock.add(trip(START + 10**10, 3_600 * 10**9, 90_000, 0, 90_000))  # an hour ahead since
    offset = clock.offset(START + 10**10)
    assert offset is not None
    assert offset.round_trips == 1
    assert offset.offset_ns == -3_600 * 10**9


def test_a_clock_that_is_set_on_the_way_is_no_measurement() -> None:
    clock = ServiceClock()
    clock.add(trip(START, 0, 100, 0, 100))
    assert not clock.add(
        RoundTrip(START + 10**10, START + 10**10, START + 10**10, START, START + 10**10)
    )
    assert clock.offset(START) is None
