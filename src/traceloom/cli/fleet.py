"""`traceloom fleet`: actions built from routes and questions; owners, prices, tokens."""

import argparse
import json
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from traceloom.cli import options as types
from traceloom.cli.options import VerbAction, VerbOption, add_actions, declare_options
from traceloom.cli.upload import FleetClient, add_server, create_fleet_client, insert_server_options
from traceloom.errors import CheckError, InputError, OutputError, UsageError, unreadable
from traceloom.fleet.questions.catalogue import QUESTIONS
from traceloom.fleet.questions.declaration import Question, describe_parameters
from traceloom.fleet.rules import MAX_BYTES
from traceloom.system import files, units
from traceloom.system.files import compute_sha256, read_small
from traceloom.system.sanitize import sanitize
from traceloom.trace.columns.declare import Column

_NO_DEVICES = """\
Nothing of that is there now.
Next: traceloom fleet hosts"""


def _run_query(args: argparse.Namespace) -> int:

    query = {
        name: str(value) for name in ("by", "job", "host", "top") if (value := getattr(args, name))
    }
    answer = create_fleet_client(args).get("query", **query)
    heads = (
        args.by,
        "host" if args.by != "host" else "jobs",
        "devices",
        "busy",
        "power",
        "memory",
        "step",
        "heard",
    )
    rows = []
    for row in answer["rows"]:
        memory = units.format_value(row["memory_bytes"], "bytes")
        if row["memory_limit_bytes"] is not None:
            memory += f" of {units.format_value(row['memory_limit_bytes'], 'bytes')}"
        rows.append(
            (
                row[args.by],
                row["host" if args.by != "host" else "job"] or units.UNKNOWN_TEXT,
                str(row["devices"]),
                units.format_value(row["busy"], "share"),
                units.UNKNOWN_TEXT
                if row["power_w"] is None
                else f"{units.format_number(round(row['power_w']))} W",
                memory,
                units.format_value(
                    None if row["step_s"] is None else round(row["step_s"] * 1e9), "time"
                ),
                f"{(answer['at_ns'] - row['heard_ns']) / 1e9:.0f} s ago",
            )
        )
    return print_answer(args, answer, heads, rows, _NO_DEVICES)


def _compact(args: argparse.Namespace) -> int:

    client = create_fleet_client(args)
    client.timeout_s = 3600.0  # the service reads all tables
    answer = client.post("compact")
    if args.json:
        return print_answer(args, answer, (), ())
    if not args.quiet:
        print(f"The tables are compacted; it took {answer['seconds']:.1f} s.")
    return 0


_NUMBER = re.compile(r"[-+<>]?\d[\d\u202f.]*(e-\d+)?( [^\d\s]+)?")  # with its unit
_MIN_COLUMN_WIDTH = 10  # characters of a column, where a table does not fit


def print_answer(
    args: argparse.Namespace,
    answer: Any,
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    empty: str = "",
) -> int:
    """Prints an answer: as JSON where requested, else as a table, else the text for an empty
    answer; returns the exit code.
    """
    if args.json:
        print(json.dumps(answer, indent=2))
        return 0
    if not rows:
        print(insert_server_options(args, empty))
        return 0

    texts = [
        [sanitize(cell) for cell in row]
        for row in ([f"{head[:1].upper()}{head[1:]}" for head in heads], *rows)
    ]
    known_cells = [
        [row[column] for row in texts[1:] if row[column] != units.UNKNOWN_TEXT]
        for column in range(len(heads))
    ]
    numeric = [bool(cells) and all(map(_NUMBER.fullmatch, cells)) for cells in known_cells]
    widths = [max(len(row[column]) for row in texts) for column in range(len(heads))]
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 10_000
    width_left = width - 2 * (len(widths) - 1)
    # Long names are shortened, so that numbers stay visible.
    while sum(widths) > width_left and max(widths) > _MIN_COLUMN_WIDTH:
        widths[widths.index(max(widths))] -= 1
    for row in texts:
        cells = [
            cell if len(cell) <= size else f"{cell[: size - 1]}…"
            for cell, size in zip(row, widths, strict=True)
        ]
        cells = [
            cell.rjust(size) if right else cell.ljust(size)
            for cell, size, right in zip(cells, widths, numeric, strict=True)
        ]
        print("  ".join(cells).rstrip()[:width])
    return 0


