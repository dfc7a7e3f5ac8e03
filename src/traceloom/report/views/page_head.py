"""Answer, key numbers, findings, capture, inputs of a page.

`capture.json` may have been written by hand: whatever is missing or of another kind is left out.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from traceloom.report.document import Cells, Col
from traceloom.report.figure import bar, inline_code, legend, text
from traceloom.report.labels import PHASES, allocator, main_account, of_answer, order, rank_name
from traceloom.report.views.page_table import table
from traceloom.system import units
from traceloom.trace.notice import HotFrame

if TYPE_CHECKING:
    from traceloom.report.documents import ReportDocument
    from traceloom.report.documents.report import AbsentRow, FindingEvidenceRow, FindingRow


class Reasons:
    """The document's `absent` list, asked by path."""

    def __init__(self, absent: Iterable[AbsentRow]) -> None:
        self._reasons = {entry["path"]: entry["reason"] for entry in absent}

    def of(self, path: str, otherwise: str = "the report does not say") -> str:
        """Why the value at `path` is unknown."""
        return self._reasons.get(path, otherwise)

    def columns(self, path: str) -> dict[str, str]:
        """Why single columns of the rows at `path` are unknown, by key."""
        start = f"{path}[*]."
        return {key[len(start) :]: reason for key, reason in self._reasons.items() if key.startswith(start)}

    def line(self, path: str, what: str) -> str:
        """One quiet line in place of a part that is missing."""
        return f'<p class="quiet absent"><span class="what">{what}: </span>{inline_code(self.of(path))}.</p>'


NO_BREAK = "\u202f"
_SMALL = 0.01  # share of the bar below which a part is not listed on its own
_CAUSES = 5  # of idle time with colours of their own
_PHASES = [phase.key for phase in PHASES]


def headline(document: ReportDocument) -> str:
    """The sentence and the bar below it."""
    answer = document.get("answer") or {}
    parts = of_answer(answer)
    whole = sum(ns for _, _, ns in parts)
    picture = ""
    if whole:
        # Colours of the largest causes of idle time by their label; none where there is only one
        idle = sorted((part for part in parts if part[1] == "idle"), key=lambda part: -part[2])
        causes = {label: f"idle-{k}" for k, (label, *_) in enumerate(idle[:_CAUSES], 1)} if len(idle) > 1 else {}
        key = legend(_coloured(_folded(parts, whole), causes), whole)
        picture = f'<div class="answer-bar">{bar(_coloured(parts, causes), whole)}{key}</div>'
    sentence = str(answer.get("sentence") or document.get("name") or "Report")
    return f"<h1>{inline_code(sentence).replace(' %', NO_BREAK + '%')}</h1>{picture}"


def _folded(parts: list[tuple[str, str, int]], whole: int) -> list[tuple[str, str, int]]:
    """The parts with those of the same colour that are too small to see as one."""
    small = [part for part in parts if part[2] < whole * _SMALL]
    out = [part for part in parts if part[2] >= whole * _SMALL]
    for colour in dict.fromkeys(part[1] for part in small):
        same = [part for part in small if part[1] == colour and part[2]]
        if not same:
            continue
        alone = not any(part[1] == colour for part in out)
        if len(same) == 1:
            label = same[0][0]
        elif colour in _PHASES:
            label = colour if alone else f"{colour}: the rest"
        else:
            label = f"{len(same)} {'' if alone else 'other '}{'causes of idle time' if colour == 'idle' else 'parts'}"
        out.append((label, colour, sum(ns for _, _, ns in same)))
    return sorted(out, key=lambda part: order(part[1]))


def _coloured(parts: list[tuple[str, str, int]], causes: dict[str, str]) -> list[tuple[str, str, int]]:
    return [(label, causes.get(label, colour), ns) for label, colour, ns in parts]


