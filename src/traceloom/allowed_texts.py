"""Which texts a field may have: patterns, each with words that say what it allows, for whoever is refused."""

from __future__ import annotations

import re

NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}\Z"
NAME_OF_USER = r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,79}\Z"
HOST = r"^[A-Za-z0-9][A-Za-z0-9._-]*\Z"
HOST_OR_NONE = r"^([A-Za-z0-9][A-Za-z0-9._-]*)?\Z"
IDENTITY = r"^[A-Za-z0-9_-]+\Z"
ONE_LINE = r"^[^\x00-\x1f\x7f]*\Z"
SHA256 = r"^[0-9a-f]{64}\Z"
WORD_OR_NONE = r"^([a-z_]+)?\Z"
WORDS = r"^[a-z_]+(,[a-z_]+){0,5}\Z"

_BEGINS = "beginning with a letter or digit"
_ALLOWED = {
    NAME: f"at most 63 letters, digits and `_.-`, {_BEGINS}, as `chat`",
    NAME_OF_USER: f"at most 80 letters, digits and `._@-`, {_BEGINS}, as `ci-bot`",
    HOST: f"letters, digits and `._-`, {_BEGINS}, as `node7.example.org`",
    HOST_OR_NONE: f"nothing, or letters, digits and `._-`, {_BEGINS}, as `node7.example.org`",
    IDENTITY: "letters, digits, `_` and `-`, as `r-41`",
    ONE_LINE: "a text in one line, without control signs, as `slurm-42`",
    SHA256: "64 hexadecimal digits in small letters, as `sha256sum` prints them",
    WORD_OR_NONE: "one name in small letters, or nothing, as `model`",
    WORDS: "one to six names in small letters with commas between them, as `division,user`",
}


def in_words(refusal: str) -> str:
    """A refusal of msgspec: where it is about comes first, and instead of a pattern stands what it allows."""
    for pattern, words in _ALLOWED.items():
        refusal = refusal.replace(f"`str` matching regex {pattern!r}", words)
    refusal = re.sub(r"`str` of length >= (\d+)", r"a text of at least \1 signs", refusal)
    refusal = re.sub(r"`str` of length <= (\d+)", r"a text of at most \1 signs", refusal)
    what, _, where = refusal.partition(" - at `$.")
    what = f"{what[:1].lower()}{what[1:]}"
    return f"`{where}: {what}" if where else what
