"""Renders answer, key numbers, findings, capture and inputs of a page.

`capture.json` may have been edited by hand: missing values and those of another type are omitted.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from traceloom.report.document import Cells, Col
from traceloom.report.figure import draw_stacked_bar, escape_html, render_inline_code, render_legend
from traceloom.report.labels import (
    PHASES,
    build_answer_parts,
    format_memory_name,
    format_rank_name,
    get_group_position,
    get_main_thread_account,
)
from traceloom.report.views.page_table import render_html_table
from traceloom.system import units
from traceloom.trace.notice import HotFrame

if TYPE_CHECKING:
    from traceloom.report.documents import ReportDocument
    from traceloom.report.documents.report import AbsentRow, FindingEvidenceRow, FindingRow


class Reasons:
    """Looks up the document's `absent` list by path."""

    def __init__(self, absent: Iterable[AbsentRow]) -> None:
        self._reasons = {entry["path"]: entry["reason"] for entry in absent}

    def of(self, path: str, otherwise: str = "the report does not say") -> str:
        """Returns why the value at `path` is unknown."""
        return self._reasons.get(path, otherwise)

    def columns(self, path: str) -> dict[str, str]:
        """Returns why single columns of the rows at `path` are unknown, by key."""
        start = f"{path}[*]."
        return {
            key[len(start) :]: reason
            for key, reason in self._reasons.items()
            if key.startswith(start)
        }

    def line(self, path: str, label: str) -> str:
        """Renders one muted line in place of a missing part."""
        return f'<p class="quiet absent"><span class="what">{label}: </span>{render_inline_code(self.of(path))}.</p>'


NO_BREAK = "\u202f"
_MIN_PART_SHARE = 0.01  # share of the bar below which a part is not listed on its own
_MAX_COLOURED_CAUSES = 5  # of idle time, with separate colours
_PHASES = [phase.key for phase in PHASES]


def render_headline(document: ReportDocument) -> str:
    """Renders the sentence and the bar below it."""
    answer = document.get("answer") or {}
    parts = build_answer_parts(answer)
    total_ns = sum(ns for _, _, ns in parts)
    picture = ""
    if total_ns:
        # Colours of the largest causes of idle time by their label; none where there is only one
        idle = sorted((part for part in parts if part[1] == "idle"), key=lambda part: -part[2])
        causes = (
            {label: f"idle-{k}" for k, (label, *_) in enumerate(idle[:_MAX_COLOURED_CAUSES], 1)}
            if len(idle) > 1
            else {}
        )
        key = render_legend(
            _assign_cause_colours(_fold_small_parts(parts, total_ns), causes), total_ns
        )
        picture = f'<div class="answer-bar">{draw_stacked_bar(_assign_cause_colours(parts, causes), total_ns)}{key}</div>'
    headline = str(answer.get("sentence") or document.get("name") or "Report")
    return f"<h1>{render_inline_code(headline).replace(' %', NO_BREAK + '%')}</h1>{picture}"


def _fold_small_parts(
    parts: list[tuple[str, str, int]], total_ns: int
) -> list[tuple[str, str, int]]:
    """Merges parts of the same colour that are too small to see."""
    small = [part for part in parts if part[2] < total_ns * _MIN_PART_SHARE]
    out = [part for part in parts if part[2] >= total_ns * _MIN_PART_SHARE]
    for colour in dict.fromkeys(part[1] for part in small):
        same = [part for part in small if part[1] == colour and part[2]]
        if not same:
            continue
        only_small = not any(part[1] == colour for part in out)
        if len(same) == 1:
            label = same[0][0]
        elif colour in _PHASES:
            label = colour if only_small else f"{colour}: the rest"
        else:
            label = f"{len(same)} {'' if only_small else 'other '}{'causes of idle time' if colour == 'idle' else 'parts'}"
        out.append((label, colour, sum(ns for _, _, ns in same)))
    return sorted(out, key=lambda part: get_group_position(part[1]))


def _assign_cause_colours(
    parts: list[tuple[str, str, int]], causes: dict[str, str]
) -> list[tuple[str, str, int]]:
    return [(label, causes.get(label, colour), ns) for label, colour, ns in parts]


