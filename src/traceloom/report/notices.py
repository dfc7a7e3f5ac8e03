"""Notices as people read them: what several ranks have in common is said once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from traceloom.report.table import Cells


@dataclass(frozen=True, slots=True)
class Said:
    """Notices of one kind, as one; `weakens` has the keys of the parts of the report that are less certain for it."""

    severity: str
    slug: str
    sentence: str
    weakens: tuple[str, ...] = ()


def said_once(notices: Sequence[Cells], ranks: int) -> list[Said]:
    """The notices of a document in their order; those that differ by rank or place alone stand as the first of them."""
    kinds: dict[tuple[str, str], list[Cells]] = {}
    for notice in notices:
        kinds.setdefault((notice["severity"], notice["slug"]), []).append(notice)
    merged = []
    for (severity, slug), alike in kinds.items():
        weakens = tuple(effect["part"].rpartition(".")[2] for effect in alike[0].get("affects", []))
        first = alike[0]
        who = f"rank {first['rank']}: " if ranks > 1 and first["rank"] is not None else ""
        mentioned = not first["where"] or first["where"] in first["message"]
        where = "" if mentioned else f" ({first['where']})"
        more = f" (and {len(alike) - 1} more like this)" if len(alike) > 1 else ""
        merged.append(Said(severity, slug, f"{who}{first['message']}{where}{more}", weakens))
    return merged


def with_ranks(notices: Sequence[Cells]) -> Iterator[tuple[Cells, str]]:
    """Notices that several ranks share, once: the first of each kind, and its sentence with all of their ranks."""
    kinds: dict[tuple[str, str], list[Cells]] = {}
    for notice in notices:
        of_run = notice["message"] if notice["rank"] is None else ""
        kinds.setdefault((notice["slug"], of_run), []).append(notice)
    for alike in kinds.values():
        first, message = alike[0], alike[0]["message"]
        ranks = sorted({notice["rank"] for notice in alike if notice["rank"] is not None})
        if len(ranks) < 2:
            yield first, message
        elif all(notice["message"] == message for notice in alike):
            yield first, f"{message} (ranks {_spans(ranks)})"
        else:
            others = [rank for rank in ranks if rank != first["rank"]]
            yield first, f"{message} (rank {first['rank']}; the like on {_spans(others)})"


def _spans(ranks: Sequence[int]) -> str:
    """`0-3, 8`."""
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(ranks), lambda at: at[1] - at[0])]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
