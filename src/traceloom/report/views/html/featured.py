"""Which ranks, and which step, a page about many ranks shows event by event; all others are summed up in tables.

A page with every event of every rank of a large job would be slow and large, and nobody looks at sixty timelines. It
shows the rank to blame, the slowest, the median and the fastest one, in one step, and says the command for any other.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from traceloom.model import Session
from traceloom.report.names import rank_name
from traceloom.report.window import cut

if TYPE_CHECKING:
    from traceloom.report.documents import ReportDocument
    from traceloom.report.documents.report import RankRow

FEW_RANKS = 8  # up to here every rank is shown
FEW_EVENTS = 1_000_000  # of all ranks together
_UNUSUAL = 1.1  # of the median step: from here on the slowest step is shown, below it the median one


@dataclass(frozen=True, slots=True)
class Featured:
    """What is shown event by event.

    Attributes:
        positions: Places in the document's `ranks` and in the session's traces, in the order of the page.
        roles: Why each is there, by position.
        step: The step; None where the ranks have no steps.
        unusual: Whether that is the slowest step, not the median one.
    """

    positions: tuple[int, ...]
    roles: Mapping[int, str]
    step: int | None
    unusual: bool = False

    def session(self, whole: Session) -> Session:
        """These ranks, cut to the step."""
        traces = (whole.traces[position] for position in self.positions)
        shown = tuple(trace if self.step is None else cut(trace, (self.step, self.step)) for trace in traces)
        return replace(whole, traces=shown)

    def document(self, whole: ReportDocument) -> ReportDocument:
        """The document with only these ranks in what is told rank by rank."""
        return {**whole, "ranks": [whole["ranks"][position] for position in self.positions]}

    def sentence(self, document: ReportDocument) -> str:
        """What is shown, and how to see the rest; plain text, the command between backticks."""
        ranks = document["ranks"]
        named = "; ".join(f"{rank_name(ranks[k], k)} ({self.roles[k]})" for k in self.positions)
        step = "" if self.step is None else f", step {self.step} ({'the slowest' if self.unusual else 'a usual one'})"
        other = next(
            (r["rank"] for k, r in enumerate(ranks) if k not in self.positions and r.get("rank") is not None), 0
        )
        where = shlex.quote(str(document.get("name") or "DIR"))
        steps = "" if self.step is None else f" --steps {self.step}"
        return (
            f"Of {len(ranks)} ranks the page shows these event by event: {named}{step}. "
            "Times of the timeline count from its own beginning. "
            f"The tables cover all ranks. Any other: `traceloom report {where} --rank {other}{steps} -o out.html`."
        )


def choose(document: ReportDocument, session: Session) -> Featured | None:
    """The ranks and the step to show; None where all are few enough."""
    ranks = document.get("ranks") or []
    if len(ranks) != len(session.traces) or len(ranks) < 3:
        return None
    if len(ranks) <= FEW_RANKS and session.event_count <= FEW_EVENTS:
        return None
    step, unusual = _step(ranks)
    path = document.get("critical_path")
    if path and path.get("step") is not None and not unusual:
        step = path["step"]  # the usual one, whose critical path is drawn
    roles: dict[int, str] = {}
    busy = []  # how long a rank computes in the step (in all, without steps); the step, where no device computes
    for rank in ranks:
        entry = next((s for s in rank.get("steps") or [] if s["step"] == step), rank)
        computes = sum(device.get("compute_ns") or 0 for device in entry.get("devices") or [])
        busy.append(computes or entry.get("duration_ns") or rank.get("window_ns") or 0)
    order = sorted(range(len(ranks)), key=lambda k: (busy[k], k))
    # The rank that most of the waiting for other ranks goes back to, where that is known.
    across = document.get("across_ranks")
    most = max(across["ranks"], key=lambda row: (row["root_ns"], row["blame_ns"]), default=None) if across else None
    if most and (most["root_ns"] or most["blame_ns"]):
        culprit = next((k for k, rank in enumerate(ranks) if rank["rank"] == most["rank"]), None)
        if culprit is not None:
            roles[culprit] = "the others wait for it most"
    for position, role in ((order[-1], "computes longest"), (order[len(order) // 2], "median"), (order[0], "shortest")):
        roles[position] = f"{roles[position]}, {role}" if position in roles else role
    return Featured(tuple(roles), roles, step, unusual)


def _step(ranks: list[RankRow]) -> tuple[int | None, bool]:
    """The step to show, and whether it is the slowest: by the longest of all ranks, whole steps before cut ones."""
    lengths: dict[int, int] = {}
    for steps in ([s for s in rank.get("steps") or [] if s.get("complete", True)] for rank in ranks):
        for step in steps:
            lengths[step["step"]] = max(lengths.get(step["step"], 0), step["duration_ns"])
    if not lengths:
        return None, False
    order = sorted(lengths, key=lambda step: (lengths[step], step))
    median, slowest = order[(len(order) - 1) // 2], order[-1]
    unusual = len(order) > 2 and lengths[slowest] > _UNUSUAL * lengths[median]
    return (slowest, True) if unusual else (median, False)
