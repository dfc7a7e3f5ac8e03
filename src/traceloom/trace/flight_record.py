"""The last collectives of one rank, as PyTorch's flight recorder keeps them."""

import msgspec


class FlightEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A collective of a rank.

    `sequence` counts those of a group, or the messages between two ranks (`partner`).
    """

    group: str
    operation: str
    sequence: int
    done: bool
    started: bool  # on the device
    created_ns: int
    sizes: str = ""  # of its inputs
    is_message: bool = False
    # (rank in the group, `<-` or `->`, rank in the group).
    partner: tuple[int, str, int] | None = None


class FlightGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A process group as one rank sees it: the last collective that it has queued, and its members
    if recorded.
    """

    title: str
    queued: int
    members: tuple[int, ...] = ()


class FlightRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The record of one rank: its groups, and entries, oldest first."""

    rank: int
    groups: dict[str, FlightGroup]
    entries: tuple[FlightEntry, ...]

    def pending(self, group: str) -> FlightEntry | None:
        """Returns the oldest unfinished collective of a group."""
        pending = (
            entry
            for entry in self.entries
            if entry.group == group and not (entry.done or entry.is_message)
        )
        return min(pending, key=lambda entry: entry.sequence, default=None)

    def find_oldest_unfinished(self) -> FlightEntry | None:
        """Returns the oldest unfinished entry of all groups."""
        return next((entry for entry in self.entries if not entry.done), None)

    def at(self, group: str, sequence: int) -> FlightEntry | None:
        """Returns the collective with a sequence number; None if it is not recorded."""
        for entry in reversed(self.entries):
            if (entry.group, entry.sequence, entry.is_message) == (group, sequence, False):
                return entry
        return None
