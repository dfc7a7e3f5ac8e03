"""The command line, `traceloom VERB`; the module of a verb is loaded only when it is called.

Exit codes: 0 success, 1 an internal error, 2 wrong usage, 3 an input was refused, 4 one of several
inputs was refused, 5 a check failed, 130 interrupted, 141 the reader of the output closed it.
"""

import argparse
import errno
import importlib
import os
import sys
import textwrap
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NoReturn, Protocol, cast

from traceloom import __version__
from traceloom.errors import (
    DOCUMENTATION,
    InputError,
    OutputError,
    TraceloomError,
    UsageError,
    nearest,
)
from traceloom.system.files import restore_addresses
from traceloom.system.process import EXIT_INTERRUPTED
from traceloom.system.sanitize import sanitize

EXIT_BROKEN_PIPE = 141
_DISK_FULL_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

# Verb -> description, by what it is for. Its module is `traceloom.cli.VERB`.
VERB_GROUPS = {
    "Everyday": {
        "record": "record a PyTorch program, without changing it",
        "report": "show where the time of a trace or a recorded run went",
        "memory": "show whose memory it is: by scope, module, operator, line of code",
        "diff": "compare two traces or recorded runs, and check for regressions",
        "baseline": "keep runs as a baseline, and check later runs against it",
        "explain": "say what an error, a notice or a finding means, and what to do",
        "completion": "print what makes a shell complete verbs and options",
    },
    "What if": {
        "whatif": "say what a change would save",
        "simulate": "say how long a workload takes on another machine",
        "calibrate": "fit a machine to recorded runs, or to what is measured here",
        "replay": "run a recorded workload again, without its code and data",
    },
    "Hosts and fleet": {
        "trace": "trace a job that is running",
        "agent": "watch a host: its devices, processes and jobs",
        "serve": "run the fleet's service, which keeps and analyses captures",
        "upload": "send captures to the fleet's service",
        "fleet": "ask the fleet's service",
    },
    "Graphs and Chakra": {
        "link": "link host and device traces of all ranks into one graph",
        "convert": "convert graphs and Chakra files into another format",
        "validate": "say what is wrong with a set of Chakra files",
        "show": "show what a graph or a Chakra workload is made of",
        "generate": "make a small workload with known answers",
        "anonymize": "make traces that can be shared, and say what they still tell",
    },
}
VERBS = {verb: summary for verbs in VERB_GROUPS.values() for verb, summary in verbs.items()}


def render_overview() -> str:
    """Returns the help of the whole: the verbs by what they are for."""
    groups = "\n\n".join(
        "\n".join((f"{title}:", *(f"  {verb:<12}{summary}" for verb, summary in verbs.items())))
        for title, verbs in VERB_GROUPS.items()
    )
    return f"""\
usage: traceloom VERB ...

Records AI workloads, accounts for every nanosecond, shows where the time went.

{groups}

Start here, then ask each verb for help and examples: traceloom report --help
  traceloom record -o run -- python train.py
  traceloom report run
"""


class VerbModule(Protocol):
    """Interface of the module of a verb."""

    DESCRIPTION: str
    EXAMPLES: str

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Declares its options."""

    def run(self, args: argparse.Namespace) -> int:
        """Runs the verb and returns the exit code."""


class VerbParser(argparse.ArgumentParser):
    """Reports errors as one sentence, like all errors of Traceloom."""

    def error(self, message: str) -> NoReturn:
        """Raises UsageError, slug `wrong-usage`."""
        raise UsageError(message, slug="wrong-usage", hint=f"see {self.prog} --help")


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Fills sentences to the width of the terminal; text laid out by hand, such as examples, stays
    unchanged.
    """

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = text.split("\n\n")
        wrapper = textwrap.TextWrapper(width, initial_indent=indent, subsequent_indent=indent)
        return "\n\n".join(part if "\n  " in part else wrapper.fill(part) for part in paragraphs)


def import_verb(name: str) -> VerbModule:
    return cast("VerbModule", importlib.import_module(f"traceloom.cli.{name}"))


