"""What is told of hangs, and to whom: a sentence says where a program is, which only those who may act on it see."""

from __future__ import annotations

from collections.abc import Collection

from traceloom.agent.hang_desk import HangDesk, HangRecord
from traceloom.agent.http.answers import HangAnswer, HangsAnswer
from traceloom.agent.http.peers import Peer


def hangs_answer(desk: HangDesk, job: str, peer: Peer, jobs: Collection[str]) -> HangsAnswer:
    """The hangs that the one who asks may see, of one job or ("") of all; and which of their jobs are watched."""

    def shown(record: HangRecord) -> HangAnswer:
        # As of stacks: a token that only reads does not see where programs of others are.
        full = peer.acts or peer.uid == record.hang.uid
        return HangAnswer(
            id=record.id, job=record.hang.job, uid=record.hang.uid, state=record.state,
            since_ns=record.hang.since_ns, seen_ns=record.hang.seen_ns, over_ns=record.over_ns,
            median_step_seconds=record.hang.median_s, pids=[member.pid for member in record.hang.processes],
            sentence=record.sentence if full else "", ranks=record.ranks, directory=record.directory if full else "",
            files=record.files if full else (), no_bundle=record.no_bundle,
        )  # fmt: skip

    return HangsAnswer(
        watched=sorted({key.job for key in desk.watch.stepping if key.job in jobs}),
        hangs=[
            shown(record)
            for record in desk.records
            if (peer.sees == "all" or (peer.sees == "own" and peer.uid == record.hang.uid))
            and job in ("", record.hang.job)
        ],
    )