def list_key_numbers(document: ReportDocument) -> Iterator[tuple[str, str, str, str]]:
    """Yields all known key numbers, the most relevant first: label, value, exact value,
    description.
    """
    answer, ranks = document["answer"], document["ranks"]
    median = answer["step_ns"]
    times = [times for rank in ranks if (times := rank["step_times"]) and times["median_ns"]]
    if median is not None and times:
        count, spread = times[0]["count"], times[0]["spread_fraction"]
        if len(times) > 1:
            detail = f"median of all ranks; slowest {units.format_duration(max(entry['median_ns'] for entry in times))}"
        elif count == 1:
            detail = "the only whole step"
        else:
            detail = f"median of {count}" + (
                "" if spread is None else f", interquartile range {spread * 100:.1f} %"
            )
        yield "Step", units.format_duration(median), f"{median} ns", detail

    # The time of the answer by kind, as in the sentence and the bar.
    parts = answer["parts"]
    devices = [device for rank in ranks for device in rank.get("devices") or []]
    if devices and any(part["kind"] in ("compute", "communication", "memory") for part in parts):
        kinds: dict[str, int] = {}
        for part in parts:
            kinds[part["kind"]] = kinds.get(part["kind"], 0) + part["ns"]
        total_ns = sum(kinds.values())
        busy, exposed = total_ns - kinds.get("idle", 0), kinds.get("communication", 0)
        detail = f"{units.format_duration(busy)} of {units.format_duration(total_ns)}" + (
            ", all GPUs" if len(devices) > 1 else ""
        )
        if total_ns:
            yield "GPU busy", units.format_share(busy, total_ns), f"{busy} of {total_ns} ns", detail
        if total_ns and any(device.get("communication_ns") for device in devices):
            yield (
                "Exposed communication",
                units.format_share(exposed, total_ns),
                f"{exposed} of {total_ns} ns",
                "of GPU time",
            )
        causes = [part for part in parts if part["kind"] == "idle"] if total_ns else []
        if causes:
            worst = max(causes, key=lambda part: int(part["ns"]))
            detail = f"of the idle time: {str(worst['label']).removeprefix('idle: ')}"
            yield (
                "Idle, mostly",
                units.format_share(worst["ns"], kinds["idle"]),
                f"{worst['ns']} ns",
                detail,
            )

    main = [row for rank in ranks for row in get_main_thread_account(rank)]
    window = sum(row["ns"] for row in main)

    def of_main(label: str, ns: int, description: str) -> Iterator[tuple[str, str, str, str]]:
        if ns:
            yield label, units.format_share(ns, window), f"{ns} of {window} ns", description

    in_operators = sum(row["ns"] for row in main if row["activity"] == "op")
    yield from of_main("In operators", in_operators, "of the main thread's time")
    loading = sum(row["ns"] for row in main if row["phase"] == "loading")
    yield from of_main("Loading data", loading, "of the main thread's time")
    memories = [
        (peak, memory)
        for memory in document["memory"]["devices"]
        if (peak := memory["peak_bytes"]) is not None
    ]
    memories = [
        entry for entry in memories if not entry[1]["device_type"].startswith("cpu")
    ] or memories
    if memories:
        peak_bytes, memory = max(memories, key=lambda each: each[0])
        yield (
            "Peak memory",
            units.format_size(peak_bytes),
            f"{peak_bytes} B",
            format_memory_name(memory),
        )
    unobserved = sum(row["ns"] for row in main if row["activity"] == "unobserved")
    yield from of_main("Unobserved", unobserved, "of the main thread: Python or waiting")
    longest = max((rank["window_ns"] or 0 for rank in ranks), default=0)
    if longest:
        events = units.format_count(sum(rank.get("event_count") or 0 for rank in ranks))
        yield "Recorded", units.format_duration(longest), f"{longest} ns", f"{events} events"


