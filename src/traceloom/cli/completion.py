"""`traceloom completion`: prints a script with which a shell completes verbs, options and files."""

import argparse

from traceloom.cli import options as types

_SHELLS = ("bash", "zsh", "fish")
_FILES = {"INPUT", "FILE", "OUT", "OUTPUT", "BASE", "NEW", "RUN"}
DESCRIPTION = "Print the script that makes a shell complete verbs, options and files. Print it anew after an update."
EXAMPLES = """\
examples:
  traceloom completion bash > ~/.local/share/bash-completion/completions/traceloom
  traceloom completion zsh > ~/.zfunc/_traceloom     with `fpath+=~/.zfunc` before `compinit` in ~/.zshrc
  traceloom completion fish > ~/.config/fish/completions/traceloom.fish
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=_SHELLS, metavar="SHELL", help=", ".join(_SHELLS))
    types.add_verbosity_options(parser, "print errors only, as without: the script is all there is")


def run(args: argparse.Namespace) -> int:
    """Prints the script; returns the exit code."""
    import shtab

    from traceloom.cli import build_parser, list_actions
    from traceloom.report.sections import SECTION_NAMES

    parser = build_parser()
    for action in list_actions(parser):
        if action.dest == "only" and action.choices is None:  # the sections of a report
            action.choices = SECTION_NAMES
        elif action.metavar in _FILES or action.metavar == "DIR":
            complete = shtab.DIRECTORY if action.metavar == "DIR" else shtab.FILE
            action.complete = complete  # type: ignore[attr-defined] # required by shtab
    print(shtab.complete(parser, args.shell), end="")
    return 0
