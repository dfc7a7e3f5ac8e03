"""The event loop that runs the nodes of all ranks, with a report of deadlocks."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from typing import Any

import numpy as np

from traceloom.errors import CheckError, UsageError
from traceloom.trace.array_types import Ints
from traceloom.workload.simulate.astra_sim.collectives import (
    AnalyticalNetwork,
    Clock,
    CollectivePhase,
    Dimensions,
    Links,
    LostOrderError,
    OrderedLinks,
    make_too_long_error,
)
from traceloom.workload.simulate.astra_sim.nodes import (
    COLLECTIVE,
    NOTHING,
    RECEIVE,
    SEND,
    SKIP,
    TIMED,
    Carried,
    Message,
    RankNodes,
    find_group_ranks,
    find_position,
)
from traceloom.workload.simulate.astra_sim.streams import (
    CollectiveStream,
    Mailbox,
    RankQueues,
    Transmit,
    compute_phase_ends,
    depends_on_all,
    is_permuting,
    is_rotation,
    simulate_synchronous,
)

Algorithm = Callable[[int], Sequence[RankNodes]]  # ranks of the group -> nodes of each position


@dataclass(eq=False, slots=True)
class Meeting:
    """One collective.

    Attributes:
        name: Name of its group, empty for all ranks.
        turn: Number of earlier collectives of the group.
        group: Its ranks, in the group's order.
        kind: all_reduce, ...
        size: Bytes.
        chunks: The phases of each chunk; empty if an algorithm or the recorded duration is used.
        count: Number of chunks of collectives that its first rank had before it.
        counts: The same for each rank.
        begin_ns: Start at each rank, -1 before it; shape (ranks of the group,).
        node: The node of each rank.
        end_ns: End at each rank, -1 before it.
        came: Number of ranks that have arrived with a matching collective.
        order: Its positions in the order in which they began, if it runs message by message.
    """

    name: str
    turn: int
    group: tuple[int, ...]
    kind: str
    size: int
    chunks: list[list[CollectivePhase]]
    count: int
    counts: list[int]
    begin_ns: list[int]
    node: list[int]
    end_ns: list[int]
    came: int = 0
    order: list[int] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class RunningRank:
    """The state of one rank.

    Attributes:
        nodes: Its nodes.
        queues: Its collectives, and its events.
        left: Number of unfinished dependencies of each node.
        ready: Ready nodes by slot.
        busy: Running node by slot, -1 for none; the slot `NOTHING` is never occupied.
        begin_ns: Start of each node, -1 before it.
        end_ns: End of each node, -1 before it.
        under_way: Number of running nodes.
        ended: Number of ended nodes.
        last_ns: End of the last node to end; None before.
        issued: Collectives of each group so far.
        count: Chunks of collectives so far.
        end: Callback that ends a node.
    """

    nodes: RankNodes
    queues: RankQueues
    left: list[int]
    ready: tuple[list[int], list[int], list[int], list[int]]
    busy: list[int]
    begin_ns: array[int]
    end_ns: array[int]
    under_way: int = 0
    ended: int = 0
    last_ns: int | None = None
    issued: dict[str, int] = field(default_factory=dict)
    count: int = 0
    end: Callable[[int], None] = field(init=False)


class AstraEngine:
    """All ranks, their messages and their collectives.

    Args:
        ranks: The nodes of every rank, in order.
        groups: Members of each named group.
        fabric: The network.
        dimensions: Algorithms of collectives.
        aware: Whether links are queues.
        memory_rate: Bytes per second at which a rank reads or writes.
        width: Max chunks in flight per dimension.
        algorithms: Messages of the collectives of a kind, instead of those of the dimensions.
        whole: Whether a collective is computed as a whole if none of its messages contend, rather
            than message by message, which takes longer.
        recorded: Whether communication takes its recorded duration once all its ranks have arrived,
            whatever the network.
    """

    def __init__(
        self,
        ranks: Sequence[RankNodes],
        groups: dict[str, tuple[int, ...]] | None,
        fabric: AnalyticalNetwork,
        dimensions: Dimensions,
        *,
        aware: bool,
        memory_rate: float,
        width: int = 1,
        algorithms: Mapping[str, Algorithm] | None = None,
        whole: bool = True,
        recorded: bool = False,
    ) -> None:
        self._nodes, self._aware, self.fabric, self._dimensions = ranks, aware, fabric, dimensions
        self._groups, self._algorithms = groups, algorithms or {}
        self._can_reduce, self._memory_rate = memory_rate > 0, memory_rate or math.inf
        self._width, self._recorded = width, recorded
        self._rotates = whole and width == 1 and not dimensions.windows
        self._everybody = tuple(range(len(ranks)))
        self._prepare(whole=self._rotates and len(fabric.sizes) == 1)

    def _prepare(self, *, whole: bool) -> None:
        """Sets everything to the beginning.

        Args:
            whole: Whether a collective is computed as a whole.
        """
        self.clock = Clock()
        self._whole = whole
        self._ordered = OrderedLinks(self.fabric) if self._aware and whole else None
        queued = Links(self.fabric, self.clock) if self._aware and not whole else None
        self._queued = queued
        self.links = self._ordered or queued
        self._mailbox = Mailbox(self.clock, queued.send if queued else self._transmit)
        self.meetings: dict[tuple[str, int], Meeting] = {}
        self._trees: Counter[tuple[str, int]] = Counter()
        self._apart_in_time = not self._aware or whole  # ranks may run in any order at one time
        self._took: dict[Any, Ints] = {}
        self.ranks: list[RunningRank] = []
        never = array("q", [-1])
        for nodes in self._nodes:
            rank = RunningRank(
                nodes,
                RankQueues(nodes.rank, self.clock, self._width),
                list(nodes.waits),
                ([], [], [], []),
                [-1] * (NOTHING + 1),
                never * len(nodes),
                never * len(nodes),
            )
            rank.end = partial(self._end, rank)
            for node, waits in enumerate(rank.left):
                if not waits:
                    rank.ready[nodes.slot[node]].append(node)
            self.ranks.append(rank)

    def run(self) -> None:
        """Runs to the end, or until no rank can proceed.

        Raises:
            UsageError: slug `times-too-long`.
        """
        try:
            try:
                self._run()
            except LostOrderError:
                self._prepare(whole=False)
                self._run()
        except OverflowError as error:  # of an infinite time
            raise make_too_long_error() from error

    def _run(self) -> None:
        for rank in self.ranks:
            self._issue(rank)
        self.clock.run()

    def _issue(self, rank: RunningRank) -> None:
        """Starts ready nodes whose slot is free, in the order of ids."""
        action, busy = rank.nodes.action, rank.busy
        selected: list[int] = []
        for slot, ready in enumerate(rank.ready):
            if ready and busy[slot] < 0:
                node = heappop(ready)
                selected.append(node)
                while action[node] == SKIP and ready:
                    node = heappop(ready)
                    selected.append(node)
                while slot == NOTHING and ready:
                    selected.append(heappop(ready))
        if len(selected) > 1:
            selected.sort()
        now = self.clock.now
        for node in selected:
            rank.begin_ns[node] = now
            rank.under_way += 1
            slot, kind = rank.nodes.slot[node], action[node]
            if slot != NOTHING:
                busy[slot] = node
            if kind == TIMED:
                if (
                    self._apart_in_time
                    and len(selected) == rank.under_way == 1
                    and not any(rank.ready)
                ):
                    self._follow(rank, node)
                else:
                    rank.queues.after(rank.nodes.duration_ns[node], rank.end, node)
            elif kind == SKIP:
                self._leave(rank, node)
            elif kind == COLLECTIVE:
                self._collective(rank, node)
            else:
                message, own_rank, ended = (
                    rank.nodes.messages[node],
                    rank.nodes.rank,
                    partial(self._end, rank, node),
                )
                if kind == RECEIVE:
                    self._mailbox.receive(
                        (message.tag, message.peer, own_rank, message.size), ended
                    )
                else:
                    key = (message.tag, own_rank, message.peer, message.size)
                    took = rank.nodes.duration_ns[node] if self._recorded else None
                    self._mailbox.send(key, own_rank, message.peer, message.size, ended, took)

    def _follow(self, rank: RunningRank, node: int) -> None:
        """Runs a timed node and the chain of nodes after it at once, if the rank has nothing else
        to do.

        Nothing can come between them, so only the end of the chain is an event.
        """
        nodes, remaining = rank.nodes, rank.left
        first, follower, action, duration = (
            nodes.first,
            nodes.follower,
            nodes.action,
            nodes.duration_ns,
        )
        first_node, time = node, self.clock.now
        while first[node + 1] - first[node] == 1:
            after = follower[first[node]]
            if remaining[after] != 1 or action[after] != TIMED:
                break
            time += duration[node]
            rank.end_ns[node] = rank.begin_ns[after] = time
            remaining[after] = 0
            rank.ended += 1
            node = after
        if nodes.slot[node] != nodes.slot[first_node]:
            rank.busy[nodes.slot[first_node]] = -1
            rank.busy[nodes.slot[node]] = node if nodes.slot[node] != NOTHING else -1
        rank.queues.after(time - self.clock.now + duration[node], rank.end, node)

    def _leave(self, rank: RunningRank, node: int) -> None:
        """Ends a node, which may make its successors ready."""
        nodes = rank.nodes
        rank.end_ns[node] = self.clock.now
        slot = nodes.slot[node]
        if slot != NOTHING:
            rank.busy[slot] = -1
        rank.under_way -= 1
        rank.ended += 1
        remaining, follower = rank.left, nodes.follower
        for k in range(nodes.first[node], nodes.first[node + 1]):
            after = follower[k]
            remaining[after] -= 1
            if not remaining[after]:
                heappush(rank.ready[nodes.slot[after]], after)

    def _end(self, rank: RunningRank, node: int) -> None:
        self._leave(rank, node)
        self._issue(rank)
        if not rank.under_way and not any(rank.ready):
            rank.last_ns = self.clock.now

    # Messages

    def _transmit(
        self, source: int, target: int, size: int, arrive: Callable[[Any], None], payload: Any
    ) -> None:
        if self._ordered is not None:
            ends = (np.array([k]) for k in (source, target, size, self.clock.now))
            self.clock.at(int(self._ordered.send(*ends)[0]), arrive, payload)
        else:
            self.clock.at(self.clock.now + self.fabric.delay(source, target, size), arrive, payload)

    # Collectives

    def _collective(self, rank: RunningRank, node: int) -> None:
        message = rank.nodes.messages[node]
        label, group = self.group_of(message)
        issue_index = rank.issued.get(label, 0)
        rank.issued[label] = issue_index + 1
        meeting = self.meetings.get((label, issue_index))
        position = find_position(group, rank.nodes, node)
        algorithm = self._algorithms.get(message.kind)
        if meeting is None:
            counts, begin_ns, nodes, end = ([-1] * len(group) for _ in range(4))
            chunks = (
                []
                if algorithm or self._recorded
                else self._chunks(message, len(group), all_ranks=not label)
            )
            meeting = Meeting(
                label,
                issue_index,
                group,
                message.kind,
                message.size,
                chunks,
                rank.count,
                counts,
                begin_ns,
                nodes,
                end,
            )
            self.meetings[label, issue_index] = meeting
        meeting.begin_ns[position], meeting.node[position] = self.clock.now, node
        meeting.counts[position] = rank.count
        if message.kind != meeting.kind:
            return  # never matches, as below
        chunks_of = (
            self._dimensions.chunks
        )  # different sizes may yield the same chunks; an algorithm has its own
        if message.size != meeting.size and (
            self._recorded
            or not (
                algorithm
                or chunks_of(message.kind, message.size) == chunks_of(message.kind, meeting.size)
            )
        ):
            return  # the ranks never match, so the run ends in a reported deadlock
        matches_by_count = not label and not algorithm and not self._recorded
        if matches_by_count and rank.count != meeting.count:
            return  # as above: ASTRA-sim matches chunks of all-rank collectives by this count
        meeting.came += 1
        if self._recorded:
            if meeting.came == len(group):
                took = (
                    self.ranks[r].nodes.duration_ns[n]
                    for r, n in zip(group, meeting.node, strict=True)
                )
                self._end_at(meeting, np.full(len(group), self.clock.now + max(took)))
            return
        rank.count += len(meeting.chunks) or 1
        if algorithm:
            # A rank's own position is its index among the sorted ranks, its peers' positions are in
            # the group's order.
            Carried(
                algorithm(len(group))[sorted(meeting.group).index(rank.nodes.rank)],
                find_group_ranks(message.group, self._groups, len(self.ranks)) or self._everybody,
                queues=rank.queues,
                mailbox=self._mailbox,
                done=lambda: self._done(rank, meeting, position),
            )
        elif self._whole and self._is_whole(meeting):
            if meeting.came == len(group):
                self._meet(meeting)
        else:
            self._begin_chunks(rank, meeting, position)
            meeting.order.append(position)
            if meeting.came == len(self.ranks):
                self._rotate(meeting)

    def _is_whole(self, meeting: Meeting) -> bool:
        """Returns whether a collective can be computed once all its ranks have come.

        Raises:
            LostOrderError: Several of its messages may ask for a link at once.
        """
        schedule = meeting.chunks[0][0].schedule
        alone = self._ordered is None or self.fabric.topologies[0] == "FullyConnected"
        whole = depends_on_all(schedule)
        if self._ordered is not None and not (whole and (alone or is_permuting(schedule))):
            raise LostOrderError
        return whole

    def group_of(self, message: Message) -> tuple[str, tuple[int, ...]]:
        """Returns the name of a collective's group, empty for all ranks, and its ranks, whose order
        matters for some ranks.
        """
        members = find_group_ranks(message.group, self._groups, len(self.ranks))
        if members is None:
            return "", self._everybody
        return str(message.group), members if len(members) < len(self.ranks) else self._everybody

    def _done(self, rank: RunningRank, meeting: Meeting, position: int) -> None:
        meeting.end_ns[position] = self.clock.now
        self._end(rank, meeting.node[position])

    def _chunks(
        self, message: Message, ranks: int, *, all_ranks: bool
    ) -> list[list[CollectivePhase]]:
        """Returns the phases of each chunk of a collective; that of a group cannot select
        dimensions.
        """
        count, chunk = self._dimensions.chunks(message.kind, message.size)
        along = message.dimensions if all_ranks else None
        chunks = [
            self._dimensions.phases(message.kind, chunk, ranks, self._trees, along)
            for _ in range(count)
        ]
        if not self._can_reduce and any(
            any(phase.reduced) or any(part.reduced.any() for part in phase.schedule.rounds)
            for phases in chunks[:1]
            for phase in phases
        ):
            raise UsageError(
                "the system file has no `local-mem-bw`, at which collectives reduce",
                slug="bad-astra-sim-config",
            )
        return chunks

    def _begin_chunks(self, rank: RunningRank, meeting: Meeting, position: int) -> None:
        remaining = [len(meeting.chunks)]

        def done() -> None:
            remaining[0] -= 1
            if not remaining[0]:
                self._done(rank, meeting, position)

        for number, phases in enumerate(meeting.chunks):
            tag = (meeting.name, meeting.turn, number)
            stream = CollectiveStream(
                rank.queues,
                self._mailbox,
                tag,
                meeting.group,
                phases,
                memory_rate=self._memory_rate,
                done=done,
            )
            stream.proceed()

    def _rotate(self, meeting: Meeting) -> None:
        """Computes a collective from one rank, and takes its messages back, if that stands for all:
        they have just begun, one after the other, and no message is in flight.
        """
        first, order = meeting.order[0], range(len(self.ranks))
        phase = meeting.chunks[0][0]
        if (
            self._queued is None
            or not self._rotates
            or set(meeting.begin_ns) != {self.clock.now}
            or meeting.order != [*order[first:], *order[:first]]
            or self._queued.in_flight
            or min(phase.delay_ns, self.fabric.latencies[0]) < 1
            or not is_rotation(phase.schedule)
        ):
            return
        for rank in self.ranks:
            rank.queues.drop((meeting.name, meeting.turn))
        took, turned, usage = simulate_synchronous(self.fabric, meeting.chunks, self._memory_rate)
        self._queued.add(usage)
        ends = np.full(len(self.ranks), self.clock.now + took)
        self._end_at(meeting, ends, (first + turned) % len(self.ranks))

    def _meet(self, meeting: Meeting) -> None:
        """Computes all chunks of a collective whose ranks have all started, one after the other."""
        begin_ns = np.array(meeting.begin_ns)
        first = int(begin_ns.min())
        phases = [phase for (phase,) in meeting.chunks]
        if self._ordered is not None:
            end = self._chunk_after_chunk(phases, meeting.group, begin_ns, self._ordered.send)
        else:
            key = (
                meeting.group,
                tuple((p.schedule, p.delay_ns) for p in phases),
                (begin_ns - first).tobytes(),
            )
            took = self._took.get(key)
            if took is None:
                took = self._chunk_after_chunk(
                    phases,
                    meeting.group,
                    begin_ns - first,
                    lambda source, target, size, sent_ns: (
                        sent_ns + self.fabric.delays(source, target, size)
                    ),
                )
                self._took[key] = took
            end = took + first
        self._end_at(meeting, end)

    def _chunk_after_chunk(
        self,
        phases: Sequence[CollectivePhase],
        group: tuple[int, ...],
        begin_ns: Ints,
        transmit: Transmit,
    ) -> Ints:
        """Returns the ends of the ranks of a collective that started at different times."""
        end, members = begin_ns, np.array(group)
        for phase in phases:
            end = compute_phase_ends(phase, members, end, self._memory_rate, transmit)
        return end

    def _end_at(self, meeting: Meeting, end_ns: Ints, first: int = 0) -> None:
        """Ends a collective at the times of its positions, those from `first` on before the others."""
        meeting.end_ns = end_ns.tolist()
        now = self.clock.now
        parts = list(zip(meeting.group, meeting.node, meeting.end_ns, strict=True))
        for rank, node, end in parts[first:] + parts[:first]:
            self.ranks[rank].queues.after(end - now, self.ranks[rank].end, node)


_MAX_SENTENCES = 6


def check_begun(engine: AstraEngine, delay_ns: int) -> None:
    """Raise UsageError `not-for-astra-sim` if an event is due at time 0, which ASTRA-sim cannot
    handle.

    Args:
        engine: After its run.
        delay_ns: Delay of an endpoint before the first message of a collective of all ranks.
    """
    for rank in engine.ranks:
        rank_nodes = rank.nodes
        for node in np.flatnonzero(np.frombuffer(rank.begin_ns, np.int64) == 0).tolist():
            action, message = rank_nodes.action[node], rank_nodes.messages.get(node)
            is_at_zero = rank.end_ns[node] == 0 and action != SKIP
            if message and action == COLLECTIVE:
                is_at_zero = not delay_ns and len(engine.group_of(message)[1]) == len(engine.ranks)
            elif message and action == SEND and engine.links:
                is_at_zero |= message.size < engine.fabric.bytes_per_ns(0)
            if is_at_zero:
                raise UsageError(
                    f"{rank_nodes.label(node)} of rank {rank_nodes.rank} asks for what takes no time at the very beginning, where "
                    "ASTRA-sim stops",
                    slug="not-for-astra-sim",
                    hint="let it wait for a node of 1 us, or set endpoint-delay above 0",
                )


def check_ended(engine: AstraEngine) -> None:
    """Raise CheckError `deadlock` if a rank did not finish.

    ASTRA-sim ends silently in that case, with exit code 0.
    """
    open_ranks = {rank.nodes.rank: rank for rank in engine.ranks if rank.ended < len(rank.nodes)}
    if not open_ranks:
        return
    sentences: list[str] = []
    visited: set[int] = set()
    current_rank = min(open_ranks)
    while (
        current_rank in open_ranks
        and current_rank not in visited
        and len(sentences) < _MAX_SENTENCES
    ):
        visited.add(current_rank)
        description, awaited = _describe_wait(engine, open_ranks[current_rank])
        sentences.append(f"rank {current_rank}: {description}")
        current_rank = awaited
    if current_rank in visited and len(sentences) > 1:
        sentences.append(f"and so to rank {current_rank} again")
    count = len(open_ranks)
    raise CheckError(
        f"{count} of {len(engine.ranks)} ranks wait for ever: {'; '.join(sentences)}",
        slug="deadlock",
        hint="`traceloom validate --target astra-sim` shows what the files disagree about",
    )


def _describe_wait(engine: AstraEngine, rank: RunningRank) -> tuple[str, int]:
    """Returns the operation that a rank waits in, and the rank it waits for; -1 for none."""
    own_rank = rank.nodes.rank
    under_way = [
        node for node in range(len(rank.nodes)) if rank.begin_ns[node] >= 0 > rank.end_ns[node]
    ]
    for node in sorted(
        under_way, key=lambda node: rank.nodes.action[node] != COLLECTIVE
    ):  # other ranks wait for these
        label, action = rank.nodes.label(node), rank.nodes.action[node]
        if action == COLLECTIVE:
            meeting = next(
                m
                for m in engine.meetings.values()
                if (own_rank, node) in zip(m.group, m.node, strict=True)
            )
            absent = [
                peer
                for peer, begin_ns in zip(meeting.group, meeting.begin_ns, strict=True)
                if begin_ns < 0
            ]
            if absent:
                return f"{label} waits for rank {absent[0]}, which does not come to it", absent[0]
            for peer, other in zip(meeting.group, meeting.node, strict=True):
                peer_nodes = engine.ranks[peer].nodes
                own_message, message = rank.nodes.messages[node], peer_nodes.messages[other]
                if (message.kind, message.size) != (own_message.kind, own_message.size):
                    own_text, peer_text = (
                        f"{m.kind} of {m.size:,} bytes" for m in (own_message, message)
                    )
                    return (
                        f"{label} is {own_text}, where rank {peer} does {peer_text} in its {peer_nodes.label(other)}",
                        peer,
                    )
            own_count = meeting.counts[meeting.group.index(own_rank)]
            for peer, count in zip(meeting.group, meeting.counts, strict=True):
                if not meeting.name and count != own_count:
                    return (
                        f"{label} comes after {own_count} chunks of collectives, in rank {peer} after {count}, and "
                        "ASTRA-sim tells those of all ranks apart by that: give it a group of all ranks of its own"
                    ), peer
            return f"{label} waits for messages that do not come", -1
        if action == RECEIVE:
            message = rank.nodes.messages[node]
            return (
                f"{label} waits for {message.size:,} bytes with tag {message.tag} from rank {message.peer}",
                message.peer,
            )
    waiting = next(node for node in range(len(rank.nodes)) if rank.begin_ns[node] < 0)
    if not rank.left[waiting]:
        return (
            f"{rank.nodes.label(waiting)} is never begun: it is ready when the last other node has ended",
            -1,
        )
    return f"{rank.nodes.label(waiting)} waits in a circle with other nodes of its file", -1
