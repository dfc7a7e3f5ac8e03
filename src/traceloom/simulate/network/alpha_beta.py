"""When the ranks of a collective end, where nothing but the collective itself uses its links (α-β model).

A message takes α, the latencies of its links, and β, its bytes at the bandwidth of the narrowest of them. Messages of
one round that share a link share its bandwidth; a link serves the rounds in their order.
"""

from __future__ import annotations

import numpy as np

from traceloom.array_types import Floats, Ints
from traceloom.schedules import Round, Schedule
from traceloom.simulate.network.topology import MachineNetwork, Routes
from traceloom.simulate.network.use import LinkUse


def finish_times(
    schedule: Schedule,
    network: MachineNetwork,
    members: Ints,
    ready_ns: Floats,
    *,
    reduction_ns_per_byte: Floats | float = 0.0,
    use: LinkUse | None = None,
) -> Floats:
    """When each rank has received, reduced and sent all its messages, ns.

    Args:
        schedule: The messages.
        network: Of the machine.
        members: The rank at each place of the group, shape (places,).
        ready_ns: When each place is ready, shape (places,).
        reduction_ns_per_byte: What a place takes to reduce a byte that arrived; one value, or one per place.
        use: Where the bytes and the busy time of links are added up.
    """
    members = np.asarray(members, dtype=np.int64)
    now = np.array(ready_ns, dtype=np.float64)
    sent = now.copy()
    reduction = np.broadcast_to(np.asarray(reduction_ns_per_byte, dtype=np.float64), now.shape)
    free = np.full(network.bandwidth.size, -np.inf)
    rounds: dict[int, _RoundOnLinks] = {}  # equal rounds are one object
    for part in schedule.rounds:
        if id(part) not in rounds:
            rounds[id(part)] = _RoundOnLinks(part, network, members)
        on_links = rounds[id(part)]
        start = now[part.source]
        sent_at = on_links.serve(start, free, use)
        np.maximum.at(sent, part.source, sent_at)
        arrived = now.copy()
        np.maximum.at(arrived, part.target, sent_at + on_links.latency)
        if on_links.reduces:
            arrived += np.bincount(part.target, part.reduced, now.size) * reduction
        now = arrived
    return np.maximum(now, sent)


class _RoundOnLinks:
    """The messages of a round on the links of a network."""

    def __init__(self, part: Round, network: MachineNetwork, members: Ints) -> None:
        self.bytes = part.bytes.astype(np.float64)
        self.reduces = bool(part.reduced.any())
        self.routes: Routes = network.routes(members[part.source], members[part.target])
        self.message = self.routes.message
        links = self.routes.links
        self.own_ns = self.bytes[self.message] / network.bandwidth[links]
        self.latency = self.routes.over(np.add, network.latency[links], 0.0)
        self.alone_ns = self.routes.over(np.maximum, self.own_ns, 0.0)
        self.shared = links.size > 0 and int(np.bincount(links).max()) > 1

    def serve(self, start: Floats, free: Floats, use: LinkUse | None) -> Floats:
        """When the last byte of each message has left its narrowest link; `free` becomes when links are free again."""
        links = self.routes.links
        begin = np.maximum(start[self.message], free[links])
        end = self.shared_ends(begin) if self.shared else begin + self.own_ns
        np.maximum.at(free, links, end)
        sent = np.maximum(self.routes.over(np.maximum, end, -np.inf), start)
        if use is not None:
            np.add.at(use.bytes, links, self.bytes[self.message])
            np.add.at(use.busy_ns, links, self.own_ns)
            waiting = np.maximum(sent - start - self.alone_ns, 0.0)
            slowest = np.flatnonzero(end == sent[self.message])
            message, first = np.unique(self.message[slowest], return_index=True)
            np.add.at(use.waiting_ns, links[slowest[first]], waiting[message])
        return sent

    def shared_ends(self, begin: Floats) -> Floats:
        """When each message has left each link, where several share one.

        Messages that overlap in time on a link share it, so all of them end when the link has served the last of them.
        """
        links = self.routes.links
        earliest = np.full(links.max() + 1, np.inf)
        np.minimum.at(earliest, links, begin)
        if (begin == earliest[links]).all():  # all at once: no need to sort
            return begin + np.bincount(links, self.own_ns)[links]
        order = np.lexsort((begin, links))
        link, begin, own = links[order], begin[order], self.own_ns[order]
        first = np.ones(link.size, dtype=np.bool_)
        first[1:] = link[1:] != link[:-1]
        segment = np.cumsum(first) - 1
        work = np.cumsum(own)
        before = work - own
        # One after the other: the end of entry i is the latest, over all entries before, of its begin + the work since.
        end = _running_max(begin - before, segment) + work
        alone = first.copy()
        alone[1:] |= begin[1:] >= end[:-1]
        period = np.cumsum(alone) - 1
        ends = np.empty(link.size)
        ends[order] = np.maximum.reduceat(end, np.flatnonzero(alone))[period]
        return ends


def _running_max(values: Floats, segment: Ints) -> Floats:
    """The largest value so far in each segment; segments are adjacent."""
    result = values.copy()
    step = 1
    while step < result.size:
        same = segment[step:] == segment[:-step]
        if not same.any():
            break
        result[step:] = np.where(same, np.maximum(result[step:], result[:-step]), result[step:])
        step *= 2
    return result