def render_findings(document: ReportDocument, reasons: Reasons) -> str:
    """Renders the list of findings; one line that explains why there are none."""
    rows = document.get("findings") or []
    if not rows:
        return reasons.line("findings", "Findings")
    context = document.get("findings_ground")
    hint = ""
    if context and not context["holds"]:
        hint += (
            f'<p class="quiet">Take the savings as hints: {render_inline_code(context["law"])}</p>'
        )
    if context and context["limit"]:
        hint += f'<p class="quiet">Of savings: {render_inline_code(context["limit"])}.</p>'
    positions = {rank.get("rank"): k for k, rank in enumerate(document["ranks"])}
    cards = "".join(_render_finding_card(row, positions) for row in rows)
    if context:
        hint += f'<p class="quiet">Savings {render_inline_code(context["basis"])}, by re-timing; they do not overlap.</p>'
    if any(row["host_ns"] and not row["frames"] for row in rows) and not (
        context and context["stacks"]
    ):
        hint += '<p class="quiet">Which code holds the host: record with <code>--stacks</code>.</p>'
    abstained = ""
    if abstentions := context["abstentions"] if context else []:
        items = "".join(
            f"<li>{escape_html(slug)}: {render_inline_code(reason)}</li>"
            for slug, reason in {row["slug"]: row["reason"] for row in abstentions}.items()
        )
        abstained = f"<details><summary>Checks that were skipped ({len(abstentions)})</summary>"
        abstained += f'<ul class="quiet">{items}</ul></details>'
    return f'{hint}<ol class="findings">{cards}</ol>{abstained}'


def _render_finding_card(row: FindingRow, positions: dict[int | None, int]) -> str:
    is_time = row["list"] == "time"
    if is_time:
        figure = ("≥ " if row["lower_bound"] else "") + units.format_share(
            row["saving_fraction"] or 0, 1
        )
        saved = units.format_duration(row["saving_ns"])
    else:
        figure = "risk" if row["saving_bytes"] is None else units.format_size(row["saving_bytes"])
        saved = "memory"
    if is_time and row["saving_low_ns"] is not None:
        saved += f" ({units.format_duration(row['saving_low_ns'])} to {units.format_duration(row['saving_high_ns'])})"
    if is_time and not row["saving_ns"]:
        figure, saved = "note", "saves nothing on its own"
    width = min(row["saving_fraction"] or 0, 1) * 100
    bar = (
        '<svg class="saving" viewBox="0 0 100 4" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect width="{width:.2f}" height="4"/></svg>'
    )
    risk = f'<p class="risk">{render_inline_code(row["risk"])}</p>' if row["risk"] else ""
    alternatives_html = "".join(
        f"<li>{render_inline_code(other['title'])} ({escape(units.format_duration(other['alone_ns']))})</li>"
        for other in row["alternatives"]
    )
    alternatives = (
        f'<p class="quiet">Or, for the same time:</p><ul class="quiet">{alternatives_html}</ul>'
        if alternatives_html
        else ""
    )
    frames = ""
    for frame in (HotFrame(**frame) for frame in row["frames"]):
        source_location = (
            "" if frame.file is None else f" <code>{escape_html(frame.file)}:{frame.line}</code>"
        )
        mostly = (
            "" if frame.inside is None else f", mostly <code>{escape_html(frame.inside)}</code>"
        )
        frames += (
            f"<li><b>{escape(units.format_duration(frame.time_ns))}</b> of host time ({escape(units.format_share(frame.share, 1))}) "
            f"in <code>{escape_html(frame.name)}</code>{source_location}{mostly}{frame.of_ranks}</li>"
        )
    frames_html = f'<ul class="frames">{frames}</ul>' if frames else ""
    alone_note = (
        ""
        if row["alone_ns"] in (None, row["saving_ns"])
        else f" · alone {units.format_duration(row['alone_ns'])}"
    )
    return (
        f'<li class="finding {escape_html(row["severity"])}">'
        f'<p class="figure"><b>{escape(figure)}</b> <span class="quiet">{escape(saved)}</span></p>{bar}'
        f'<p class="title">{render_inline_code(row["title"])}</p><p>{render_inline_code(row["advice"])}</p>{risk}{alternatives}{frames_html}'
        f'<ul class="evidence">{"".join(_render_evidence(evidence, positions) for evidence in row["evidence"])}</ul>'
        f'<p class="quiet"><a href="{escape_html(row["learn_more"])}" target="_blank" rel="noreferrer">What '
        f"{escape_html(row['slug'])} means</a> · confidence {row['confidence']:.1f}{alone_note} · "
        f"evaluated: {render_inline_code(row['change'] or 'no change')}</p></li>"
    )


def _render_evidence(evidence: FindingEvidenceRow, positions: dict[int | None, int]) -> str:
    long = evidence["duration_ns"] if evidence["duration_ns"] is not None else evidence["total_ns"]
    size = "" if long is None else f" ({escape(units.format_duration(long))})"
    count = f"{units.format_count(evidence['count'])} × " if evidence["count"] > 1 else ""
    description = f"{escape(count)}{render_inline_code(evidence['what'])}{size}"
    if evidence["start_ns"] is None or evidence["duration_ns"] is None:
        return f"<li>{description}</li>"
    end = evidence["start_ns"] + max(evidence["duration_ns"], 1)
    rank = positions.get(evidence["rank"], 0)
    return f'<li><a href="#timeline" data-rank="{rank}" data-range="{evidence["start_ns"]}-{end}">{description}</a></li>'


