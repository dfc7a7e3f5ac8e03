"""What the sections about communication and about several ranks share: one measurement of each rank, one comparison."""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from traceloom import analyze
from traceloom.analyze.across.rank_part import RankPart
from traceloom.analyze.collective.bandwidth import against_hosts
from traceloom.model import Trace
from traceloom.report.options import ReportOptions
from traceloom.report.sections.section import Section, Value

SEVERAL = "only one rank is at hand; give the traces of several ranks of one run"
NO_CALLS = "no communication was recorded"


class RanksSection(Section[RankPart, Value]):
    """A section about communication or several ranks: all of them measure the same."""

    def measure(self, trace: Trace, options: ReportOptions) -> RankPart:
        return analyze.rank_part(trace)


def calls_of(parts: Sequence[RankPart]) -> pl.DataFrame:
    """The communication of all ranks, with links as their hosts tell."""
    calls = pl.concat([part.calls for part in parts])
    hosts = {part.rank: part.host for part in parts if part.rank is not None and part.host is not None}
    links = {part.rank: part.link for part in parts if part.rank is not None and part.link is not None}
    return against_hosts(calls, hosts, links) if len(hosts) > 1 else calls
