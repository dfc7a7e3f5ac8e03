"""Writes docs/reference/command-line.md from the parsers; with --check, says whether it is up to
date.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from made_page import write_or_check

from traceloom.cli import VERBS, build_parser

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "command-line.md"
_INTRODUCTION = """\
# Command line

<!-- Written by scripts/command_line_page.py from the parsers; do not edit. -->

One command, `traceloom`, with a verb: `traceloom VERB ...`. `traceloom --help` shows the verbs, `traceloom VERB --help`
what each understands.

| exit code | meaning |
|--:|---|
| 0 | fine; damage that was repaired is a notice in the report |
| 1 | a defect of Traceloom |
| 2 | the call cannot be right |
| 3 | the input, or the place to write to, is refused |
| 4 | one of several inputs was refused, the rest was done |
| 5 | a check failed |
| 130 | interrupted by Ctrl-C |
| 141 | whoever read the output stopped reading |

`traceloom record` ends with the exit code of the command it records, always; with `--fail-without-capture` 5 says that
nothing was recorded. An error is one sentence with a remedy and the
name of its entry in [Messages](messages.md); `--debug` shows a traceback as well. Colours are shown on a terminal only,
and never where `NO_COLOR` is set.

`-o -` is standard output: the answer is printed beside the files that other `-o` name.

What a verb writes is made beside its place under a name of chance (`.*.partial`) and renamed, so that it is whole or
not there; Ctrl-C takes it away. `--force` replaces ordinary files, which hand on who may read and write them: never a
symbolic link, a device or a pipe, and never anything that the command reads, named by you or found in a directory.
"""


def page() -> str:
    """The whole page."""
    return "\n".join([_INTRODUCTION, *(line for verb in VERBS for line in _verb(verb))]) + "\n"


def _verb(name: str) -> Iterator[str]:
    own = _inner(build_parser([name]))[name]
    yield from _section(f"## traceloom {name}", own)
    for action, of_action in _inner(own).items():
        yield from _section(f"### traceloom {name} {action}", of_action)


def _inner(whole: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parsers of a parser's verbs."""
    for action in whole._actions:  # noqa: SLF001  (argparse has no other way)
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            return dict(action.choices)
    return {}


def _section(title: str, own: argparse.ArgumentParser) -> Iterator[str]:
    yield f"{title}\n"
    yield f"{own.description}\n"
    yield "| argument | meaning |"
    yield "|---|---|"
    for action in own._actions:  # noqa: SLF001
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            for choice in action._choices_actions:  # noqa: SLF001
                yield f"| `{choice.dest}` | {_cell(choice.help or '')} |"
        elif action.help is not argparse.SUPPRESS:
            yield f"| {_spelled(action)} | {_cell((action.help or '') % {'default': action.default})} |"
    yield f"\n```text\n{(own.epilog or '').strip()}\n```\n"


def _spelled(action: argparse.Action) -> str:
    value = str(action.metavar or action.dest.upper())
    if not action.option_strings:
        return f"`{value}`"
    takes = "" if action.nargs == 0 else f" {value}"
    return ", ".join(f"`{option}{takes}`" for option in action.option_strings)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(write_or_check(PAGE, page()))
