"""What was done: counted while the files are rewritten, told in the reports."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

_STRING = re.compile(rb'"((?:[^"\\]|\\.)*)"')
_MOST_REMEMBERED = 200_000  # distinct texts that were left out; the leak report compares with them
_LONGEST = 2000
_NUMERIC = frozenset((b"", *(bytes([digit]) for digit in b"-0123456789tfn")))


@dataclass(slots=True)
class Account:
    """Counts over all files, or of one; `add` puts them together.

    Attributes:
        entries_in: Entries (events, nodes) read; entries_out: entries written.
        dropped_entries: Reason -> how many whole entries were left out.
        dropped: Name of an argument, attribute or entry -> how often its value was left out.
        unknown: Those of them that no rule knows.
        odd: Those whose value was not what it should be.
        texts: Distinct texts that were left out, as JSON or as they are.
        strings: Distinct texts of the output as JSON without the quotes, keys among them.
        kept_arguments: What stays of arguments of operators that are to run again -> how often.
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
        """Count a value that is left out."""
        self.dropped[key] += 1
        if unknown:
            self.unknown.add(key)
        if value is not None and value[:1] not in _NUMERIC and len(self.texts) < _MOST_REMEMBERED:
            self.texts.add(value[:_LONGEST])

    def refuse(self, key: str, value: bytes | None = None) -> None:
        """Count a value that is not what it should be, and is left out."""
        self.odd[key] += 1
        self.drop(key, value)

    def scan(self, output: bytes) -> None:
        """Take the texts of a piece of JSON that is written."""
        if b"\\" in output:
            self.strings.update(_STRING.findall(output))
        else:  # every second part between quotes is a text
            self.strings.update(output.split(b'"')[1::2])

    def add(self, other: Account) -> None:
        """Take the counts of another account."""
        self.entries_in += other.entries_in
        self.entries_out += other.entries_out
        for name in ("dropped_entries", "dropped", "odd", "kept_arguments"):
            getattr(self, name).update(getattr(other, name))
        for name in ("unknown", "texts", "strings"):
            getattr(self, name).update(getattr(other, name))

    def to_dict(self) -> dict[str, Any]:
        """As it stands in the report."""
        return {
            "entries_in": self.entries_in,
            "entries_out": self.entries_out,
            "dropped_entries": dict(self.dropped_entries.most_common()),
            "dropped": [
                {"name": name, "count": count, "unknown": name in self.unknown, "odd": self.odd.get(name, 0)}
                for name, count in self.dropped.most_common()
            ],
        }
