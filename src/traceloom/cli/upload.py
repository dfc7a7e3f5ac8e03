"""`traceloom upload`: sends captures to the fleet's service."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from traceloom.cli import options as types
from traceloom.cli.progress import Progress
from traceloom.errors import InputError

DESCRIPTION = (
    "Send recorded runs or traces to the fleet's service, which analyses and keeps them. An upload that stopped goes "
    "on where it was; the same capture twice is one."
)
EXAMPLES = """\
examples:
  traceloom upload run --job slurm-42
  traceloom upload run --wait                      until it is analysed, or refused
  traceloom upload trace.json.gz --server https://fleet.example.org
then: traceloom fleet captures
"""
_LOOK_S = 0.5


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the verb."""
    parser.add_argument("captures", nargs="+", metavar="CAPTURE", help="recorded run, or trace; each is one capture")
    parser.add_argument("--job", metavar="JOB", default="", help="the job that was captured")
    parser.add_argument("--wait", action="store_true", help="wait until they are analysed")
    add_server(parser)
    parser.add_argument("--json", action="store_true", help="print the service's answers as JSON")
    types.add_silence(parser)


def add_server(parser: argparse.ArgumentParser) -> None:
    """Which service is asked, and as whom."""
    parser.add_argument(
        "--server", metavar="URL", default="",
        help="address of the service (default: TRACELOOM_SERVER, else http://127.0.0.1:9466)",
    )  # fmt: skip
    parser.add_argument(
        "--token-file", metavar="FILE", type=Path,
        help="file with the token (default: TRACELOOM_TOKEN, else that of this user's own service)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Send them; returns the exit code."""
    from traceloom.cli.fleet import client_of, follow_up
    from traceloom.collect.client import upload

    client = client_of(args)
    answers = []
    with Progress(shown=not args.quiet) as progress:
        for name in args.captures:

            def tell(sent: int, whole: int, name: str = name) -> None:
                progress.say(f"{name}: {sent * 100 // max(whole, 1)} %")

            answers += [upload(client, Path(name), args.job, tell)]
        for at, answer in enumerate(answers):
            while args.wait and answer["state"] in {"received", "checked", "analysed"}:
                progress.say(f"{args.captures[at]}: {answer['state']}")
                time.sleep(_LOOK_S)
                answer = client.get(f"captures/{answer['id']}")  # noqa: PLW2901  (the same, later)
            answers[at] = answer
    if args.json:
        print(json.dumps(answers, indent=2))
    elif not args.quiet:
        for name, answer in zip(args.captures, answers, strict=True):
            print(f"{name} is {answer['id']}: {answer['state']}")
        done = [answer["id"] for answer in answers if answer["state"] == "committed"]
        look = f"report {done[0]} -o report.html" if done else "captures"
        print(follow_up(args, f"Look: traceloom fleet {look}"))
    refused = [answer for answer in answers if answer["state"] == "quarantined"]
    if refused:
        raise InputError(
            f"the service could not analyse it: {refused[0]['tasks'][-1]['error']}", slug="not-analysed",
            where=refused[0]["id"],
        )  # fmt: skip
    return 0
