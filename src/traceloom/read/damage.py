"""What was wrong with a file, counted while it is read; told as notices at the end."""

from __future__ import annotations

from msgspec import Struct, field

from traceloom.model.notice import Notice, Severity


class _Kind(Struct, frozen=True):
    """One kind of damage, and the sentence that tells it."""

    slug: str
    severity: Severity
    words: str


_KINDS = (
    _Kind("cut-file", "error", "the file ends in the middle; every whole {one} before the cut is kept"),
    _Kind("cut-gzip", "error", "the compressed file ends early; everything before the cut is kept"),
    _Kind("corrupt-gzip", "error", "the compressed file is corrupt; what can be decompressed before the fault is kept"),
    _Kind("trailing-bytes", "warning", "the compressed file goes on with bytes that are no gzip; they are left out"),
    _Kind("lost-events", "error", "malformed beyond repair and left out: {n} {event}"),
    _Kind(
        "repaired-events", "warning", "malformed (escapes, quotes, NaN, control characters) and repaired: {n} {event}"
    ),
    _Kind(
        "odd-values", "warning", "values of an unexpected type, left empty where they are no numbers: in {n} {event}"
    ),
    _Kind(
        "replaced-text",
        "warning",
        "text beside `{list}` that is none (halves of surrogate pairs), replaced by U+FFFD: in {n} {place}",
    ),
    _Kind("stray-text", "warning", "text between the entries of `{list}`, left out: in {n} {place}"),
    _Kind("damaged-metadata", "warning", "malformed beside `{list}` and left out: {n} {place}"),
    _Kind("duplicate-key", "warning", "standing twice beside `{list}`, where the last one counts: {n} {entry}"),
    _Kind("missing-time", "error", "without a usable start time and left out: {n} {event}"),
    _Kind("missing-duration", "warning", "without a usable duration, for which 0 is taken: {n} {event}"),
    _Kind("unknown-phase", "info", "of a phase (`ph`) that is no part of a Kineto trace, and left out: {n} {entry}"),
    _Kind("text-after-end", "warning", "there is text after the end of the trace; it is left out"),
)
_BY_SLUG = {kind.slug: kind for kind in _KINDS}
_PLURAL = {"event": "events", "node": "nodes", "entry": "entries", "place": "places"}


class _Case(Struct):
    count: int = 0
    where: str = ""


class Damage(Struct):
    """Counts by slug, each with the place of its first case.

    Attributes:
        cases: What was counted.
        entry: What one entry of the file's list is called.
        list_key: The key of that list.
    """

    cases: dict[str, _Case] = field(default_factory=dict)
    entry: str = "event"
    list_key: str = "traceEvents"

    def note(self, slug: str, where: str = "", count: int = 1) -> None:
        """Count a case; the first place is kept."""
        case = self.cases.setdefault(slug, _Case())
        case.count += count
        case.where = case.where or where

    def add(self, later: Damage) -> None:
        """Count what was found in a later part of the file, too."""
        for slug, case in later.cases.items():
            self.note(slug, case.where, case.count)

    def notices(self) -> list[Notice]:
        """One notice per kind of damage."""
        out = []
        for slug, case in self.cases.items():
            kind = _BY_SLUG[slug]
            count = max(1, case.count)
            nouns = {singular: singular if count == 1 else plural for singular, plural in _PLURAL.items()}
            nouns |= {"event": nouns[self.entry], "one": self.entry, "list": self.list_key}
            message = kind.words.format(n=f"{count:,}", **nouns)
            if case.where:
                message += f" (first at {case.where})" if count > 1 else f" (at {case.where})"
            out.append(Notice(slug, kind.severity, message, count, where=case.where))
        return out
