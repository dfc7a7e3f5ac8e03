"""`traceloom fleet`: asks the fleet's service."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from traceloom import files
from traceloom.cli import options as types
from traceloom.cli.fleet_now import NOW_ACTIONS
from traceloom.cli.fleet_questions import QUESTION_ACTIONS
from traceloom.cli.fleet_rules import RULE_ACTIONS
from traceloom.cli.fleet_triggers import NO_RULES, TRIGGER_HEADS, add_triggers, budget_line, trigger_rows, triggers
from traceloom.cli.fleet_webhooks import NO_WEBHOOKS, add_webhooks, webhooks
from traceloom.cli.upload import add_server
from traceloom.cli.verb_actions import VerbAction, VerbOption, add_actions, declaring
from traceloom.errors import CheckError, OutputError, UsageError, unreadable
from traceloom.model import units

if TYPE_CHECKING:
    from traceloom.collect.client import FleetClient

DESCRIPTION = "Ask the fleet's service: what it has, whether it works, who may use it."
EXAMPLES = """\
examples:
  traceloom fleet captures
  traceloom fleet report c0123456789abcdef0123 -o report.html
  traceloom fleet check

What each can do: traceloom fleet token --help.
"""

_NUMBER = re.compile(r"[-+<>]?\d[\d\u202f.]*(e-\d+)?( [^\d\s]+)?")  # with its unit
_NARROWEST = 10  # signs of a column, where not all of a table fits
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
_MOST = VerbOption("--most", type=types.count, default=20, metavar="N", help="at most so many (default: 20)")
_CAPTURE = VerbOption("capture", metavar="CAPTURE", help="name of a capture, as `traceloom fleet captures` shows it")
_OF_REPORT = (
    _CAPTURE,
    VerbOption("-o", "--output", metavar="FILE", type=Path, required=True, help="the HTML file to write"),
    VerbOption("--force", action="store_true", help="overwrite the file"),
)
_OF_TOKEN = (
    VerbOption(
        "what", choices=("list", "add", "revoke", "enrol"),
        help="what is to be done; enrol: a token by which a host joins the fleet, once",
    ),
    VerbOption("name", nargs="?", metavar="NAME", help="of the token; of the host, with enrol (default: any)"),
    VerbOption(
        "--role", choices=("viewer", "requester", "operator", "admin"), default="requester",
        help="what it may do: read; upload too; all captures; all (default: requester)",
    ),
    VerbOption(
        "--days", type=types.positive, metavar="N",
        help="after so many days it expires (default: never; with enrol, one)",
    ),
)  # fmt: skip


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the actions and their options."""
    for _, own in add_actions(parser, ACTIONS):
        add_server(own)
        own.add_argument("--json", action="store_true", help="print the answer as JSON")
        types.add_silence(own)


def run(args: argparse.Namespace) -> int:
    """Do what the action says; returns the exit code."""
    return ACTIONS[args.action].run(args)


def client_of(args: argparse.Namespace) -> FleetClient:
    """Who asks the service that the options name.

    Raises:
        InputError: `unreadable`: the token's file.
    """
    from traceloom.collect.client import FleetClient

    token = ""
    if args.token_file is not None:
        try:
            token = args.token_file.read_text(encoding="ascii").strip()
        except (OSError, ValueError) as error:
            raise unreadable(args.token_file, error) from error
    return FleetClient(args.server, token)


def follow_up(args: argparse.Namespace, text: str) -> str:
    """A text with commands to be copied: each asks the service that was just asked, as whoever asked."""
    from traceloom.collect.client import FleetClient

    server = f" --server {shlex.quote(FleetClient(args.server).url)}"
    token = f" --token-file {shlex.quote(str(args.token_file))}" if args.token_file else ""
    same = f"{server if args.server else ''}{token}"
    text = text.replace("trace --server URL", f"trace{server}{token}").replace(" --server URL", server)
    return re.sub(r"traceloom (fleet [a-z-]+|upload)", lambda command: command[0] + same, text)


def _captures(args: argparse.Namespace) -> int:
    answer = client_of(args).get("captures", most=str(args.most), **({"job": args.job} if args.job else {}))
    rows = [
        (capture["id"], capture["day"], capture["job"] or units.NONE, capture["state"], capture["uploader"])
        for capture in answer["captures"]
    ]
    return shown(args, answer, ("capture", "day", "job", "state", "by"), rows, NO_CAPTURES)


def _hosts(args: argparse.Namespace) -> int:
    if args.remove:
        removed = client_of(args).delete(f"hosts/{args.remove}")
        print(json.dumps(removed, indent=2) if args.json else f"{removed['host']} belongs to the fleet no more.")
        return 0
    answer = client_of(args).get("hosts")
    rows = []
    for host in answer["hosts"]:
        error, offset = host["clock_error_ns"], host["clock_offset_ns"]
        clock = units.NONE
        if error is not None:
            side = "ahead" if offset < 0 else "behind"
            clock = f"{units.duration(abs(offset))} {side} ± {units.duration(error)}"
        heard = "never" if host["heard_ns"] is None else "lost" if host["lost"] else "here"
        devices = str(host["devices"]) + (f" ({host['stale_devices']} silent)" if host["stale_devices"] else "")
        rows.append(
            (host["host"], heard, devices, str(host["processes"]), ", ".join(host["jobs"]) or units.NONE, clock)
        )
    return shown(args, answer, ("host", "heard", "devices", "processes", "jobs", "clock"), rows, NO_HOSTS)


