"""Rules and their candidates, and the Python frames that hold the host time of a finding."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import reduce
from operator import or_

import polars as pl
from msgspec import Struct

from traceloom.analyze.host_events import (
    FRAME_TIME_SCHEMA,
    measure_frame_time,
    measure_sampled_frame_time,
    parse_frame_places,
)
from traceloom.changes.changes import Change
from traceloom.findings.context import Context, shorten_name
from traceloom.graph import graph as graph_schema
from traceloom.system import units
from traceloom.trace.notice import Abstention, Evidence, Finding, HotFrame


class Candidate(Struct, frozen=True):
    """Something that could be fixed, before its saving is known.

    Attributes:
        title: One line with the main figure.
        changes: The effect of the fix on works and delays; evaluated by re-timing.
        confidence: From 0 to 1.
        advice: What to do.
        evidence: Events and places to inspect.
        at_most_ns: A bound on the saving, where re-timing would promise more than the fix can; None
            for none.
        host: Computes the host time of the finding, as `Context.stretches` does; None where that is
            the host time of the changed nodes. Called for findings alone.
        hot_advice: What to do instead where one Python frame holds most of that time; `{frame}` is
            replaced by the share and the name of that frame.
    """

    title: str
    changes: tuple[Change, ...]
    confidence: float
    advice: str
    evidence: tuple[Evidence, ...] = ()
    at_most_ns: int | None = None
    host: Callable[[], pl.DataFrame] | None = None
    hot_advice: str | None = None


class MemoryCandidate(Struct, frozen=True):
    """A finding about memory: bytes or a risk, no time.

    Attributes:
        title: One line with the main figure.
        saving_bytes: What the fix frees; None where it is only a risk.
        risk: What will go wrong, and in which context.
        severe: Whether the run will fail.
        confidence: From 0 to 1.
        advice: What to do.
        evidence: Events and places to inspect.
    """

    title: str
    saving_bytes: int | None
    risk: str | None
    severe: bool
    confidence: float
    advice: str
    evidence: tuple[Evidence, ...] = ()


class Remark(Struct, frozen=True):
    """Information that is needed to read the other findings; it saves nothing on its own.

    Attributes:
        title: One line with the main figure.
        confidence: From 0 to 1.
        advice: What to do.
        evidence: Events and places to inspect.
        first: Whether it comes before all findings, since their figures mean little without it.
    """

    title: str
    confidence: float
    advice: str
    evidence: tuple[Evidence, ...] = ()
    first: bool = False


Message = Candidate | MemoryCandidate | Remark | Abstention


Condition = tuple[Callable[[Context], bool], str]
"""When a rule cannot decide, and why."""

NO_DEVICE: Condition = (lambda context: not context.has_gpu_work, "no GPU work was recorded")
SAMPLED: Condition = (
    lambda context: context.sampled,
    "most operators were left out of the file: nobody knows what lies between those in it",
)
ONE_RANK: Condition = (
    lambda context: context.rank_count < 2 or context.rank_comparison is None,
    "only one rank was recorded",
)
NEVER_MEET: Condition = (
    lambda context: not context.meeting,
    "the ranks share no communication, so none waits for another",
)
NO_COMMUNICATION: Condition = (
    lambda context: not context.select_kinds(*graph_schema.COMMUNICATION).any(),
    "no communication was recorded",
)
NO_HOST: Condition = (
    lambda context: not context.select_kinds(graph_schema.HOST).any(),
    "nothing was recorded of the host",
)


class FindingRule(Struct, frozen=True):
    """One rule; its page is docs/findings/SLUG.md.

    Attributes:
        slug: Stable name.
        title: What it looks for, in a few words.
        find: Context -> candidates, or an abstention; nothing where all is well.
        unless: Where it abstains; the first that holds counts.
    """

    slug: str
    title: str
    find: Callable[[Context], Iterable[Message]]
    unless: tuple[Condition, ...] = ()

    def evaluate(self, context: Context) -> Iterable[Message]:
        """Returns what the rule says of the steps."""
        for holds, reason in self.unless:
            if holds(context):
                return (Abstention(self.slug, reason),)
        return self.find(context)


MAX_FRAMES = 3
MIN_FRAME_SHARE = 0.05  # of the host time of a finding
_MAJORITY = 0.5  # of that, or of a frame's time
_BUILT_IN_PATTERN = re.compile(r"^<built-in (?:function|method) ([^ >]+).*$")


def add_frames(findings: Sequence[tuple[Finding, Candidate, Context]]) -> tuple[Finding, ...]:
    """Adds to findings the frames that hold their host time, computed for all of them together,
    rank by rank.

    Args:
        findings: Each with its candidate, and the context of its words.
    """
    if not findings:
        return ()
    intervals = [
        candidate.host()
        if candidate.host
        else context.stretches(
            reduce(or_, (change.selection.nodes(context.graph) for change in candidate.changes))
        )
        for _, candidate, context in findings
    ]
    tables = [[pl.DataFrame(schema={"rank": pl.Int32, **FRAME_TIME_SCHEMA})] for _ in findings]
    context = findings[0][2]
    for trace in context.traces:
        is_rank = pl.col("rank").eq_missing(trace.rank) if len(context.traces) > 1 else pl.lit(True)
        parts = [rows.filter(is_rank) for rows in intervals]
        samples = context.session.samples.filter(pl.col("rank").eq_missing(trace.rank))
        if not any(part.height for part in parts):
            continue
        if context.stacks:
            times = measure_frame_time(trace, parts)
        elif samples.height:
            times = measure_sampled_frame_time(trace, samples, parts)
        else:
            continue
        rank = pl.lit(trace.rank, dtype=pl.Int32).alias("rank")
        for table, part in zip(tables, times, strict=True):
            table.append(part.select(rank, *FRAME_TIME_SCHEMA))
    return tuple(
        _add_hot_frames(finding, candidate, rows, pl.concat(table), context.rank_count > 1)
        for (finding, candidate, _), rows, table in zip(findings, intervals, tables, strict=True)
    )


def _add_hot_frames(
    finding: Finding,
    candidate: Candidate,
    intervals: pl.DataFrame,
    table: pl.DataFrame,
    several: bool,
) -> Finding:
    """Returns the finding with the frames of its table (rank and `HELD`) that hold the most."""
    if not intervals.height:
        return finding
    late = {
        rank
        for change in candidate.changes
        if change.action == "delay"
        for rank in change.selection.ranks
    }
    if late:  # it is about what these ranks do beyond the median of the others
        is_late = pl.col("rank").is_in(list(late))
        other_count = intervals.filter(~is_late)["rank"].n_unique()
        keys = ["frame", "inside"]
        typical = table.filter(~is_late).group_by(keys).agg("ns")
        typical = typical.with_columns(  # ranks without it count as 0
            usual=pl.col("ns")
            .list.concat(pl.lit(0).repeat_by(other_count - pl.col("ns").list.len()))
            .list.median()
        ).drop("ns")
        intervals = intervals.filter(is_late)
        table = table.filter(is_late).join(typical, on=keys, how="left", nulls_equal=True)
        table = table.with_columns(
            ns=pl.col("ns") - pl.col("usual").fill_null(0).ceil().cast(pl.Int64)
        ).filter(pl.col("ns") > 0)
    host_ns = int((intervals["end_ns"] - intervals["start_ns"]).sum())
    if not host_ns:
        return finding
    rank_times = (
        table.group_by("frame", "rank")
        .agg(pl.col("ns").sum())
        .sort("ns", "rank", descending=[True, False])
    )
    top = (
        rank_times.group_by("frame", maintain_order=True)
        .agg(pl.col("ns").sum(), pl.col("rank").first(), ranks=pl.len())
        .filter(pl.col("ns") >= MIN_FRAME_SHARE * host_ns)
        .sort("ns", "frame", descending=[True, False])
        .head(MAX_FRAMES)
    )
    inner_times = (
        table.group_by("frame", "inside").agg(inside_ns=pl.col("ns").sum()).drop_nulls("inside")
    )
    inner_times = inner_times.sort("inside_ns", "inside", descending=[True, False]).unique(
        "frame", keep="first"
    )
    rows = pl.concat([top, parse_frame_places(top["frame"])], how="horizontal").join(
        inner_times, on="frame", how="left"
    )
    frames = []
    for row in rows.sort("ns", "frame", descending=[True, False]).to_dicts():
        mostly = row["inside_ns"] is not None and row["inside_ns"] >= _MAJORITY * row["ns"]
        frames.append(
            HotFrame(
                name=_format_function_name(row["name"]),
                file=row["file"],
                line=row["line"],
                time_ns=row["ns"],
                share=row["ns"] / host_ns,
                inside=_format_function_name(
                    parse_frame_places(pl.Series([row["inside"]]))["name"][0]
                )
                if mostly
                else None,
                inside_ns=row["inside_ns"] if mostly else None,
                rank=row["rank"] if several else None,
                rank_count=row["ranks"],
            )
        )
    advice = finding.advice
    if candidate.hot_advice is not None and frames and frames[0].share >= _MAJORITY:
        hottest = replace(frames[0], file=frames[0].file and frames[0].file.rpartition("/")[2])
        part = f"{units.format_duration(hottest.time_ns)} of {units.format_duration(host_ns)} are {hottest}"
        advice = candidate.hot_advice.format(frame=part)
    return replace(finding, host_ns=host_ns, frames=tuple(frames), advice=advice)


def _format_function_name(name: str) -> str:
    """Returns the name of a function, an operator or a call as part of a sentence."""
    return shorten_name(_BUILT_IN_PATTERN.sub(r"\1", name))