def build_parser(names: Sequence[str] = tuple(VERBS)) -> VerbParser:
    """Builds a parser for these verbs; only their modules are loaded."""
    parser = VerbParser(prog="traceloom", add_help=False)
    subparsers = parser.add_subparsers(dest="verb", parser_class=VerbParser)
    for name in names:
        module = import_verb(name)
        subparser = subparsers.add_parser(
            name,
            help=VERBS[name],
            description=module.DESCRIPTION,
            epilog=module.EXAMPLES,
            formatter_class=HelpFormatter,
        )
        module.add_options(subparser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line and returns the exit code. A traceback is shown only with `--debug`."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in _select_own_arguments(arguments)
    try:
        code = _dispatch(arguments)
        sys.stdout.flush()
    except TraceloomError as error:
        _print_error(error, debug=debug)
        return error.exit_code
    except KeyboardInterrupt:
        print("traceloom: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Buffered output would fail once more when Python exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except OSError as error:
        _print_error(_convert_os_error(error), debug=debug, cause=error)
        return OutputError.exit_code
    except Exception as error:  # noqa: BLE001  (last resort: a sentence, not a traceback)
        defect = TraceloomError(
            f"a defect of Traceloom: {type(error).__name__}: {error}",
            slug="internal-error",
            hint="please report it with the traceback that --debug shows",
        )
        _print_error(defect, debug=debug, cause=error)
        return 1
    return code


def _select_own_arguments(arguments: list[str]) -> list[str]:
    """Returns the arguments before `--`: what follows belongs to the recorded program."""
    return arguments[: arguments.index("--")] if "--" in arguments else arguments


def _dispatch(arguments: list[str]) -> int:
    verb = next((argument for argument in arguments if argument != "--debug"), "--help")
    if verb in {"-h", "--help", "help"}:
        print(render_overview(), end="")
        return 0
    if verb in {"-V", "--version"}:
        print(f"traceloom {__version__}")
        return 0
    if verb not in VERBS:
        hint = nearest(verb, VERBS) + f"it has {', '.join(VERBS)}"
        raise UsageError(f"`{verb}` is not a verb of traceloom", slug="unknown-verb", hint=hint)
    if verb != "record":  # `record` passes its environment to the user's program
        # Before NumPy is loaded: it would start threads for linear algebra, which no verb uses, and
        # wait for them.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    program = arguments[len(_select_own_arguments(arguments)) :]
    try:
        parser = build_parser([verb])
        args, unknown = parser.parse_known_args(
            [a for a in _select_own_arguments(arguments) if a != "--debug"] + program
        )
    except SystemExit as stop:  # argparse exits this way after --help
        return int(stop.code or 0)
    if unknown:
        options = [option for action in list_actions(parser) for option in action.option_strings]
        hint = nearest(unknown[0].split("=")[0], options) + f"see traceloom {verb} --help"
        raise UsageError(
            f"unrecognized arguments: {' '.join(unknown)}", slug="wrong-usage", hint=hint
        )
    if verb == "record":  # its arguments include the user's program
        return import_verb(verb).run(args)
    from traceloom.cli import outputs

    outputs.fetch_remote_inputs(args)
    with outputs.protect_inputs(args):
        return import_verb(verb).run(args)


def list_actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:  # noqa: SLF001  (argparse has no other way)
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            for subparser in action.choices.values():
                yield from list_actions(subparser)
        else:
            yield action


def _convert_os_error(error: OSError) -> TraceloomError:
    """Converts an error of the operating system: reading a file, a directory or a disk, or writing
    standard output.
    """
    reason = (error.strerror or str(error)).lower()
    if error.filename is not None:
        return InputError(
            f"the file or directory cannot be used: {reason}",
            slug="unreadable",
            where=os.fsdecode(error.filename)
            if isinstance(error.filename, (str, bytes))
            else str(error.filename),
        )
    is_output_error = error.errno in _DISK_FULL_ERRORS
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        is_output_error = True
    if not is_output_error:
        return InputError(
            f"reading failed: {reason}", slug="unreadable", hint="copy the input to another disk"
        )
    with suppress(OSError, ValueError):
        # Buffered output would fail once more when Python exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return OutputError(
        f"standard output cannot be written: {reason}",
        slug="cannot-write",
        hint="make room there, or write a file with -o",
    )


def _print_error(error: TraceloomError, *, debug: bool, cause: Exception | None = None) -> None:
    """Prints the error in one sentence, its remedy, and a reference to its explanation."""
    if debug:
        traceback.print_exception(cause or error)
    location = f" ({error.where})" if error.where else ""
    print(f"traceloom: {sanitize(restore_addresses(error.message + location))}", file=sys.stderr)
    if error.hint:
        print(f"hint: {sanitize(restore_addresses(error.hint))}", file=sys.stderr)
    page = f"{DOCUMENTATION}/reference/messages/#{error.slug}"
    print(f"see traceloom explain {error.slug}, or {page}", file=sys.stderr)