_STATE_LABELS = {
    "recorded": "recorded",
    "graph": "graph step (not used for durations)",
    "unrecorded": "not recorded",
    "early": "not recorded, before the window",
}
_MAX_STEPS = 2_000  # drawn steps of a run


def render_capture(document: ReportDocument, reasons: Reasons) -> str:
    recorded = document.get("capture")
    if not isinstance(recorded, dict):
        return reasons.line("capture", "Recording")
    command = _get_nested(recorded, "run", "command")
    line = ""
    if isinstance(command, list):
        line = f"<p>Recorded with <code>{escape_html(shlex.join(map(str, command)))}</code></p>"
    captured_ranks = recorded.get("ranks")
    ranks = (
        [entry for entry in captured_ranks if isinstance(entry, dict)]
        if isinstance(captured_ranks, list)
        else []
    )
    pictures = "".join(_render_rank_picture(entry, ranks, document) for entry in ranks)
    return f"<h3>Recording</h3>{line}{_render_recording_table(ranks)}{pictures}"


def _get_nested(row: Any, *keys: str) -> Any:
    """Returns the value at a path of keys; None where there is none."""
    for key in keys:
        row = row.get(key) if isinstance(row, dict) else None
    return row


def _render_recording_table(ranks: list[dict[str, Any]]) -> str:
    if not ranks:
        return ""
    rows = []
    for entry in ranks:
        settings, ratio = entry.get("settings"), _get_nested(entry, "overhead", "ratio")
        switched_on = None
        if isinstance(settings, dict):
            switched_on = (
                ", ".join(key.replace("_", " ") for key, on in settings.items() if on is True)
                or "none"
            )
        rows.append(
            {
                "rank": entry.get("rank"),
                "host": entry.get("host"),
                "processor": entry.get("processor"),
                "cpus": entry.get("usable_cpus"),
                "threads": entry.get("torch_threads"),
                "torch": _get_nested(entry, "versions", "torch"),
                "python": _get_nested(entry, "versions", "python"),
                "with": switched_on,
                "recorded_ns": _get_nested(entry, "overhead", "recorded_median_ns"),
                "bare_ns": _get_nested(entry, "overhead", "unrecorded_median_ns"),
                "ratio": f"{ratio:.2f} ×" if isinstance(ratio, (int, float)) else None,
            }
        )
    columns = [
        Col("rank", "Rank", "count"),
        Col("host", "Host"),
        Col("processor", "Processor"),
        Col("cpus", "CPUs", "count", "that the process may use"),
        Col("threads", "Threads", "count", "of PyTorch's operators"),
        Col("torch", "PyTorch"),
        Col("python", "Python"),
        Col("with", "With"),
        Col("recorded_ns", "Step", "time", "median of the recorded steps", scale="step"),
        Col(
            "bare_ns",
            "Bare step",
            "time",
            "median of the steps of this run that were not recorded",
            scale="step",
        ),
        Col("ratio", "Overhead", "text", "recorded by bare step: what recording cost, and chance"),
    ]
    why_unknown = dict.fromkeys(
        ("bare_ns", "ratio"), "no step of this run was left unrecorded after the first ones"
    )
    return render_html_table("recording-table", columns, rows, why_unknown, "Recording by rank")


def _render_rank_picture(
    entry: dict[str, Any], ranks: list[dict[str, Any]], document: ReportDocument
) -> str:
    """Renders the figure of one rank, shown when this rank is selected."""
    picture = _draw_steps(entry)
    if not picture or len(ranks) == 1:
        return picture
    position = next(
        (k for k, r in enumerate(document["ranks"]) if r.get("rank") == entry.get("rank")), None
    )
    if position is None:
        return ""
    only = "" if len(document["ranks"]) == 1 else f' data-of-rank="{position}"'
    return f'<div{only}><p class="of">{format_rank_name(entry, position).capitalize()}</p>{picture}</div>'


