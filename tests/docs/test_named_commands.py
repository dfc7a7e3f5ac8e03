"""Commands that messages and pages name in passing have these actions and options: what a hint proposes can be run."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

from traceloom.cli import build_parser

ROOT = Path(__file__).resolve().parents[2]
COMMAND = re.compile(r"`traceloom ([a-z][^`]*)`")
LINE = re.compile(
    r"(?:^ *(?:\$ )?|&& |\()traceloom ([a-z](?:\\\n|[^\n#)&<>])*)", re.MULTILINE
)  # of a shell
WHOLE = build_parser()


def named() -> Iterator[tuple[str, str]]:
    """File, and what stands behind `traceloom` in it."""
    for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "src").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        for command in COMMAND.findall(re.sub(r"\s*\n[ #]*", " ", text)):
            yield str(path.relative_to(ROOT)), command
        if path.suffix == ".md":
            for command in LINE.findall(text):
                yield str(path.relative_to(ROOT)), command.replace("\\\n", " ")


def actions_of(of: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Its verbs or actions."""
    # argparse has no public way to them.
    return next(
        (it.choices for it in of._actions if isinstance(it, argparse._SubParsersAction)), {}
    )


def wrong_words(command: str) -> list[str]:
    """Words of a command that it does not have: its actions, and options."""
    of, wrong = WHOLE, []
    for word in re.split(r"[\s,;|]+", command.partition(" then:")[0]):
        actions = actions_of(of)
        if actions and re.fullmatch(r"[a-z][a-z-]*", word):
            if word not in actions:
                return [word]
            of = actions[word]
        elif word == "--":
            break  # a program of the user
        elif re.fullmatch(r"--[a-z][a-z-]+(=.*)?", word):
            options = {option for action in of._actions for option in action.option_strings}
            wrong += [word] if word.partition("=")[0] not in options else []
    return wrong


def test_what_is_wrong_is_seen() -> None:
    assert wrong_words("fleet token --enrol") == ["--enrol"]
    assert wrong_words("fleet tokens") == ["tokens"]
    assert wrong_words("fleet token enrol NAME --days 3") == []


def test_commands_in_messages_and_pages_are_there() -> None:
    commands = list(named())
    assert len(commands) > 200
    wrong = {
        f"{file}: traceloom {command}": words
        for file, command in commands
        if (words := wrong_words(command))
    }
    assert not wrong