NOW_ACTIONS = {
    "query": VerbAction(
        "show what jobs, hosts or devices do now",
        "traceloom fleet query --by host --json\nthen: traceloom trace --server URL --job JOB --steps 3",
        declare_options(
            VerbOption(
                "--by",
                choices=("job", "host", "device"),
                default="job",
                help="what a row is of (default: job)",
            ),
            *(
                VerbOption(
                    f"--{name}",
                    default="",
                    metavar=name.upper(),
                    help=f"only these {name}s; `*` and `?` stand for any signs",
                )
                for name in ("job", "host")
            ),
            VerbOption(
                "--top",
                type=types.parse_count,
                default=50,
                metavar="N",
                help="so many rows (default: 50)",
            ),
        ),
        _run_query,
    ),
    "compact": VerbAction(
        "make large files of the tables' small ones, and remove what was kept long enough; done every night by itself",
        "traceloom fleet compact\nthen: traceloom fleet check",
        lambda _: None,
        _compact,
    ),
}

_TIME_COLUMNS = {"since_ns", "last_before_ns", "start_ns", "time_ns"}
_MILLISECOND_COLUMNS = {
    "saved_ms",
    "device_ms",
    "busy_ms",
    "idle_ms",
    "unallocated_ms",
    "unreachable_ms",
}
_MAX_CELL_WIDTH = 44  # characters of the name of a kernel
_HOUR_MS = 3_600_000
_NO_DEVICE_TIME = """\
No host has said anything of its devices in this time.
Next: traceloom fleet hosts; --since 90d looks further back"""


class AnswerView(NamedTuple):
    """How a verb shows an answer: an example, columns of its tables, and the next
    useful command.
    """

    example: str
    then: str
    columns: Mapping[str, Sequence[str]]
    next_of: Callable[[dict[str, Any]], Sequence[str]] = lambda _: ()
    empty: str = """\
There is nothing in this time.
Next: traceloom fleet captures; --since 90d looks further back"""


def _make_report_hint(rows: str, argument: str) -> Callable[[dict[str, Any]], Sequence[str]]:
    def follow(answer: dict[str, Any]) -> Sequence[str]:
        captures = [row[argument] for row in answer[rows] if row.get(argument)]
        return [f"Next: traceloom fleet report {captures[0]} -o report.html"] if captures else []

    return follow


def _list_change_hints(answer: dict[str, Any]) -> Sequence[str]:
    for row in answer["changes"][:1]:
        healthy, slow = row["healthy_capture"], row["capture"]
        fetches = (
            f"traceloom fleet fetch {healthy} -o healthy && traceloom fleet fetch {slow} -o changed"
        )
        return [
            f"Compare: {fetches} && traceloom diff healthy changed",
            f"Its jobs: {', '.join(row['jobs'][:5])}",
            f"Over time: traceloom fleet kernel-history --kernel {shlex.quote(row['kernel'])}",
        ]
    return [f"{answer['series']} series have no change; {answer['short']} are too short to tell."]


_VIEWS: Mapping[str, AnswerView] = {
    "kernels": AnswerView(
        "--since 7d --division ads --top 10",
        "traceloom fleet regressions",
        {"rows": ("kernel", "kind", "total_ns", "fraction", "count", "mean_ns", "jobs", "example")},
        _make_report_hint("rows", "example"),
    ),
    "kernel-history": AnswerView(
        "--kernel NAME --since 90d",
        "traceloom fleet report CAPTURE -o report.html",
        {"rows": ("start_ns", "job", "mean_ns", "count", "capture", "code")},
    ),
    "regressions": AnswerView(
        "--since 30d",
        "traceloom diff healthy changed, of the captures that it names",
        {
            "changes": (
                "kernel",
                "shapes",
                "cause",
                "since_ns",
                "before_ns",
                "after_ns",
                "change",
                "extra_ns",
            )
        },
        _list_change_hints,
        "No kernel changed.",
    ),
    "characterise": AnswerView(
        "--by division,kind --since 7d",
        "traceloom fleet coverage",
        {"rows": ("total_ns", "fraction", "count", "captures")},
    ),
    "coverage": AnswerView(
        "--top 50 --kernel '*gemm*'",
        "traceloom fleet kernels",
        {"rows": ("number", "kernel", "shapes", "total_ns", "covered_fraction")},
    ),
    "attribution": AnswerView(
        "--by division,product,user --since 30d",
        "traceloom fleet owners set owners.toml --dry-run",
        {},
        empty=_NO_DEVICE_TIME,
    ),
    "topline": AnswerView(
        "--by model --since 7d",
        "traceloom fleet invest",
        {
            "rows": (
                "device_hours",
                "device_use",
                "flop_rate",
                "compute_use",
                "power_w",
                "roofline_fraction",
                "mfu",
            )
        },
        empty=_NO_DEVICE_TIME,
    ),
    "findings": AnswerView(
        "--since 7d --rule '*-bound'",
        "traceloom fleet invest; traceloom explain RULE",
        {
            "rows": (
                "rule",
                "captures",
                "fraction",
                "jobs",
                "saving_fraction",
                "confidence",
                "example",
            )
        },
        _make_report_hint("rows", "example"),
    ),
    "outliers": AnswerView(
        "--since 7d",
        "traceloom fleet kernels --host HOST",
        {
            "hosts": ("host", "device_model", "ratio", "z", "outlier", "kernels", "jobs"),
            "ranks": ("job", "rank", "host", "ratio", "z", "outlier", "captures"),
        },
        empty="No four hosts ran the same kernels on the same shapes, and no job has four ranks: none can be compared.",
    ),
    "invest": AnswerView(
        "--by rule,division --since 30d",
        "traceloom explain RULE",
        {"rows": ("saved_ms", "jobs", "confidence", "example")},
        _make_report_hint("rows", "example"),
    ),
}


