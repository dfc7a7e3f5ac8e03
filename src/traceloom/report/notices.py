"""Notices as people read them: what several ranks have in common is said once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Said:
    """Notices of one kind, as one; `weakens` has the keys of the parts of the report that are less certain for it."""

    severity: str
    slug: str
    sentence: str
    weakens: tuple[str, ...] = ()


def said_once(notices: list[dict[str, Any]], ranks: int) -> list[Said]:
    """The notices of a document in their order; those that differ by rank or place alone stand as the first of them."""
    kinds: dict[tuple[str, str], list[dict[str, Any]]] = {}
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
