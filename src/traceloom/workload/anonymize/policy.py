"""The policy file, the key, the public vocabulary and the statistics of rewriting.

The policy file is TOML; docs/reference/anonymize.md describes it.

The vocabulary is a list rather than a pattern, since `aten::anything` would let anything through.
It is `public_names.txt` next to this file; scripts/public_names.py adds the names of an installed
PyTorch.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import sys
from collections import Counter
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from traceloom.errors import InputError, OutputError, UsageError, other_version
from traceloom.system.files import read_small, remember_input

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover - the tests run on newer ones
    import tomli as tomllib

KEEP, PSEUDONYM, BUCKET, DROP, CATEGORY, ZERO = (
    "keep",
    "pseudonym",
    "bucket",
    "drop",
    "category",
    "zero",
)
COLLAPSE = "collapse"
FIT, CALLS = "fit", "calls"
FORMAT = "traceloom-anonymize-policy"
_MAX_BYTES = 1 << 24

# Field -> allowed values; the first is the default.
CHOICES: dict[str, tuple[str, ...]] = {
    "public_names": (KEEP, PSEUDONYM),
    "names": (PSEUDONYM, KEEP),
    "kernels": (CATEGORY, KEEP),
    "shapes": (BUCKET, KEEP, DROP, FIT),
    "scalars": (DROP, KEEP, CALLS),
    "stacks": (PSEUDONYM, DROP, KEEP),
    "groups": (PSEUDONYM, KEEP),
    "hosts": (PSEUDONYM, DROP),
    "processes": (PSEUDONYM, KEEP),
    "times": (ZERO, KEEP),
    "devices": (KEEP, DROP),
    "versions": (KEEP, DROP),
    "counters": (DROP, KEEP),
    "structure": (KEEP, COLLAPSE),
}


@dataclass(frozen=True, slots=True)
class Policy:
    """The treatment of each kind of data; docs/reference/anonymize.md describes each choice.

    Attributes:
        keep_names: Regular expressions; a name that fully matches one of them is kept.
        keep_arguments: Additional arguments of events, and entries besides the events, that are
            kept if they are numbers.

    Raises:
        UsageError: slug `wrong-usage`: an unknown choice, which would hide nothing or the wrong
            data.
    """

    public_names: str = KEEP
    names: str = PSEUDONYM
    kernels: str = CATEGORY
    shapes: str = BUCKET
    scalars: str = DROP
    stacks: str = PSEUDONYM
    groups: str = PSEUDONYM
    hosts: str = PSEUDONYM
    processes: str = PSEUDONYM
    times: str = ZERO
    devices: str = KEEP
    versions: str = KEEP
    counters: str = DROP
    structure: str = KEEP
    keep_names: tuple[str, ...] = ()
    keep_arguments: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            if (value := getattr(self, name)) not in choices:
                raise UsageError(
                    f"expected `{name}` to be one of {', '.join(choices)}, got {value!r}",
                    slug="wrong-usage",
                )

    def with_structure(self, structure: str | None) -> Policy:
        """Returns the policy with the command line's `--structure`, if given."""
        return self if structure is None else replace(self, structure=structure)

    def for_replay(self) -> Policy:
        """Returns the policy with what a replay needs: arguments of operators, and consistent
        sizes.

        Raises:
            UsageError: slug `wrong-usage`: a collapsed structure cannot be replayed.
        """
        if self.structure == COLLAPSE:
            raise UsageError(
                "what is collapsed cannot be replayed",
                slug="wrong-usage",
                hint="leave --structure collapse out, or --for replay",
            )
        shapes = self.shapes if self.shapes == KEEP else FIT
        return replace(self, shapes=shapes, scalars=self.scalars if self.scalars == KEEP else CALLS)

    def to_dict(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in values.items()
        }


