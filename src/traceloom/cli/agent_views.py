"""Renders the responses of the agent as lines of a terminal."""

import datetime as dt
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from operator import attrgetter, itemgetter
from pathlib import PurePosixPath
from statistics import fmean

import msgspec
from rich.text import Text

from traceloom.agent.api import (
    DeviceResponse,
    DevicesResponse,
    DoctorResponse,
    EventResponse,
    HangsResponse,
    ProcessesResponse,
    QueryResponse,
    SeriesResponse,
    StacksResponse,
    StatusResponse,
    TraceResponse,
    TriggersResponse,
    ValueResponse,
)
from traceloom.agent.metrics import METRICS, PREFIX
from traceloom.report.views.terminal_table import (
    BAR_FILLS,
    DIM_STYLE,
    SEVERITY_STYLES,
    Cell,
    TextColumn,
    draw_bar,
    draw_sparkline,
    render_heading,
    render_paragraph,
    render_table,
)
from traceloom.server.client import AgentClient
from traceloom.system import units
from traceloom.system.sanitize import sanitize

_BAR_WIDTH = 10
_NONE = "–"
_COLOR = BAR_FILLS["compute"][1]
_CHECK_STATES = {
    "yes": ("work", "✓", "green"),
    "partly": ("work in part", *SEVERITY_STYLES["warning"]),
    "no": ("do not work", *SEVERITY_STYLES["error"]),
}
_AREAS = (
    "rights",
    "devices",
    "collect",
    "owners",
    "jobs",
    "traces",
    "triggers",
    "probes",
    "stacks",
    "files",
    "extras",
)


class HostValues(msgspec.Struct, frozen=True):
    """Busy share of the processors; bytes of memory, used and total. None if unknown."""

    cpu: float | None = None
    memory: tuple[float, float] | None = None


class HostSnapshot(msgspec.Struct, frozen=True):
    """The current state of host, devices and processes."""

    status: StatusResponse
    devices: DevicesResponse
    processes: ProcessesResponse
    host: HostValues


