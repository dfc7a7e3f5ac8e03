"""Text for encoders without lone surrogates, and readable messages of validation errors.

Names of files and hosts need not be UTF-8, and JSON can hold halves of surrogate pairs. Python
keeps both as lone surrogates, which neither UTF-8 nor Arrow can represent. Where such text comes in
or goes out, they become U+FFFD.
"""

import re
from typing import Any

import msgspec

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def replace_surrogates(text: str) -> str:
    """Returns the text with each lone surrogate replaced by U+FFFD."""
    return text if text.isascii() else _LONE_SURROGATE.sub("\ufffd", text)


def replace_json_surrogates(value: Any) -> tuple[Any, int]:
    """Returns a JSON value without lone surrogates, and how many texts had any. Of keys that become
    equal, the last wins.
    """
    changed = 0

    def cleaned(inner: Any) -> Any:
        nonlocal changed
        if isinstance(inner, str):
            replaced = replace_surrogates(inner)
            changed += replaced != inner
            return replaced
        if isinstance(inner, (dict, list, tuple)):
            inner = (
                {cleaned(key): item for key, item in inner.items()}
                if isinstance(inner, dict)
                else list(inner)
            )
            waiting.append(inner)
        return inner

    # Iterative, as untrusted files may nest deeper than the recursion limit.
    waiting: list[Any] = []
    result = cleaned(value)
    while waiting:
        holder = waiting.pop()
        for key, item in holder.items() if isinstance(holder, dict) else enumerate(holder):
            holder[key] = cleaned(item)
    return result, changed


# The number of an error, and the directories of an absolute path, but not of an address.
_OF_THIS_HOST = re.compile(r"\[Errno -?\d+\] |(?<![\w.:/@-])/(?:[^\s'\"`():;,/]+/)+")


def hide_paths(text: str) -> str:
    """Returns what went wrong as others than the administrator may read it: where files of this host
    lie is left out.
    """
    return _OF_THIS_HOST.sub("", text)


def encode_utf8(text: str) -> bytes:
    """Returns the text as UTF-8, without lone surrogates."""
    return replace_surrogates(text).encode("utf-8")


def encode_json(value: Any) -> bytes:
    """Returns the value as JSON in UTF-8; integers stay integers."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return msgspec.json.encode(replace_json_surrogates(msgspec.to_builtins(value))[0])


NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}\Z"
USER_NAME = r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,79}\Z"
HOST = r"^[A-Za-z0-9][A-Za-z0-9._-]*\Z"
OPTIONAL_HOST = r"^([A-Za-z0-9][A-Za-z0-9._-]*)?\Z"
IDENTITY = r"^[A-Za-z0-9_-]+\Z"
ONE_LINE = r"^[^\x00-\x1f\x7f]*\Z"
SHA256 = r"^[0-9a-f]{64}\Z"
OPTIONAL_WORD = r"^([a-z_]+)?\Z"
WORD_LIST = r"^[a-z_]+(,[a-z_]+){0,5}\Z"

_FIRST_CHARACTER = "beginning with a letter or digit"
_PATTERN_DESCRIPTIONS = {
    NAME: f"at most 63 letters, digits and `_.-`, {_FIRST_CHARACTER}, as `chat`",
    USER_NAME: f"at most 80 letters, digits and `._@-`, {_FIRST_CHARACTER}, as `ci-bot`",
    HOST: f"letters, digits and `._-`, {_FIRST_CHARACTER}, as `node7.example.org`",
    OPTIONAL_HOST: f"nothing, or letters, digits and `._-`, {_FIRST_CHARACTER}, as `node7.example.org`",
    IDENTITY: "letters, digits, `_` and `-`, as `r-41`",
    ONE_LINE: "a text in one line, without control signs, as `slurm-42`",
    SHA256: "64 hexadecimal digits in small letters, as `sha256sum` prints them",
    OPTIONAL_WORD: "one name in small letters, or nothing, as `model`",
    WORD_LIST: "one to six names in small letters with commas between them, as `division,user`",
}


def describe_validation_error(refusal: str) -> str:
    """Returns a message of msgspec with the path first, and patterns replaced by a description of
    the allowed text.
    """
    for pattern, description in _PATTERN_DESCRIPTIONS.items():
        refusal = refusal.replace(f"`str` matching regex {pattern!r}", description)
    refusal = re.sub(r"`str` of length >= (\d+)", r"a text of at least \1 signs", refusal)
    refusal = re.sub(r"`str` of length <= (\d+)", r"a text of at most \1 signs", refusal)
    problem, _, location = refusal.partition(" - at `$.")
    problem = f"{problem[:1].lower()}{problem[1:]}"
    return f"`{location}: {problem}" if location else problem
