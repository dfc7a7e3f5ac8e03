"""Formats by name, never over an input, what is printed at the end; progress.

`-` is standard output, where verbs print what they print without `-o`. Files are written by `traceloom.system.files`: whole or
not at all, and over others only with `--force`.
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
from traceloom.system.files import is_address, restore_addresses
from traceloom.system.sanitize import sanitize, unsanitized
from traceloom.system.text import encode_utf8

if TYPE_CHECKING:
    from rich.text import Text


_PATIENCE_S = 1.0
_TICK_S = 0.2
_WHEEL = "|/-\\"


class Progress:
    """A line that says what is being done, and is wiped off when all is done.

    Args:
        shown: False to stay silent whatever happens.
    """

    def __init__(self, *, shown: bool) -> None:
        self._shown = shown and sys.stderr.isatty()
        self._what = ""
        self._begin = time.monotonic()
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Progress:  # noqa: PYI034  (typing.Self is younger than Python 3.10)
        if self._shown:
            self._thread = threading.Thread(target=self._turn, name="traceloom progress", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join()

    def say(self, what: str) -> None:
        """What is being done from now on."""
        self._what = sanitize(what)

    def _turn(self) -> None:
        if self._done.wait(_PATIENCE_S):
            return
        turns, stream = 0, unsanitized(sys.stderr)
        while not self._done.wait(_TICK_S):
            passed = time.monotonic() - self._begin
            stream.write(f"\r\x1b[K{_WHEEL[turns % 4]} {self._what} ({passed:.0f} s)")
            stream.flush()
            turns += 1
        stream.write("\r\x1b[K")
        stream.flush()


_STANDARD_OUTPUT = "-"
# Arguments that name what is written. A store of baselines is read and written.
_WRITTEN = ("output", "map", "record")
_READ = ("inputs", "input", "base", "new", "more_base", "more_new", "runs")
Form = TypeVar("Form")
Document = TypeVar("Document")


def add_output(parser: argparse._ActionsContainer, endings: str) -> None:
    """The options of a verb that writes files, any number of them.

    Args:
        parser: Where they are added.
        endings: The formats, for the help.
    """
    parser.add_argument(
        "-o", "--output", action="append", default=[], metavar="FILE",
        help=f"write a file instead: {endings} (may be repeated)",
    )  # fmt: skip
    parser.add_argument("--force", action="store_true", help="overwrite files")


def fetch(args: argparse.Namespace) -> None:
    """Put local copies in the place of inputs that lie elsewhere (see `traceloom.system.remote`)."""
    named = {name: value for name in _READ if (value := getattr(args, name, None))}
    words = {name: [value] if isinstance(value, str) else value for name, value in named.items()}
    if not any(map(is_address, chain(*words.values()))):
        return
    from traceloom.system import units
    from traceloom.system.remote import local

    with Progress(shown=not args.quiet) as progress:

        def say(done: int, total: int | None) -> None:
            progress.say(f"fetching {units.size(done)}" + (f" of {units.size(total)}" if total is not None else ""))

        progress.say("fetching")
        for name, value in named.items():
            copies = local(words[name], cache=not getattr(args, "no_cache", False), say=say)
            setattr(args, name, copies[0] if isinstance(value, str) else list(copies))


@contextmanager
def protect_inputs(args: argparse.Namespace) -> Iterator[None]:
    """Write over nothing that the user names for reading, or that readers find there, for what is done inside.

    Raises:
        UsageError: slug `wrong-usage`: an output is an input, is named twice, or cannot be standard output.
    """
    from traceloom.system import files

    read: list[str | Path] = []
    written: list[str | Path] = []
    for name, value in vars(args).items():
        words = [word for word in (value if isinstance(value, list) else [value]) if isinstance(word, (str, Path))]
        if name not in _WRITTEN:
            read += words if name != "store" else []
        elif not isinstance(value, list) and _STANDARD_OUTPUT in map(str, words):
            raise UsageError(
                "`-` is standard output, which cannot take this", slug="wrong-usage", hint="name a file or a directory"
            )
        else:
            written += [word for word in words if str(word) != _STANDARD_OUTPUT]
    with files.protect_inputs(read):
        for path in map(Path, written):
            files.check_name(path)
            files.refuse_input(path)
        if len({os.path.realpath(path) for path in written}) < len(written):
            raise UsageError("one file is named twice by -o", slug="wrong-usage", hint="name each file once")
        yield


def format_of(name: str | Path, formats: Mapping[str, Form], *, directory: Form | None = None) -> Form:
    """The format that a name stands for: that of its longest ending.

    Args:
        name: As the user wrote it.
        formats: By ending, in small letters.
        directory: What a name without an ending, one with a slash behind it or a directory stands for; or None.

    Raises:
        UsageError: slug `unknown-format`.
    """
    path = Path(name)
    if directory is not None and (str(name).endswith("/") or path.is_dir() or not path.suffix):
        return directory
    matches = [ending for ending in formats if path.name.lower().endswith(ending)]
    if not matches:
        hint = f"use one of the endings {', '.join(formats)}" + (", or a directory" if directory is not None else "")
        raise UsageError(f"`{path}` does not tell which format to write", slug="unknown-format", hint=hint)
    return formats[max(matches, key=len)]


def targets(
    args: argparse.Namespace, formats: Mapping[str, Form], directory: tuple[Form, str] | None = None
) -> list[tuple[Path, Form]]:
    """The files to write with their formats, all of which can be written.

    Args:
        args: With `output` and `force`.
        formats: By ending.
        directory: What a directory stands for, with `ours` of `files.check_directory`; None where the verb writes none.

    Raises:
        UsageError: slug `unknown-format`.
        OutputError: slugs `file-exists`, `cannot-write`.
    """
    from traceloom.system import files

    names = [args.output] if isinstance(args.output, str) else args.output or []
    form, ours = directory or (None, "")
    chosen = [(Path(name), format_of(name, formats, directory=form)) for name in names if name != _STANDARD_OUTPUT]
    for path, chosen_form in chosen:
        if directory is not None and chosen_form is form:
            files.check_directory(path, ours, force=args.force)
        else:
            files.refuse_existing(path, force=args.force)
    return chosen


def form_of(args: argparse.Namespace, formats: Mapping[str, str], ours: str, *, mostly_directory: bool = False) -> str:
    """What the one output of a verb is, which can be written: a format, or `directory`.

    Args:
        args: With `output` and `force`.
        formats: By ending.
        ours: As for `files.check_directory`.
        mostly_directory: A name with any other ending is a directory.

    Raises:
        UsageError: slug `unknown-format`.
        OutputError: slugs `file-exists`, `cannot-write`.
    """
    from traceloom.system import files

    form, path = "directory", Path(args.output)
    if not mostly_directory or path.name.lower().endswith(tuple(formats)):
        form = format_of(args.output, formats, directory="directory")
    if form == "directory":
        files.check_directory(path, ours, force=args.force)
    else:
        files.refuse_existing(path, force=args.force)
    return form


def check_name_free(args: argparse.Namespace, what: str, taken: Callable[[], bool]) -> None:
    """Refuse to write over what has a name in a place that need not be a directory, as a baseline in a store.

    Args:
        args: With `force`, with which nothing is looked up.
        what: What is to be written, with its name.
        taken: Whether there is such a thing already.

    Raises:
        OutputError: slug `file-exists`.
    """
    if not args.force and taken():
        raise OutputError(f"{what} exists already", slug="file-exists", hint="use --force to overwrite it")


def write(
    args: argparse.Namespace,
    chosen: Iterable[tuple[Path, Callable[[Document, BinaryIO], object]]],
    document: Document,
    progress: Progress,
) -> list[tuple[Path, int]]:
    """Write the document into each file by what its format names; the files with their sizes in bytes."""
    from traceloom.system import files

    written = []
    for path, produce in chosen:
        progress.say(f"writing {path}")
        written.append((path, files.write(path, partial(produce, document), force=args.force)))
    return written


def as_json(document: Any, handle: BinaryIO) -> None:
    """A document as JSON."""
    from traceloom.report.views.files import encode

    handle.write(encode(document))


def lazy_renderer(path: str) -> Callable[[Any, BinaryIO], object]:
    """Writes the text that a function (`module:name`) makes of a document; its module is loaded when it is needed."""
    module, _, function = path.partition(":")
    return lambda document, handle: handle.write(encode_utf8(getattr(import_module(module), function)(document)))


def is_printed(args: argparse.Namespace) -> bool:
    """Whether the answer is printed: where no file was asked for, or `-` beside files."""
    return not args.output or _STANDARD_OUTPUT in args.output


def show(args: argparse.Namespace, document: Document, render: Callable[[Document, int], Iterable[Text]]) -> None:
    """Print the answer where it is asked for.

    Args:
        args: With `json` and `output`.
        document: The answer.
        render: Its lines on a terminal of a width in columns.
    """
    if args.json:
        as_json(document, sys.stdout.buffer)
    elif is_printed(args):
        from traceloom.report.views import terminal

        terminal.put(partial(render, document), sys.stdout)


def add_reason(args: argparse.Namespace, *lines: str) -> None:
    """Print what is no part of the answer: nothing with `--quiet`, beside standard output where that is JSON."""
    if not args.quiet:
        for line in lines:
            print(restore_addresses(line), file=sys.stderr if args.json else sys.stdout)


def repeat_command(args: argparse.Namespace, output: str) -> str:
    """The same command, with every option that was given, writing a file.

    Args:
        args: As they were parsed.
        output: The file to write.
    """
    from traceloom import cli

    words = ["traceloom", args.verb]
    for action in cli.actions(cli.parser([args.verb])):
        value = getattr(args, action.dest, action.default)
        if value == action.default or action.dest in {"verb", "output", "force", "json"}:
            continue
        for word in value if isinstance(value, list) else [value]:
            option = action.option_strings[-1:]
            text = f"{100 * word:g}%" if action.type is types.share else str(word)
            if isinstance(word, tuple):
                text = f"{word[0]}..{word[1] + 1}" if action.type is types.steps else ",".join(map(str, word))
            words += option if word is True else [*option, text]
    return shlex.join([*words, "-o", output])


def print_outcome(args: argparse.Namespace, written: Iterable[tuple[Path, int]], following: str | None) -> None:
    """The last lines of a verb: what was written, or what to try next.

    Args:
        args: With `quiet` and `json`.
        written: Files with their sizes in bytes.
        following: The next useful command, for who has written nothing; None where there is none.
    """
    from traceloom.system import units

    lines = [f"Wrote {path} ({units.size(size)})." for path, size in written]
    add_reason(args, *lines)
    if following is not None and not lines and not args.json:
        add_reason(args, f"\nNext: {following}")
