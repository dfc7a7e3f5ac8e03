"""Sections about host threads, blocking calls and data loading."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING

import polars as pl

from traceloom import analyze
from traceloom.analyze.blocking_calls import KINDS, SITES
from traceloom.analyze.host_time import CONCURRENCY, CURVE, ROLES, THREAD_SCHEMA
from traceloom.report.document import (
    Bar,
    Cells,
    Col,
    ListSchema,
    ReportOptions,
    Table,
    UnknownValues,
    format_yes_no,
)
from traceloom.report.labels import (
    ACTIVITIES,
    build_time_parts,
    fit_name,
    format_rank_name,
    get_step_length,
)
from traceloom.report.sections.section import (
    Columns,
    CoreSection,
    Frames,
    Measurements,
    RankMeasurements,
    Section,
    build_table,
)
from traceloom.system import units
from traceloom.system.sanitize import sanitize
from traceloom.trace.frames import build_schema, cast_to_schema
from traceloom.trace.trace import Trace

if TYPE_CHECKING:
    from traceloom.report.documents import ReportDocument
    from traceloom.report.documents.report import DataLoadingValue
    from traceloom.report.documents.sections import (
        BlockingCallsSitesRow,
        BlockingCallsValue,
        ThreadsValue,
    )


class HostSection(CoreSection):
    key, title = "host", "Host threads"
    shows_only = True
    note = "What each thread did, by innermost activity."
    path = "ranks[*].host.threads"

    def tables(self, document: ReportDocument) -> Iterator[Table]:
        for position, rank in enumerate(document["ranks"]):
            host = rank["host"]
            times: Counter[tuple[int, str]] = Counter()  # by lane and activity
            for row in host["account"]:
                times[row["lane"], row["activity"]] += row["ns"]
            rows: list[Cells] = []
            for thread in host["threads"]:
                activities = {part.key: times[thread["lane"], part.key] for part in ACTIVITIES}
                name = thread["name"] or f"thread {thread['thread']}"
                rows.append(
                    {
                        "name": f"{name} (main)" if thread["main"] and "main" not in name else name,
                        **activities,
                        "events": thread["event_count"],
                        "bar": Bar(build_time_parts(ACTIVITIES, activities), thread["window_ns"]),
                    }
                )
            columns = [
                Col("name", "Thread"),
                *(
                    Col(part.key, part.label, "time", swatch=part.group, scale="activity")
                    for part in ACTIVITIES
                ),
                Col("events", "Events", "count", narrow=False),
                Col("bar", "By activity", "bar"),
            ]
            if rows:
                title = f"Host threads of {format_rank_name(rank, position)}"
                yield Table(
                    f"host-{position}", title, columns, rows, position=position, brief=False
                )


HOST_SECTION = HostSection()

MAX_CURVES = 8  # ranks whose curve is kept
_WIDTH, _HEIGHT = 720, 72
_SUM_SCHEMA = pl.Schema({name: kind for name, kind in CONCURRENCY.items() if name != "step"})


class ThreadsSection(Section[Frames, "ThreadsValue"]):
    key, title = "threads", "Threads"
    note = "What each host thread is for, and how many work at the same time."
    what = "host threads by what they do"
    missing = "no host events were recorded"
    parts = {
        "threads": ListSchema(THREAD_SCHEMA, "one row per host thread", nullable=("says", "role")),
        "concurrency": ListSchema(
            _SUM_SCHEMA, "how long exactly so many threads were active at once"
        ),
        "curve": ListSchema(CURVE, "mean number of active threads in equal parts of the window"),
    }

    def measure(self, trace: Trace, options: ReportOptions) -> Frames:
        threads = analyze.threads(trace)
        concurrency = (
            threads.concurrency.group_by("threads")
            .agg(pl.col("ns").sum())
            .sort("threads")
            .pipe(cast_to_schema, _SUM_SCHEMA)
        )
        return {"threads": threads.threads, "concurrency": concurrency, "curve": threads.curve}

    def build(
        self, measurements: Measurements[Frames], unknowns: UnknownValues
    ) -> ThreadsValue | None:
        frames = measurements.frames(self.parts)
        if not frames["threads"].height:
            unknowns.explain("threads")
            return None
        frames["curve"] = frames["curve"].filter(
            pl.col("rank").is_in(
                [trace.rank for trace in measurements.part.traces][:MAX_CURVES], nulls_equal=True
            )
        )
        return self.lists(frames, unknowns)

    def tables(self, value: ThreadsValue) -> Iterator[Table]:
        rows = []
        for row in value["threads"]:
            role = ROLES.get(row["role"] or "", str(row["role"]))
            # where it only runs some Python, with the name for that
            rows.append(
                {
                    **row,
                    "role": f"{role}: {row['says']}"
                    if row["role"] == "python" and row["says"]
                    else role,
                }
            )
        columns = [
            "?rank",
            "name",
            "active_ns",
            "blocking_call_ns",
            "+op_ns",
            "+launch_ns",
            "+python_ns",
            "+unobserved_ns",
            "+event_count",
            "role",
        ]
        yield build_table("threads.threads", "Threads", columns, rows)
        totals: Counter[int | None] = Counter()
        for at_once in value["concurrency"]:
            totals[at_once["rank"]] += at_once["ns"]
        yield build_table(
            "threads.concurrency",
            "Threads active at once",
            ["?rank", "threads", "ns", Col("share", "Share", "share", "of the window")],
            [
                {**row, "share": row["ns"] / max(totals[row["rank"]], 1)}
                for row in value["concurrency"]
            ],
            among=rows,
        )

    def summary(self, value: ThreadsValue) -> str | None:
        rows = value["concurrency"]
        window = sum(row["ns"] for row in rows)
        if not window:
            return None
        several = sum(row["ns"] for row in rows if row["threads"] > 1)
        none = sum(row["ns"] for row in rows if row["threads"] == 0)
        count = len(value["threads"])
        return (
            f"{count} {'thread' if count == 1 else 'threads'}; none is active {units.format_share(none, window)} of the time, "
            f"several at once {units.format_share(several, window)}"
        )

    def picture(self, value: ThreadsValue) -> str:
        """Returns the number of active threads over time, of the first rank."""
        curve = value["curve"]
        if len(curve) < 2:
            return ""
        rank = curve[0]["rank"]
        active = [row["active"] for row in curve if row["rank"] == rank]
        max_active = max(*active, 1.0)
        step = _WIDTH / len(active)
        points = "".join(
            f"L{index * step:.1f} {_HEIGHT - value / max_active * _HEIGHT:.1f}H{(index + 1) * step:.1f}"
            for index, value in enumerate(active)
        )
        rank_suffix = (
            ""
            if rank is None or all(row["rank"] == rank for row in value["threads"])
            else f" of rank {rank}"
        )
        label = escape(sanitize(f"Active threads{rank_suffix} over time, at most {max_active:.2f}"))
        return (
            f'<figure class="spark"><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="100%" height="{_HEIGHT}" '
            f'preserveAspectRatio="none" role="img" aria-label="{label}"><path d="M0 {_HEIGHT}{points}V{_HEIGHT}Z" '
            f'fill="currentColor" fill-opacity="0.35"/></svg><figcaption class="quiet">{label}</figcaption></figure>'
        )


THREADS_SECTION = ThreadsSection()

MAX_RANK_SITES = 100  # of one rank
MAX_ROWS = 800  # max for all ranks together, unless `MIN_RANK_SITES` requires more
MIN_RANK_SITES = 10  # min for each rank
_MAX_NAME_WIDTH = 60
_KIND_LABELS = {
    "item": "reads of a value (.item())",
    "data_dependent_shape": "results whose size is needed (nonzero, masks)",
    "copy_to_host": "copies to the host",
    "copy_to_device": "copies to the GPU",
    "other_copy": "other copies",
    "synchronize": "synchronizing calls",
    "event_synchronize": "waits for events",
    "allocation": "allocations",
    "module_load": "loads of code",
    "fill": "fills",
    "python": "waits in Python",
    "other": "other calls",
}
_BY_KIND = build_schema("kind count blocked_ns idle_after_ns", {"kind": SITES["kind"]})
_SPREAD_COLUMNS = ("mean_blocked_ns", "min_blocked_ns", "max_blocked_ns", "step_count")
_NO_FRAME_REASON = "no Python frame of the program is recorded around the call"


class BlockingCallsSection(Section[tuple[Frames, int], "BlockingCallsValue"]):
    # The measurement holds the lists, and the time in all calls.
    key, title = "blocking_calls", "Blocking calls"
    note = "Where the host stops and waits, and whether the GPU has work meanwhile."
    what = "calls in which the host waits"
    missing = "no call that waits was recorded"
    parts = {
        "by_kind": ListSchema(
            _BY_KIND, f"sums by kind: {', '.join(KINDS)}", nullable=("idle_after_ns",)
        ),
        "sites": ListSchema(
            SITES,
            "by place, those in Python last, the longest first; at most 100 of a rank, fewer of many",
            {
                "op": "no operator is recorded around the call",
                "frame": _NO_FRAME_REASON,
                "stack": _NO_FRAME_REASON,
                **dict.fromkeys(
                    _SPREAD_COLUMNS, "the trace holds no whole step, or the call is in none"
                ),
            },
            ("gpu_busy_ns", "gpu_idle_ns", "idle_after_ns"),
        ),
    }
    others = {"blocked_ns": {"type": "integer"}}

    def measure(self, trace: Trace, options: ReportOptions) -> tuple[Frames, int]:
        calls = analyze.blocking_calls(trace)
        idle = pl.col("idle_after_ns")
        kind_totals = (
            calls.sites.group_by("kind")
            .agg(
                pl.col("count", "blocked_ns").sum(),
                pl.when(idle.is_not_null().any()).then(idle.sum()),
            )
            .sort("blocked_ns", "kind", descending=[True, False])
            .pipe(cast_to_schema, _BY_KIND)
        )
        return {"by_kind": kind_totals, "sites": calls.sites.head(MAX_RANK_SITES)}, calls.blocked_ns

    def build(
        self, measurements: Measurements[tuple[Frames, int]], unknowns: UnknownValues
    ) -> BlockingCallsValue | None:
        max_sites = max(MAX_ROWS // len(measurements.results), MIN_RANK_SITES)
        sites = measurements.concat(lambda of: of[0]["sites"].head(max_sites))
        if not sites.height:
            unknowns.explain("blocking_calls")
            return None
        lists = self.lists(
            {"by_kind": measurements.concat(lambda of: of[0]["by_kind"]), "sites": sites}, unknowns
        )
        return {"blocked_ns": sum(blocked_ns for _, blocked_ns in measurements.results), **lists}

    def tables(self, value: BlockingCallsValue) -> Iterator[Table]:
        rows = [
            {
                **row,
                "what": _KIND_LABELS.get(row["kind"], row["kind"]),
                "where": describe_call_site(row),
            }
            for row in value["sites"]
        ]
        on_gpu = any(row["gpu_busy_ns"] is not None for row in rows)
        stepped = any(row["mean_blocked_ns"] is not None for row in rows)
        columns: Columns = [
            "?rank",
            "blocked_ns",
            *(["+gpu_busy_ns", "idle_after_ns"] if on_gpu else []),
            "count",
            "+max_ns",
            *(["+mean_blocked_ns", "+max_blocked_ns"] if stepped else []),
            Col("what", "Kind"),
            Col(
                "where",
                "Where",
                "name",
                "the line that asks, the operators around the call, the call",
            ),
        ]
        yield build_table("blocking_calls.sites", "Blocking calls", columns, rows)

    def summary(self, value: BlockingCallsValue) -> str | None:
        kinds = [row for row in value["by_kind"] if row["kind"] != "python"] or value["by_kind"]
        total_ns = sum(row["blocked_ns"] for row in kinds)
        site_ns: dict[tuple[str, str], int] = defaultdict(int)  # over all ranks
        for row in value["sites"]:
            if any(row["kind"] == kind["kind"] for kind in kinds):
                site_ns[row["kind"], describe_call_site(row)] += row["blocked_ns"]
        kind, site = max(site_ns, key=lambda key: site_ns[key])
        share = units.format_share(site_ns[kind, site], max(total_ns, 1))
        return (
            f"{units.format_duration(total_ns)} of host time in calls that wait; "
            f"{share} of it for {_KIND_LABELS.get(kind, kind)} at {fit_name(site, _MAX_NAME_WIDTH)}"
        )


def describe_call_site(row: BlockingCallsSitesRow) -> str:
    """Returns line (file without folders), outermost operator and call: `train.py(12): step:
    aten::item, ...`.
    """
    operator = str(row["op"]).split(" > ", 1)[0] if row["op"] else None
    call = str(row["call"]).removeprefix("<built-in ").removesuffix(">")
    operation = ", ".join(part for part in (operator, call) if part)
    return f"{str(row['frame']).rsplit('/', 1)[-1]}: {operation}" if row["frame"] else operation


SECTION = BlockingCallsSection()

_BATCH_MAKER_CLAUSES = {
    "main_thread": "the main thread makes the batches itself",
    "workers": "workers make the batches",
}
_LOADING_PARTS = {
    "fetch": "fetching from the data set",
    "collate": "collating",
    "pin_memory": "pinning memory",
    "workers": "waiting for workers",
    "operators": "operators",
}


class DataLoadingSection(CoreSection):
    key, title = "data_loading", "Data loading"
    anchor = "loading"
    note = "Waits for the next batch."

    def build(
        self, measurements: Measurements[RankMeasurements], unknowns: UnknownValues
    ) -> DataLoadingValue | None:
        """Returns waits for the data loader; null where no rank has a loader."""
        has_loader = [rank.data_loading.waits.height > 0 for rank in measurements.results]
        if not any(has_loader):
            unknowns.explain("data_loading")
            return None
        return {
            "total_ns": sum(rank.data_loading.total_ns or 0 for rank in measurements.results),
            "waits": unknowns.rows(
                measurements.concat(lambda rank: rank.data_loading.waits.drop("event"), has_loader),
                "data_loading.waits",
            ),
            "steps": unknowns.rows(
                measurements.concat(lambda rank: rank.data_loading.steps, has_loader),
                "data_loading.steps",
            ),
            "spent": unknowns.rows(
                measurements.concat(lambda rank: rank.data_loading.spent, has_loader),
                "data_loading.spent",
            ),
        }

    def tables(self, document: ReportDocument) -> Iterator[Table]:
        loading = document.get("data_loading")
        if not loading or not loading["steps"]:
            return
        names = {
            rank["rank"]: format_rank_name(rank, k) for k, rank in enumerate(document["ranks"])
        }
        yield Table(
            "loading-table",
            "Loader waits by step",
            [
                *((Col("rank", "Rank"),) if len(names) > 1 else ()),
                Col("step", "Step", "count"),
                Col("wait_ns", "Wait", "time", "time in the data loader's next batch"),
                Col("fraction", "Of the step", "share"),
                Col(
                    "gpu_idle_ns",
                    "GPU idle",
                    "time",
                    "part of the wait in which no device had any work",
                ),
                Col(
                    "holds",
                    "Holds up",
                    "text",
                    "at least 5 % of the step, and the GPU had no work in at least half of it",
                ),
            ],
            [
                {
                    **row,
                    "rank": names.get(row["rank"], "–"),
                    "holds": format_yes_no(row.get("bottleneck")),
                }
                for row in loading["steps"]
            ],
            "data_loading.steps",
            brief=False,
        )

    def summary(self, document: ReportDocument) -> str | None:
        """Describes how long the main threads waited, the producers of batches, their activities,
        and whether the GPU waits too.
        """
        loading = document.get("data_loading")
        if not loading:
            return None
        total, waits = loading["total_ns"], loading["waits"]
        # for the ranks that have a loader: time of the answer, their steps; without steps, their
        # windows
        loaders = {wait["rank"] for wait in waits}
        ranks = [rank for rank in document["ranks"] if rank["rank"] in loaders]
        length = sum(
            max(step["duration_ns"], get_step_length(rank, step))
            for rank in ranks
            for step in rank["steps"]
        )
        waited = sum(row["wait_ns"] or 0 for row in loading["steps"]) if length else total
        total_ns = length or sum(rank["window_ns"] for rank in ranks)
        longest = max(wait["duration_ns"] for wait in waits)
        batches = f"{units.format_count(len(waits))} batch{'es' if len(waits) > 1 else ''}"
        if len(ranks) < len(document["ranks"]):
            batches += (
                f" of rank {ranks[0]['rank']}" if len(ranks) == 1 else f" of {len(ranks)} ranks"
            )
        lead = (
            f"{units.format_duration(waited)} waited for data in {batches} "
            f"({units.format_share(waited, total_ns)} of {'the steps' if length else 'the time'}); "
            f"the longest wait took {units.format_duration(longest)}."
        )
        makers = {maker for wait in waits if (maker := wait.get("maker")) is not None}
        clauses = [_BATCH_MAKER_CLAUSES[maker] for maker in sorted(makers)]
        parts: dict[str, int] = {}
        for row in loading.get("spent") or []:
            parts[row["part"]] = parts.get(row["part"], 0) + row["ns"]
        part, ns = max(parts.items(), key=lambda item: item[1], default=("other", 0))
        if part != "other" and 2 * ns > total:
            clauses.append(
                f"{units.format_share(ns, total)} of the waits is {_LOADING_PARTS[part]}"
            )
        steps = [
            bottleneck
            for row in loading["steps"]
            if (bottleneck := row.get("bottleneck")) is not None
        ]
        slow = sum(steps)
        if slow:
            clauses.append(
                f"it holds up {slow} of {len(steps)} {'step' if len(steps) == 1 else 'steps'}"
            )
        clause_text = "; ".join(clauses)
        return f"{lead} {clause_text[0].upper()}{clause_text[1:]}." if clause_text else lead


DATA_LOADING_SECTION = DataLoadingSection()