def numbers(document: ReportDocument) -> Iterator[tuple[str, str, str, str]]:
    """All key numbers that are known, those that say most first: label, value, exact value, what it is of."""
    answer, ranks = document["answer"], document["ranks"]
    median = answer["step_ns"]
    times = [times for rank in ranks if (times := rank["step_times"]) and times["median_ns"]]
    if median is not None and times:
        count, spread = times[0]["count"], times[0]["spread_fraction"]
        if len(times) > 1:
            more = f"median of all ranks; slowest {units.duration(max(each['median_ns'] for each in times))}"
        elif count == 1:
            more = "the only whole step"
        else:
            more = f"median of {count}" + ("" if spread is None else f", interquartile range {spread * 100:.1f} %")
        yield "Step", units.duration(median), f"{median} ns", more

    # The time of the answer, as the sentence and the bar have it, by kind.
    parts = answer["parts"]
    devices = [device for rank in ranks for device in rank.get("devices") or []]
    if devices and any(part["kind"] in ("compute", "communication", "memory") for part in parts):
        kinds: dict[str, int] = {}
        for part in parts:
            kinds[part["kind"]] = kinds.get(part["kind"], 0) + part["ns"]
        whole = sum(kinds.values())
        busy, exposed = whole - kinds.get("idle", 0), kinds.get("communication", 0)
        more = f"{units.duration(busy)} of {units.duration(whole)}" + (", all GPUs" if len(devices) > 1 else "")
        if whole:
            yield "GPU busy", units.share(busy, whole), f"{busy} of {whole} ns", more
        if whole and any(device.get("communication_ns") for device in devices):
            yield "Exposed communication", units.share(exposed, whole), f"{exposed} of {whole} ns", "of GPU time"
        causes = [part for part in parts if part["kind"] == "idle"] if whole else []
        if causes:
            worst = max(causes, key=lambda part: int(part["ns"]))
            more = f"of the idle time: {str(worst['label']).removeprefix('idle: ')}"
            yield "Idle, mostly", units.share(worst["ns"], kinds["idle"]), f"{worst['ns']} ns", more

    main = [row for rank in ranks for row in main_account(rank)]
    window = sum(row["ns"] for row in main)

    def of_main(label: str, ns: int, more: str) -> Iterator[tuple[str, str, str, str]]:
        if ns:
            yield label, units.share(ns, window), f"{ns} of {window} ns", more

    in_operators = sum(row["ns"] for row in main if row["activity"] == "op")
    yield from of_main("In operators", in_operators, "of the main thread's time")
    loading = sum(row["ns"] for row in main if row["phase"] == "loading")
    yield from of_main("Loading data", loading, "of the main thread's time")
    memories = [
        (peak, memory) for memory in document["memory"]["devices"] if (peak := memory["peak_bytes"]) is not None
    ]
    memories = [each for each in memories if not each[1]["device_type"].startswith("cpu")] or memories
    if memories:
        peak_bytes, memory = max(memories, key=lambda each: each[0])
        yield "Peak memory", units.size(peak_bytes), f"{peak_bytes} B", allocator(memory)
    unobserved = sum(row["ns"] for row in main if row["activity"] == "unobserved")
    yield from of_main("Unobserved", unobserved, "of the main thread: Python or waiting")
    longest = max((rank["window_ns"] or 0 for rank in ranks), default=0)
    if longest:
        events = units.count(sum(rank.get("event_count") or 0 for rank in ranks))
        yield "Recorded", units.duration(longest), f"{longest} ns", f"{events} events"


def findings(document: ReportDocument, reasons: Reasons) -> str:
    """The list of findings; one line that says why there are none."""
    rows = document.get("findings") or []
    if not rows:
        return reasons.line("findings", "Findings")
    context = document.get("findings_ground")
    hint = ""
    if context and not context["holds"]:
        hint += f'<p class="quiet">Take the savings as hints: {inline_code(context["law"])}</p>'
    if context and context["limit"]:
        hint += f'<p class="quiet">Of savings: {inline_code(context["limit"])}.</p>'
    positions = {rank.get("rank"): k for k, rank in enumerate(document["ranks"])}
    cards = "".join(_card(row, positions) for row in rows)
    if context:
        hint += f'<p class="quiet">Savings {inline_code(context["basis"])}, by re-timing; they do not overlap.</p>'
    if any(row["host_ns"] for row in rows) and not (context and context["stacks"]):
        hint += '<p class="quiet">Which code holds the host: record with <code>--stacks</code>.</p>'
    abstained = ""
    if abstentions := context["abstentions"] if context else []:
        reason_of = {row["slug"]: row["reason"] for row in abstentions}
        items = "".join(f"<li>{text(slug)}: {inline_code(reason)}</li>" for slug, reason in reason_of.items())
        abstained = f"<details><summary>Checks that were skipped ({len(abstentions)})</summary>"
        abstained += f'<ul class="quiet">{items}</ul></details>'
    return f'{hint}<ol class="findings">{cards}</ol>{abstained}'


