"""Which groups of ranks communicate, and what they are for."""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from traceloom import analyze
from traceloom.analyze.across.rank_part import RankPart
from traceloom.analyze.collective.groups import GROUP_SCHEMA
from traceloom.model import units
from traceloom.report.absent import Absent
from traceloom.report.sections.of_ranks import NO_CALLS, calls_of, part_of
from traceloom.report.sections.section import Row, Section, Study
from traceloom.report.sections.shapes import rows
from traceloom.report.table import Col, Table

_MOST = 200
_UNKNOWN = {
    "group": "the recording does not say which group communicates",
    "description": "the group has no description",
    "backend": "the recording does not say it",
    "group_size": "the recording does not say how many ranks communicate",
    "members": "the recording does not list the members, or cuts the list",
    "stride": "the members are not evenly spaced, or are not known",
    "kinds": "nothing was called in the window",
    "bytes": "nothing was called, or the size of a call is not known",
    "total_ns": "nothing was called in the window",
    "exposed_ns": "nothing was called, or only on the host",
}


def _build(study: Study[RankPart], absent: Absent) -> list[Row]:
    declared = pl.concat([part.groups for part in study.results])
    groups = analyze.groups(calls_of(study.results), declared, study.session.world_size).groups
    if not groups.height:
        absent.say("groups")
    return absent.rows(groups.head(_MOST), "groups")


def _tables(value: list[Row]) -> Iterator[Table]:
    if not value:
        return
    shown = [{**row, "who": _spoken(row["members"])} for row in value]
    yield Table(
        "groups-groups",
        "Process groups",
        [
            Col("group", "Group"),
            Col("role", "Role", hint="what it is for"),
            Col("group_size", "Ranks", "count"),
            Col("who", "Members"),
            Col("count", "Calls", "count", "of all recorded ranks"),
            Col("total_ns", "Total", "time", "of all recorded ranks, waiting included"),
            Col("exposed_ns", "Exposed", "time", narrow=False),
            Col("bytes", "Bytes", "bytes", "messages of all recorded ranks", narrow=False),
            Col("recorded_ranks", "Recorded", "count", "ranks at hand that call it", narrow=False),
            Col("description", "Description", narrow=False),
            Col("evidence", "Evidence", "name"),
        ],
        shown,
        "groups",
    )


def _spoken(members: list[int] | None) -> str | None:
    """`0–7`, `0, 8, 16, …`."""
    if members is None:
        return None
    if len(members) > 2 and members == list(range(members[0], members[-1] + 1)):
        return f"{members[0]}–{members[-1]}"
    return ", ".join(map(str, members[:6])) + (", …" if len(members) > 6 else "")


def _summary(value: list[Row]) -> str | None:
    used = [row for row in value if row["count"]]
    if not used:
        return None
    roles: dict[str, int] = {}
    for row in used:
        roles[row["role"]] = roles.get(row["role"], 0) + 1
    role_counts = ", ".join(
        f"{units.count(number)} {role}" for role, number in sorted(roles.items(), key=lambda pair: -pair[1])
    )
    return f"{units.count(len(used))} {'group' if len(used) == 1 else 'groups'} in use: {role_counts}"


SECTION = Section(
    key="groups",
    title="Groups",
    note="Which ranks communicate with each other, and what for.",
    measure=part_of,
    build=_build,
    tables=_tables,
    summary=_summary,
    schema=rows(GROUP_SCHEMA, nullable=set(_UNKNOWN), what="process groups; the most time first, unused ones last"),
    reasons={"groups": NO_CALLS, **{f"groups[*].{name}": why for name, why in _UNKNOWN.items()}},
)