def status(answer: StatusResponse, width: int) -> Iterator[Text]:
    """Yields the state of the agent: itself, its collectors, its history."""
    up = dt.timedelta(seconds=(answer.now_ns - answer.started_ns) // 10**9)
    yield Text.assemble(
        ("Agent of ", ""),
        (sanitize(answer.host), "bold"),
        f": up {up}, pid {answer.pid}, version {answer.version}",
    )
    stale = f", {answer.stale_devices} stale" if answer.stale_devices else ""
    yield Text(
        f"{units.format_quantity(answer.devices, 'device')}{stale}, {units.format_quantity(answer.processes, 'process')} "
        f"that matter, {units.format_count(answer.series)} series"
    )
    history = answer.history
    lost = f", {history['lost_ticks']:.0f} ticks lost" if history.get("lost_ticks") else ""
    yield Text(f"History: {units.format_size(int(history.get('bytes', 0)))} on disk{lost}")
    if answer.history_error:
        yield from render_paragraph(f"  in memory alone: {answer.history_error}", width)
    for name, last_error in answer.publishers.items():
        yield from render_paragraph(f"{name}: {last_error or 'publishes'}", width)
    yield from render_heading("Collectors", "period, time of the last run", width)
    columns = [
        TextColumn("collector", right=False),
        TextColumn("every"),
        TextColumn("took"),
        TextColumn("runs"),
        TextColumn("failed"),
    ]
    rows = [
        [
            sanitize(state.name),
            f"{state.period_seconds:g} s",
            units.format_duration(int(state.seconds * 1e9)) if state.runs else _NONE,
            units.format_count(state.runs),
            units.format_count(sum(state.failures.values())),
        ]
        for state in answer.collectors
    ]
    yield from render_table(
        columns, rows, ("", lambda row, left: _cut(answer.collectors[row].last_error, left)), width
    )


def render_processes(
    answer: ProcessesResponse, devices: Sequence[DeviceResponse], width: int
) -> Iterator[Text]:
    """Yields the relevant processes, with owner, devices and step rate."""
    if not answer.processes:
        owner_note = " of yours" if answer.hidden else ""
        yield from render_paragraph(
            f"No process{owner_note} uses a device, runs a framework, or belongs to a job.", width
        )
    index = {device.uuid: device.index for device in devices}
    rows = sorted(answer.processes, key=lambda row: (row.owner.job, row.owner.rank or 0, row.pid))
    columns = [
        TextColumn("pid"),
        TextColumn("user", right=False),
        TextColumn("job", right=False),
        TextColumn("rank"),
        TextColumn("framework", right=False),
        TextColumn("GPUs", right=False),
        TextColumn("memory"),
        TextColumn("steps/s"),
    ]
    cells: list[list[Cell]] = []
    calls: list[str] = []
    for row in rows:
        owner = row.owner
        rank = (
            _NONE
            if owner.rank is None
            else f"{owner.rank}" + (f"/{owner.world_size}" if owner.world_size else "")
        )
        memory = _find_value(row.values, "process_memory_bytes")
        framework = f"{owner.framework} {owner.framework_version}".strip()
        pace: Cell = _NONE if row.steps_per_second is None else f"{row.steps_per_second:.3g}"
        if (since_ns := row.hung_since_ns) is not None:
            pace = Text(
                f"hangs {units.format_duration(max(time.time_ns() - since_ns, 0))}",
                SEVERITY_STYLES["error"][1],
            )
        # Omit the directory of the program, which would fill a narrow terminal.
        program, blank, arguments = row.command.partition(" ")
        calls.append(
            f"{program.rpartition('/')[2]}{blank}{arguments}" if program else str(row.unreadable)
        )
        cells.append(
            [
                str(row.pid),
                _cut(owner.user or str(row.uid), 12),
                _cut(owner.job or _NONE, width // 5),
                rank,
                _cut(framework or _NONE, 20),
                ",".join(index.get(uuid, uuid[:8]) for uuid in row.devices) or _NONE,
                _NONE if memory is None else units.format_size(int(memory)),
                pace,
            ]
        )
    filled = [
        column for column in range(len(columns)) if any(row[column] != _NONE for row in cells)
    ]  # columns without values are omitted
    if rows:
        yield from render_table(
            [columns[column] for column in filled],
            [[row[column] for column in filled] for row in cells],
            ("command", lambda row, left: _cut(calls[row], left)),
            width,
        )
    if answer.hidden:
        yield from render_paragraph(
            f"{units.format_quantity(answer.hidden, 'process')} of other users are not shown; root sees them.",
            width,
            DIM_STYLE,
        )


def render_events(happened: Sequence[EventResponse], width: int) -> Iterator[Text]:
    """Yields a line for each event: time, job or device, description."""
    if not happened:
        yield Text("Nothing happened in this time.")
        return
    columns = [TextColumn("at", right=False), TextColumn("job or device", right=False)]
    cells: list[list[Cell]] = [
        [
            dt.datetime.fromtimestamp(event.at_ns / 1e9, tz=dt.timezone.utc)
            .astimezone()
            .strftime("%d %b %H:%M:%S"),
            _cut(event.job or event.device or _NONE, 24),
        ]
        for event in happened
    ]

    def what(row: int, width_left: int) -> Text:
        event = happened[row]
        code = "" if event.code is None else f" {event.code}"
        return Text(_cut(f"{event.kind}{code}: {event.text}", width_left))

    yield from render_heading("Events", "oldest first", width)
    yield from render_table(columns, cells, ("", what), width)


def render_top(picture: HostSnapshot, width: int) -> Iterator[Text]:
    """Yields the current state of host, devices and processes."""
    state, host = picture.status, picture.host
    yield Text.assemble((sanitize(state.host), "bold"), f"  {_format_time(state.now_ns)}")
    if host.cpu is not None:
        yield Text.assemble(
            " processors ", _draw_bar(host.cpu), f" {units.format_percent(host.cpu)} % busy"
        )
    if host.memory is not None:
        used, total_memory = host.memory
        yield Text.assemble(
            " memory     ",
            _draw_bar(used / total_memory),
            f" {units.format_size(int(used))} of {units.format_size(int(total_memory))}",
        )
    devices = picture.devices.devices
    if devices:
        models = Counter(device.model for device in devices)
        yield from render_heading(
            "Devices", ", ".join(f"{number} x {model}" for model, number in models.items()), width
        )
        yield from _render_devices(devices, width)
        yield from render_paragraph(
            "None of busy, SM active and power alone says whether work gets done.", width, DIM_STYLE
        )
    yield from render_heading("Processes", "", width)
    yield from render_processes(picture.processes, devices, width)


def _render_devices(devices: Sequence[DeviceResponse], width: int) -> Iterator[Text]:
    columns = [
        TextColumn("GPU"),
        TextColumn("busy", right=False),
        TextColumn("SM active"),
        TextColumn("memory"),
        TextColumn("power"),
        TextColumn("FLOP/s"),
    ]
    cells: list[list[Cell]] = []
    for device in devices:
        values = device.values
        busy, active = (
            _find_value(values, "gpu_busy_ratio"),
            _find_value(values, "gpu_sm_active_ratio"),
        )
        memory, power = (
            _find_value(values, "gpu_memory_used_bytes"),
            _find_value(values, "gpu_power_watts"),
        )
        rates = [value for value in values if value.metric == f"{PREFIX}gpu_flops"]
        bounds = [
            [value.value for value in rates if value.labels["bound"] == bound]
            for bound in ("low", "high")
        ]
        rate = _NONE
        if bounds[0] and bounds[1]:
            low, high = bounds[0][0], bounds[1][0]
            rate = (
                units.format_flop_rate(low)
                if low == high
                else f"{low / 1e12:.3g} – {units.format_flop_rate(high)}"
            )
        cells.append(
            [
                device.index,
                Text(_NONE)
                if busy is None
                else Text.assemble(_draw_bar(busy), f" {units.format_percent(busy):>5} %"),
                _NONE if active is None else f"{units.format_percent(active)} %",
                _NONE if memory is None else units.format_size(int(memory)),
                _NONE if power is None else f"{power:.0f} W",
                rate,
            ]
        )

    def remark(row: int, width_left: int) -> Text:
        """Returns why it is stale, else its owner."""
        stale = devices[row].stale
        return Text(_cut(stale or ", ".join(devices[row].jobs), width_left), "red" if stale else "")

    yield from render_table(columns, cells, ("", remark), width)


def fetch_host_values(client: AgentClient) -> HostValues:
    """Returns the busy share of processors and the used memory, from the last minute."""
    cpu = memory = None
    rates = {
        series["labels"]["mode"]: series["values"][-1]
        for series in client.get("query", metric="host_cpu_seconds_total", since="60s")["series"]
        if series["values"]
    }
    if rates and sum(rates.values()):
        cpu = 1 - (rates.get("idle", 0.0) + rates.get("iowait", 0.0)) / sum(rates.values())
    states = {
        series["labels"]["state"]: series["values"][-1]
        for series in client.get("query", metric="host_memory_bytes", since="60s")["series"]
        if series["values"]
    }
    if states:
        memory = states.get("used", 0.0), sum(states.values())
    return HostValues(cpu, memory)


def render_query(answer: QueryResponse, index: Mapping[str, str], width: int) -> Iterator[Text]:
    """Yields a line for each series: its labels, last value, range and curve.

    Args:
        answer: The agent's response.
        index: Identity of a device -> its number on this host.
        width: Columns of the terminal.
    """
    series = [curve for curve in answer.series if curve.values]
    first, last = answer.since_ns, answer.until_ns
    if series:
        first, last = (
            min(curve.times_ns[0] for curve in series),
            max(curve.times_ns[-1] for curve in series),
        )
    unit = f"  {answer.unit}" if answer.unit else ""
    yield Text.assemble(
        (answer.metric, "bold"),
        (f"{unit}, {_format_time(first)} to {_format_time(last)}", DIM_STYLE),
    )
    if not series:
        yield from render_paragraph(
            "Nothing that you may see is known of it in this time; `traceloom agent doctor` says what does not work.",
            width,
        )
        return
    labels = list(dict.fromkeys(label for curve in series for label in curve.labels))
    label_width = max(
        8, min(40, (width - 45) // max(len(labels), 1))
    )  # the other columns, and a curve of a visible width
    columns = [
        *(TextColumn(label, right=False) for label in labels),
        TextColumn("last"),
        TextColumn("min"),
        TextColumn("max"),
    ]
    cells: list[list[Cell]] = [
        [
            *(
                f"GPU {sanitize(index[value])}"
                if label == "device" and value in index
                else _cut(value or _NONE, label_width)
                for label in labels
                for value in [curve.labels.get(label, "")]
            ),
            *(
                _format_value(value, answer.unit)
                for value in (curve.values[-1], min(curve.values), max(curve.values))
            ),
        ]
        for curve in series
    ]
    longest = min(60, max(len(curve.values) for curve in series))
    yield from render_table(
        columns,
        cells,
        (
            "",
            lambda row, left: Text(
                _draw_curve(series[row], first, last, min(left, longest)), _COLOR
            ),
        ),
        width,
    )


def render_metrics(width: int) -> Iterator[Text]:
    """Yields all metrics, with their labels."""
    for metric in METRICS.values():
        yield Text.assemble(
            f"{metric.name}", (f"{{{','.join(metric.labels)}}}" if metric.labels else "", DIM_STYLE)
        )
        yield from render_paragraph(metric.help, width, DIM_STYLE, indent=4)


def build_metrics_document() -> list[dict[str, object]]:
    return [
        {
            "name": metric.full_name,
            "kind": metric.kind,
            "unit": metric.unit,
            "labels": list(metric.labels),
            "help": metric.help,
        }
        for metric in METRICS.values()
    ]


def render_job_facts(answer: TraceResponse) -> Iterator[Text]:
    """Yields what a trace shows about its job, and which metrics that enables."""
    yield Text(f"A step of job {answer.job}, as its trace shows it (mean of its processes):")
    mix, total = answer.dtype_mix, sum(answer.dtype_mix.values())
    types = ", ".join(
        f"{kind} {flops / total:.0%}"
        for kind, flops in sorted(mix.items(), key=itemgetter(1), reverse=True)
    )
    flops, roofline, copied = (
        answer.flops_per_step,
        answer.roofline_ratio,
        answer.copied_bytes_per_step,
    )
    size = None if copied is None else units.format_size(int(copied))
    for name, value, metric in (
        ("FLOPs", None if flops is None else units.format_flops(flops), "job_flops_error_ratio"),
        ("matrix types", types, 'job_flops{method="trace"}'),
        ("roofline", None if roofline is None else f"{roofline:.1%}", "job_roofline_ratio"),
        ("copied to device", size, 'job_input_bytes_total{source="copies"}'),
    ):
        yield Text(f"  {name:<17}{value or 'not in the trace':<28}{metric}")
    if flops is None:
        yield Text(
            "FLOPs are counted from shapes of tensors: traceloom trace --shapes, or traceloom record.",
            DIM_STYLE,
        )


def render_stacks(answer: StacksResponse, width: int, *, native: bool) -> Iterator[Text]:
    """Yields a sentence on where the ranks are, then each group of equal stacks, from the outermost
    call to the innermost.
    """
    yield from render_paragraph(answer.sentence, width, "bold")
    titles = {
        "rank": "Main threads",
        "worker": "Other processes of the job",
        "thread": "Other threads",
    }
    for role, groups in groupby(answer.groups, key=attrgetter("role")):
        yield from render_heading(titles[role], "from the outermost call to the innermost", width)
        for group in groups:
            ranks, pids = units.format_ranges(group.ranks), units.format_ranges(group.pids)
            process_label = (
                f"{'rank' if len(group.ranks) == 1 else 'ranks'} {ranks}" if ranks else ""
            )
            process_label = (
                f"process {pids} of {process_label}"
                if process_label and role == "worker"
                else process_label or f"process {pids}"
            )
            calls = " > ".join(
                function
                if line
                else function.partition("<")[0]  # C++ template arguments fill pages
                for function, _, line in group.frames
                if function != "<module>" and not function.startswith("pybind11::")
            )
            innermost = next(
                ((file, line) for _, file, line in reversed(group.frames) if line), None
            )
            source_location = (
                f" ({PurePosixPath(innermost[0]).name}:{innermost[1]})" if innermost else ""
            )
            thread = f" {sanitize(group.thread)}" if group.thread else ""
            text = f"{calls or 'no call that can be seen'}{source_location}"
            yield from render_paragraph(
                f"{process_label}{thread}: {text}",
                width,
                SEVERITY_STYLES["warning"][1] if group.elsewhere else "",
            )
    if not native and any(group.elsewhere for group in answer.groups):
        yield from render_paragraph(
            "A wait inside C++ (work.wait(), backward) looks like the Python that called it; --native tells which.",
            width,
            DIM_STYLE,
        )


def hangs(answer: HangsResponse, width: int) -> Iterator[Text]:
    """Yields each hang: job, start, outcome, the ranks that others wait for, and the path of its
    bundle.
    """
    if not answer.hangs:
        watched = answer.watched
        text = f"No job of yours hangs; steps are known of {units.format_quantity(len(watched), 'job')}."
        yield from render_paragraph(
            text if watched else "No job of yours hangs, as far as is known.", width
        )
        if not watched:
            yield from render_paragraph(
                "A hang is seen of jobs whose steps are known: by probes (`traceloom agent doctor`), or reported.",
                width,
                DIM_STYLE,
            )
    for hang in answer.hangs:
        lasted = (
            None
            if hang.over_ns is None
            else units.format_duration(max(hang.over_ns - hang.since_ns, 0))
        )
        became = {
            "hangs": "hangs",
            "recovered": f"went on after {lasted}",
            "ended": f"ended after {lasted}",
            "unknown": "hung when the host or the agent ended",
        }[hang.state]
        style = SEVERITY_STYLES["error"][1] if hang.state == "hangs" else DIM_STYLE
        yield Text.assemble(
            (sanitize(hang.job), "bold"),
            f"  since {_format_time(hang.since_ns)}  ",
            (became, style),
        )
        yield from render_paragraph(
            hang.sentence or "its processes are being looked at", width, indent=2
        )
        yield from render_paragraph(
            hang.directory or f"no bundle: {hang.no_bundle or 'not yet'}",
            width,
            DIM_STYLE,
            indent=2,
        )


EXAMPLE_RULES = """\
[[triggers]]
name = "loader-waits"
on = "metric"
metric = "dataloader_wait_seconds_total"
above = 0.3        # of each second
for = 60
target = "slowest-and-median"
ranks_by = "waits"
"""


def triggers(answer: TriggersResponse, width: int) -> Iterator[Text]:
    """Yields the rules, their last actions, why they were refused, and the remaining budget."""
    if not answer.rules:
        yield Text("No triggers: nothing is traced unasked. A rule for agent.toml, to begin with:")
        yield Text("")
        yield from (Text(f"  {line}") for line in EXAMPLE_RULES.splitlines())
        yield Text("")
        yield from render_paragraph(
            "It counts when the agent is started again. More: docs/how-to/triggers.md",
            width,
            DIM_STYLE,
        )
        return
    remaining, budget, share = (
        units.format_size(answer.bytes_left),
        units.format_size(answer.bytes_per_day),
        answer.share,
    )
    yield from render_paragraph(
        f"{remaining} of {budget} a day are left; a process is traced for at most {units.format_percent(share)} % of its time.",
        width,
    )
    if answer.last_error:
        yield from render_paragraph(
            f"What was spent is in memory alone: {answer.last_error}",
            width,
            SEVERITY_STYLES["warning"][1],
        )
    for rule in answer.rules:
        yield from render_heading(sanitize(rule.name), f"{rule.on}, traces {rule.target}", width)
        cost = f"{units.format_duration(int(rule.traced_seconds * 1e9))} traced, {units.format_size(rule.kept_bytes)} kept"
        yield Text(
            f"  {units.format_quantity(rule.fired, 'request')}"
            + (f": {cost}" if rule.fired else "")
        )
        if last := rule.last:
            yield from render_paragraph(
                f"last {_format_time(last.at_ns)}, request {last.request}, {last.target}: {last.what}",
                width,
                indent=2,
            )
        if rule.refusals:
            reasons = ", ".join(
                f"{units.format_count(number)} {reason}"
                for reason, number in sorted(rule.refusals.items())
            )
            yield from render_paragraph(f"refused: {reasons}", width, indent=2)
        if refusal := rule.last_refusal:
            when, refusal_text = _format_time(refusal.at_ns), f"{refusal.detail} ({refusal.reason})"
            yield from render_paragraph(
                f"last refusal {when}, {refusal.target}: {refusal_text}", width, DIM_STYLE, indent=2
            )
        if rule.problem:
            yield from render_paragraph(
                f"as things are it cannot fire: {rule.problem}",
                width,
                SEVERITY_STYLES["warning"][1],
                indent=2,
            )


def render_doctor(answer: DoctorResponse, width: int, *, running: bool) -> Iterator[Text]:
    """Yields what works, what does not, why, and a remedy."""
    number = Counter[str](check.works for check in answer.checks)
    parts = [
        f"{number[works]} {state_label}"
        for works, (state_label, _, _) in _CHECK_STATES.items()
        if number[works]
    ]
    yield from render_paragraph(
        f"Of {units.format_quantity(len(answer.checks), 'thing')}, {', '.join(parts)}.",
        width,
        "bold",
    )
    if not running:
        yield from render_paragraph(
            "No agent runs; this is what one would have, run by you: traceloom agent run",
            width,
            DIM_STYLE,
        )
    checks = sorted(answer.checks, key=lambda check: (*_AREAS, check.area).index(check.area))
    for area, area_checks in groupby(checks, key=attrgetter("area")):
        yield from render_heading(area, "", width)
        for check in area_checks:
            _, mark, style = _CHECK_STATES[check.works]
            yield Text.assemble(" ", (mark, style), f" {sanitize(check.name)}")
            yield from render_paragraph(check.why, width, DIM_STYLE, indent=3)
            if check.help:
                yield from render_paragraph(f"→ {check.help}", width, indent=3)


def _format_time(at_ns: int) -> str:
    """Formats the local time of day, with the date if it is not today."""
    local_time, now = (
        dt.datetime.fromtimestamp(ns / 1e9, tz=dt.timezone.utc).astimezone()
        for ns in (at_ns, time.time_ns())
    )
    return local_time.strftime(
        "%H:%M:%S" if local_time.date() == now.date() else "%Y-%m-%d %H:%M:%S"
    )


def _find_value(values: Sequence[ValueResponse], metric: str) -> float | None:
    return next((value.value for value in values if value.metric == PREFIX + metric), None)


def _format_value(value: float, unit: str) -> str:
    if unit.startswith("bytes"):
        return (
            units.format_byte_rate(value) if unit.endswith("/s") else units.format_size(int(value))
        )
    if unit == "ratio":
        return f"{units.format_percent(value)} %"
    return units.format_duration(int(value * 1e9)) if unit == "seconds" else f"{value:.4g}"


def _draw_curve(curve: SeriesResponse, first_ns: int, last_ns: int, width: int) -> str:
    """Draws means over equal intervals, scaled from min to max; blank where there are no values.

    The curves of one response share the time axis; if all values are equal, the line is at the
    bottom.
    """
    times, values = curve.times_ns, curve.values
    if width <= 0:
        return ""
    parts: list[list[float]] = [[] for _ in range(width)]
    for at_ns, value in zip(times, values, strict=True):
        parts[min(width * (at_ns - first_ns) // max(last_ns - first_ns, 1), width - 1)].append(
            value
        )
    means = [fmean(part) for part in parts if part]
    levels = iter(draw_sparkline([mean - min(means) for mean in means], width))
    return "".join(next(levels) if part else " " for part in parts)


def _draw_bar(share: float) -> Text:
    bar = draw_bar(min(max(share, 0.0), 1.0), _BAR_WIDTH, _COLOR)
    return bar + Text("·" * (_BAR_WIDTH - bar.cell_len), DIM_STYLE)


def _cut(text: str, width: int) -> str:
    text = sanitize(text)
    return text if len(text) <= width else text[: max(width - 1, 0)] + "…"
