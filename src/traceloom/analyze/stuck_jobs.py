"""Finds the ranks that the others of a stuck job wait for, from their flight records."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from traceloom.system.units import format_ranges
from traceloom.trace.flight_record import FlightEntry, FlightRecord

Kind = Literal["behind", "unfinished", "mismatch", "cycle", "device", "all-in", "nothing"]

# Some ranks finish these without waiting for the others.
_ROOTED = frozenset({"broadcast", "reduce", "scatter", "gather", "send", "recv"})


class FlightVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """The conclusion from the records of several ranks.

    `ranks` are those that the others wait for; `waits`: rank -> the collective that it waits in.
    """

    kind: Kind
    sentence: str
    ranks: tuple[int, ...] = ()
    waits: dict[int, str] = {}
    group: str = ""
    operation: str = ""
    sequence: int | None = None


def find_late_ranks(records: Sequence[FlightRecord]) -> FlightVerdict:
    """Finds the ranks that the others wait for.

    In the oldest unfinished collective that some rank has queued, these are the ranks that have not
    queued it, or that alone have not finished it. A rank that has not queued it but waits in another group itself is not to blame; if
    all missing ranks wait, they wait for each other.
    """
    records_by_rank = {record.rank: record for record in records}
    waits: dict[int, FlightEntry] = {}
    stalls: list[_BlockedCollective] = []
    for group in dict.fromkeys(name for record in records for name in record.groups):
        pending = {
            rank: entry
            for rank, record in records_by_rank.items()
            if (entry := record.pending(group))
        }
        if not pending:
            continue
        first = min(pending.values(), key=lambda entry: (entry.sequence, entry.created_ns))
        waiting = {
            rank: entry for rank, entry in pending.items() if entry.sequence == first.sequence
        }
        # Members among the ranks with a record: all for the default group, else those that the
        # group lists or that have used it.
        using = {rank for rank, record in records_by_rank.items() if group in record.groups}
        listed = {rank for user in using for rank in records_by_rank[user].groups[group].members}
        is_of_all = any(records_by_rank[rank].groups[group].title == "default_pg" for rank in using)
        members = tuple(
            sorted(records_by_rank if is_of_all else (listed & records_by_rank.keys()) | using)
        )
        queued = {
            rank: records_by_rank[rank].groups[group].queued
            if group in records_by_rank[rank].groups
            else 0
            for rank in members
        }
        missing = {rank: number for rank, number in queued.items() if number < first.sequence}
        title = next(
            records_by_rank[rank].groups[group].title for rank in records_by_rank if rank in using
        )
        finished = tuple(
            rank
            for rank in members
            if first.operation not in _ROOTED
            and rank not in missing
            and (rank not in pending or pending[rank].sequence > first.sequence)
        )
        stalls.append(_BlockedCollective(group, title, first, waiting, missing, members, finished))
        for rank, entry in waiting.items():
            waits.setdefault(rank, entry)
    for rank, record in records_by_rank.items():
        for entry in record.entries:
            if entry.is_message and not entry.done and entry.partner:
                waits.setdefault(rank, entry)
    names = {rank: entry.operation for rank, entry in waits.items()}
    # Independent of the order of records.
    stalls.sort(key=lambda stall: (stall.first.created_ns, stall.group))
    for stall in stalls:
        if stall.finished:
            unfinished = {rank for each in stalls if each.finished for rank in each.inside}
            return FlightVerdict(
                kind="unfinished",
                ranks=tuple(sorted(unfinished)),
                waits=names,
                group=stall.group,
                operation=stall.first.operation,
                sequence=stall.first.sequence,
                sentence=f"{_format_ranks(stall.inside)} {'has' if len(stall.inside) == 1 else 'have'} not finished {stall.name}, "
                f"which {_format_ranks(stall.finished)} {'has' if len(stall.finished) == 1 else 'have'} finished",
            )
        late_ranks = sorted(rank for rank in stall.missing if rank not in waits)
        if late_ranks:
            last = {stall.missing[rank] for rank in late_ranks}
            before = (
                f"; {'its' if len(late_ranks) == 1 else 'their'} last was number {last.pop()}"
                if len(last) == 1
                else ""
            )
            return FlightVerdict(
                kind="behind",
                ranks=tuple(late_ranks),
                waits=names,
                group=stall.group,
                operation=stall.first.operation,
                sequence=stall.first.sequence,
                sentence=f"{_format_ranks(late_ranks)} {'has' if len(late_ranks) == 1 else 'have'} not queued {stall.name}, in which "
                f"{_format_ranks(stall.inside)} {'waits' if len(stall.inside) == 1 else 'wait'}{before}",
            )
    messages = _find_unmatched_messages(records_by_rank)
    silent_ranks = sorted({peer for _, peer in messages.values()} - waits.keys())
    if silent_ranks:
        first_rank = min(
            (rank for rank, (_, peer) in messages.items() if peer in silent_ranks),
            key=lambda rank: (messages[rank][0].created_ns, rank),
        )
        message, peer = messages[first_rank]
        return FlightVerdict(
            kind="behind",
            ranks=tuple(silent_ranks),
            waits=names,
            group=message.group,
            operation=message.operation,
            sequence=message.sequence,
            sentence=f"rank {peer} has not queued its side of `{message.operation}` number {message.sequence}, in which rank {first_rank} waits",
        )
    if not stalls:
        text = "; ".join(f"rank {rank} waits in `{name}`" for rank, name in sorted(names.items()))
        return FlightVerdict(
            kind="nothing",
            sentence=text or "no rank waits in a collective that is recorded",
            waits=names,
        )
    for stall in stalls:
        if not stall.missing and (verdict := _find_inner_fault(stall, records_by_rank, names)):
            return verdict
    stuck = [stall for stall in stalls if stall.missing]
    if stuck:
        parts = [f"{_format_ranks(stall.inside)} in {stall.name}" for stall in stuck]
        involved_ranks = sorted(
            {rank for stall in stuck for rank in (*stall.inside, *stall.missing)}
        )
        text = f"{_format_ranks(involved_ranks)} wait for each other: {'; '.join(parts)}"
        return FlightVerdict(kind="cycle", sentence=text, ranks=tuple(involved_ranks), waits=names)
    stall = stalls[0]
    has = "has" if len(stall.members) == 1 else "have"
    return FlightVerdict(
        kind="all-in",
        waits=names,
        group=stall.group,
        operation=stall.first.operation,
        sequence=stall.first.sequence,
        sentence=f"{_format_ranks(stall.members)} {has} queued {stall.name}, and it does not end",
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
    """An unfinished collective: the ranks in it, its members with a record that have not queued it
    (-> last one queued), and those that have finished it, which nobody can without the others.
    """

    group: str
    title: str
    first: FlightEntry
    inside: dict[int, FlightEntry]
    missing: dict[int, int]
    members: tuple[int, ...]
    finished: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"`{self.first.operation}` number {self.first.sequence} of {self.title}"


def _find_inner_fault(
    stall: _BlockedCollective, records_by_rank: Mapping[int, FlightRecord], waits: dict[int, str]
) -> FlightVerdict | None:
    """If all members are in it: finds ranks with another operation under the same number, or whose
    device has not started it.
    """
    entries = {
        rank: records_by_rank[rank].at(stall.group, stall.first.sequence) for rank in stall.members
    }
    operations = Counter(entry.operation for entry in entries.values() if entry)
    if len(operations) > 1:
        ranks_by_operation = {
            name: [rank for rank, entry in entries.items() if entry and entry.operation == name]
            for name in operations
        }
        parts = [
            f"{_format_ranks(ranks)} in `{name}`"
            for name, ranks in sorted(ranks_by_operation.items())
        ]
        (common_operation, number), (_, second) = operations.most_common(2)
        differing_ranks = (
            [
                rank
                for rank, entry in entries.items()
                if entry and entry.operation != common_operation
            ]
            if number > second
            else []
        )
        return FlightVerdict(
            kind="mismatch",
            ranks=tuple(differing_ranks),
            waits=waits,
            group=stall.group,
            sequence=stall.first.sequence,
            sentence=f"under number {stall.first.sequence} of {stall.title} ranks do not do the same: "
            + ", ".join(parts),
        )
    late = [rank for rank, entry in stall.inside.items() if not entry.started]
    if not late or len(late) == len(stall.inside):
        return None
    text = f"{_format_ranks(late)} {'has' if len(late) == 1 else 'have'} queued {stall.name}, but the device "
    return FlightVerdict(
        kind="device",
        ranks=tuple(late),
        waits=waits,
        group=stall.group,
        operation=stall.first.operation,
        sequence=stall.first.sequence,
        sentence=text + "has not begun it, as those of the others have",
    )


def _format_ranks(ranks: Iterable[int]) -> str:
    listed = sorted(ranks)
    return f"rank{'' if len(listed) == 1 else 's'} {format_ranges(listed)}"
