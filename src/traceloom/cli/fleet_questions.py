"""`traceloom fleet kernels`, `regressions`, `attribution`, ...: verbs made of the questions' declarations."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from functools import partial
from typing import Any, NamedTuple

from traceloom.cli import options as types
from traceloom.cli.verb_actions import VerbAction
from traceloom.collect.questions.asking import described
from traceloom.collect.questions.catalogue import QUESTIONS
from traceloom.collect.questions.declared import Question
from traceloom.harmless import harmless
from traceloom.model import units
from traceloom.model.columns import Column

_INSTANTS = {"since_ns", "last_before_ns", "start_ns", "time_ns"}
_MS = {"saved_ms", "device_ms", "busy_ms", "idle_ms", "unallocated_ms", "unreachable_ms"}
_WIDEST = 44  # signs of a name of a kernel
_HOUR_MS = 3_600_000
_NO_DEVICE_TIME = """\
No host has said anything of its devices in this time.
Next: traceloom fleet hosts; --since 90d looks further back"""


class AnswerView(NamedTuple):
    """What a verb shows of an answer: columns of its tables, an example, and what is worth doing next."""

    example: str
    then: str
    columns: Mapping[str, Sequence[str]]
    next_of: Callable[[dict[str, Any]], Sequence[str]] = lambda _: ()
    empty: str = """\
