"""Which groups of ranks communicate, and what they are for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

import polars as pl

from traceloom import analyze
from traceloom.analyze.across.rank_part import RankPart
from traceloom.analyze.collective.groups import GROUP_SCHEMA
from traceloom.model import units
from traceloom.report.absent import Absent
from traceloom.report.sections.of_ranks import NO_CALLS, RanksSection, calls_of
from traceloom.report.sections.section import Columns, Study, table
from traceloom.report.sections.shapes import Part
from traceloom.report.table import Col, Table

if TYPE_CHECKING:
    from traceloom.report.documents.sections import GroupsRow

_MOST = 200
_GROUPS = Part(
    GROUP_SCHEMA,
    "process groups; longest first, unused ones last",
    {
        "backend": "the recording does not say it",
        "members": "the recording does not list the members, or cuts the list",
        "stride": "the members are not evenly spaced, or are not known",
        "kinds": "nothing was called in the window",
        "bytes": "nothing was called, or the size of a call is not known",
        "total_ns": "nothing was called in the window",
        "exposed_ns": "nothing was called, or only on the host",
    },
    ("group", "description", "group_size"),
    NO_CALLS,
    ranked=False,
)


class GroupsSection(RanksSection["list[GroupsRow]"]):
    """Process groups and their roles."""

    key, title = "groups", "Groups"
    note = "Which ranks communicate with each other, and what for."
    schema = _GROUPS.schema()
    reasons = _GROUPS.reasons("groups")

    def build(self, study: Study[RankPart], absent: Absent) -> list[GroupsRow]:
        declared = pl.concat([part.groups for part in study.results])
        groups = analyze.groups(calls_of(study.results), declared, study.session.world_size).groups
        if not groups.height:
            absent.say("groups")
        return absent.rows(groups.head(_MOST), "groups")

    def tables(self, value: list[GroupsRow]) -> Iterator[Table]:
        if not value:
            return
        rows = []
        for row in value:
            members, who = row["members"], None
            if members and len(members) > 2 and all(after - before == 1 for before, after in pairwise(members)):
                who = f"{members[0]}–{members[-1]}"
            elif members is not None:
                who = ", ".join(map(str, members[:6])) + (", …" if len(members) > 6 else "")
            rows.append({**row, "who": who})
        evidence = Col("evidence", "Evidence", "name", "how the role is known")
        columns: Columns = ["group", "role", "group_size", Col("who", "Members"), "count", "total_ns",
                   "+exposed_ns", "+bytes", "+recorded_ranks", "+description", evidence]  # fmt: skip
        yield table("groups", "Process groups", columns, rows, key="groups-groups")

    def summary(self, value: list[GroupsRow]) -> str | None:
        used = [row for row in value if row["count"]]
        if not used:
            return None
        roles = Counter(row["role"] for row in used)
        role_counts = ", ".join(f"{units.count(number)} {role}" for role, number in roles.most_common())
        return f"{units.count(len(used))} {'group' if len(used) == 1 else 'groups'} in use: {role_counts}"


SECTION = GroupsSection()
