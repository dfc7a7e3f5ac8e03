"""What the agent answers, as lines of a terminal."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import PurePosixPath
from typing import Any

from rich.text import Text

from traceloom.agent.client import Client
from traceloom.agent.grouping import numbers
from traceloom.agent.metrics import METRICS, PREFIX
from traceloom.harmless import harmless
from traceloom.model import units
from traceloom.report.views.terminal.bars import plain, sparkline
from traceloom.report.views.terminal.columns import Cell, TextColumn, heading, lines, paragraph
from traceloom.report.views.terminal.look import DIM, FILLS, SEVERITY

Row = dict[str, Any]
_BAR = 10
_NONE = "–"
_COLOR = FILLS["compute"][1]


def status(answer: Row, width: int) -> Iterator[Text]:
    """How the agent fares: itself, its collectors, its history."""
    up = units.duration(answer["now_ns"] - answer["started_ns"])
    yield Text.assemble(
        ("Agent of ", ""),
        (harmless(answer["host"]), "bold"),
        f": up {up}, pid {answer['pid']}, version {answer['version']}",
    )
    stale = f", {answer['stale_devices']} stale" if answer["stale_devices"] else ""
    yield Text(
        f"{units.counted(answer['devices'], 'device')}{stale}, {units.counted(answer['processes'], 'process')} "
        f"that matter, {units.count(answer['series'])} series"
    )
    history = answer["history"]
    lost = f", {history['lost_ticks']:.0f} ticks lost" if history.get("lost_ticks") else ""
    yield Text(f"History: {units.size(int(history.get('bytes', 0)))} on disk{lost}")
    for name, trouble in answer["publishers"].items():
        yield from paragraph(f"{name}: {trouble or 'publishes'}", width)
    yield from heading("Collectors", "period, time of the last run", width)
    columns = [
        TextColumn("collector", right=False),
        TextColumn("every"),
        TextColumn("took"),
        TextColumn("runs"),
        TextColumn("failed"),
    ]
    rows = [
        [
            state["name"], f"{state['period_seconds']:g} s",
            units.duration(int(state["seconds"] * 1e9)) if state["runs"] else _NONE,
            units.count(state["runs"]), units.count(sum(state["failures"].values())),
        ]
        for state in answer["collectors"]
    ]  # fmt: skip
    yield from lines(columns, rows, ("", lambda row, left: _cut(answer["collectors"][row]["trouble"], left)), width)


def processes(answer: Row, devices: Sequence[Row], width: int) -> Iterator[Text]:
    """Processes that matter, with owner, devices and step rate."""
    if not answer["processes"]:
        yield Text("No process uses a device, runs a framework, or belongs to a job.")
    else:
        yield from _process_lines(answer["processes"], devices, width)
    if answer["hidden"]:
        yield from paragraph(
            f"{units.counted(answer['hidden'], 'process')} of other users are not shown; root sees them.", width, DIM
        )


def _process_lines(rows: Sequence[Row], devices: Sequence[Row], width: int) -> Iterator[Text]:
    index = {device["uuid"]: device["index"] for device in devices}
    rows = sorted(rows, key=lambda row: (row["owner"]["job"], row["owner"]["rank"] or 0, row["pid"]))
    columns = [
        TextColumn("pid"), TextColumn("user", right=False), TextColumn("job", right=False), TextColumn("rank"),
        TextColumn("framework", right=False), TextColumn("GPUs", right=False), TextColumn("memory"),
        TextColumn("steps/s"),
    ]  # fmt: skip
    cells: list[list[Cell]] = []
    for row in rows:
        owner = row["owner"]
        rank = (
            _NONE
            if owner["rank"] is None
            else f"{owner['rank']}" + (f"/{owner['world_size']}" if owner["world_size"] else "")
        )
        memory = _value(row["values"], "process_memory_bytes")
        framework = f"{owner['framework']} {owner['framework_version']}".strip()
        cells.append([
            str(row["pid"]), _cut(owner["user"] or str(row["uid"]), 12), _cut(owner["job"] or _NONE, 24), rank,
            _cut(framework or _NONE, 16), ",".join(index.get(uuid, uuid[:8]) for uuid in row["devices"]) or _NONE,
            _NONE if memory is None else units.size(int(memory)),
            _NONE if row["steps_per_second"] is None else f"{row['steps_per_second']:.3g}",
        ])  # fmt: skip
    yield from lines(
        columns,
        cells,
        ("command", lambda row, left: _cut(rows[row]["command"] or rows[row]["unreadable"], left)),
        width,
    )


def top(picture: Row, width: int) -> Iterator[Text]:
    """Host, devices and processes as they are now."""
    state, host = picture["status"], picture["host"]
    at = dt.datetime.fromtimestamp(state["now_ns"] / 1e9, tz=dt.timezone.utc).astimezone().strftime("%H:%M:%S")
    yield Text.assemble((harmless(state["host"]), "bold"), f"  {at}")
    if host.get("cpu") is not None:
        yield Text.assemble(" processors ", _bar(host["cpu"]), f" {units.per_cent(host['cpu'])} % busy")
    if host.get("memory"):
        used, whole = host["memory"]
        yield Text.assemble(" memory     ", _bar(used / whole), f" {units.size(int(used))} of {units.size(int(whole))}")
    devices = picture["devices"]["devices"]
    if devices:
        yield from heading(
            "Devices", "busy, multiprocessors active, power: none of them alone says whether work gets done", width
        )
        yield from _device_lines(devices, width)
    yield from heading("Processes", "", width)
    yield from processes(picture["processes"], devices, width)


def _device_lines(devices: Sequence[Row], width: int) -> Iterator[Text]:
    columns = [
        TextColumn("GPU"), TextColumn("model", right=False), TextColumn("busy", right=False), TextColumn("SM active"),
        TextColumn("memory"), TextColumn("power"), TextColumn("FLOP/s"),
    ]  # fmt: skip
    cells: list[list[Cell]] = []
    for device in devices:
        values = device["values"]
        busy, active = _value(values, "gpu_busy_ratio"), _value(values, "gpu_sm_active_ratio")
        memory, power = _value(values, "gpu_memory_used_bytes"), _value(values, "gpu_power_watts")
        rates = [value for value in values if value["metric"] == f"{PREFIX}gpu_flops"]
        bounds = [[value["value"] for value in rates if value["labels"]["bound"] == bound] for bound in ("low", "high")]
        rate = _NONE
        if bounds[0] and bounds[1]:
            low, high = bounds[0][0], bounds[1][0]
            rate = units.flop_rate(low) if low == high else f"{units.flop_rate(low)} – {units.flop_rate(high)}"
        cells.append([
            device["index"], _cut(device["model"], 24),
            Text(_NONE) if busy is None else Text.assemble(_bar(busy), f" {units.per_cent(busy):>5} %"),
            _NONE if active is None else f"{units.per_cent(active)} %",
            _NONE if memory is None else units.size(int(memory)), _NONE if power is None else f"{power:.0f} W", rate,
        ])  # fmt: skip
    yield from lines(
        columns, cells,
        ("", lambda row, left: _on_device(devices[row], left)), width,
    )  # fmt: skip


def _on_device(device: Row, width: int) -> Text:
    """Why it is stale, else whose it is."""
    return (
        Text(_cut(device["stale"], width), "red") if device["stale"] else Text(_cut(", ".join(device["jobs"]), width))
    )


def host_values(client: Client) -> Row:
    """Busy share of processors and used memory, from the last minute."""
    result: Row = {"cpu": None, "memory": None}
    rates = {
        series["labels"]["mode"]: series["values"][-1]
        for series in client.get("query", metric="host_cpu_seconds_total", since="60s")["series"]
        if series["values"]
    }
    if rates and sum(rates.values()):
        idle = rates.get("idle", 0.0) + rates.get("iowait", 0.0)
        result["cpu"] = 1 - idle / sum(rates.values())
    states = {
        series["labels"]["state"]: series["values"][-1]
        for series in client.get("query", metric="host_memory_bytes", since="60s")["series"]
        if series["values"]
    }
    if states:
        result["memory"] = [states.get("used", 0.0), sum(states.values())]
    return result


def query(answer: Row, width: int) -> Iterator[Text]:
    """A line for each series: what it is of, its curve, its last value, its range."""
    unit = f" {answer['unit']}" if answer["unit"] else ""
    span = units.duration(answer["until_ns"] - answer["since_ns"])
    yield Text.assemble((answer["metric"], "bold"), (f"{unit}, {span}", DIM))
    series = [curve for curve in answer["series"] if curve["values"]]
    if not series:
        yield from paragraph(
            "Nothing is known of it in this time; `traceloom agent doctor` says what does not work.", width
        )
        return
    labels = list(dict.fromkeys(label for curve in series for label in curve["labels"]))
    columns = [
        *(TextColumn(label, right=False) for label in labels),
        TextColumn("last"),
        TextColumn("min"),
        TextColumn("max"),
    ]
    cells: list[list[Cell]] = [
        [
            *(_cut(curve["labels"].get(label, "") or _NONE, 40) for label in labels),
            *(
                _written(value, answer["unit"])
                for value in (curve["values"][-1], min(curve["values"]), max(curve["values"]))
            ),
        ]
        for curve in series
    ]
    yield from lines(columns, cells, ("", lambda row, left: Text(_curve(series[row]["values"], left), _COLOR)), width)


def metrics(width: int) -> Iterator[Text]:
    """All metrics, with their labels."""
    for metric in METRICS.values():
        yield Text.assemble(f"{metric.name}", (f"{{{','.join(metric.labels)}}}" if metric.labels else "", DIM))
        yield from paragraph(f"   {metric.help}", width, DIM)


def metrics_document() -> list[Row]:
    """All metrics as JSON."""
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


def learned(answer: Row) -> Iterator[Text]:
    """What a trace tells of its job, and which metrics that makes possible."""
    yield Text(f"A step of job {answer['job']}, as its trace shows it (mean of its processes):")
    mix, total = answer["dtype_mix"], sum(answer["dtype_mix"].values())
    types = ", ".join(
        f"{kind} {flops / total:.0%}" for kind, flops in sorted(mix.items(), key=itemgetter(1), reverse=True)
    )
    flops, roofline, copied = answer["flops_per_step"], answer["roofline_ratio"], answer["copied_bytes_per_step"]
    size = None if copied is None else units.size(int(copied))
    facts = (
        ("FLOPs", None if flops is None else units.flops(flops), "job_flops_error_ratio"),
        ("matrix types", types, 'job_flops{method="trace"}'),
        ("roofline", None if roofline is None else f"{roofline:.1%}", "job_roofline_ratio"),
        ("copied to device", size, 'job_input_bytes_total{source="copies"}'),
    )
    for name, value, metric in facts:
        yield Text(f"  {name:<17}{value or 'not in the trace':<28}{metric}")


def stacks(answer: Row, width: int, *, native: bool) -> Iterator[Text]:
    """Where the ranks are in a sentence, then each group of equal stacks, from the outermost call to the innermost."""
    yield from paragraph(answer["sentence"], width, "bold")
    titles = {"rank": "Main threads", "worker": "Other processes of the job", "thread": "Other threads"}
    for role, groups in groupby(answer["groups"], key=itemgetter("role")):
        yield from heading(titles[role], "from the outermost call to the innermost", width)
        for group in groups:
            ranks, pids = numbers(group["ranks"]), numbers(group["pids"])
            who = f"{'rank' if len(group['ranks']) == 1 else 'ranks'} {ranks}" if ranks else ""
            who = f"process {pids} of {who}" if who and role == "worker" else who or f"process {pids}"
            calls = " > ".join(
                function if line else function.partition("<")[0]  # templates of C++ fill pages
                for function, _, line in group["frames"]
                if function != "<module>" and not function.startswith("pybind11::")
            )
            innermost = next(((file, line) for _, file, line in reversed(group["frames"]) if line), None)
            where = f" ({PurePosixPath(innermost[0]).name}:{innermost[1]})" if innermost else ""
            thread = f" {harmless(group['thread'])}" if group["thread"] else ""
            text = f"{calls or 'no call that can be seen'}{where}"
            yield from paragraph(f"{who}{thread}: {text}", width, SEVERITY["warning"][1] if group["elsewhere"] else "")
    if not native and any(group["elsewhere"] for group in answer["groups"]):
        yield from paragraph(
            "A wait inside C++ (work.wait(), backward) looks like the Python that called it; --native tells which.",
            width, DIM,
        )  # fmt: skip


def doctor(answer: Row, width: int, *, running: bool) -> Iterator[Text]:
    """What works, what not, why, and what would help."""
    if not running:
        yield from paragraph("No agent runs; this is what one would find, run by you.", width, DIM)
    marks = {"yes": ("✓", "green"), "partly": SEVERITY["warning"], "no": SEVERITY["error"]}
    area = ""
    for check in sorted(answer["checks"], key=lambda check: check["area"]):
        if check["area"] != area:
            area = check["area"]
            yield from heading(area, "", width)
        mark, style = marks[check["works"]]
        yield Text.assemble(" ", (mark, style), f" {harmless(check['name'])}")
        if check["why"]:
            yield from paragraph(f"  {check['why']}", width, DIM)
        if check["help"]:
            yield from paragraph(f"  → {check['help']}", width)


def _last(values: Sequence[float]) -> float:
    return values[-1]


def _value(values: Sequence[Row], metric: str) -> float | None:
    return next((value["value"] for value in values if value["metric"] == PREFIX + metric), None)


def _written(value: float, unit: str) -> str:
    if unit.startswith("bytes"):
        return units.byte_rate(value) if unit.endswith("/s") else units.size(int(value))
    if unit == "ratio":
        return f"{units.per_cent(value)} %"
    if unit == "seconds":
        return units.duration(int(value * 1e9))
    return f"{value:.4g}"


def _curve(values: Sequence[float], width: int) -> str:
    """From the least to the greatest; a line along the bottom where they are equal."""
    least = min(values)
    return sparkline([value - least for value in values], min(width, 60))


def _bar(share: float) -> Text:
    bar = plain(min(max(share, 0.0), 1.0), _BAR, _COLOR)
    return bar + Text("·" * (_BAR - bar.cell_len), DIM)


def _cut(text: str, width: int) -> str:
    text = harmless(text)
    return text if len(text) <= width else text[: max(width - 1, 0)] + "…"
