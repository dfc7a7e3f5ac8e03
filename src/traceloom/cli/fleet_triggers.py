"""`traceloom fleet triggers`: rules by which the fleet traces jobs though nobody asks."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from traceloom.errors import UsageError, unreadable
from traceloom.harmless import harmless
from traceloom.model import units

if TYPE_CHECKING:
    from traceloom.collect.client import FleetClient

NO_RULES = """\
There are no rules.
Next: traceloom fleet triggers set FILE"""
TRIGGER_HEADS = ("rule", "on", "of", "traces", "refused", "kept", "last")


def add_triggers(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("what", choices=("list", "set", "show"), nargs="?", default="list", help="show: as TOML")
    parser.add_argument("file", nargs="?", metavar="FILE", type=Path, help="the rules, TOML, with set")


def triggers(args: argparse.Namespace, client: FleetClient) -> Any:
    """Do it: the answer of the service.

    Raises:
        UsageError: `wrong-usage`.
        InputError: `unreadable`; `wrong-config`: the rules are wrong, and those before stay.
    """
    if (args.file is not None) != (args.what == "set"):
        raise UsageError("`set` takes a file, and nothing else does", slug="wrong-usage", hint="set FILE")
    if args.what != "set":
        return client.get("triggers")
    try:
        text = args.file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(args.file, error, "file of rules") from error
    return client.put("triggers", {"toml": text})


def trigger_rows(answer: Any) -> list[Sequence[str]]:
    """A row per rule."""
    rows: list[Sequence[str]] = []
    for rule in answer["rules"]:
        refused = ", ".join(f"{number} {reason}" for reason, number in rule["refusals"].items())
        last, refusal = rule["last"], rule["last_refusal"]
        text = units.NONE
        if last is not None and (refusal is None or last["at_ns"] >= refusal["at_ns"]):
            text = f"{last['request']}: {last['target']}: {last['what']}"
        elif refusal is not None:
            text = f"{refusal['target'] or 'no job'} not, as {refusal['detail']}"
        size = units.size(rule["kept_bytes"])
        rows.append((rule["name"], rule["on"], rule["target"], str(rule["fired"]), refused or units.NONE, size, text))
    return rows


def budget_line(answer: Any) -> str:
    """What may still be spent, and what is wrong."""
    left, day = units.size(answer["bytes_left"]), units.size(answer["bytes_per_day"])
    line = f"left of 24 hours: {answer['traces_left']} of {answer['traces_per_day']} traces, {left} of {day}"
    return f"{line}\n{harmless(answer['trouble'])}" if answer["trouble"] else line
