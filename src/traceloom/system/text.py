"""Text for encoders; patterns with words for a refusal.

Names of files and hosts need not be UTF-8, and JSON can hold halves of surrogate pairs. Python keeps both as lone
surrogates, which neither UTF-8 nor Arrow has. Where such text comes in, or goes out, they become U+FFFD.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

_LONE = re.compile("[\ud800-\udfff]")


def replace_surrogates(text: str) -> str:
    """The text without lone surrogates."""
    return text if text.isascii() else _LONE.sub("\ufffd", text)


def clean_json(value: Any) -> tuple[Any, int]:
    """A JSON value without lone surrogates, and how many texts had any. Keys that become equal: the last one counts."""
    changed = 0

    def cleaned(inner: Any) -> Any:
        nonlocal changed
        if isinstance(inner, str):
            made = replace_surrogates(inner)
            changed += made != inner
            return made
        if isinstance(inner, (dict, list, tuple)):
            inner = {cleaned(key): item for key, item in inner.items()} if isinstance(inner, dict) else list(inner)
            waiting.append(inner)
        return inner

    # Files of strangers nest deeper than calls do.
    waiting: list[Any] = []
    whole = cleaned(value)
    while waiting:
        holder = waiting.pop()
        for key, item in holder.items() if isinstance(holder, dict) else enumerate(holder):
            holder[key] = cleaned(item)
    return whole, changed


def encode_utf8(text: str) -> bytes:
    """The text as UTF-8."""
    return replace_surrogates(text).encode("utf-8")


def json_line(value: Any) -> bytes:
    """The value as JSON in UTF-8; integers stay integers."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return msgspec.json.encode(clean_json(msgspec.to_builtins(value))[0])


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


def describe_refusal(refusal: str) -> str:
    """A refusal of msgspec: where it is about comes first, and instead of a pattern stands what it allows."""
    for pattern, words in _ALLOWED.items():
        refusal = refusal.replace(f"`str` matching regex {pattern!r}", words)
    refusal = re.sub(r"`str` of length >= (\d+)", r"a text of at least \1 signs", refusal)
    refusal = re.sub(r"`str` of length <= (\d+)", r"a text of at most \1 signs", refusal)
    what, _, where = refusal.partition(" - at `$.")
    what = f"{what[:1].lower()}{what[1:]}"
    return f"`{where}: {what}" if where else what
