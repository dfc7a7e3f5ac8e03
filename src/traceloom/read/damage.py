"""What was wrong with a file, counted while it is read; told as notices at the end."""

from __future__ import annotations

from dataclasses import dataclass, field

from traceloom.model.notice import Notice, Severity

_WORDS: dict[str, tuple[Severity, str]] = {
    "cut-file": ("error", "the file ends in the middle: {n} event was cut; all whole events before the cut are kept"),
    "cut-gzip": ("error", "the compressed file ends early; everything before the cut is kept"),
    "corrupt-gzip": ("error", "the compressed file is corrupt; what can be decompressed before the fault is kept"),
    "trailing-bytes": ("warning", "the compressed file goes on with bytes that are no gzip; they are left out"),
    "lost-events": ("error", "{n} events are malformed beyond repair and left out"),
    "repaired-events": ("warning", "{n} events were malformed (escapes, quotes, NaN, control characters) and repaired"),
    "odd-values": ("warning", "{n} events hold values of an unexpected type; what has no number is left empty"),
    "damaged-metadata": ("warning", "{n} entries beside `traceEvents` are malformed and left out"),
    "duplicate-key": ("warning", "{n} entries stand twice beside `traceEvents`; the last one counts"),
    "missing-time": ("error", "{n} events have no usable start time and are left out"),
    "missing-duration": ("warning", "{n} events have no usable duration; 0 is taken"),
    "unknown-phase": ("info", "{n} entries of `traceEvents` have a phase (`ph`) that is no part of a Kineto trace"),
    "text-after-end": ("warning", "there is text after the end of the trace; it is left out"),
}


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
            message = words.format(n=f"{case.count:,}")
            if case.where:
                message += f" (first at {case.where})" if case.count > 1 else f" (at {case.where})"
            out.append(Notice(slug, severity, message, case.count, where=case.where))
        return out