def _jobs(args: argparse.Namespace) -> int:
    answer = client_of(args).get("jobs")
    rows = [
        (
            job["job"], job["user"] or units.NONE, ", ".join(job["hosts"]),
            f"{job['ranks']}/{job['world_size'] or '?'}", f"{job['traceable']} of {job['processes']}",
            units.number(job["steps_per_second"]),
        )
        for job in answer["jobs"]
    ]  # fmt: skip
    return shown(args, answer, ("job", "user", "hosts", "ranks", "traceable", "steps/s"), rows, NO_JOBS)


def _requests(args: argparse.Namespace) -> int:
    answer = client_of(args).get("requests", most=str(args.most))
    rows = [
        (request["id"], request["wanted"]["job"], request["who"], request["state"], request["capture"] or units.NONE)
        for request in answer["requests"]
    ]
    return shown(args, answer, ("request", "job", "by", "state", "capture"), rows, NO_REQUESTS)


def _report(args: argparse.Namespace) -> int:
    client = client_of(args)
    client.timeout_s = 3600.0  # it may be rendered now
    size = files.write(
        args.output, lambda file: client.fetch(f"captures/{args.capture}/report", file), force=args.force
    )
    if args.json:
        print(json.dumps({"report": str(args.output), "bytes": size}))
    elif not args.quiet:
        print(f"Wrote {args.output} ({units.size(size)}).")
    return 0


def _fetch(args: argparse.Namespace) -> int:
    from traceloom.cli.trace import download

    if args.output.exists() or args.output.is_symlink():
        message = "there is something already"
        raise OutputError(message, slug="file-exists", where=str(args.output), hint="name another -o")
    client, route = client_of(args), f"captures/{args.capture}"

    def fetch(name: str, path: Path) -> None:
        with path.open("xb") as file:
            client.fetch(f"{route}/files/{name}", file)

    answer = client.get(route)
    download(args.output, answer["files"], fetch)
    if args.json:
        print(json.dumps(answer, indent=2))
    elif not args.quiet:
        print(f"Wrote {args.output} ({units.size(answer['bytes'])}).")
    return 0


def _token(args: argparse.Namespace) -> int:
    if args.what == "enrol":
        answer = client_of(args).post("agents", {"host": args.name or "", "days": args.days or 1})
        print(json.dumps(answer, indent=2) if args.json else answer["token"])
        return 0
    if (args.name is None) != (args.what == "list"):
        needs = "needs no name" if args.what == "list" else "needs a name"
        raise UsageError(f"`{args.what}` {needs}", slug="wrong-usage", hint="see traceloom fleet token --help")
    client = client_of(args)
    if args.what == "add":
        answer = client.post("tokens", {"name": args.name, "role": args.role, "days": args.days or 0})
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
            until = datetime.fromtimestamp(token["expires_ns"] / 1e9, timezone.utc).date().isoformat()
        rows.append((token["name"], token["role"], until))
    return shown(args, answer, ("token", "role", "until"), rows)


def _check(args: argparse.Namespace) -> int:
    answer = client_of(args).get("check")
    rows = [(check["name"], "✓" if check["works"] else "✗", check["text"]) for check in answer["checks"]]
    tasks = ", ".join(f"{units.count(count)} {state}" for state, count in answer["tasks"].items() if count)
    shown(args, answer, ("part", "works", "what it is"), [*rows, ("tasks", "", tasks or "none yet")])
    failed = [check for check in answer["checks"] if not check["works"]]
    if failed:
        names = ", ".join(dict.fromkeys(check["name"] for check in failed))
        raise CheckError(f"not all works: {names}", slug="fleet-not-well", hint=failed[0]["help"])
    return 0


def _triggers(args: argparse.Namespace) -> int:
    answer = triggers(args, client_of(args))
    if args.what == "show":
        print(json.dumps(answer, indent=2) if args.json else answer["toml"].rstrip() or follow_up(args, NO_RULES))
        return 0
    shown(args, answer, TRIGGER_HEADS, trigger_rows(answer), NO_RULES)
    if not args.json:
        print(budget_line(answer))
    return 0


def _webhooks(args: argparse.Namespace) -> int:
    answer, text = webhooks(args, client_of(args))
    if text:
        if args.json and answer is not None:
            print(json.dumps(answer, indent=2))
        elif not args.json and (args.what == "add" or not args.quiet):
            print(text)
        return 0
    rows = [
        (
            hook["name"], hook["url"], ", ".join(hook["events"]), str(hook["waiting"]), str(hook["delivered"]),
            str(hook["failed"] + hook["dropped"]), hook["error"] or units.NONE,
        )
        for hook in answer["webhooks"]
    ]  # fmt: skip
    return shown(
        args, answer, ("webhook", "to", "events", "waiting", "arrived", "lost", "last error"), rows, NO_WEBHOOKS
    )


