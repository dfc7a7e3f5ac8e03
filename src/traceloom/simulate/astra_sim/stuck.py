"""Why a run cannot go on: who waits for whom."""

from __future__ import annotations

import numpy as np

from traceloom.errors import CheckError, UsageError
from traceloom.simulate.astra_sim.engine import AstraEngine, RunningRank
from traceloom.simulate.astra_sim.nodes import COLLECTIVE, RECEIVE, SEND, SKIP

_MOST = 6


def check_begun(engine: AstraEngine, delay_ns: int) -> None:
    """Raise UsageError `not-for-astra-sim` where an event is asked for at time 0, which ASTRA-sim cannot have.

    Args:
        engine: After its run.
        delay_ns: Of an endpoint: before the first message of a collective of all ranks.
    """
    for rank in engine.ranks:
        own = rank.nodes
        for node in np.flatnonzero(np.frombuffer(rank.begin_ns, np.int64) == 0).tolist():
            action, message = own.action[node], own.messages.get(node)
            at_once = rank.end_ns[node] == 0 and action != SKIP
            if message and action == COLLECTIVE:
                at_once = not delay_ns and len(engine.group_of(message)[1]) == len(engine.ranks)
            elif message and action == SEND and engine.links:
                at_once |= not engine.links.occupied_ns(message.size)
            if at_once:
                raise UsageError(
                    f"{own.label(node)} of rank {own.rank} asks for what takes no time at the very beginning, where "
                    "ASTRA-sim stops",
                    slug="not-for-astra-sim",
                    hint="let it wait for a node of 1 us, or set endpoint-delay above 0",
                )


def check_ended(engine: AstraEngine) -> None:
    """Raise CheckError `deadlock` where a rank did not come to its end.

    ASTRA-sim ends without a word there, and with exit code 0.
    """
    open_ranks = {rank.nodes.rank: rank for rank in engine.ranks if rank.ended < len(rank.nodes)}
    if not open_ranks:
        return
    sentences: list[str] = []
    seen: set[int] = set()
    own = min(open_ranks)
    while own in open_ranks and own not in seen and len(sentences) < _MOST:
        seen.add(own)
        sentence, awaited = _waits(engine, open_ranks[own])
        sentences.append(f"rank {own}: {sentence}")
        own = awaited
    if own in seen and len(sentences) > 1:
        sentences.append(f"and so to rank {own} again")
    count = len(open_ranks)
    raise CheckError(
        f"{count} of {len(engine.ranks)} ranks wait for ever: {'; '.join(sentences)}",
        slug="deadlock",
        hint="`traceloom validate --target astra-sim` shows what the files disagree about",
    )


def _waits(engine: AstraEngine, rank: RunningRank) -> tuple[str, int]:
    """What a rank waits in, and for which rank; -1 for none."""
    own_rank = rank.nodes.rank
    under_way = [node for node in range(len(rank.nodes)) if rank.begin_ns[node] >= 0 > rank.end_ns[node]]
    for node in sorted(under_way, key=lambda node: rank.nodes.action[node] != COLLECTIVE):  # others wait for these
        label, action = rank.nodes.label(node), rank.nodes.action[node]
        if action == COLLECTIVE:
            meeting = next(m for m in engine.meetings.values() if (own_rank, node) in zip(m.group, m.node, strict=True))
            absent = [peer for peer, begin in zip(meeting.group, meeting.begin_ns, strict=True) if begin < 0]
            if absent:
                return f"{label} waits for rank {absent[0]}, which does not come to it", absent[0]
            for peer, other in zip(meeting.group, meeting.node, strict=True):
                peer_nodes = engine.ranks[peer].nodes
                ours, message = rank.nodes.messages[node], peer_nodes.messages[other]
                if (message.kind, message.size) != (ours.kind, ours.size):
                    here, there = (f"{m.kind} of {m.size:,} bytes" for m in (ours, message))
                    return f"{label} is {here}, where rank {peer} does {there} in its {peer_nodes.label(other)}", peer
            own = meeting.counts[meeting.group.index(own_rank)]
            for peer, count in zip(meeting.group, meeting.counts, strict=True):
                if not meeting.name and count != own:
                    return (
                        f"{label} comes after {own} chunks of collectives, in rank {peer} after {count}, and "
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
        return f"{rank.nodes.label(waiting)} is never begun: it is ready when the last other node has ended", -1
    return f"{rank.nodes.label(waiting)} waits in a circle with other nodes of its file", -1
