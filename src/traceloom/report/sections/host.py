"""Host threads, blocking calls, data loading."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING

import polars as pl

from traceloom import analyze
from traceloom.analyze.blocking_calls import KINDS, SITES
from traceloom.analyze.host_time import CONCURRENCY, CURVE, ROLES, THREAD_SCHEMA
from traceloom.report.document import Bar, Cells, Col, Part, ReportOptions, Table, UnknownValues, yes_or_no
from traceloom.report.labels import ACTIVITIES, named, rank_name, short
from traceloom.report.sections.section import (
    Columns,
    CoreSection,
    Frames,
    Measurements,
    RankMeasurements,
    Section,
    table,
)
from traceloom.system import units
from traceloom.system.sanitize import sanitize
from traceloom.trace.frames import cast_to_schema, schema
from traceloom.trace.trace import Trace

if TYPE_CHECKING:
    from traceloom.report.documents import ReportDocument
    from traceloom.report.documents.report import DataLoadingValue
    from traceloom.report.documents.sections import BlockingCallsSitesRow, BlockingCallsValue, ThreadsValue


class HostSection(CoreSection):
    """What each host thread did, by innermost activity."""

    key, title = "host", "Host threads"
    shows_only = True
    note = "What each thread did, by innermost activity."
    path = "ranks[*].host.threads"

    def tables(self, document: ReportDocument) -> Iterator[Table]:
        """The host threads of each rank."""
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
                        "bar": Bar(named(ACTIVITIES, activities), thread["window_ns"]),
                    }
                )
            columns = [
                Col("name", "Thread"),
                *(Col(part.key, part.label, "time", swatch=part.group, scale="activity") for part in ACTIVITIES),
                Col("events", "Events", "count", narrow=False),
                Col("bar", "By activity", "bar"),
            ]
            if rows:
                title = f"Host threads of {rank_name(rank, position)}"
                yield Table(f"host-{position}", title, columns, rows, position=position, brief=False)


HOST_SECTION = HostSection()

MOST_CURVES = 8  # ranks whose curve is kept
_WIDTH, _HEIGHT = 720, 72
_SUMS = pl.Schema({name: kind for name, kind in CONCURRENCY.items() if name != "step"})


class ThreadsSection(Section[Frames, "ThreadsValue"]):
    """Host threads by what they do."""

    key, title = "threads", "Threads"
    note = "What each host thread is for, and how many work at the same time."
    what = "host threads by what they do"
    missing = "no host events were recorded"
    parts = {
        "threads": Part(THREAD_SCHEMA, "one row per host thread", nullable=("says", "role")),
        "concurrency": Part(_SUMS, "how long exactly so many threads were active at once"),
        "curve": Part(CURVE, "mean number of active threads in equal parts of the window"),
    }

    def measure(self, trace: Trace, options: ReportOptions) -> Frames:
        threads = analyze.threads(trace)
        by_number = (
            threads.concurrency.group_by("threads").agg(pl.col("ns").sum()).sort("threads").pipe(cast_to_schema, _SUMS)
        )
        return {"threads": threads.threads, "concurrency": by_number, "curve": threads.curve}

    def build(self, study: Measurements[Frames], absent: UnknownValues) -> ThreadsValue | None:
        frames = study.frames(self.parts)
        if not frames["threads"].height:
            absent.say("threads")
            return None
        kept = [trace.rank for trace in study.part.traces][:MOST_CURVES]
        frames["curve"] = frames["curve"].filter(pl.col("rank").is_in(kept, nulls_equal=True))
        return self.lists(frames, absent)

    def tables(self, value: ThreadsValue) -> Iterator[Table]:
        rows = []
        for row in value["threads"]:
            role = ROLES.get(row["role"] or "", str(row["role"]))
            # where it only runs some Python, with the name that says so
            rows.append({**row, "role": f"{role}: {row['says']}" if row["role"] == "python" and row["says"] else role})
        columns = ["?rank", "name", "active_ns", "blocking_call_ns", "+op_ns", "+launch_ns", "+python_ns",
                   "+unobserved_ns", "+event_count", "role"]  # fmt: skip
        yield table("threads.threads", "Threads", columns, rows)
        totals: Counter[int | None] = Counter()
        for at_once in value["concurrency"]:
            totals[at_once["rank"]] += at_once["ns"]
        shares = [{**row, "share": row["ns"] / max(totals[row["rank"]], 1)} for row in value["concurrency"]]
        share = Col("share", "Share", "share", "of the window")
        yield table(
            "threads.concurrency", "Threads active at once", ["?rank", "threads", "ns", share], shares, among=rows
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
            f"{count} {'thread' if count == 1 else 'threads'}; none is active {units.share(none, window)} of the time, "
            f"several at once {units.share(several, window)}"
        )

    def picture(self, value: ThreadsValue) -> str:
        """The number of active threads over time, of the first rank."""
        curve = value["curve"]
        if len(curve) < 2:
            return ""
        rank = curve[0]["rank"]
        active = [row["active"] for row in curve if row["rank"] == rank]
        most = max(*active, 1.0)
        step = _WIDTH / len(active)
        points = "".join(
            f"L{at * step:.1f} {_HEIGHT - value / most * _HEIGHT:.1f}H{(at + 1) * step:.1f}"
            for at, value in enumerate(active)
        )
        of = "" if rank is None or all(row["rank"] == rank for row in value["threads"]) else f" of rank {rank}"
        label = escape(sanitize(f"Active threads{of} over time, at most {most:.2f}"))
        return (
            f'<figure class="spark"><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="100%" height="{_HEIGHT}" '
            f'preserveAspectRatio="none" role="img" aria-label="{label}"><path d="M0 {_HEIGHT}{points}V{_HEIGHT}Z" '
            f'fill="currentColor" fill-opacity="0.35"/></svg><figcaption class="quiet">{label}</figcaption></figure>'
        )


THREADS_SECTION = ThreadsSection()

MOST_SITES = 100  # of one rank
MOST_ROWS = 800  # of all ranks together, but
LEAST_SITES = 10  # of each
_NAME = 60
_WORDS = {
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
_BY_KIND = schema("kind count blocked_ns idle_after_ns", {"kind": SITES["kind"]})
_SPREAD = ("mean_blocked_ns", "min_blocked_ns", "max_blocked_ns", "step_count")
_NO_FRAME = "no Python frame of the program is recorded around the call"


class BlockingCallsSection(Section[tuple[Frames, int], "BlockingCallsValue"]):
    """Calls in which the host waits. Measured are its lists, and the time in all calls."""

    key, title = "blocking_calls", "Blocking calls"
    note = "Where the host stops and waits, and whether the GPU has work meanwhile."
    what = "calls in which the host waits"
    missing = "no call that waits was recorded"
    parts = {
        "by_kind": Part(_BY_KIND, f"sums by kind: {', '.join(KINDS)}", nullable=("idle_after_ns",)),
        "sites": Part(
            SITES,
            "by place, those in Python last, the longest first; at most 100 of a rank, fewer of many",
            {
                "op": "no operator is recorded around the call",
                "frame": _NO_FRAME,
                "stack": _NO_FRAME,
                **dict.fromkeys(_SPREAD, "the trace holds no whole step, or the call is in none"),
            },
            ("gpu_busy_ns", "gpu_idle_ns", "idle_after_ns"),
        ),
    }
    others = {"blocked_ns": {"type": "integer"}}

    def measure(self, trace: Trace, options: ReportOptions) -> tuple[Frames, int]:
        calls = analyze.blocking_calls(trace)
        idle = pl.col("idle_after_ns")
        by_kind = (
            calls.sites.group_by("kind")
            .agg(pl.col("count", "blocked_ns").sum(), pl.when(idle.is_not_null().any()).then(idle.sum()))
            .sort("blocked_ns", "kind", descending=[True, False])
            .pipe(cast_to_schema, _BY_KIND)
        )
        return {"by_kind": by_kind, "sites": calls.sites.head(MOST_SITES)}, calls.blocked_ns

    def build(self, study: Measurements[tuple[Frames, int]], absent: UnknownValues) -> BlockingCallsValue | None:
        most = max(MOST_ROWS // len(study.results), LEAST_SITES)
        sites = study.concat(lambda of: of[0]["sites"].head(most))
        if not sites.height:
            absent.say("blocking_calls")
            return None
        lists = self.lists({"by_kind": study.concat(lambda of: of[0]["by_kind"]), "sites": sites}, absent)
        return {"blocked_ns": sum(blocked_ns for _, blocked_ns in study.results), **lists}

    def tables(self, value: BlockingCallsValue) -> Iterator[Table]:
        rows = [{**row, "what": _WORDS.get(row["kind"], row["kind"]), "where": where(row)} for row in value["sites"]]
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
            Col("where", "Where", "name", "the line that asks, the operators around the call, the call"),
        ]
        yield table("blocking_calls.sites", "Blocking calls", columns, rows)

    def summary(self, value: BlockingCallsValue) -> str | None:
        kinds = [row for row in value["by_kind"] if row["kind"] != "python"] or value["by_kind"]
        whole = sum(row["blocked_ns"] for row in kinds)
        by_site: dict[tuple[str, str], int] = defaultdict(int)  # over all ranks
        for row in value["sites"]:
            if any(row["kind"] == kind["kind"] for kind in kinds):
                by_site[row["kind"], where(row)] += row["blocked_ns"]
        kind, site = max(by_site, key=lambda key: by_site[key])
        share = units.share(by_site[kind, site], max(whole, 1))
        return (
            f"{units.duration(whole)} of host time in calls that wait; "
            f"{share} of it for {_WORDS.get(kind, kind)} at {short(site, _NAME)}"
        )


def where(row: BlockingCallsSitesRow) -> str:
    """The line (its file without folders), the outermost operator, the call: `train.py(12): step: aten::item, ...`."""
    operator = str(row["op"]).split(" > ", 1)[0] if row["op"] else None
    call = str(row["call"]).removeprefix("<built-in ").removesuffix(">")
    operation = ", ".join(part for part in (operator, call) if part)
    return f"{str(row['frame']).rsplit('/', 1)[-1]}: {operation}" if row["frame"] else operation


SECTION = BlockingCallsSection()

_MAKERS = {"main_thread": "the main thread makes the batches itself", "workers": "workers make the batches"}
_LOADING_PARTS = {
    "fetch": "fetching from the data set",
    "collate": "collating",
    "pin_memory": "pinning memory",
    "workers": "waiting for workers",
    "operators": "operators",
}


class DataLoadingSection(CoreSection):
    """Waits of the main thread for the next batch."""

    key, title = "data_loading", "Data loading"
    anchor = "loading"
    note = "Waits for the next batch."

    def build(self, study: Measurements[RankMeasurements], absent: UnknownValues) -> DataLoadingValue | None:
        """Waits for the data loader; null where no rank has a loader."""
        with_loader = [rank.data_loading.waits.height > 0 for rank in study.results]
        if not any(with_loader):
            absent.say("data_loading")
            return None
        return {
            "total_ns": sum(rank.data_loading.total_ns or 0 for rank in study.results),
            "waits": absent.rows(
                study.concat(lambda rank: rank.data_loading.waits.drop("event"), with_loader), "data_loading.waits"
            ),
            "steps": absent.rows(study.concat(lambda rank: rank.data_loading.steps, with_loader), "data_loading.steps"),
            "spent": absent.rows(study.concat(lambda rank: rank.data_loading.spent, with_loader), "data_loading.spent"),
        }

    def tables(self, document: ReportDocument) -> Iterator[Table]:
        """The waits by step."""
        loading = document.get("data_loading")
        if not loading or not loading["steps"]:
            return
        names = {rank["rank"]: rank_name(rank, k) for k, rank in enumerate(document["ranks"])}
        columns = [
            *((Col("rank", "Rank"),) if len(names) > 1 else ()),
            Col("step", "Step", "count"),
            Col("wait_ns", "Wait", "time", "time in the data loader's next batch"),
            Col("fraction", "Of the step", "share"),
            Col("gpu_idle_ns", "GPU idle", "time", "part of the wait in which no device had any work"),
            Col(
                "holds", "Holds up", "text", "at least 5 % of the step, and the GPU had no work in at least half of it"
            ),
        ]
        rows = [
            {**row, "rank": names.get(row["rank"], "–"), "holds": yes_or_no(row.get("bottleneck"))}
            for row in loading["steps"]
        ]
        yield Table("loading-table", "Loader waits by step", columns, rows, "data_loading.steps", brief=False)

    def summary(self, document: ReportDocument) -> str | None:
        """How long the main threads waited, who makes the batches, what the time goes to, whether the GPU waits too."""
        loading = document.get("data_loading")
        if not loading:
            return None
        total, waits = loading["total_ns"], loading["waits"]
        # of the ranks that have a loader: of the time of the answer, their steps; without steps, of their windows
        loaders = {wait["rank"] for wait in waits}
        ranks = [rank for rank in document["ranks"] if rank["rank"] in loaders]
        length = sum(step["duration_ns"] for rank in ranks for step in rank["steps"])
        waited = sum(row["wait_ns"] or 0 for row in loading["steps"]) if length else total
        whole = length or sum(rank["window_ns"] for rank in ranks)
        longest = max(wait["duration_ns"] for wait in waits)
        batches = f"{units.count(len(waits))} batch{'es' if len(waits) > 1 else ''}"
        if len(ranks) < len(document["ranks"]):
            batches += f" of rank {ranks[0]['rank']}" if len(ranks) == 1 else f" of {len(ranks)} ranks"
        sentence = (
            f"{units.duration(waited)} waited for data in {batches} "
            f"({units.share(waited, whole)} of {'the steps' if length else 'the time'}); "
            f"the longest wait took {units.duration(longest)}."
        )
        makers = {maker for wait in waits if (maker := wait.get("maker")) is not None}
        clauses = [_MAKERS[maker] for maker in sorted(makers)]
        parts: dict[str, int] = {}
        for row in loading.get("spent") or []:
            parts[row["part"]] = parts.get(row["part"], 0) + row["ns"]
        part, ns = max(parts.items(), key=lambda item: item[1], default=("other", 0))
        if part != "other" and 2 * ns > total:
            clauses.append(f"{units.share(ns, total)} of the waits is {_LOADING_PARTS[part]}")
        steps = [held for row in loading["steps"] if (held := row.get("bottleneck")) is not None]
        slow = sum(steps)
        if slow:
            clauses.append(f"it holds up {slow} of {len(steps)} {'step' if len(steps) == 1 else 'steps'}")
        more = "; ".join(clauses)
        return f"{sentence} {more[0].upper()}{more[1:]}." if more else sentence


DATA_LOADING_SECTION = DataLoadingSection()