def _backfill(args: argparse.Namespace) -> int:
    answer = client_of(args).post("backfill", {"again": args.again})
    if args.json:
        print(json.dumps(answer, indent=2))
    elif not args.quiet:
        wait = "waits" if answer["captures"] == 1 else "wait"
        print(f"{units.counted(answer['captures'], 'capture')} {wait} for version {answer['version']}.")
    return 0


def shown(
    args: argparse.Namespace, answer: Any, heads: Sequence[str], rows: Sequence[Sequence[str]], empty: str = ""
) -> int:
    """Print an answer: as JSON where that is asked for, else as a table, else what there is not; the exit code."""
    if args.json:
        print(json.dumps(answer, indent=2))
        return 0
    if not rows:
        print(follow_up(args, empty))
        return 0
    from traceloom.harmless import harmless

    texts = [[harmless(cell) for cell in row] for row in ([f"{head[:1].upper()}{head[1:]}" for head in heads], *rows)]
    known = [[row[at] for row in texts[1:] if row[at] != units.NONE] for at in range(len(heads))]
    numeric = [bool(cells) and all(map(_NUMBER.fullmatch, cells)) for cells in known]
    widths = [max(len(row[at]) for row in texts) for at in range(len(heads))]
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 10_000
    room = width - 2 * (len(widths) - 1)
    while sum(widths) > room and max(widths) > _NARROWEST:  # long names give way, so that numbers are seen
        widths[widths.index(max(widths))] -= 1
    for row in texts:
        cells = [cell if len(cell) <= size else f"{cell[: size - 1]}…" for cell, size in zip(row, widths, strict=True)]
        cells = [
            cell.rjust(size) if right else cell.ljust(size)
            for cell, size, right in zip(cells, widths, numeric, strict=True)
        ]
        print("  ".join(cells).rstrip()[:width])
    return 0


ACTIONS = {
    "hosts": VerbAction(
        "list hosts, whether they are there, and how far their clocks are off",
        "traceloom fleet hosts\nthen: traceloom fleet token enrol, for one more",
        declaring(VerbOption("--remove", metavar="HOST", help="let this host belong to the fleet no more")), _hosts,
    ),
    "jobs": VerbAction(
        "list jobs that run now",
        "traceloom fleet jobs\nthen: traceloom trace --server URL --job JOB --steps 3", lambda _: None, _jobs,
    ),
    "requests": VerbAction(
        "list requests for traces, and how far they are",
        "traceloom fleet requests --most 5\nthen: traceloom fleet report CAPTURE -o report.html",
        declaring(_MOST), _requests,
    ),
    "captures": VerbAction(
        "list captures and how far they are",
        "traceloom fleet captures --job slurm-42\nthen: traceloom fleet report CAPTURE -o report.html",
        declaring(VerbOption("--job", metavar="JOB", default="", help="only of this job"), _MOST), _captures,
    ),
    "report": VerbAction(
        "write the report of a capture to a file",
        "traceloom fleet report c0123456789abcdef0123 -o report.html",
        declaring(*_OF_REPORT), _report,
    ),
    "token": VerbAction(
        "make, list and revoke tokens",
        "traceloom fleet token add ci --role requester --days 90 > ci.token\n"
        "traceloom fleet token list\ntraceloom fleet token revoke ci\n"
        "traceloom fleet token enrol node7 > node7.token",
        declaring(*_OF_TOKEN), _token,
    ),
    "triggers": VerbAction(
        "show or set the rules by which jobs are traced though nobody asks, and what they did",
        "traceloom fleet triggers set fleet-triggers.toml\ntraceloom fleet triggers\ntraceloom fleet triggers show",
        add_triggers, _triggers,
    ),
    "webhooks": VerbAction(
        "have the fleet's events sent to an address, signed",
        "traceloom fleet webhooks add chat https://chat.example/hook > chat.secret\n"
        "traceloom fleet webhooks test chat\ntraceloom fleet webhooks",
        add_webhooks, _webhooks,
    ),
    "check": VerbAction(
        "say what works, what does not, and which captures could not be analysed",
        "traceloom fleet check\nthen: traceloom fleet backfill --again, once a cause is gone",
        lambda _: None, _check,
    ),
    "backfill": VerbAction(
        "have captures analysed again, by the version that the service has now",
        "traceloom fleet backfill\nthen: traceloom fleet check",
        declaring(VerbOption("--again", action="store_true", help="also what this version could not analyse")),
        _backfill,
    ),
    "fetch": VerbAction(
        "write the files of a capture to a new directory",
        "traceloom fleet fetch c0123456789abcdef0123 -o run\nthen: traceloom report run; traceloom diff other run",
        declaring(
            _CAPTURE,
            VerbOption("-o", "--output", metavar="DIR", type=Path, required=True, help="the directory to make"),
        ),
        _fetch,
    ),
    **QUESTION_ACTIONS,
    **RULE_ACTIONS,
    **NOW_ACTIONS,
}  # fmt: skip
