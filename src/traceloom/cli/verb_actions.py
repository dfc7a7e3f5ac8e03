"""Verbs that can do several things: each is an action with options, examples and help of its own."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple


class VerbAction(NamedTuple):
    """What a verb can do: in a sentence, with examples, its options, and how it is done."""

    text: str
    examples: str
    add_options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def add_actions(
    parser: argparse.ArgumentParser, actions: Mapping[str, VerbAction]
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Declare actions; each with its parser, for the options that all of the verb have."""
    declared = parser.add_subparsers(dest="action", metavar="ACTION", required=True, title="actions")
    for name, action in actions.items():
        own = declared.add_parser(
            name,
            help=action.text,
            description=f"{action.text[0].upper()}{action.text[1:]}.",
            epilog=f"examples:\n{textwrap.indent(action.examples, '  ')}",
            formatter_class=parser.formatter_class,
        )
        action.add_options(own)
        yield name, own


class VerbOption:
    """An option of actions: its names, and what else argparse takes of it."""

    def __init__(self, *names: str, **settings: Any) -> None:
        self.names, self.settings = names, settings


def declaring(*options: VerbOption) -> Callable[[argparse.ArgumentParser], None]:
    """What declares these options."""

    def declare(parser: argparse.ArgumentParser) -> None:
        for option in options:
            parser.add_argument(*option.names, **option.settings)

    return declare