def _draw_steps(entry: dict[str, Any]) -> str:
    """Draws every step of the run as a column as high as its wall time."""
    durations, states = (
        _get_nested(entry, "steps", "duration_ns"),
        _get_nested(entry, "steps", "state"),
    )
    if not isinstance(durations, list) or not isinstance(states, list) or len(durations) < 2:
        return ""
    visible_steps = [
        (ns, str(state))
        for ns, state in zip(durations, states, strict=False)
        if isinstance(ns, int) and ns >= 0
    ]
    visible_steps = visible_steps[-_MAX_STEPS:]
    longest = max((ns for ns, _ in visible_steps), default=0) or 1
    columns = "".join(
        f'<rect class="s-{state if state in _STATE_LABELS else "early"}" x="{k + 0.1:.1f}" width="0.8" '
        f'y="{100 - 100 * ns / longest:.2f}" height="{100 * ns / longest:.2f}">'
        f"<title>{units.format_duration(ns)}, {_STATE_LABELS.get(state, escape_html(state))}</title></rect>"
        for k, (ns, state) in enumerate(visible_steps)
    )
    caption = f"Wall time of {len(visible_steps)} steps of the run, up to {units.format_duration(longest)}"
    legend = "".join(
        f'<li><i class="swatch s-{state}"></i>{title}</li>'
        for state, title in _STATE_LABELS.items()
        if any(state == other for _, other in visible_steps)
    )
    return (
        f'<figure class="columns"><figcaption class="quiet">{caption}</figcaption><svg viewBox="0 0 {len(visible_steps)} 100" '
        f'preserveAspectRatio="none" role="img" aria-label="{caption}">{columns}</svg>'
        f'<ul class="legend">{legend}</ul></figure>'
    )


def render_notices(rows: Sequence[Cells], reasons: Reasons) -> str:
    """Renders notices about the data itself, the worst first."""
    if not rows:
        return '<p class="quiet">Nothing to note: every event was read, and nothing in the data looks wrong.</p>'
    marked = [
        {
            **row,
            "weakens": "; ".join(
                f"{effect['part']}: {effect['how']}" for effect in row.get("affects", [])
            ),
        }
        for row in rows
    ]
    columns = [
        Col("severity", "Severity", "grade"),
        Col("message", "Notice"),
        Col("weakens", "Weakens", "text", "parts of the report that are less certain for it"),
        Col("count", "Events", "count"),
        *(
            (Col("rank", "Rank", "count"),)
            if any(row.get("rank") is not None for row in rows)
            else ()
        ),
        Col("slug", "Name", "text", "traceloom explain NAME says what it means"),
    ]
    return render_html_table("notice-table", columns, marked, reasons.columns("notices"), "Notices")


def render_runs(document: ReportDocument, reasons: Reasons) -> str:
    """Renders the runs of the inputs, with the command that reports each alone."""
    columns = [
        Col("name", "Run", "name"),
        Col("sentence", "Answer"),
        Col("ranks", "Ranks", "count", "traces at hand"),
        Col("world_size", "Of", "count", "ranks of the job"),
        Col("window_ns", "Window", "time"),
        Col("steps", "Steps", "count"),
        Col("events", "Events", "count"),
        Col("command", "Report it alone", "name"),
    ]
    return render_html_table(
        "run-table", columns, document["runs"], reasons.columns("runs"), "Runs"
    )


def render_inputs(document: ReportDocument, reasons: Reasons) -> str:
    """Renders the files that were read, and what they state about their recording."""
    rows = []
    for row in document.get("inputs") or []:
        versions = ", ".join(f"{key} {value}" for key, value in (row.get("versions") or {}).items())
        settings = {
            key.replace("_", " "): value for key, value in (row.get("settings") or {}).items()
        }
        on = ", ".join(name for name, value in settings.items() if value) or "none of " + ", ".join(
            settings
        )
        rows.append({**row, "versions": versions or None, "settings": on if settings else None})
    columns = [
        Col("path", "File", "name"),
        Col("rank", "Rank", "count"),
        Col("world_size", "Of", "count", "ranks of the job"),
        Col("host", "Host"),
        Col("events", "Events", "count"),
        Col("settings", "Recorded"),
        Col("versions", "Versions"),
    ]
    why_unknown = {
        **reasons.columns("inputs"),
        "versions": "the file names no versions",
        "settings": "the file does not record its settings",
    }
    return render_html_table("input-table", columns, rows, why_unknown, "Inputs")
