"""Finds the ranks that the others of a stuck job wait for, from their flight records."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from traceloom.system.units import format_ranks
from traceloom.trace.flight_record import FlightEntry, FlightRecord

Kind = Literal["behind", "unfinished", "absent", "mismatch", "cycle", "device", "all-in", "nothing"]

# All ranks give these the same sizes.
_EQUAL_SIZES = frozenset({"all_reduce", "broadcast", "reduce", "_all_gather_base"})
# Some ranks finish these without waiting for the others.
_ROOTED = frozenset({"broadcast", "reduce", "scatter", "gather", "send", "recv"})
_CONFIDENCE: dict[Kind, float] = {
    "behind": 0.95,
    "unfinished": 0.9,
    "device": 0.85,
    "mismatch": 0.85,
    "absent": 0.8,
}


class FlightVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """The conclusion from the records of several ranks.

    `ranks` are those that the others wait for, and `confidence` how likely each of them is the one;
    `waits`: rank -> the collective that it waits in.
    """

    kind: Kind
    sentence: str
    ranks: tuple[int, ...] = ()
    confidence: float | None = None
    waits: dict[int, str] = {}
    group: str = ""
    operation: str = ""
    sequence: int | None = None


def find_late_ranks(records: Sequence[FlightRecord], absent: Collection[int] = ()) -> FlightVerdict:
    """Finds the ranks that the others wait for.

    In the oldest unfinished collective that some rank has queued, these are the ranks that have not
    queued it, or that alone have not finished it. A rank that has not queued it but waits in
    another group itself is not to blame; if all missing ranks wait, they wait for each other.

    Args:
        records: Those of the ranks that left one.
        absent: Ranks that left none, although all ranks of the job should have.
    """
    records_by_rank = {record.rank: record for record in records}
    stalls = _find_blocked_collectives(records_by_rank, absent)
    waits = {rank: entry for stall in reversed(stalls) for rank, entry in stall.inside.items()}
    for rank, record in records_by_rank.items():
        for entry in record.entries:
            if entry.is_message and not entry.done and entry.partner:
                waits.setdefault(rank, entry)
    names = {rank: entry.operation for rank, entry in waits.items()}
    # Independent of the order of records.
    stalls.sort(key=lambda stall: (stall.first.created_ns, stall.group))
    faults = (_find_inner_fault(stall, records_by_rank) for stall in stalls if not stall.missing)
    verdict = (
        _find_ranks_behind(stalls, waits)
        or _find_silent_peers(records_by_rank, waits)
        or _find_absent_ranks(stalls)
        or next(filter(None, faults), None)
        or _describe_undecided(stalls, waits)
    )
    return msgspec.structs.replace(verdict, waits=names)


def _find_blocked_collectives(
    records_by_rank: Mapping[int, FlightRecord], absent: Collection[int]
) -> list["_BlockedCollective"]:
    """Returns the oldest unfinished collective of each group that has one."""
    stalls: list[_BlockedCollective] = []
    for group in dict.fromkeys(
        name for record in records_by_rank.values() for name in record.groups
    ):
        pending = {
            rank: entry
            for rank, record in records_by_rank.items()
            if (entry := record.pending(group))
        }
        if not pending:
            continue
        first = min(pending.values(), key=lambda entry: (entry.sequence, entry.created_ns))
        # Members among the ranks with a record: all for the default group, else those that the
        # group lists or that have used it.
        views = {
            rank: record.groups[group]
            for rank, record in records_by_rank.items()
            if group in record.groups
        }
        title = next(iter(views.values())).title
        listed = {rank for view in views.values() for rank in view.members}
        if any(view.title == "default_pg" for view in views.values()):
            listed |= records_by_rank.keys()
        members = sorted((listed & records_by_rank.keys()) | views.keys())
        queued = {rank: views[rank].queued if rank in views else 0 for rank in members}
        missing = {rank: number for rank, number in queued.items() if number < first.sequence}
        stalls.append(
            _BlockedCollective(
                group,
                title,
                first,
                {
                    rank: entry
                    for rank, entry in pending.items()
                    if entry.sequence == first.sequence
                },
                missing,
                tuple(members),
                tuple(
                    rank
                    for rank in members
                    if first.operation not in _ROOTED
                    and rank not in missing
                    and (rank not in pending or pending[rank].sequence > first.sequence)
                ),
                tuple(sorted(listed.intersection(absent) if listed else absent)),
            )
        )
    return stalls


def _find_ranks_behind(
    stalls: Sequence["_BlockedCollective"], waits: Mapping[int, FlightEntry]
) -> FlightVerdict | None:
    """Finds ranks that have not queued, or alone have not finished, a collective of the others."""
    for stall in stalls:
        if stall.finished:
            return _judge(
                "unfinished",
                {rank for each in stalls if each.finished for rank in each.inside},
                stall,
                f"{_format_have(stall.inside)} not finished {stall.name}, "
                f"which {_format_have(stall.finished)} finished",
            )
        if late_ranks := stall.missing.keys() - waits.keys():
            last = {stall.missing[rank] for rank in late_ranks}
            before = (
                f"; {'its' if len(late_ranks) == 1 else 'their'} last was number {last.pop()}"
                if len(last) == 1
                else ""
            )
            return _judge(
                "behind",
                late_ranks,
                stall,
                f"{_format_have(late_ranks)} not queued {stall.name}, in which "
                f"{_format_waits(stall.inside)}{before}",
            )
    return None


def _find_silent_peers(
    records_by_rank: Mapping[int, FlightRecord], waits: Mapping[int, FlightEntry]
) -> FlightVerdict | None:
    """Finds ranks that have not queued their side of a message, and wait for nothing themselves."""
    messages = {
        rank: (entry, peer)
        for rank, (entry, peer) in _find_unmatched_messages(records_by_rank).items()
        if peer not in waits
    }
    if not messages:
        return None
    rank = min(messages, key=lambda rank: (messages[rank][0].created_ns, rank))
    message, peer = messages[rank]
    return FlightVerdict(
        kind="behind",
        ranks=tuple(sorted({peer for _, peer in messages.values()})),
        confidence=_CONFIDENCE["behind"],
        group=message.group,
        operation=message.operation,
        sequence=message.sequence,
        sentence=f"rank {peer} has not queued its side of `{message.operation}` number {message.sequence}, in which rank {rank} waits",
    )


def _find_absent_ranks(stalls: Sequence["_BlockedCollective"]) -> FlightVerdict | None:
    """Finds ranks without a record in the oldest collective that waits for one of them."""
    stall = next((stall for stall in stalls if stall.absent), None)
    if stall is None:
        return None
    text = f"{_format_waits(stall.inside)} in {stall.name}, and {_format_have(stall.absent)} left no record"
    if len(stall.absent) > 1:
        text += ", so that they cannot be told apart"
    return _judge("absent", stall.absent, stall, text, _CONFIDENCE["absent"] / len(stall.absent))


def _describe_undecided(
    stalls: Sequence["_BlockedCollective"], waits: Mapping[int, FlightEntry]
) -> FlightVerdict:
    """Describes who waits, if no rank can be named for it."""
    complete = next((stall for stall in stalls if not stall.missing), None)
    if complete is not None:
        text = f"{_format_have(complete.members)} queued {complete.name}, and it does not end"
        return _judge("all-in", (), complete, text)
    if held := sorted(waits.keys() - {rank for stall in stalls for rank in stall.inside}):
        parts = [f"rank {rank} waits in `{waits[rank].operation}`" for rank in held]
        return FlightVerdict(kind="all-in", sentence=f"messages do not end: {', '.join(parts)}")
    if not stalls:
        return FlightVerdict(
            kind="nothing", sentence="no rank waits in a collective that is recorded"
        )
    parts = [f"{format_ranks(stall.inside)} in {stall.name}" for stall in stalls]
    involved = sorted({rank for stall in stalls for rank in (*stall.inside, *stall.missing)})
    return FlightVerdict(
        kind="cycle",
        sentence=f"{format_ranks(involved)} wait for each other: {'; '.join(parts)}",
        ranks=tuple(involved),
        confidence=1 / len(involved),
    )


def _judge(
    kind: Kind,
    ranks: Iterable[int],
    stall: "_BlockedCollective",
    sentence: str,
    confidence: float | None = None,
) -> FlightVerdict:
    named = tuple(sorted(ranks))
    return FlightVerdict(
        kind=kind,
        sentence=sentence,
        ranks=named,
        confidence=(confidence or _CONFIDENCE[kind]) if named else None,
        group=stall.group,
        operation=stall.first.operation,
        sequence=stall.first.sequence,
    )


def _find_unmatched_messages(
    records_by_rank: Mapping[int, FlightRecord],
) -> dict[int, tuple[FlightEntry, int]]:
    """Returns the oldest message that each rank waits for, with its peer, if the peer has a record
    and has not queued its side.
    """
    queued: dict[tuple[str, int, int], int] = {}  # last message by group, rank in it and peer in it
    pending: dict[tuple[int, str, int, int], FlightEntry] = {}
    for rank, record in records_by_rank.items():
        for entry in record.entries:
            if entry.is_message and entry.partner:
                own, _, other = entry.partner
                queued[entry.group, own, other] = max(
                    entry.sequence, queued.get((entry.group, own, other), 0)
                )
                if not entry.done:
                    pending.setdefault((rank, entry.group, own, other), entry)
    unmatched: dict[int, tuple[FlightEntry, int]] = {}
    for (rank, group, own, other), entry in pending.items():
        # The peer's global rank if the group lists its members.
        known = records_by_rank[rank].groups.get(group)
        peer = known.members[other] if known and other < len(known.members) else other
        if peer in records_by_rank and queued.get((group, other, own), 0) < entry.sequence:
            unmatched.setdefault(rank, (entry, peer))
    return unmatched


class _BlockedCollective(NamedTuple):
    """An unfinished collective.

    `inside` are the ranks in it; `missing` members have a record, but have not queued it (-> last
    one queued); `finished` ones have finished it, which nobody can without the others; `absent`
    ones left no record.
    """

    group: str
    title: str
    first: FlightEntry
    inside: dict[int, FlightEntry]
    missing: dict[int, int]
    members: tuple[int, ...]
    finished: tuple[int, ...]
    absent: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"`{self.first.operation}` number {self.first.sequence} of {self.title}"


def _find_inner_fault(
    stall: _BlockedCollective, records_by_rank: Mapping[int, FlightRecord]
) -> FlightVerdict | None:
    """If all members are in it: finds ranks with another operation or size under the same number,
    or whose device has not started it.
    """
    entries = {
        rank: records_by_rank[rank].at(stall.group, stall.first.sequence) for rank in stall.members
    }
    ranks_by_call: dict[str, list[int]] = {}
    for rank, entry in entries.items():
        if entry:
            sizes = f" of {entry.sizes}" if entry.sizes and entry.operation in _EQUAL_SIZES else ""
            ranks_by_call.setdefault(f"`{entry.operation}`{sizes}", []).append(rank)
    if len(ranks_by_call) > 1:
        calls = sorted(ranks_by_call, key=lambda call: len(ranks_by_call[call]))
        has_majority = len(ranks_by_call[calls[-1]]) > len(ranks_by_call[calls[-2]])
        parts = [
            f"{format_ranks(ranks)} in {call}" for call, ranks in sorted(ranks_by_call.items())
        ]
        return _judge(
            "mismatch",
            [rank for call in calls[:-1] for rank in ranks_by_call[call]] if has_majority else (),
            stall,
            f"under number {stall.first.sequence} of {stall.title} ranks do not do the same: "
            + ", ".join(parts),
        )
    # A device may be held by an earlier call of another group.
    late = [
        rank
        for rank, entry in stall.inside.items()
        if not entry.started and records_by_rank[rank].find_oldest_unfinished() is entry
    ]
    if not late or len(late) == len(stall.inside):
        return None
    return _judge(
        "device",
        late,
        stall,
        f"{_format_have(late)} queued {stall.name}, but the device has not begun it, as those of the others have",
    )


def _format_have(ranks: Collection[int]) -> str:
    return f"{format_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'}"


def _format_waits(ranks: Collection[int]) -> str:
    return f"{format_ranks(ranks)} {'waits' if len(ranks) == 1 else 'wait'}"