def _card(row: FindingRow, positions: dict[int | None, int]) -> str:
    of_time = row["list"] == "time"
    if of_time:
        figure = ("≥ " if row["lower_bound"] else "") + units.share(row["saving_fraction"] or 0, 1)
        saved = units.duration(row["saving_ns"])
    else:
        figure = "risk" if row["saving_bytes"] is None else units.size(row["saving_bytes"])
        saved = "memory"
    if of_time and row["saving_low_ns"] is not None:
        saved += f" ({units.duration(row['saving_low_ns'])} to {units.duration(row['saving_high_ns'])})"
    if of_time and not row["saving_ns"]:
        figure, saved = "note", "saves nothing on its own"
    width = min(row["saving_fraction"] or 0, 1) * 100
    bar = (
        '<svg class="saving" viewBox="0 0 100 4" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect width="{width:.2f}" height="4"/></svg>'
    )
    risk = f'<p class="risk">{inline_code(row["risk"])}</p>' if row["risk"] else ""
    others = "".join(
        f"<li>{inline_code(other['title'])} ({escape(units.duration(other['alone_ns']))})</li>"
        for other in row["alternatives"]
    )
    alternatives = f'<p class="quiet">Or, for the same time:</p><ul class="quiet">{others}</ul>' if others else ""
    frames = ""
    for frame in (HotFrame(**frame) for frame in row["frames"]):
        where = "" if frame.file is None else f" <code>{text(frame.file)}:{frame.line}</code>"
        mostly = "" if frame.inside is None else f", mostly <code>{text(frame.inside)}</code>"
        frames += (
            f"<li><b>{escape(units.duration(frame.time_ns))}</b> of host time ({escape(units.share(frame.share, 1))}) "
            f"in <code>{text(frame.name)}</code>{where}{mostly}{frame.of_ranks}</li>"
        )
    held = f'<ul class="frames">{frames}</ul>' if frames else ""
    alone = "" if row["alone_ns"] in (None, row["saving_ns"]) else f" · alone {units.duration(row['alone_ns'])}"
    return (
        f'<li class="finding {text(row["severity"])}">'
        f'<p class="figure"><b>{escape(figure)}</b> <span class="quiet">{escape(saved)}</span></p>{bar}'
        f'<p class="title">{inline_code(row["title"])}</p><p>{inline_code(row["advice"])}</p>{risk}{alternatives}{held}'
        f'<ul class="evidence">{"".join(_evidence(evidence, positions) for evidence in row["evidence"])}</ul>'
        f'<p class="quiet"><a href="{text(row["learn_more"])}" target="_blank" rel="noreferrer">What '
        f"{text(row['slug'])} means</a> · confidence {row['confidence']:.1f}{alone} · "
        f"evaluated: {inline_code(row['change'] or 'no change')}</p></li>"
    )


def _evidence(evidence: FindingEvidenceRow, positions: dict[int | None, int]) -> str:
    long = evidence["duration_ns"] if evidence["duration_ns"] is not None else evidence["total_ns"]
    size = "" if long is None else f" ({escape(units.duration(long))})"
    count = f"{units.count(evidence['count'])} × " if evidence["count"] > 1 else ""
    description = f"{escape(count)}{inline_code(evidence['what'])}{size}"
    if evidence["start_ns"] is None or evidence["duration_ns"] is None:
        return f"<li>{description}</li>"
    end = evidence["start_ns"] + max(evidence["duration_ns"], 1)
    rank = positions.get(evidence["rank"], 0)
    return (
        f'<li><a href="#timeline" data-rank="{rank}" data-range="{evidence["start_ns"]}-{end}">{description}</a></li>'
    )


_STATES = {
    "recorded": "recorded",
    "graph": "graph step (not used for durations)",
    "unrecorded": "not recorded",
    "early": "not recorded, before the window",
}
_MOST_STEPS = 2_000  # drawn of a run