def _add_parameters(question: Question, parser: argparse.ArgumentParser) -> None:
    for name, schema in describe_parameters(question.parameters).items():
        text, default = str(schema.get("description", "")), schema.get("default")
        help_text = text + (f" (default: {default})" if default else "")
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            default=None,
            required="default" not in schema,
            **(
                {"choices": [choice for choice in schema["enum"] if choice]}  # type: ignore[attr-defined]
                if "enum" in schema
                else {"type": types.parse_whole_number, "metavar": "N"}
                if schema["type"] == "integer"
                else {"metavar": name.upper().replace("_", "-")}
            ),
            help=help_text.replace("%", "%%"),
        )


def _run(question: Question, args: argparse.Namespace) -> int:

    query = {name: getattr(args, name) for name in describe_parameters(question.parameters)}
    client = create_fleet_client(args)
    client.timeout_s = 120.0  # a question may take a minute
    answer = client.get(
        question.path.removeprefix("/api/v1/"),
        **{name: str(value) for name, value in query.items() if value is not None},
    )
    if args.json:
        return print_answer(args, answer, (), ())
    view, skipped = _VIEWS[question.name], query.get("skip") or 0
    empty = f"There are no more than {skipped} rows." if skipped else view.empty
    if question.name == "attribution":
        _show_tree(args, answer)
    for number, (table, columns) in enumerate(view.columns.items()):
        declared = question.tables[table]
        dimensions = answer.get("by") or () if declared.divided else ()
        dimensions = (dimensions,) if isinstance(dimensions, str) else dimensions
        titles = ((name, declared.columns[name].title.removesuffix(", ms")) for name in columns)
        heads = [
            *dimensions,
            *(f"{title}, h" if name in _MILLISECOND_COLUMNS else title for name, title in titles),
        ]
        rows = [
            [
                *(str(row[name]) for name in dimensions),
                *(_format_cell(name, declared.columns[name], row[name]) for name in columns),
            ]
            for row in answer[table]
            if row.get("device_hours") != 0  # the topline has a row for the total, even if it is 0
        ]
        if number and rows and not args.quiet:
            print()
        if rows or not number:
            print_answer(args, answer, heads, rows, empty)
    if not args.quiet:
        if answer["more"]:
            skip_option = f"--skip {skipped + len(answer[next(iter(question.tables))])}"
            print(f"There are more: {skip_option if 'skip' in query else 'ask for less time'}")
        if answer.get("lacking"):
            print(
                f"Without {units.format_quantity(answer['lacking'], 'capture')} that wait or are in quarantine: traceloom fleet check"
            )
        for line in view.next_of(answer):
            print(sanitize(insert_server_options(args, line)))
        print(
            f"Looked at {_format_time(answer['since_ns'])} to {_format_time(answer['until_ns'])} UTC."
        )
    return 0


def _format_cell(name: str, column: Column, value: Any) -> str:
    if value is None:
        return units.UNKNOWN_TEXT
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name in _TIME_COLUMNS:
        return _format_time(value)
    if name in _MILLISECOND_COLUMNS:
        return units.format_number(value / _HOUR_MS)
    if column.unit in units.NUMERIC_UNITS:
        return units.format_value(value, column.unit)
    text = ", ".join(value) if isinstance(value, list) else str(value)
    return text if len(text) <= _MAX_CELL_WIDTH else f"{text[: _MAX_CELL_WIDTH - 1]}…"


def _format_time(time_ns: int) -> str:
    return datetime.fromtimestamp(time_ns / 1e9, timezone.utc).strftime("%Y-%m-%d %H:%M")


