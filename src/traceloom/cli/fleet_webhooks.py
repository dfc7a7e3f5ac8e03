"""`traceloom fleet webhooks`: where the fleet's events go."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from traceloom.errors import CheckError, UsageError

if TYPE_CHECKING:
    from traceloom.collect.client import FleetClient

NO_WEBHOOKS = """\
There are no webhooks.
Next: traceloom fleet webhooks add chat https://chat.example/hook"""


def add_webhooks(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "what", choices=("list", "add", "remove", "test"), nargs="?", default="list", help="default: list"
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="of the webhook")
    parser.add_argument("url", nargs="?", metavar="URL", help="where it leads, with add")
    parser.add_argument(
        "--events", metavar="NAMES", default="",
        help="what it is told, with commas: request.done, request.partial, request.failed, regression.new (default: "
        "all)",
    )  # fmt: skip


def webhooks(args: argparse.Namespace, client: FleetClient) -> tuple[Any, str]:
    """Do it: the answer of the service, and what is printed of it; "" of a list.

    Raises:
        UsageError: `wrong-usage`.
        CheckError: `not-delivered`: the event of a test did not arrive.
    """
    needs = {"list": 0, "add": 2, "remove": 1, "test": 1}[args.what]
    if sum(word is not None for word in (args.name, args.url)) != needs:
        raise UsageError(
            f"`{args.what}` takes {('nothing', 'a name', 'a name and an address')[needs]}", slug="wrong-usage",
            hint="see traceloom fleet webhooks --help",
        )  # fmt: skip
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