There is nothing in this time.
Next: traceloom fleet captures; --since 90d looks further back"""


def _next_of_example(rows: str, argument: str) -> Callable[[dict[str, Any]], Sequence[str]]:
    def follow(answer: dict[str, Any]) -> Sequence[str]:
        captures = [row[argument] for row in answer[rows] if row.get(argument)]
        return [f"Next: traceloom fleet report {captures[0]} -o report.html"] if captures else []

    return follow


def _next_of_change(answer: dict[str, Any]) -> Sequence[str]:
    for row in answer["changes"][:1]:
        healthy, slow = row["healthy_capture"], row["capture"]
        fetches = f"traceloom fleet fetch {healthy} -o healthy && traceloom fleet fetch {slow} -o changed"
        return [
            f"Compare: {fetches} && traceloom diff healthy changed",
            f"Its jobs: {', '.join(row['jobs'][:5])}",
            f"Over time: traceloom fleet kernel-history --kernel {shlex.quote(row['kernel'])}",
        ]
    return [f"{answer['series']} series have no change; {answer['short']} are too short to tell."]


_VIEWS: Mapping[str, AnswerView] = {
    "kernels": AnswerView(
        "--since 7d --division ads --top 10", "traceloom fleet regressions",
        {"rows": ("kernel", "kind", "total_ns", "fraction", "count", "mean_ns", "jobs", "example")},
        _next_of_example("rows", "example"),
    ),
    "kernel-history": AnswerView(
        "--kernel NAME --since 90d", "traceloom fleet report CAPTURE -o report.html",
        {"rows": ("start_ns", "job", "mean_ns", "count", "capture", "code")},
    ),
    "regressions": AnswerView(
        "--since 30d", "traceloom diff healthy changed, of the captures that it names",
        {"changes": ("kernel", "shapes", "cause", "since_ns", "before_ns", "after_ns", "change", "extra_ns")},
        _next_of_change, "No kernel changed.",
    ),
    "characterise": AnswerView(
        "--by division,kind --since 7d", "traceloom fleet coverage",
        {"rows": ("total_ns", "fraction", "count", "captures")},
    ),
    "coverage": AnswerView(
        "--top 50 --kernel '*gemm*'", "traceloom fleet kernels",
        {"rows": ("number", "kernel", "shapes", "total_ns", "covered_fraction")},
    ),
    "attribution": AnswerView(
        "--by division,product,user --since 30d", "traceloom fleet owners set owners.toml --dry-run", {},
        empty=_NO_DEVICE_TIME,
    ),
    "topline": AnswerView(
        "--by model --since 7d", "traceloom fleet invest",
        {"rows": ("device_hours", "device_use", "flop_rate", "compute_use", "power_w", "roofline_fraction", "mfu")},
        empty=_NO_DEVICE_TIME,
    ),
    "findings": AnswerView(
        "--since 7d --rule '*-bound'", "traceloom fleet invest; traceloom explain RULE",
        {"rows": ("rule", "captures", "fraction", "jobs", "saving_fraction", "confidence", "example")},
        _next_of_example("rows", "example"),
    ),
    "outliers": AnswerView(
        "--since 7d", "traceloom fleet kernels --host HOST",
        {
            "hosts": ("host", "device_model", "ratio", "z", "outlier", "kernels", "jobs"),
            "ranks": ("job", "rank", "host", "ratio", "z", "outlier", "captures"),
        },
        empty="No four hosts ran the same kernels on the same shapes, and no job has four ranks: none can be compared.",
    ),
    "invest": AnswerView(
        "--by rule,division --since 30d", "traceloom explain RULE",
        {"rows": ("saved_ms", "jobs", "confidence", "example")}, _next_of_example("rows", "example"),
    ),
}  # fmt: skip


def _add_parameters(question: Question, parser: argparse.ArgumentParser) -> None:
    for name, schema in described(question.parameters).items():
        text, default = str(schema.get("description", "")), schema.get("default")
        help_text = text + (f" (default: {default})" if default else "")
        parser.add_argument(
            f"--{name.replace('_', '-')}", default=None, required="default" not in schema,
            **(
                {"choices": [choice for choice in schema["enum"] if choice]}  # type: ignore[attr-defined]
                if "enum" in schema
                else {"type": types.whole, "metavar": "N"}
                if schema["type"] == "integer"
                else {"metavar": name.upper().replace("_", "-")}
            ),
            help=help_text.replace("%", "%%"),
        )  # fmt: skip


def _run(question: Question, args: argparse.Namespace) -> int:
    from traceloom.cli.fleet import client_of, follow_up, shown

    wanted = {name: getattr(args, name) for name in described(question.parameters)}
    client = client_of(args)
    client.timeout_s = 120.0  # a question may take a minute
    answer = client.get(
        question.path.removeprefix("/api/v1/"),
        **{name: str(value) for name, value in wanted.items() if value is not None},
    )
    if args.json:
        return shown(args, answer, (), ())
    view, skipped = _VIEWS[question.name], wanted.get("skip") or 0
    empty = f"There are no more than {skipped} rows." if skipped else view.empty
    if question.name == "attribution":
        _show_tree(args, answer)
    for number, (table, columns) in enumerate(view.columns.items()):
        declared = question.tables[table]
        by = answer.get("by") or () if declared.divided else ()
        by = (by,) if isinstance(by, str) else by
        titles = ((name, declared.columns[name].title.removesuffix(", ms")) for name in columns)
        heads = [*by, *(f"{title}, h" if name in _MS else title for name, title in titles)]
        rows = [
            [*(str(row[name]) for name in by), *(_cell(name, declared.columns[name], row[name]) for name in columns)]
            for row in answer[table]
            if row.get("device_hours") != 0  # all of it is a row of the topline, also where there is none
        ]
        if number and rows and not args.quiet:
            print()
        if rows or not number:
            shown(args, answer, heads, rows, empty)
    if not args.quiet:
        if answer["more"]:
            further = f"--skip {skipped + len(answer[next(iter(question.tables))])}"
            print(f"There are more: {further if 'skip' in wanted else 'ask for less time'}")
        for line in view.next_of(answer):
            print(harmless(follow_up(args, line)))
        print(f"Looked at {_instant(answer['since_ns'])} to {_instant(answer['until_ns'])} UTC.")
    return 0


def _cell(name: str, column: Column, value: Any) -> str:
    if value is None:
        return units.NONE
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name in _INSTANTS:
        return _instant(value)
    if name in _MS:
        return units.number(value / _HOUR_MS)
    if column.unit in units.NUMBERS:
        return units.written(value, column.unit)
    text = ", ".join(value) if isinstance(value, list) else str(value)
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 1]}…"


def _instant(time_ns: int) -> str:
    return datetime.fromtimestamp(time_ns / 1e9, timezone.utc).strftime("%Y-%m-%d %H:%M")


def _show_tree(args: argparse.Namespace, answer: dict[str, Any]) -> None:
    """Device time as a tree, in hours; each level has the same sum."""
    from traceloom.cli.fleet import shown

    priced = answer["currency"] is not None
    heads = [" > ".join(answer["by"]), "hours", "share", "use", *([f"cost, {answer['currency']}"] if priced else [])]
    rows, whole = [], {row["time_ns"]: row["device_ms"] for row in answer["rows"] if not row["values"]}
    for row in answer["rows"]:
        depth = len(row["values"])
        name = row["values"][-1] if depth else "all" if row["time_ns"] is None else _instant(row["time_ns"])
        used = units.share(row["busy_ms"], row["busy_ms"] + row["idle_ms"])
        cells = [f"{'  ' * depth}{name}", units.number(row["device_ms"] / _HOUR_MS)]
        cells += [units.share(row["device_ms"], whole[row["time_ns"]]), used]
        rows.append([*cells, *([units.number(row["cost"])] if priced else [])])
    shown(args, answer, heads, rows if any(whole.values()) else [], _NO_DEVICE_TIME)


QUESTION_ACTIONS = {
    question.name: VerbAction(
        f"show {question.summary}",
        f"traceloom fleet {question.name} {_VIEWS[question.name].example}\nthen: {_VIEWS[question.name].then}",
        partial(_add_parameters, question), partial(_run, question),
    )
    for question in QUESTIONS
}  # fmt: skip
