"""Collectives whose messages a set of `.et` files gives: one file per position of the group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from traceloom.chakra.node_table import read_table
from traceloom.errors import InputError, UsageError
from traceloom.simulate.astra_sim.nodes import RECEIVE, SEND, TIMED, Compute, RankNodes, rank_nodes
from traceloom.simulate.astra_sim.streams import Mailbox, RankQueues


def read_algorithm(prefix: str, ranks: int) -> list[RankNodes]:
    """Read the files `PREFIX.<position>.et` of an algorithm: what each position of a group does.

    The peers of its messages are positions.

    Args:
        prefix: Directory and beginning of the names.
        ranks: How many there must be.

    Raises:
        InputError: `bad-algorithm`: one is missing, or holds other things than sends, receives and computation.
    """
    positions = []
    for position in range(ranks):
        path = Path(f"{prefix}.{position}.et")
        if not path.is_file():
            raise InputError(
                f"the algorithm has no file for position {position}",
                slug="bad-algorithm",
                where=str(path),
                hint=f"a group of {ranks} ranks needs {Path(prefix).name}.0.et to {Path(prefix).name}.{ranks - 1}.et",
            )
        nodes = rank_nodes(position, read_table(path), Compute())
        for node, action in enumerate(nodes.action):
            if action not in {TIMED, SEND, RECEIVE}:
                raise InputError(
                    f"{nodes.label(node)} is no send, no receive and no computation",
                    slug="bad-algorithm",
                    where=str(path),
                )
            peer = nodes.messages[node].peer if action != TIMED else 0
            if not 0 <= peer < ranks:
                raise InputError(
                    f"{nodes.label(node)} names position {peer} in a group of {ranks}",
                    slug="bad-algorithm",
                    where=str(path),
                )
        positions.append(nodes)
    return positions


class Carried:
    """One rank's part of such a collective: everything that waits for nothing begins at once.

    Args:
        nodes: Of its position.
        group: The rank at each position.
        queues: Of the rank.
        mailbox: Where messages go.
        done: Called at the end.
    """

    def __init__(
        self,
        nodes: RankNodes,
        group: Sequence[int],
        *,
        queues: RankQueues,
        mailbox: Mailbox,
        done: Callable[[], None],
    ) -> None:
        self._nodes, self._group, self._rank = nodes, group, queues.rank
        self._queues, self._mailbox, self._done = queues, mailbox, done
        self._left = list(nodes.waits)
        self._under_way = 0
        self._issue([node for node, waits in enumerate(self._left) if not waits])

    def _issue(self, ready: list[int]) -> None:
        self._under_way += len(ready)
        for node in ready:
            action = self._nodes.action[node]
            ended = partial(self._end, node)
            if action == TIMED:
                self._queues.after(self._nodes.duration_ns[node], ended)
                continue
            message = self._nodes.messages[node]
            peer = self._group[message.peer]
            if peer == self._rank:
                raise UsageError(
                    f"rank {peer} would send itself a message: its own position is that among the ranks in ascending "
                    "order, its peers' that in the group's order",
                    slug="bad-collective",
                    hint="list the group's ranks in ascending order",
                )
            if action == SEND:
                key = (message.tag, self._rank, peer, message.size)
                self._mailbox.send(key, self._rank, peer, message.size, ended)
            else:
                self._mailbox.receive((message.tag, peer, self._rank, message.size), ended)

    def _end(self, node: int, _: object = None) -> None:
        self._under_way -= 1
        ready = []
        for k in range(self._nodes.first[node], self._nodes.first[node + 1]):
            after = self._nodes.follower[k]
            self._left[after] -= 1
            if not self._left[after]:
                ready.append(after)
        self._issue(ready)
        if not self._under_way:
            self._done()