def _show_tree(args: argparse.Namespace, answer: dict[str, Any]) -> None:
    """Prints device time as a tree, in hours; each level has the same sum."""
    priced = answer["currency"] is not None
    heads = [
        " > ".join(answer["by"]),
        "hours",
        "share",
        "use",
        *([f"cost, {answer['currency']}"] if priced else []),
    ]
    rows, totals = (
        [],
        {row["time_ns"]: row["device_ms"] for row in answer["rows"] if not row["values"]},
    )
    for row in answer["rows"]:
        depth = len(row["values"])
        name = (
            row["values"][-1]
            if depth
            else "all"
            if row["time_ns"] is None
            else _format_time(row["time_ns"])
        )
        used = units.format_share(row["busy_ms"], row["busy_ms"] + row["idle_ms"])
        cells = [f"{'  ' * depth}{name}", units.format_number(row["device_ms"] / _HOUR_MS)]
        cells += [units.format_share(row["device_ms"], totals[row["time_ns"]]), used]
        rows.append([*cells, *([units.format_number(row["cost"])] if priced else [])])
    print_answer(args, answer, heads, rows if any(totals.values()) else [], _NO_DEVICE_TIME)


QUESTION_ACTIONS = {
    question.name: VerbAction(
        f"show {question.summary}",
        f"traceloom fleet {question.name} {_VIEWS[question.name].example}\nthen: {_VIEWS[question.name].then}",
        partial(_add_parameters, question),
        partial(_run, question),
    )
    for question in QUESTIONS
}
_RULES_ARGUMENT = VerbOption(
    "what",
    nargs="?",
    choices=("show", "set", "history"),
    default="show",
    help="what is to be done (default: show)",
)
_RULES_OPTIONS = (
    VerbOption(
        "--version", type=int, metavar="N", help="with show: this version (default: the last)"
    ),
    VerbOption(
        "--dry-run", action="store_true", help="with set: say what would change, and keep nothing"
    ),
    VerbOption(
        "--since", default="30d", help="with set: since when changes are looked at (default: 30d)"
    ),
    VerbOption("--until", default="", help="with set: until when (default: now)"),
)


def _run_rules(name: str, args: argparse.Namespace) -> int:

    if (args.file is not None) != (args.what == "set"):
        needs = "needs a file" if args.what == "set" else "needs no file"
        raise UsageError(
            f"`{args.what}` {needs}", slug="wrong-usage", hint=f"see traceloom fleet {name} --help"
        )
    client, nothing = (
        create_fleet_client(args),
        f"Nothing is set.\nNext: traceloom fleet {name} set {name}.toml --dry-run",
    )
    if args.what == "history":
        answer = client.get(f"{name}/history")
        rows = [
            (str(version["version"]), _format_date_time(version["at_ns"]), version["who"])
            for version in answer["versions"]
        ]
        return print_answer(args, answer, ("version", "since", "by"), rows, nothing)
    if args.what == "show":
        answer = client.get(name, **({"version": str(args.version)} if args.version else {}))
        if args.json or not answer["version"]:
            return print_answer(args, answer, (), (), nothing)
        lines = [
            f"# version {answer['version']}, {_format_date_time(answer['at_ns'])}, by {answer['who']}"
        ]
        print(*(sanitize(line) for line in [*lines, *answer["text"].splitlines()]), sep="\n")
        return 0
    try:
        text = read_small(args.file, MAX_BYTES).decode()
    except (OSError, ValueError) as error:
        raise unreadable(args.file, error) from error
    client.timeout_s = 120.0
    answer = client.post(
        name, {"text": text, "dry_run": args.dry_run, "since": args.since, "until": args.until}
    )
    if args.json:
        print(json.dumps(answer, indent=2))
        return 0
    if name == "owners":
        print_answer(
            args,
            answer,
            ("dimension", "from", "to", "jobs", "device hours"),
            [
                (
                    row["dimension"],
                    row["before"],
                    row["after"],
                    units.format_count(row["jobs"]),
                    units.format_number(row["device_ms"] / _HOUR_MS),
                )
                for row in answer["moves"]
            ],
            "No device time changes hands.",
        )
    else:
        then = (
            f"cost, {answer['currency_before'] or units.UNKNOWN_TEXT}",
            f"then, {answer['currency_after']}",
        )
        costs = [
            (
                row["device_model"],
                units.format_number(row["device_ms"] / _HOUR_MS),
                units.format_number(row["before"]),
                units.format_number(row["after"]),
            )
            for row in answer["costs"]
        ]
        print_answer(args, answer, ("device", "hours", *then), costs, "There was no device time.")
    if not args.quiet:
        outcome = (
            "Nothing was kept: leave out --dry-run."
            if args.dry_run
            else f"Version {answer['version']} counts now."
        )
        print(
            f"Looked at {_format_date_time(answer['since_ns'])} to {_format_date_time(answer['until_ns'])} UTC. {outcome}"
        )
    return 0


def _format_date_time(time_ns: int) -> str:

    return datetime.fromtimestamp(time_ns / 1e9, timezone.utc).strftime("%Y-%m-%d %H:%M")


