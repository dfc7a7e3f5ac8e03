"""Options that several verbs share, parsers of their values, and verbs with actions."""

import argparse
import math
import os
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[kKMGT]?)(?P<binary>i?)[bB]?")
_SIZE_POWERS = {"": 0, "k": 1, "K": 1, "M": 2, "G": 3, "T": 4}
_TIME = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(ns|us|µs|ms|s)")
_NANOSECONDS = {"ns": 1, "us": 10**3, "µs": 10**3, "ms": 10**6, "s": 10**9}


def add_inputs(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help=text)


def add_reading(group: argparse._ActionsContainer) -> None:
    """Adds the options of verbs that read traces."""
    group.add_argument(
        "--no-cache", action="store_true", help="read the files again, without the cache"
    )
    add_verbosity_options(group)


def add_verbosity_options(
    group: argparse._ActionsContainer, quiet: str = "no progress, no closing line"
) -> None:
    """Adds the options about messages besides the result."""
    group.add_argument("-q", "--quiet", action="store_true", help=quiet)
    group.add_argument("--debug", action="store_true", help="show a traceback when something fails")


# Types of arguments: each raises argparse.ArgumentTypeError for an invalid text.


def parse_ranks(text: str) -> tuple[int, ...]:
    """Parses `0,3` as ranks."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"`{text}` is not a rank, as 3 or 0,3") from None


def parse_pids(text: str) -> tuple[int, ...]:
    """Parses `4711,4712` as process ids."""
    try:
        return tuple(parse_count(part) for part in text.split(","))
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"`{text}` is no number of a process, as 4711 or 4711,4712"
        ) from None


def parse_whole_number(text: str) -> int:
    """Parses an integer from 0, such as a step or a node."""
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"`{text}` is not a whole number from 0 on")
    return int(text)


def parse_count(text: str) -> int:
    """Parses an integer from 1, such as a number of rows or tokens."""
    if not text.isascii() or not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"`{text}` is not a whole number above 0")
    return int(text)


def parse_positive(text: str) -> float:
    """Parses a finite number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"`{text}` is not a number above 0")
    return number


def parse_steps(text: str) -> tuple[int, int]:
    """Parses `20..25` as the steps 20 to 24, as for `traceloom record`; `20` is one step.

    Returns the first and the last step.
    """
    first, dots, end = text.partition("..")
    try:
        steps = int(first), int(end) - 1 if dots else int(first)
    except ValueError:
        raise argparse.ArgumentTypeError(f"`{text}` is not a range of steps, as 20..25") from None
    if steps[0] > steps[1]:
        raise argparse.ArgumentTypeError(f"`{text}` has no steps")
    return steps


def parse_sections(text: str) -> tuple[str, ...]:
    """Parses keys of sections, separated by commas."""
    return tuple(part.strip().replace("-", "_") for part in text.split(","))


def parse_size(text: str) -> int:
    """Parses bytes: `64kB` are 64 000, `1MiB` are 1 048 576."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or (match["binary"] and not match["unit"]):
        raise argparse.ArgumentTypeError(f"`{text}` is not a size, as 1MiB or 64kB")
    return int(
        float(match["number"]) * (1024 if match["binary"] else 1000) ** _SIZE_POWERS[match["unit"]]
    )


def parse_instant(text: str) -> str:
    """Converts `12.5ms` to nanoseconds; words stay unchanged."""
    match = _TIME.fullmatch(text.strip())
    if match:
        return str(round(float(match[1]) * _NANOSECONDS[match[2]]))
    if text in ("peak", "start", "end") or re.fullmatch(r"step \d+", text):
        return text
    raise argparse.ArgumentTypeError(
        f'`{text}` is no instant: give peak, start, end, "step 3" or a time as 12.5ms'
    )


def parse_duration(text: str) -> float:
    """Parses `500ms` as seconds, above 0."""
    match = _TIME.fullmatch(text.strip())
    seconds = float(match[1]) * _NANOSECONDS[match[2]] / 1e9 if match else 0.0
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"`{text}` is no duration, as 500ms or 2s")
    return seconds


def parse_percentage(text: str) -> float:
    """Parses a change in percent as a fraction."""
    try:
        fraction = float(text.strip().removesuffix("%").strip()) / 100
    except ValueError:
        fraction = math.nan
    if not 0 < fraction < 100:
        raise argparse.ArgumentTypeError(f"`{text}` is no change, as 5%")
    return fraction


class VerbAction(NamedTuple):
    """An action of a verb: description, examples, options, and its function."""

    text: str
    examples: str
    add_options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def add_actions(
    parser: argparse.ArgumentParser, actions: Mapping[str, VerbAction]
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Declares actions; yields each name with its parser, for the options that all
    actions share.
    """
    declared = parser.add_subparsers(
        dest="action", metavar="ACTION", required=True, title="actions"
    )
    for name, action in actions.items():
        subparser = declared.add_parser(
            name,
            help=action.text,
            description=f"{action.text[0].upper()}{action.text[1:]}.",
            epilog=f"examples:\n{textwrap.indent(action.examples, '  ')}",
            formatter_class=parser.formatter_class,
        )
        action.add_options(subparser)
        yield name, subparser


class VerbOption:
    """An option of actions: its names, and further arguments of `add_argument`."""

    def __init__(self, *names: str, **settings: Any) -> None:
        self.names, self.settings = names, settings


def declare_options(*options: VerbOption) -> Callable[[argparse.ArgumentParser], None]:
    def declare(parser: argparse.ArgumentParser) -> None:
        for option in options:
            parser.add_argument(*option.names, **option.settings)

    return declare


def take_environment(parser: argparse.ArgumentParser, prefix: str) -> None:
    """Lets environment variables stand for options, as `PREFIX_STORE` for `--store`; several values
    have commas, and a switch is `true`. An option goes before its variable.
    """
    for action in parser._actions:  # noqa: SLF001  (argparse lists them nowhere else)
        text = os.environ.get(f"{prefix}_{action.dest.upper()}", "")
        if text and isinstance(action.default, bool):
            action.default = text.lower() in {"1", "true", "yes"}
        elif text:
            action.default = text.split(",") if isinstance(action.default, list) else text
