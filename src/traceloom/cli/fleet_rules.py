"""`traceloom fleet owners` and `prices`: what operators write, and what a change of it would do."""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path

from traceloom.cli.verb_actions import VerbAction, VerbOption, declaring
from traceloom.errors import UsageError, unreadable
from traceloom.files import read_small
from traceloom.fleet.documents import MOST_BYTES
from traceloom.harmless import harmless
from traceloom.model import units

_HOUR_MS = 3_600_000
_WHAT = VerbOption(
    "what", nargs="?", choices=("show", "set", "history"), default="show", help="what is to be done (default: show)"
)
_OPTIONS = (
    VerbOption("--version", type=int, metavar="N", help="with show: this version (default: the last)"),
    VerbOption("--dry-run", action="store_true", help="with set: say what would change, and keep nothing"),
    VerbOption("--since", default="30d", help="with set: since when changes are looked at (default: 30d)"),
    VerbOption("--until", default="", help="with set: until when (default: now)"),
)


def _run(name: str, args: argparse.Namespace) -> int:
    from traceloom.cli.fleet import client_of, shown

    if (args.file is not None) != (args.what == "set"):
        needs = "needs a file" if args.what == "set" else "needs no file"
        raise UsageError(f"`{args.what}` {needs}", slug="wrong-usage", hint=f"see traceloom fleet {name} --help")
    client, nothing = client_of(args), f"Nothing is set.\nNext: traceloom fleet {name} set {name}.toml --dry-run"
    if args.what == "history":
        answer = client.get(f"{name}/history")
        rows = [(str(each["version"]), _date(each["at_ns"]), each["who"]) for each in answer["versions"]]
        return shown(args, answer, ("version", "since", "by"), rows, nothing)
    if args.what == "show":
        answer = client.get(name, **({"version": str(args.version)} if args.version else {}))
        if args.json or not answer["version"]:
            return shown(args, answer, (), (), nothing)
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
    if name == "owners":
        moves = [
            (
                row["dimension"],
                row["before"],
                row["after"],
                units.count(row["jobs"]),
                units.number(row["device_ms"] / _HOUR_MS),
            )
            for row in answer["moves"]
        ]
        shown(args, answer, ("dimension", "from", "to", "jobs", "device hours"), moves, "No device time changes hands.")
    else:
        then = f"cost, {answer['currency_before'] or units.NONE}", f"then, {answer['currency_after']}"
        costs = [
            (
                row["device_model"],
                units.number(row["device_ms"] / _HOUR_MS),
                units.number(row["before"]),
                units.number(row["after"]),
            )
            for row in answer["costs"]
        ]
        shown(args, answer, ("device", "hours", *then), costs, "There was no device time.")
    if not args.quiet:
        kept = "Nothing was kept: leave out --dry-run." if args.dry_run else f"Version {answer['version']} counts now."
        print(f"Looked at {_date(answer['since_ns'])} to {_date(answer['until_ns'])} UTC. {kept}")
    return 0


def _date(time_ns: int) -> str:
    from datetime import datetime, timezone

    return datetime.fromtimestamp(time_ns / 1e9, timezone.utc).strftime("%Y-%m-%d %H:%M")


RULE_ACTIONS = {
    "owners": VerbAction(
        "show and change the rules that say whose jobs are",
        "traceloom fleet owners set owners.toml --dry-run     device time that would move, from whom to whom\n"
        "traceloom fleet owners set owners.toml\ntraceloom fleet owners history\nthen: traceloom fleet attribution",
        declaring(
            _WHAT, VerbOption("file", nargs="?", metavar="FILE", type=Path, help="with set: owners.toml"), *_OPTIONS
        ),
        partial(_run, "owners"),
    ),
    "prices": VerbAction(
        "show and change what device hours and energy cost",
        "traceloom fleet prices set prices.toml --dry-run\nthen: traceloom fleet attribution",
        declaring(
            _WHAT, VerbOption("file", nargs="?", metavar="FILE", type=Path, help="with set: prices.toml"), *_OPTIONS
        ),
        partial(_run, "prices"),
    ),
}  # fmt: skip