RULE_ACTIONS = {
    "owners": VerbAction(
        "show and change the rules that say whose jobs are",
        "traceloom fleet owners set owners.toml --dry-run     device time that would move, from whom to whom\n"
        "traceloom fleet owners set owners.toml\ntraceloom fleet owners history\nthen: traceloom fleet attribution",
        declare_options(
            _RULES_ARGUMENT,
            VerbOption("file", nargs="?", metavar="FILE", type=Path, help="with set: owners.toml"),
            *_RULES_OPTIONS,
        ),
        partial(_run_rules, "owners"),
    ),
    "prices": VerbAction(
        "show and change what device hours and energy cost",
        "traceloom fleet prices set prices.toml --dry-run\nthen: traceloom fleet attribution",
        declare_options(
            _RULES_ARGUMENT,
            VerbOption("file", nargs="?", metavar="FILE", type=Path, help="with set: prices.toml"),
            *_RULES_OPTIONS,
        ),
        partial(_run_rules, "prices"),
    ),
}

NO_RULES = """\
There are no rules.
Next: traceloom fleet triggers set FILE"""
TRIGGER_HEADS = ("rule", "on", "of", "traces", "refused", "kept", "last")


def add_triggers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what", choices=("list", "set", "show"), nargs="?", default="list", help="show: as TOML"
    )
    parser.add_argument(
        "file", nargs="?", metavar="FILE", type=Path, help="the rules, TOML, with set"
    )


def send_trigger_command(args: argparse.Namespace, client: FleetClient) -> Any:
    """Sends the command and returns the service's response.

    Raises:
        UsageError: `wrong-usage`.
        InputError: `unreadable`; `wrong-config`: the rules are invalid, and the previous ones
            remain.
    """
    if (args.file is not None) != (args.what == "set"):
        raise UsageError(
            "`set` takes a file, and nothing else does", slug="wrong-usage", hint="set FILE"
        )
    if args.what != "set":
        return client.get("triggers")
    try:
        text = args.file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(args.file, error, "file of rules") from error
    return client.put("triggers", {"toml": text})


def build_trigger_rows(answer: Any) -> list[Sequence[str]]:
    rows: list[Sequence[str]] = []
    for rule in answer["rules"]:
        refused = ", ".join(f"{number} {reason}" for reason, number in rule["refusals"].items())
        last, refusal = rule["last"], rule["last_refusal"]
        text = units.UNKNOWN_TEXT
        if last is not None and (refusal is None or last["at_ns"] >= refusal["at_ns"]):
            text = f"{last['request']}: {last['target']}: {last['what']}"
        elif refusal is not None:
            text = f"{refusal['target'] or 'no job'} not, as {refusal['detail']}"
        rows.append(
            (
                rule["name"],
                rule["on"],
                rule["target"],
                str(rule["fired"]),
                refused or units.UNKNOWN_TEXT,
                units.format_size(rule["kept_bytes"]),
                text,
            )
        )
    return rows


def format_budget(answer: Any) -> str:
    """Formats the remaining budget, and problems."""
    remaining, day = (
        units.format_size(answer["bytes_left"]),
        units.format_size(answer["bytes_per_day"]),
    )
    line = f"left of 24 hours: {answer['traces_left']} of {answer['traces_per_day']} traces, {remaining} of {day}"
    return f"{line}\n{sanitize(answer['last_error'])}" if answer["last_error"] else line


NO_WEBHOOKS = """\
There are no webhooks.
Next: traceloom fleet webhooks add chat https://chat.example/hook"""


def add_webhooks(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        choices=("list", "add", "remove", "test"),
        nargs="?",
        default="list",
        help="default: list",
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="of the webhook")
    parser.add_argument("url", nargs="?", metavar="URL", help="where it leads, with add")
    parser.add_argument(
        "--events",
        metavar="NAMES",
        default="",
        help="what it is told, with commas: request.done, request.partial, request.failed, regression.new (default: "
        "all)",
    )


def send_webhook_command(args: argparse.Namespace, client: FleetClient) -> tuple[Any, str]:
    """Sends the command and returns the service's response and the text to print; "" for a list.

    Raises:
        UsageError: `wrong-usage`.
        CheckError: `not-delivered`: the event of a test did not arrive.
    """
    needs = {"list": 0, "add": 2, "remove": 1, "test": 1}[args.what]
    if sum(word is not None for word in (args.name, args.url)) != needs:
        raise UsageError(
            f"`{args.what}` takes {('nothing', 'a name', 'a name and an address')[needs]}",
            slug="wrong-usage",
            hint="see traceloom fleet webhooks --help",
        )
    if args.what == "add":
        events = {"events": args.events.split(",")} if args.events else {}
        answer = client.post("webhooks", {"name": args.name, "url": args.url, **events})
        return answer, str(answer["secret"])
    if args.what == "remove":
        return client.delete(f"webhooks/{args.name}"), f"{args.name} is told nothing any more."
    if args.what == "test":
        answer = client.post(f"webhooks/{args.name}/test")
        if args.json:
            print(json.dumps(answer, indent=2))
        if not answer["arrived"]:
            raise CheckError(f"the event did not arrive: {answer['error']}", slug="not-delivered")
        return None if args.json else answer, f"{args.name} took the event."
    return client.get("webhooks"), ""


