"""The order of the report page: sections in groups by what they are about, and the menus that lead to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from traceloom.report.sections import GROUPS

Section = tuple[str, str, str, str, str]
"""Key, id, title, how to read it, body."""

_LAST = GROUPS[-1][0]
_FEW = 2  # sections without anything to show that stand as they are


@dataclass(frozen=True, slots=True)
class SectionGroup:
    """Sections that are about the same thing."""

    name: str
    shown: Sequence[Section]
    missing: Sequence[Section]


def grouped(sections: Iterable[Section], missing: Callable[[str], bool]) -> list[SectionGroup]:
    """The groups that have sections.

    Args:
        sections: In any order; those that no group names come before the last group.
        missing: Whether the body of a section only says why there is nothing.
    """
    by_key = {section[0]: section for section in sections}
    named = {key for _, keys in GROUPS for key in keys}
    unnamed = tuple(key for key in by_key if key not in named)
    out = []
    for name, keys in (*GROUPS[:-1], ("More", unnamed), GROUPS[-1]):
        members = [by_key[key] for key in keys if key in by_key]
        if members:
            out.append(
                SectionGroup(
                    name,
                    [section for section in members if not missing(section[4])],
                    [section for section in members if missing(section[4])],
                )
            )
    return out


def links(groups: Iterable[SectionGroup]) -> str:
    """The links of the bar: those of the first group and of groups of one stand open, others fold into menus."""
    out = []
    for group in groups:
        inside = "".join(f'<a href="#{anchor}">{title}</a>' for _, anchor, title, _, _ in group.shown)
        if group.name and len(group.shown) > 1:
            inside = f'<details class="menu" name="menu"><summary>{group.name}</summary><div>{inside}</div></details>'
        out.append(inside)
    return "".join(out)


def body(groups: Iterable[SectionGroup], draw: Callable[[str, str, str, str], str]) -> str:
    """All sections of the page; of each group those without anything to show come last, folded into one line.

    Args:
        groups: As `grouped` gives them.
        draw: Makes one section.
    """
    out = []
    for group in groups:
        shown = "\n".join(draw(*section[1:]) for section in group.shown)
        nothing = "".join(draw(*section[1:]) for section in group.missing)
        if group.name and len(group.missing) >= _FEW:
            titles = ", ".join(title for _, _, title, _, _ in group.missing)
            nothing = (
                '<details class="nothing"><summary>Nothing to show here for '
                f"<span>{titles}</span></summary>{nothing}</details>"
            )
        several = group.name and group.name != _LAST and group.shown
        head = f'<p class="part-name">{group.name}</p>' if several else ""
        out.append(f'<div class="part">{head}{shown}{nothing}</div>')
    return "\n".join(out)
