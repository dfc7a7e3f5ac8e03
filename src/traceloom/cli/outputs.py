"""Output of verbs: formats by file name, protection of inputs, printed results, progress.

`-` is standard output, where verbs print the same as without `-o`. Files are written by
`traceloom.system.files`: whole or not at all, and over existing ones only with `--force`.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

from traceloom.cli import options as types
from traceloom.errors import OutputError, UsageError
from traceloom.system import files
from traceloom.system.files import is_address, restore_addresses
from traceloom.system.sanitize import sanitize, unwrap_stream
from traceloom.system.text import encode_utf8

if TYPE_CHECKING:
    from rich.text import Text


_PROGRESS_DELAY_S = 1.0
_REFRESH_INTERVAL_S = 0.2
_SPINNER = "|/-\\"


class Progress:
    """A line that shows the current activity, and is erased at the end.

    Args:
        enabled: False suppresses all output.
    """

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled and sys.stderr.isatty()
        self._activity = ""
        self._start_s = time.monotonic()
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Progress:  # noqa: PYI034  (typing.Self is younger than Python 3.10)
        if self._enabled:
            self._thread = threading.Thread(
                target=self._spin, name="traceloom progress", daemon=True
            )
            self._thread.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join()

    def show(self, activity: str) -> None:
        """Sets the current activity."""
        self._activity = sanitize(activity)

    def _spin(self) -> None:
        if self._done.wait(_PROGRESS_DELAY_S):
            return
        ticks, stream = 0, unwrap_stream(sys.stderr)
        while not self._done.wait(_REFRESH_INTERVAL_S):
            elapsed_s = time.monotonic() - self._start_s
            stream.write(f"\r\x1b[K{_SPINNER[ticks % 4]} {self._activity} ({elapsed_s:.0f} s)")
            stream.flush()
            ticks += 1
        stream.write("\r\x1b[K")
        stream.flush()


_STDOUT_NAME = "-"
# Arguments that name outputs. A store of baselines is read and written.
_OUTPUT_ARGUMENTS = ("output", "map", "record")
_INPUT_ARGUMENTS = ("inputs", "input", "base", "new", "more_base", "more_new", "runs")
Format = TypeVar("Format")
Document = TypeVar("Document")


def add_output_options(parser: argparse._ActionsContainer, suffixes: str) -> None:
    """Adds the options of a verb that writes any number of files.

    Args:
        parser: The parser to add them to.
        suffixes: The formats, for the help.
    """
    parser.add_argument(
        "-o",
        "--output",
        action="append",
        default=[],
        metavar="FILE",
        help=f"write a file instead: {suffixes} (may be repeated)",
    )
    parser.add_argument("--force", action="store_true", help="overwrite files")


def fetch_remote_inputs(args: argparse.Namespace) -> None:
    """Replaces remote inputs by local copies (see `traceloom.system.remote`)."""
    argument_values = {
        name: value for name in _INPUT_ARGUMENTS if (value := getattr(args, name, None))
    }
    paths_by_argument = {
        name: [value] if isinstance(value, str) else value
        for name, value in argument_values.items()
    }
    if not any(map(is_address, chain(*paths_by_argument.values()))):
        return
    from traceloom.system import units
    from traceloom.system.remote import fetch_inputs

    with Progress(enabled=not args.quiet) as progress:

        def show_bytes(done: int, total: int | None) -> None:
            progress.show(
                f"fetching {units.format_size(done)}"
                + (f" of {units.format_size(total)}" if total is not None else "")
            )

        progress.show("fetching")
        for name, value in argument_values.items():
            copies = fetch_inputs(
                paths_by_argument[name],
                cache=not getattr(args, "no_cache", False),
                report_progress=show_bytes,
            )
            setattr(args, name, copies[0] if isinstance(value, str) else list(copies))


@contextmanager
def protect_inputs(args: argparse.Namespace) -> Iterator[None]:
    """Prevents the body of the `with` statement from overwriting files that the user names as
    inputs or that readers find there.

    Raises:
        UsageError: slug `wrong-usage`: an output is an input, is named twice, or cannot be standard
            output.
    """
    input_paths: list[str | Path] = []
    output_paths: list[str | Path] = []
    for name, value in vars(args).items():
        paths = [
            word
            for word in (value if isinstance(value, list) else [value])
            if isinstance(word, (str, Path))
        ]
        if name not in _OUTPUT_ARGUMENTS:
            input_paths += paths if name != "store" else []
        elif not isinstance(value, list) and _STDOUT_NAME in map(str, paths):
            raise UsageError(
                "`-` is standard output, which cannot take this",
                slug="wrong-usage",
                hint="name a file or a directory",
            )
        else:
            output_paths += [word for word in paths if str(word) != _STDOUT_NAME]
    with files.protect_inputs(input_paths):
        for path in map(Path, output_paths):
            files.check_name(path)
            files.refuse_input(path)
        if len({os.path.realpath(path) for path in output_paths}) < len(output_paths):
            raise UsageError(
                "one file is named twice by -o", slug="wrong-usage", hint="name each file once"
            )
        yield


def detect_format(
    name: str | Path, formats: Mapping[str, Format], *, directory: Format | None = None
) -> Format:
    """Returns the format of a file name: that of its longest ending.

    Args:
        name: As the user wrote it.
        formats: By ending, in lower case.
        directory: The format of a name without an ending, with a trailing slash, or of a directory;
            or None.

    Raises:
        UsageError: slug `unknown-format`.
    """
    path = Path(name)
    if directory is not None and (str(name).endswith("/") or path.is_dir() or not path.suffix):
        return directory
    matches = [ending for ending in formats if path.name.lower().endswith(ending)]
    if not matches:
        hint = f"use one of the endings {', '.join(formats)}" + (
            ", or a directory" if directory is not None else ""
        )
        raise UsageError(
            f"`{path}` does not tell which format to write", slug="unknown-format", hint=hint
        )
    return formats[max(matches, key=len)]


def resolve_output_files(
    args: argparse.Namespace,
    formats: Mapping[str, Format],
    directory: tuple[Format, str] | None = None,
) -> list[tuple[Path, Format]]:
    """Returns the files to write with their formats, after checking that they can be written.

    Args:
        args: With `output` and `force`.
        formats: By ending.
        directory: The format of a directory, with the pattern for `files.check_directory`; None
            where the verb writes none.

    Raises:
        UsageError: slug `unknown-format`.
        OutputError: slugs `file-exists`, `cannot-write`.
    """
    names = [args.output] if isinstance(args.output, str) else args.output or []
    directory_format, file_pattern = directory or (None, "")
    targets = [
        (Path(name), detect_format(name, formats, directory=directory_format))
        for name in names
        if name != _STDOUT_NAME
    ]
    for path, target_format in targets:
        if directory is not None and target_format is directory_format:
            files.check_directory(path, file_pattern, force=args.force)
        else:
            files.refuse_existing(path, force=args.force)
    return targets


def resolve_output_format(
    args: argparse.Namespace,
    formats: Mapping[str, str],
    file_pattern: str,
    *,
    default_to_directory: bool = False,
) -> str:
    """Returns the format of the only output of a verb, or `directory`, after checking that it can
    be written.

    Args:
        args: With `output` and `force`.
        formats: By ending.
        file_pattern: As for `files.check_directory`.
        default_to_directory: A name with any other ending is a directory.

    Raises:
        UsageError: slug `unknown-format`.
        OutputError: slugs `file-exists`, `cannot-write`.
    """
    output_format, path = "directory", Path(args.output)
    if not default_to_directory or path.name.lower().endswith(tuple(formats)):
        output_format = detect_format(args.output, formats, directory="directory")
    if output_format == "directory":
        files.check_directory(path, file_pattern, force=args.force)
    else:
        files.refuse_existing(path, force=args.force)
    return output_format


def check_name_available(
    args: argparse.Namespace, description: str, is_taken: Callable[[], bool]
) -> None:
    """Refuses to overwrite a named object outside of a directory, such as a baseline in a store.

    Args:
        args: With `force`, which disables the check.
        description: Kind and name of the object to write.
        is_taken: Whether the object exists already.

    Raises:
        OutputError: slug `file-exists`.
    """
    if not args.force and is_taken():
        raise OutputError(
            f"{description} exists already", slug="file-exists", hint="use --force to overwrite it"
        )


def write_output_files(
    args: argparse.Namespace,
    targets: Iterable[tuple[Path, Callable[[Document, BinaryIO], object]]],
    document: Document,
    progress: Progress,
) -> list[tuple[Path, int]]:
    """Writes the document to each file with the function of its format; returns the files with
    their sizes in bytes.
    """
    written = []
    for path, write_document in targets:
        progress.show(f"writing {path}")
        written.append(
            (path, files.write(path, partial(write_document, document), force=args.force))
        )
    return written


def write_json(document: Any, handle: BinaryIO) -> None:
    from traceloom.report.views.files import encode

    handle.write(encode(document))


def make_lazy_writer(path: str) -> Callable[[Any, BinaryIO], object]:
    """Returns a writer of the text that a function (`module:name`) makes from a document; its
    module is loaded on first use.
    """
    module, _, function = path.partition(":")
    return lambda document, handle: handle.write(
        encode_utf8(getattr(import_module(module), function)(document))
    )


def should_print_document(args: argparse.Namespace) -> bool:
    """Whether the result is printed: where no file was requested, or `-` beside files."""
    return not args.output or _STDOUT_NAME in args.output


def print_document(
    args: argparse.Namespace, document: Document, render: Callable[[Document, int], Iterable[Text]]
) -> None:
    """Prints the result where requested.

    Args:
        args: With `json` and `output`.
        document: The result.
        render: Returns its lines for a terminal of a width in columns.
    """
    if args.json:
        write_json(document, sys.stdout.buffer)
    elif should_print_document(args):
        from traceloom.report.views import terminal

        terminal.print_lines(partial(render, document), sys.stdout)


def print_messages(args: argparse.Namespace, *lines: str) -> None:
    """Prints messages that are not part of the result: nothing with `--quiet`, to standard error
    where standard output is JSON.
    """
    if not args.quiet:
        for line in lines:
            print(restore_addresses(line), file=sys.stderr if args.json else sys.stdout)


def format_repeat_command(args: argparse.Namespace, output: str) -> str:
    """Returns the same command, with all of its options, writing a file.

    Args:
        args: The parsed arguments.
        output: The file to write.
    """
    from traceloom import cli

    command = ["traceloom", args.verb]
    for action in cli.list_actions(cli.build_parser([args.verb])):
        value = getattr(args, action.dest, action.default)
        if value == action.default or action.dest in {"verb", "output", "force", "json"}:
            continue
        for word in value if isinstance(value, list) else [value]:
            option = action.option_strings[-1:]
            text = f"{100 * word:g}%" if action.type is types.parse_percentage else str(word)
            if isinstance(word, tuple):
                text = (
                    f"{word[0]}..{word[1] + 1}"
                    if action.type is types.parse_steps
                    else ",".join(map(str, word))
                )
            command += option if word is True else [*option, text]
    return shlex.join([*command, "-o", output])


def print_outcome(
    args: argparse.Namespace, written: Iterable[tuple[Path, int]], next_command: str | None
) -> None:
    """Prints the last lines of a verb: the written files, or the next useful command.

    Args:
        args: With `quiet` and `json`.
        written: Files with their sizes in bytes.
        next_command: The next useful command if nothing was written; None where there is none.
    """
    from traceloom.system import units

    lines = [f"Wrote {path} ({units.format_size(size)})." for path, size in written]
    print_messages(args, *lines)
    if next_command is not None and not lines and not args.json:
        print_messages(args, f"\nNext: {next_command}")