def read_policy(path: Path | None) -> Policy:
    """Returns the policy in a file; the defaults for None.

    Raises:
        InputError: slug `bad-policy`: the file is not TOML or has unknown fields or values.
    """
    if path is None:
        return Policy()
    try:
        document = tomllib.loads(read_small(path, _MAX_BYTES).decode("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        reason = (
            (error.strerror or str(error)).lower() if isinstance(error, OSError) else str(error)
        )
        raise InputError(
            f"the policy cannot be read: {reason}", slug="bad-policy", where=str(path)
        ) from error
    location = str(path)
    settings: dict[str, Any] = {}
    for key, value in document.items():
        if key == "format":
            if value != FORMAT:
                raise InputError(
                    f"expected the format `{FORMAT}`, got {value!r}",
                    slug="bad-policy",
                    where=location,
                )
        elif key == "version":
            if value != 1:
                raise other_version("policy", value, 1, location)
        elif key in ("keep_names", "keep_arguments"):
            if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
                raise InputError(
                    f"expected `{key}` to be a list of texts", slug="bad-policy", where=location
                )
            try:
                re.compile("|".join(f"(?:{item})" for item in value) if key == "keep_names" else "")
            except re.error as error:
                raise InputError(
                    f"a text in `keep_names` is no regular expression: {error}",
                    slug="bad-policy",
                    where=location,
                ) from error
            settings[key] = tuple(value)
        elif key in CHOICES:
            if value not in CHOICES[key]:
                allowed = ", ".join(f'"{choice}"' for choice in CHOICES[key])
                raise InputError(
                    f"expected `{key}` to be one of {allowed}, got {value!r}",
                    slug="bad-policy",
                    where=location,
                )
            settings[key] = value
        else:
            raise InputError(
                f"`{key}` is no part of a policy",
                slug="bad-policy",
                where=location,
                hint=f"a policy has {', '.join([*CHOICES, 'keep_names', 'keep_arguments'])}",
            )
    return Policy(**settings)


# Sixteen letters without vowels, c, d, l and w: they spell no word, and none of the marks in
# pseudonyms.
ALPHABET = "bfghjkmnpqrstvxz"
LETTERS = 10
KEY_BYTES = 32
_MIN_KEY_BYTES = 16
_MAX_KEY_BYTES = 1 << 16
_LETTERS_OF_BYTE = tuple(ALPHABET[byte >> 4] + ALPHABET[byte & 15] for byte in range(256))


class Key:
    """Makes pseudonyms by HMAC-SHA-256.

    The same text gives the same pseudonym on all ranks, in all files and, with the same key, in all
    runs.

    Args:
        secret: The key; anyone who has it can test guesses of names.
    """

    def __init__(self, secret: bytes) -> None:
        self._base = hmac.new(secret, digestmod=hashlib.sha256)

    def digest(self, label: str, text: str) -> bytes:
        """Returns 32 bytes for a text; `label` separates kinds of texts."""
        mac = self._base.copy()
        mac.update(label.encode() + b"\0" + text.encode("utf-8", "surrogatepass"))
        return mac.digest()

    def letters(self, text: str, label: str = "name") -> str:
        """Returns ten letters (40 bits) for a text."""
        return "".join(_LETTERS_OF_BYTE[byte] for byte in self.digest(label, text)[: LETTERS // 2])

    def number(self, text: str, label: str = "number") -> int:
        """Returns a number of nine digits for a text, without a leading 0."""
        return 10**8 + int.from_bytes(self.digest(label, text)[:8], "big") % (9 * 10**8)


def generate_key() -> Key:
    return Key(secrets.token_bytes(KEY_BYTES))


def read_key(path: Path) -> tuple[Key, bool]:
    """Returns the key in a file; if there is no file, creates it with a new key, readable by its
    owner only.

    Returns:
        The key, and whether it is new.

    Raises:
        InputError: slug `bad-key`: too short or too long to be a key, or unreadable.
        OutputError: slug `cannot-write`: a new one cannot be stored.
    """
    try:
        with path.open("rb") as file:
            secret = file.read(_MAX_KEY_BYTES + 1)
    except FileNotFoundError:
        secret = secrets.token_hex(KEY_BYTES).encode() + b"\n"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with os.fdopen(
                os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb"
            ) as file:
                file.write(secret)
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise OutputError(
                f"the key cannot be kept in `{path}`: {reason}", slug="cannot-write"
            ) from error
        remember_input(path)
        return Key(secret), True
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise InputError(
            f"the key cannot be read: {reason}", slug="bad-key", where=str(path)
        ) from error
    if not _MIN_KEY_BYTES <= len(secret.strip()) <= _MAX_KEY_BYTES:
        raise InputError(
            f"expected a key of {_MIN_KEY_BYTES} to {_MAX_KEY_BYTES} bytes, got {len(secret)}",
            slug="bad-key",
            where=str(path),
            hint="name a file that is not there yet, and a good key is made",
        )
    return Key(secret), False


_WORD = re.compile(r"[A-Za-z_]\w*|\d+")
_SCHEMA = re.compile(r"[\w:]+(\.\w+)?\(.*\) -> .*", re.DOTALL)
_ALLOWED_CHARACTERS = re.compile(r"[\w\s:.,()\[\]{}<>*&!?=|+\-\"']*")
_NUMBER_LENGTH = (
    4  # longer numbers must be in the list, as defaults such as 9223372036854775807 are
)


@lru_cache(maxsize=1)
def read_sections() -> dict[str, frozenset[str]]:
    """Returns the names in each section of the list: PyTorch's, and a few lists of our own."""
    names_by_section: dict[str, set[str]] = {}
    section_names: set[str] = set()
    for line in (
        files("traceloom.workload.anonymize")
        .joinpath("public_names.txt")
        .read_text(encoding="utf-8")
        .splitlines()
    ):
        if line.startswith("=== "):
            section_names = names_by_section.setdefault(line[4:], set())
        elif line:
            section_names.add(line)
    return {name: frozenset(names) for name, names in names_by_section.items()}


@lru_cache(maxsize=1)
def list_host_names() -> frozenset[str]:
    """Returns the names of operators, autograd nodes and regions that PyTorch itself assigns."""
    sections = read_sections()
    return sections["ops"] | sections["nodes"] | sections["regions"]


def is_schema(text: str) -> bool:
    """Returns whether an operator's schema consists of public words only."""
    if not _SCHEMA.fullmatch(text) or not _ALLOWED_CHARACTERS.fullmatch(text):
        return False
    name = text.split("(", 1)[0]
    if name.split(".", 1)[0] not in read_sections()["ops"]:
        return False
    public_words = read_sections()["words"] | read_sections()["types"]
    schema_words = (
        word
        for part in (text.split("(", 1)[1], name.partition(".")[2])
        for word in _WORD.findall(part)
    )
    return all(
        word in public_words or (word.isdigit() and len(word) <= _NUMBER_LENGTH)
        for word in schema_words
    )


def is_type(text: str) -> bool:
    """Returns whether the name of a type, such as `Tensor(c10::Half)` or `long int`, consists of
    public words only.
    """
    type_words = read_sections()["types"]
    return _ALLOWED_CHARACTERS.fullmatch(text) is not None and all(
        word in type_words or (word.isdigit() and len(word) <= 2) for word in _WORD.findall(text)
    )


_STRING = re.compile(rb'"((?:[^"\\]|\\.)*)"')
_MAX_REMEMBERED = 200_000  # distinct dropped texts, which the leak report compares with
_MAX_TEXT_BYTES = 2000
_NUMERIC = frozenset((b"", *(bytes([digit]) for digit in b"-0123456789tfn")))


@dataclass(slots=True)
class RewriteStats:
    """Statistics of rewriting one file, or several merged by `add`.

    Attributes:
        entries_in, entries_out: Entries (events, nodes) read and written.
        dropped_entries: Reason -> number of dropped entries.
        dropped: Name of an argument, attribute or entry -> number of dropped values.
        unknown: Those names that no rule knows.
        odd: Name -> number of values dropped since they were malformed.
        texts: Distinct dropped texts, as JSON or unchanged.
        strings: Distinct texts of the output as JSON without the quotes, including keys.
        kept_arguments: Kind of operator argument kept for replay -> count.
    """

    entries_in: int = 0
    entries_out: int = 0
    dropped_entries: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    unknown: set[str] = field(default_factory=set)
    odd: Counter[str] = field(default_factory=Counter)
    texts: set[bytes] = field(default_factory=set)
    strings: set[bytes] = field(default_factory=set)
    kept_arguments: Counter[str] = field(default_factory=Counter)

    def drop(self, key: str, value: bytes | None = None, *, unknown: bool = False) -> None:
        self.dropped[key] += 1
        if unknown:
            self.unknown.add(key)
        if value is not None and value[:1] not in _NUMERIC and len(self.texts) < _MAX_REMEMBERED:
            self.texts.add(value[:_MAX_TEXT_BYTES])

    def refuse(self, key: str, value: bytes | None = None) -> None:
        """Counts a value that is dropped since it is malformed."""
        self.odd[key] += 1
        self.drop(key, value)

    def scan(self, output: bytes) -> None:
        """Collects the texts in a piece of output JSON."""
        # Without escapes, every second part is inside quotes.
        self.strings.update(
            _STRING.findall(output) if b"\\" in output else output.split(b'"')[1::2]
        )

    def add(self, other: RewriteStats) -> None:
        """Adds the statistics of another file."""
        self.entries_in += other.entries_in
        self.entries_out += other.entries_out
        names = "dropped_entries", "dropped", "odd", "kept_arguments", "unknown", "texts", "strings"
        for name in names:
            getattr(self, name).update(getattr(other, name))

    def to_dict(self) -> dict[str, Any]:
        """Returns the statistics as they appear in the report."""
        return {
            "entries_in": self.entries_in,
            "entries_out": self.entries_out,
            "dropped_entries": dict(self.dropped_entries.most_common()),
            "dropped": [
                {
                    "name": name,
                    "count": count,
                    "unknown": name in self.unknown,
                    "odd": self.odd.get(name, 0),
                }
                for name, count in self.dropped.most_common()
            ],
        }