def capture(document: ReportDocument, reasons: Reasons) -> str:
    """The recording of every rank."""
    recorded = document.get("capture")
    if not isinstance(recorded, dict):
        return reasons.line("capture", "Recording")
    command = _of(recorded, "run", "command")
    line = ""
    if isinstance(command, list):
        line = f"<p>Recorded with <code>{text(shlex.join(map(str, command)))}</code></p>"
    listed = recorded.get("ranks")
    ranks = [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
    pictures = "".join(_in_block(entry, ranks, document) for entry in ranks)
    return f"<h3>Recording</h3>{line}{_machines(ranks)}{pictures}"


def _of(row: Any, *keys: str) -> Any:
    """The value at a path of keys; None where there is none."""
    for key in keys:
        row = row.get(key) if isinstance(row, dict) else None
    return row


def _machines(ranks: list[dict[str, Any]]) -> str:
    if not ranks:
        return ""
    rows = []
    for entry in ranks:
        settings, ratio = entry.get("settings"), _of(entry, "overhead", "ratio")
        switched_on = None
        if isinstance(settings, dict):
            switched_on = ", ".join(key.replace("_", " ") for key, on in settings.items() if on is True) or "none"
        rows.append(
            {
                "rank": entry.get("rank"),
                "host": entry.get("host"),
                "processor": entry.get("processor"),
                "cpus": entry.get("usable_cpus"),
                "threads": entry.get("torch_threads"),
                "torch": _of(entry, "versions", "torch"),
                "python": _of(entry, "versions", "python"),
                "with": switched_on,
                "recorded_ns": _of(entry, "overhead", "recorded_median_ns"),
                "bare_ns": _of(entry, "overhead", "unrecorded_median_ns"),
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
        Col("bare_ns", "Bare step", "time", "median of the steps of this run that were not recorded", scale="step"),
        Col("ratio", "Overhead", "text", "recorded by bare step: what recording cost, and chance"),
    ]
    why_unknown = dict.fromkeys(("bare_ns", "ratio"), "no step of this run was left unrecorded after the first ones")
    return table("recording-table", columns, rows, why_unknown, "Recording by rank")


def _in_block(entry: dict[str, Any], ranks: list[dict[str, Any]], document: ReportDocument) -> str:
    """The picture of one rank, shown when this rank is the chosen one."""
    picture = _steps(entry)
    if not picture or len(ranks) == 1:
        return picture
    position = next((k for k, r in enumerate(document["ranks"]) if r.get("rank") == entry.get("rank")), None)
    if position is None:
        return ""
    only = "" if len(document["ranks"]) == 1 else f' data-of-rank="{position}"'
    return f'<div{only}><p class="of">{rank_name(entry, position).capitalize()}</p>{picture}</div>'


def _steps(entry: dict[str, Any]) -> str:
    """Every step of the run as a column as high as its wall time."""
    durations, states = _of(entry, "steps", "duration_ns"), _of(entry, "steps", "state")
    if not isinstance(durations, list) or not isinstance(states, list) or len(durations) < 2:
        return ""
    shown = [(ns, str(state)) for ns, state in zip(durations, states, strict=False) if isinstance(ns, int) and ns >= 0]
    shown = shown[-_MOST_STEPS:]
    longest = max((ns for ns, _ in shown), default=0) or 1
    columns = "".join(
        f'<rect class="s-{state if state in _STATES else "early"}" x="{k + 0.1:.1f}" width="0.8" '
        f'y="{100 - 100 * ns / longest:.2f}" height="{100 * ns / longest:.2f}">'
        f"<title>{units.duration(ns)}, {_STATES.get(state, text(state))}</title></rect>"
        for k, (ns, state) in enumerate(shown)
    )
    caption = f"Wall time of {len(shown)} steps of the run, up to {units.duration(longest)}"
    legend = "".join(
        f'<li><i class="swatch s-{state}"></i>{title}</li>'
        for state, title in _STATES.items()
        if any(state == other for _, other in shown)
    )
    return (
        f'<figure class="columns"><figcaption class="quiet">{caption}</figcaption><svg viewBox="0 0 {len(shown)} 100" '
        f'preserveAspectRatio="none" role="img" aria-label="{caption}">{columns}</svg>'
        f'<ul class="legend">{legend}</ul></figure>'
    )


def notices(rows: Sequence[Cells], reasons: Reasons) -> str:
    """What the reader must know about the data itself, the worst first."""
    if not rows:
        return '<p class="quiet">Nothing to note: every event was read, and nothing in the data looks wrong.</p>'
    marked = [
        {
            **row,
            "weakens": "; ".join(f"{effect['part']}: {effect['how']}" for effect in row.get("affects", [])),
        }
        for row in rows
    ]
    columns = [
        Col("severity", "Severity", "grade"),
        Col("message", "Notice"),
        Col("weakens", "Weakens", "text", "parts of the report that are less certain for it"),
        Col("count", "Events", "count"),
        *((Col("rank", "Rank", "count"),) if any(row.get("rank") is not None for row in rows) else ()),
        Col("slug", "Name", "text", "traceloom explain NAME says what it means"),
    ]
    return table("notice-table", columns, marked, reasons.columns("notices"), "Notices")


def runs(document: ReportDocument, reasons: Reasons) -> str:
    """The runs that the inputs hold, with the command that reports each alone."""
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
    return table("run-table", columns, document["runs"], reasons.columns("runs"), "Runs")


def inputs(document: ReportDocument, reasons: Reasons) -> str:
    """The files that were read, and what they say about their recording."""
    rows = []
    for row in document.get("inputs") or []:
        versions = ", ".join(f"{key} {value}" for key, value in (row.get("versions") or {}).items())
        settings = {key.replace("_", " "): value for key, value in (row.get("settings") or {}).items()}
        on = ", ".join(name for name, value in settings.items() if value) or "none of " + ", ".join(settings)
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
    return table("input-table", columns, rows, why_unknown, "Inputs")
