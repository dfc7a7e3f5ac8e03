"""How far the host's clock is from the service's: the best of the last round trips.

A message that leaves at `sent` by the host's clock, arrives at `received` and is answered at `answered` by the
service's, and is back at `returned`, bounds the offset: it is `((received - sent) + (answered - returned)) / 2`, at
most half of the time on the way beside it (RFC 5905, section 8).
"""

from __future__ import annotations

from collections import deque

from msgspec import Struct

from traceloom.agent.uplink.messages import ClockOffset

KEPT = 16
# What two clocks may drift apart while a round trip ages; NTP takes 15 ppm, undisciplined quartz has up to 50.
DRIFT = 50e-6
_JUMP_NS = 5_000_000  # what a clock that was set differs by; slewing stays below


class RoundTrip(Struct, frozen=True):
    """One exchange: times in ns of the host's clock (`sent`, `returned`, `monotonic`) and the service's."""

    sent_ns: int
    received_ns: int
    answered_ns: int
    returned_ns: int
    monotonic_ns: int  # when it returned

    @property
    def offset_ns(self) -> int:
        """What is added to a time of the host to get the service's."""
        return ((self.received_ns - self.sent_ns) + (self.answered_ns - self.returned_ns)) // 2

    @property
    def error_ns(self) -> int:
        """How far the offset may be wrong: half of the time on the way."""
        return ((self.returned_ns - self.sent_ns) - (self.answered_ns - self.received_ns) + 1) // 2


class ServiceClock:
    """Keeps the last round trips; those from before the host's clock was set count no more."""

    def __init__(self) -> None:
        self._kept: deque[RoundTrip] = deque(maxlen=KEPT)

    def add(self, trip: RoundTrip) -> bool:
        """Take a round trip; False where it cannot be: a clock was set while it was on its way."""
        if trip.error_ns < 0 or trip.answered_ns < trip.received_ns:
            self._kept.clear()
            return False
        if self._kept:
            last = self._kept[-1]
            by_clock, by_counter = trip.returned_ns - last.returned_ns, trip.monotonic_ns - last.monotonic_ns
            if abs(by_clock - by_counter) > _JUMP_NS + DRIFT * by_counter:
                self._kept.clear()
        self._kept.append(trip)
        return True

    def offset(self, monotonic_ns: int) -> ClockOffset | None:
        """The offset with the smallest error now; None before the first round trip."""
        if not self._kept:
            return None

        def error(trip: RoundTrip) -> int:
            return trip.error_ns + int(DRIFT * max(monotonic_ns - trip.monotonic_ns, 0))

        best = min(self._kept, key=error)
        return ClockOffset(offset_ns=best.offset_ns, error_ns=error(best), round_trips=len(self._kept))