DESCRIPTION = "Ask the fleet's service: what it has, whether it works, who may use it."
EXAMPLES = """\
examples:
  traceloom fleet captures
  traceloom fleet report c0123456789abcdef0123 -o report.html
  traceloom fleet check

What each can do: traceloom fleet token --help.
"""
NO_HOSTS = """\
No host belongs to the fleet yet.
Next: traceloom fleet token enrol > host.token
on the host: traceloom agent run --server URL --token-file host.token"""
NO_JOBS = """\
No job runs on hosts of the fleet, as far as they say.
Next: traceloom fleet hosts"""
NO_REQUESTS = """\
No trace was asked for.
Next: traceloom trace --server URL --job JOB --steps 3"""
NO_CAPTURES = """\
There are no such captures.
Next: traceloom upload CAPTURE"""
_MOST_OPTION = VerbOption(
    "--most", type=types.parse_count, default=20, metavar="N", help="at most so many (default: 20)"
)
_CAPTURE_ARGUMENT = VerbOption(
    "capture", metavar="CAPTURE", help="name of a capture, as `traceloom fleet captures` shows it"
)
_REPORT_OPTIONS = (
    _CAPTURE_ARGUMENT,
    VerbOption(
        "-o", "--output", metavar="FILE", type=Path, required=True, help="the HTML file to write"
    ),
    VerbOption("--force", action="store_true", help="overwrite the file"),
)
_TOKEN_OPTIONS = (
    VerbOption(
        "what",
        choices=("list", "add", "revoke", "enrol"),
        help="what is to be done; enrol: a token by which a host joins the fleet, once",
    ),
    VerbOption(
        "name",
        nargs="?",
        metavar="NAME",
        help="of the token; of the host, with enrol (default: any)",
    ),
    VerbOption(
        "--role",
        choices=("viewer", "requester", "operator", "admin"),
        default="requester",
        help="what it may do: read; upload too; all captures; all (default: requester)",
    ),
    VerbOption(
        "--days",
        type=types.parse_positive,
        metavar="N",
        help="after so many days it expires (default: never; with enrol, one)",
    ),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    for _, subparser in add_actions(parser, ACTIONS):
        add_server(subparser)
        subparser.add_argument("--json", action="store_true", help="print the answer as JSON")
        types.add_verbosity_options(subparser)


def run(args: argparse.Namespace) -> int:
    """Runs the action and returns the exit code."""
    return ACTIONS[args.action].run(args)


def _show_captures(args: argparse.Namespace) -> int:
    answer = create_fleet_client(args).get(
        "captures", most=str(args.most), **({"job": args.job} if args.job else {})
    )
    rows = [
        (
            capture["id"],
            capture["day"],
            capture["job"] or units.UNKNOWN_TEXT,
            capture["state"],
            capture["uploader"],
        )
        for capture in answer["captures"]
    ]
    return print_answer(args, answer, ("capture", "day", "job", "state", "by"), rows, NO_CAPTURES)


def _run_hosts(args: argparse.Namespace) -> int:
    if args.remove:
        removed = create_fleet_client(args).delete(f"hosts/{args.remove}")
        print(
            json.dumps(removed, indent=2)
            if args.json
            else f"{removed['host']} belongs to the fleet no more."
        )
        return 0
    answer = create_fleet_client(args).get("hosts")
    rows = []
    for host in answer["hosts"]:
        error, offset = host["clock_error_ns"], host["clock_offset_ns"]
        clock = units.UNKNOWN_TEXT
        if error is not None:
            side = "ahead" if offset < 0 else "behind"
            clock = f"{units.format_duration(abs(offset))} {side} ± {units.format_duration(error)}"
        heard = "never" if host["heard_ns"] is None else "lost" if host["lost"] else "here"
        devices = str(host["devices"]) + (
            f" ({host['stale_devices']} silent)" if host["stale_devices"] else ""
        )
        rows.append(
            (
                host["host"],
                heard,
                devices,
                str(host["processes"]),
                ", ".join(host["jobs"]) or units.UNKNOWN_TEXT,
                clock,
            )
        )
    return print_answer(
        args, answer, ("host", "heard", "devices", "processes", "jobs", "clock"), rows, NO_HOSTS
    )


def _show_jobs(args: argparse.Namespace) -> int:
    answer = create_fleet_client(args).get("jobs")
    rows = [
        (
            job["job"],
            job["user"] or units.UNKNOWN_TEXT,
            ", ".join(job["hosts"]),
            f"{job['ranks']}/{job['world_size'] or '?'}",
            f"{job['traceable']} of {job['processes']}",
            units.format_number(job["steps_per_second"]),
        )
        for job in answer["jobs"]
    ]
    return print_answer(
        args, answer, ("job", "user", "hosts", "ranks", "traceable", "steps/s"), rows, NO_JOBS
    )


def _show_requests(args: argparse.Namespace) -> int:
    answer = create_fleet_client(args).get("requests", most=str(args.most))
    rows = [
        (
            request["id"],
            request["spec"]["job"],
            request["who"],
            request["state"],
            request["capture"] or units.UNKNOWN_TEXT,
        )
        for request in answer["requests"]
    ]
    return print_answer(
        args, answer, ("request", "job", "by", "state", "capture"), rows, NO_REQUESTS
    )


def _report(args: argparse.Namespace) -> int:
    client = create_fleet_client(args)
    client.timeout_s = 3600.0  # the service may have to render it first
    size = files.write(
        args.output,
        lambda file: client.fetch(f"captures/{args.capture}/report", file),
        force=args.force,
    )
    if args.json:
        print(json.dumps({"report": str(args.output), "bytes": size}))
    elif not args.quiet:
        print(f"Wrote {args.output} ({units.format_size(size)}).")
    return 0


def _fetch(args: argparse.Namespace) -> int:
    from traceloom.cli.trace import download

    if args.output.exists() or args.output.is_symlink():
        raise OutputError(
            "there is something already",
            slug="file-exists",
            where=str(args.output),
            hint="name another -o",
        )
    client, route = create_fleet_client(args), f"captures/{args.capture}"

    def fetch(name: str, path: Path) -> None:
        with path.open("x+b") as file:
            client.fetch(f"{route}/files/{name}", file)
            file.seek(0)
            if compute_sha256(file) != answer["digests"][name]:
                raise InputError(
                    "the file is another than was uploaded", slug="upload-differs", where=name
                )

    answer = client.get(route)
    download(args.output, answer["files"], fetch)
    if args.json:
        print(json.dumps(answer, indent=2))
    elif not args.quiet:
        print(f"Wrote {args.output} ({units.format_size(answer['bytes'])}).")
    return 0


def _run_token(args: argparse.Namespace) -> int:
    if args.what == "enrol":
        answer = create_fleet_client(args).post(
            "agents", {"host": args.name or "", "days": args.days or 1}
        )
        print(json.dumps(answer, indent=2) if args.json else answer["token"])
        return 0
    if (args.name is None) != (args.what == "list"):
        needs = "needs no name" if args.what == "list" else "needs a name"
        raise UsageError(
            f"`{args.what}` {needs}", slug="wrong-usage", hint="see traceloom fleet token --help"
        )
    client = create_fleet_client(args)
    if args.what == "add":
        answer = client.post(
            "tokens", {"name": args.name, "role": args.role, "days": args.days or 0}
        )
        print(json.dumps(answer, indent=2) if args.json else answer["token"])
        return 0
    if args.what == "revoke":
        answer = client.delete(f"tokens/{args.name}")
        if args.json:
            print(json.dumps(answer, indent=2))
        elif not args.quiet:
            print(f"{args.name} opens nothing any more.")
        return 0
    answer = client.get("tokens")
    rows = []
    for token in answer["tokens"]:
        until = "revoked" if token["revoked_ns"] else "for ever"
        if token["expires_ns"] and not token["revoked_ns"]:
            until = (
                datetime.fromtimestamp(token["expires_ns"] / 1e9, timezone.utc).date().isoformat()
            )
        rows.append((token["name"], token["role"], until))
    return print_answer(args, answer, ("token", "role", "until"), rows)


def _check(args: argparse.Namespace) -> int:
    answer = create_fleet_client(args).get("check")
    rows = [
        (check["name"], "✓" if check["works"] else "✗", check["text"]) for check in answer["checks"]
    ]
    tasks = ", ".join(
        f"{units.format_count(count)} {state}" for state, count in answer["tasks"].items() if count
    )
    print_answer(
        args, answer, ("part", "works", "what it is"), [*rows, ("tasks", "", tasks or "none yet")]
    )
    failed = [check for check in answer["checks"] if not check["works"]]
    if failed:
        names = ", ".join(dict.fromkeys(check["name"] for check in failed))
        raise CheckError(f"not all works: {names}", slug="fleet-not-well", hint=failed[0]["help"])
    return 0


def _run_triggers(args: argparse.Namespace) -> int:
    answer = send_trigger_command(args, create_fleet_client(args))
    if args.what == "show":
        print(
            json.dumps(answer, indent=2)
            if args.json
            else answer["toml"].rstrip() or insert_server_options(args, NO_RULES)
        )
        return 0
    print_answer(args, answer, TRIGGER_HEADS, build_trigger_rows(answer), NO_RULES)
    if not args.json:
        print(format_budget(answer))
    return 0


def _run_webhooks(args: argparse.Namespace) -> int:
    answer, text = send_webhook_command(args, create_fleet_client(args))
    if text:
        if args.json and answer is not None:
            print(json.dumps(answer, indent=2))
        elif not args.json and (args.what == "add" or not args.quiet):
            print(text)
        return 0
    return print_answer(
        args,
        answer,
        ("webhook", "to", "events", "waiting", "arrived", "lost", "last error"),
        [
            (
                hook["name"],
                hook["url"],
                ", ".join(hook["events"]),
                str(hook["waiting"]),
                str(hook["delivered"]),
                str(hook["failed"] + hook["dropped"]),
                hook["error"] or units.UNKNOWN_TEXT,
            )
            for hook in answer["webhooks"]
        ],
        NO_WEBHOOKS,
    )


def _start_backfill(args: argparse.Namespace) -> int:
    answer = create_fleet_client(args).post("backfill", {"again": args.again})
    if args.json:
        print(json.dumps(answer, indent=2))
    elif not args.quiet:
        wait = "waits" if answer["captures"] == 1 else "wait"
        print(
            f"{units.format_quantity(answer['captures'], 'capture')} {wait} for version {answer['version']}."
        )
    return 0


ACTIONS = {
    "hosts": VerbAction(
        "list hosts, whether they are there, and how far their clocks are off",
        "traceloom fleet hosts\nthen: traceloom fleet token enrol, for one more",
        declare_options(
            VerbOption("--remove", metavar="HOST", help="let this host belong to the fleet no more")
        ),
        _run_hosts,
    ),
    "jobs": VerbAction(
        "list jobs that run now",
        "traceloom fleet jobs\nthen: traceloom trace --server URL --job JOB --steps 3",
        lambda _: None,
        _show_jobs,
    ),
    "requests": VerbAction(
        "list requests for traces, and how far they are",
        "traceloom fleet requests --most 5\nthen: traceloom fleet report CAPTURE -o report.html",
        declare_options(_MOST_OPTION),
        _show_requests,
    ),
    "captures": VerbAction(
        "list captures and how far they are",
        "traceloom fleet captures --job slurm-42\nthen: traceloom fleet report CAPTURE -o report.html",
        declare_options(
            VerbOption("--job", metavar="JOB", default="", help="only of this job"), _MOST_OPTION
        ),
        _show_captures,
    ),
    "report": VerbAction(
        "write the report of a capture to a file",
        "traceloom fleet report c0123456789abcdef0123 -o report.html",
        declare_options(*_REPORT_OPTIONS),
        _report,
    ),
    "token": VerbAction(
        "make, list and revoke tokens",
        "traceloom fleet token add ci --role requester --days 90 > ci.token\n"
        "traceloom fleet token list\ntraceloom fleet token revoke ci\n"
        "traceloom fleet token enrol node7 > node7.token",
        declare_options(*_TOKEN_OPTIONS),
        _run_token,
    ),
    "triggers": VerbAction(
        "show or set the rules by which jobs are traced though nobody asks, and what they did",
        "traceloom fleet triggers set fleet-triggers.toml\ntraceloom fleet triggers\ntraceloom fleet triggers show",
        add_triggers,
        _run_triggers,
    ),
    "webhooks": VerbAction(
        "have the fleet's events sent to an address, signed",
        "traceloom fleet webhooks add chat https://chat.example/hook > chat.secret\n"
        "traceloom fleet webhooks test chat\ntraceloom fleet webhooks",
        add_webhooks,
        _run_webhooks,
    ),
    "check": VerbAction(
        "say what works, what does not, and which captures could not be analysed",
        "traceloom fleet check\nthen: traceloom fleet backfill --again, once a cause is gone",
        lambda _: None,
        _check,
    ),
    "backfill": VerbAction(
        "have captures analysed again, by the version that the service has now",
        "traceloom fleet backfill\nthen: traceloom fleet check",
        declare_options(
            VerbOption(
                "--again", action="store_true", help="also what this version could not analyse"
            )
        ),
        _start_backfill,
    ),
    "fetch": VerbAction(
        "write the files of a capture to a new directory",
        "traceloom fleet fetch c0123456789abcdef0123 -o run\nthen: traceloom report run; traceloom diff other run",
        declare_options(
            _CAPTURE_ARGUMENT,
            VerbOption(
                "-o",
                "--output",
                metavar="DIR",
                type=Path,
                required=True,
                help="the directory to make",
            ),
        ),
        _fetch,
    ),
    **QUESTION_ACTIONS,
    **RULE_ACTIONS,
    **NOW_ACTIONS,
}
