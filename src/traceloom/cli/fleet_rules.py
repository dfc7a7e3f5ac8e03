"""`traceloom fleet owners` and `prices`: what operators write, and what a change of it would do."""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

from traceloom.cli.verb_actions import VerbAction
from traceloom.errors import UsageError, unreadable
from traceloom.files import read_small
from traceloom.fleet.documents import MOST_BYTES
from traceloom.harmless import harmless
from traceloom.model import units

_HOUR_MS = 3_600_000


def _add_what(name: str, parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what", nargs="?", choices=("show", "set", "history"), default="show", help="what is to be done (default: show)"
    )
    parser.add_argument("file", nargs="?", metavar="FILE", type=Path, help=f"with set: {name}.toml")
    parser.add_argument("--version", type=int, metavar="N", help="with show: this version (default: the last)")
    parser.add_argument("--dry-run", action="store_true", help="with set: say what would change, and keep nothing")
    parser.add_argument("--since", default="30d", help="with set: since when changes are looked at (default: 30d)")
    parser.add_argument("--until", default="", help="with set: until when (default: now)")


def _run(name: str, args: argparse.Namespace) -> int:
    from traceloom.cli.fleet import client_of, shown

    if (args.file is not None) != (args.what == "set"):
        needs = "needs a file" if args.what == "set" else "needs no file"
        raise UsageError(f"`{args.what}` {needs}", slug="wrong-usage", hint=f"see traceloom fleet {name} --help")
    client = client_of(args)
    if args.what == "history":
        answer = client.get(f"{name}/history")
        rows = [(str(each["version"]), _date(each["at_ns"]), each["who"]) for each in answer["versions"]]
        return shown(args, answer, ("version", "since", "by"), rows, f"Nothing is set.\n{_next(name)}")
    if args.what == "show":
        answer = client.get(name, **({"version": str(args.version)} if args.version else {}))
        if args.json or not answer["version"]:
            return shown(args, answer, (), (), f"Nothing is set.\n{_next(name)}")
        lines = [f"# version {answer['version']}, {_date(answer['at_ns'])}, by {answer['who']}"]
        print(*(harmless(line) for line in [*lines, *answer["text"].splitlines()]), sep="\n")
        return 0
    try:
        text = read_small(args.file, MOST_BYTES).decode()
    except (OSError, ValueError) as error:
        raise unreadable(args.file, error) from error
    client.timeout_s = 120.0
    body = {"text": text, "dry_run": args.dry_run, "since": args.since, "until": args.until}
    answer = client.post(name, body)
    if args.json:
        print(json.dumps(answer, indent=2))
        return 0
    (_show_moves if name == "owners" else _show_costs)(args, answer)
    if not args.quiet:
        kept = "Nothing was kept: leave out --dry-run." if args.dry_run else f"Version {answer['version']} counts now."
        print(f"Looked at {_date(answer['since_ns'])} to {_date(answer['until_ns'])} UTC. {kept}")
    return 0


def _show_moves(args: argparse.Namespace, answer: Any) -> None:
    from traceloom.cli.fleet import shown

    rows = [
        (
            row["dimension"],
            row["before"],
            row["after"],
            units.count(row["jobs"]),
            units.number(row["device_ms"] / _HOUR_MS),
        )
        for row in answer["moves"]
    ]
    shown(args, answer, ("dimension", "from", "to", "jobs", "device hours"), rows, "No device time changes hands.")


def _show_costs(args: argparse.Namespace, answer: Any) -> None:
    from traceloom.cli.fleet import shown

    heads = ("device", "hours", f"cost, {answer['currency_before'] or units.NONE}", f"then, {answer['currency_after']}")
    rows = [
        (
            row["device_model"],
            units.number(row["device_ms"] / _HOUR_MS),
            *(units.number(row[side]) for side in ("before", "after")),
        )
        for row in answer["costs"]
    ]
    shown(args, answer, heads, rows, "There was no device time.")


def _date(time_ns: int) -> str:
    from datetime import datetime, timezone

    return datetime.fromtimestamp(time_ns / 1e9, timezone.utc).strftime("%Y-%m-%d %H:%M")


def _next(name: str) -> str:
    return f"Next: traceloom fleet {name} set {name}.toml --dry-run"


RULE_ACTIONS = {
    "owners": VerbAction(
        "show and change the rules that say whose jobs are",
        "traceloom fleet owners set owners.toml --dry-run     device time that would move, from whom to whom\n"
        "traceloom fleet owners set owners.toml\ntraceloom fleet owners history\nthen: traceloom fleet attribution",
        partial(_add_what, "owners"), partial(_run, "owners"),
    ),
    "prices": VerbAction(
        "show and change what device hours and energy cost",
        "traceloom fleet prices set prices.toml --dry-run\nthen: traceloom fleet attribution",
        partial(_add_what, "prices"), partial(_run, "prices"),
    ),
}  # fmt: skip
