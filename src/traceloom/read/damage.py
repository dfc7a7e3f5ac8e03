"""What was wrong with a file, counted while it is read; told as notices at the end."""

from __future__ import annotations

from dataclasses import dataclass, field

from traceloom.model.notice import Notice, Severity

_WORDS: dict[str, tuple[Severity, str]] = {
    "cut-file": ("error", "the file ends in the middle; every whole event before the cut is kept"),
    "cut-gzip": ("error", "the compressed file ends early; everything before the cut is kept"),
    "corrupt-gzip": ("error", "the compressed file is corrupt; what can be decompressed before the fault is kept"),
    "trailing-bytes": ("warning", "the compressed file goes on with bytes that are no gzip; they are left out"),
    "lost-events": ("error", "malformed beyond repair and left out: {n} {event}"),
    "repaired-events": ("warning", "malformed (escapes, quotes, NaN, control characters) and repaired: {n} {event}"),
    "odd-values": ("warning", "values of an unexpected type, left empty where they are no numbers: in {n} {event}"),
    "damaged-metadata": ("warning", "malformed beside `traceEvents` and left out: {n} {place}"),
    "duplicate-key": ("warning", "standing twice beside `traceEvents`, where the last one counts: {n} {entry}"),
    "missing-time": ("error", "without a usable start time and left out: {n} {event}"),
    "missing-duration": ("warning", "without a usable duration, for which 0 is taken: {n} {event}"),
    "unknown-phase": ("info", "of a phase (`ph`) that is no part of a Kineto trace, and left out: {n} {entry}"),
    "text-after-end": ("warning", "there is text after the end of the trace; it is left out"),
}
_PLURAL = {"event": "events", "entry": "entries", "place": "places"}


@dataclass(slots=True)
class _Case:
    count: int = 0
    where: str = ""


@dataclass(slots=True)
class Damage:
    """Counts by slug, each with the place of its first case."""

    cases: dict[str, _Case] = field(default_factory=dict)

    def note(self, slug: str, where: str = "", count: int = 1) -> None:
        """Count a case; the first place is kept."""
        case = self.cases.setdefault(slug, _Case())
        case.count += count
        case.where = case.where or where

    def notices(self) -> list[Notice]:
        """One notice per kind of damage."""
        out = []
        for slug, case in self.cases.items():
            severity, words = _WORDS[slug]
            count = max(1, case.count)
            nouns = {one: one if count == 1 else many for one, many in _PLURAL.items()}
            message = words.format(n=f"{count:,}", **nouns)
            if case.where:
                message += f" (first at {case.where})" if count > 1 else f" (at {case.where})"
            out.append(Notice(slug, severity, message, count, where=case.where))
        return out
