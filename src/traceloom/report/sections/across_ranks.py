"""Who arrived last at each collective, why, and whom it cost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import polars as pl

from traceloom.analyze.across.across_ranks import AcrossRanks
from traceloom.analyze.across.blame import COLLECTIVE_SCHEMA, HEAT_SCHEMA, HOST_SCHEMA, RANK_SCHEMA, REASON_SCHEMA
from traceloom.analyze.across.chain import LINK_SCHEMA
from traceloom.analyze.across.lateness import CAUSE_WORDS
from traceloom.analyze.across.matched import CLOCK_SCHEMA
from traceloom.analyze.across.rank_part import RankPart
from traceloom.model import units
from traceloom.report.absent import Absent
from traceloom.report.sections.heat_map import blocks, heat_map
from traceloom.report.sections.of_ranks import SEVERAL, compared, part_of
from traceloom.report.sections.section import Row, Section, Study
from traceloom.report.sections.shapes import of_type, or_null, record, rows
from traceloom.report.table import Col, Table

_MOST = 100  # collectives, those with the longest waits
_MOST_CELLS = 20_000
COLLECTIVES = pl.Schema({name: kind for name, kind in COLLECTIVE_SCHEMA.items() if name != "met_ns"})
UNMATCHED = pl.Schema({"rank": pl.Int32(), "kind": pl.String(), "group": pl.String(), "count": pl.Int64()})
_UNKNOWN = {
    "kind": "neither arguments nor name of the kernel tell what it does",
    "group": "the recording does not say which group communicates",
    "group_size": "the recording does not say how many ranks communicate",
    "whole": "the recording does not say how many ranks communicate",
    "sequence": "the recording does not number its collectives",
    "size_bytes": "the recording does not say how much is sent",
    "step": "null is the time outside all steps",
    "launch_skew_ns": "the launch of the last one is not recorded",
    "arrival_wait_ns": "the launch of the last one is not recorded",
    "transfer_gb_per_s": "size or group is not known",
    "evidence": "it is not known how they were joined",
}
_LINKS = {
    "cause": "small parts together",
    "detail": "the cause has no parts with names, or they are no longer than elsewhere",
    "follows": "the chain does not go on from here",
}


def _build(study: Study[RankPart], absent: Absent) -> Row | None:
    if len(study.results) < 2:
        absent.say("across_ranks")
        return None
    comparison = compared(study.results)
    if not comparison.collectives.height:
        absent.say("across_ranks.collectives")
    worst = comparison.collectives.sort("wait_ns", "instance", descending=[True, False]).head(_MOST)
    frames = {
        "ranks": comparison.ranks,
        "hosts": comparison.hosts,
        "reasons": comparison.reasons.head(_MOST),
        "collectives": worst.select(list(COLLECTIVES)),
        "chains": comparison.chains,
        "heat": comparison.heat.head(_MOST_CELLS),
        "clocks": comparison.clocks,
        "unmatched": comparison.unmatched,
    }
    for notice in comparison.notices:
        absent.value(notice.rank, "across_ranks.notices[*].rank")
    return {
        "sentence": _sentence(comparison),
        "collective_count": comparison.collectives.height,
        "collective_ns": comparison.collective_ns,
        "wait_ns": comparison.wait_ns,
        "notices": [notice.to_dict() for notice in comparison.notices],
        **{name: absent.rows(frame, f"across_ranks.{name}") for name, frame in frames.items()},
    }


def _sentence(comparison: AcrossRanks) -> str:
    if not comparison.collectives.height:
        alone = int(comparison.unmatched["count"].sum())
        calls = f": {units.count(alone)} calls found no partner on another recorded rank" if alone else ""
        return f"No collective could be joined over ranks{calls}."
    share = units.share(comparison.wait_ns, comparison.collective_ns)
    text = f"{share} of {units.duration(comparison.collective_ns)} in joined collectives is waiting for other ranks"
    slowest = comparison.slowest
    if slowest is None:
        return f"{text}."
    of_it = units.share(slowest.waited_ns, comparison.wait_ns)
    because = f", mostly because of: {CAUSE_WORDS[slowest.cause]}"
    return f"{text}; {of_it} of the waiting goes back to rank {slowest.rank}{because}."


def _tables(value: Row | None) -> Iterator[Table]:
    if value is None:
        return
    if value["collectives"]:
        yield from _joined(value)
    if value["unmatched"]:
        columns = [
            Col("rank", "Rank", "count"), Col("kind", "Kind"), Col("group", "Group"), Col("count", "Calls", "count"),
        ]  # fmt: skip
        yield Table("across-ranks-unmatched", "Not joined", columns, value["unmatched"], "across_ranks.unmatched")
    if value["notices"]:
        columns = [Col("slug", "Notice"), Col("count", "Count", "count"), Col("message", "Says", "name")]
        yield Table("across-ranks-notices", "What to know", columns, value["notices"])


def _joined(value: Row) -> Iterator[Table]:
    yield Table("across-ranks-ranks", "Ranks", _blame("rank", "Rank"), _with_blocks(value), "across_ranks.ranks")
    if len(value["hosts"]) > 1 and len(value["hosts"]) < len(value["ranks"]):
        yield Table("across-ranks-hosts", "Hosts", _blame("host", "Host"), value["hosts"], "across_ranks.hosts")
    yield Table(
        "across-ranks-reasons",
        "Why ranks were late",
        [
            Col("rank", "Rank", "count", "where the chain of causes ends"),
            Col("waited_ns", "Waited", "time", "by the others, for this"),
            Col("collective_count", "Collectives", "count"),
            Col("most_late_ns", "At most late", "time", narrow=False),
            Col("word", "Cause", "name"),
        ],
        [{**row, "word": CAUSE_WORDS[row["cause"]]} for row in value["reasons"]],
        "across_ranks.reasons",
    )
    chains = [{**row, "said": _said(row)} for row in value["chains"]]
    yield Table("across-ranks-chains", "Chains of causes", _CHAIN_COLUMNS, chains, "across_ranks.chains",
                "For the longest waits: what the last rank did longer than the others since they last stood together; "
                "the parts of a link add up to how late it was.")  # fmt: skip
    yield Table("across-ranks-collectives", "Longest waits", _COLLECTIVE_COLUMNS, value["collectives"],
                "across_ranks.collectives")  # fmt: skip
    yield Table(
        "across-ranks-clocks",
        "Clocks",
        [
            Col("host", "Host"),
            Col("ranks", "Ranks", "count"),
            Col("offset_ns", "Corrected by", "time"),
            Col("drift", "Drift", "number", "ns per ns"),
            Col("residual_ns", "Residual", "time", "differences of ends that remain, 95th percentile"),
            Col("meetings", "Collectives", "count", "that the fit stands on"),
        ],
        value["clocks"],
        "across_ranks.clocks",
    )


def _blame(key: str, title: str) -> list[Col]:
    steps = Col("steps", "Steps", hint="each step, darker = waited longer because of it")
    return [
        Col(key, title, "count" if key == "rank" else "text"),
        Col("root_ns", "Waited because of it", "time", "by others, followed back to where the delay began"),
        Col("blame_ns", "Waited for it", "time", "by others, where it came last"),
        Col("wait_ns", "Own waits", "time"),
        Col("last_count", "Last", "count", "collectives at which it came last"),
        Col("collective_count", "Of", "count", "collectives", narrow=False),
        Col("alone_ns", "Alone late", "time", "how much later than the last but one, summed", narrow=False),
        *([Col("host", "Host", narrow=False), steps] if key == "rank" else []),
    ]  # fmt: skip


def _with_blocks(value: Row) -> list[Row]:
    """The ranks with a picture of their steps in characters."""
    cells = {(row["step"], row["rank"]): row["root_ns"] for row in value["heat"] if row["step"] is not None}
    steps = sorted({step for step, _ in cells})[:60]
    most = max(cells.values(), default=0)
    return [
        {**row, "steps": "".join(blocks(cells.get((step, row["rank"]), 0), most) for step in steps) or None}
        for row in sorted(value["ranks"], key=lambda row: -row["root_ns"])
    ]


_CHAIN_COLUMNS = (
    Col("chain", "Collective", "count"),
    Col("link", "Link", "count", "0 is the last rank there; the next the one it waited for"),
    Col("rank", "Rank", "count"),
    Col("late_ns", "Late", "time"),
    Col("ns", "Part", "time"),
    Col("said", "What took longer there", "name"),
)


def _said(link: Row) -> str:
    if link["cause"] is None:
        return "smaller parts together"
    follows = f" (collective {link['follows']})" if link["follows"] is not None else ""
    return CAUSE_WORDS[link["cause"]] + follows + (f": {link['detail']}" if link["detail"] else "")


_COLLECTIVE_COLUMNS = (
    Col("instance", "Collective", "count"),
    Col("step", "Step", "count", narrow=False),
    Col("kind", "Kind"),
    Col("group", "Group", narrow=False),
    Col("size_bytes", "Message", "bytes", narrow=False),
    Col("recorded", "Ranks", "count", "recorded", narrow=False),
    Col("start_skew_ns", "Skew", "time", "from the first to the last arrival"),
    Col("wait_ns", "Waits", "time", "of all ranks"),
    Col("launch_skew_ns", "Not launched", "time", "waits while the last had not launched it", narrow=False),
    Col("arrival_wait_ns", "Not arrived", "time", "waits while it was launched and not begun", narrow=False),
    Col("transfer_ns", "Transfer", "time", "median over ranks, from the last arrival to the end"),
    Col("last_rank", "Last", "count"),
    Col("late_ns", "Late by", "time", "against the middle half of the others"),
    Col("unexplained_ns", "Unexplained", "time", narrow=False),
    Col("root_rank", "Goes back to", "count"),
    Col("root_cause", "Cause", narrow=False),
)


def _summary(value: Row | None) -> str | None:
    if value is None or not (value["collectives"] or value["unmatched"]):
        return None
    text: str = value["sentence"]
    return text[0].lower() + text[1:].rstrip(".")


def _picture(value: Row | None) -> str:
    if value is None:
        return ""
    in_steps = [row for row in value["heat"] if row["step"] is not None]
    cells: dict[tuple[Any, Any], float] = {(row["rank"], row["step"]): float(row["root_ns"]) for row in in_steps}
    hover_texts = {
        (row["rank"], row["step"]): f"rank {row['rank']}, step {row['step']}: others waited "
        f"{units.duration(row['root_ns'])} because of it, it waited {units.duration(row['wait_ns'])}"
        for row in in_steps
    }
    ranks, steps = sorted({row["rank"] for row in in_steps}), sorted({row["step"] for row in in_steps})
    picture = heat_map(cells, ranks, steps, hover_texts, titles=("rank", "step"))
    return f'<p class="quiet">How long others waited because of a rank, by step</p>{picture}' if picture else ""


SECTION = Section(
    key="across_ranks",
    title="Across ranks",
    note="Who arrived last at collectives, why, and how long the others waited.",
    measure=part_of,
    build=_build,
    tables=_tables,
    summary=_summary,
    picture=_picture,
    schema=or_null(
        record(
            {
                "sentence": {"type": "string"},
                "collective_count": of_type(pl.Int64),
                "collective_ns": of_type(pl.Int64),
                "wait_ns": of_type(pl.Int64),
                "notices": {
                    "description": "what did not match, and what the result cannot see",
                    "type": "array",
                    "items": {"type": "object"},
                },
                "ranks": rows(RANK_SCHEMA, what="waits of and for each rank"),
                "hosts": rows(HOST_SCHEMA, what="the same, added over the ranks of a host"),
                "reasons": rows(REASON_SCHEMA, what="by rank and cause at the ends of the chains"),
                "collectives": rows(COLLECTIVES, nullable=set(_UNKNOWN), what=f"the {_MOST} with the longest waits"),
                "chains": rows(LINK_SCHEMA, nullable=set(_LINKS), what="causes link by link, for the longest waits"),
                "heat": rows(HEAT_SCHEMA, nullable={"step"}, what="steps × ranks"),
                "clocks": rows(CLOCK_SCHEMA, nullable={"residual_ns"}, what="how clocks were corrected"),
                "unmatched": rows(UNMATCHED, nullable={"kind", "group"}, what="calls without a partner"),
            },
            what="the ranks of a job against each other",
        )
    ),
    reasons={
        "across_ranks.notices[*].rank": "the notice is about the whole run",
        "across_ranks": SEVERAL,
        "across_ranks.collectives": "no collective could be joined over ranks",
        "across_ranks.heat[*].step": "null is the time outside all steps",
        "across_ranks.clocks[*].residual_ns": "the host shares no collective with another",
        "across_ranks.unmatched[*].kind": "neither arguments nor name of the kernel tell what it does",
        "across_ranks.unmatched[*].group": "the recording does not say which group communicates",
        **{f"across_ranks.collectives[*].{name}": why for name, why in _UNKNOWN.items()},
        **{f"across_ranks.chains[*].{name}": why for name, why in _LINKS.items()},
    },
)
