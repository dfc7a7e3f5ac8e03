"""The views of the report page: sections by what they are about, what leads to them, and what they say in short."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from traceloom.report.sections import GROUPS
from traceloom.report.views.html.frame import missing, standing
from traceloom.report.views.html.text import prose

_FEW = 2  # sections without anything to show that stand as they are


@dataclass(frozen=True, slots=True)
class PageSection:
    """One section: key in the report, id in the page, title, how to read it, body, its main figure in a sentence."""

    key: str
    anchor: str
    title: str
    note: str
    body: str
    sentence: str = ""

    @property
    def drawn(self) -> str:
        """It as HTML."""
        return standing(self.anchor, self.title, self.note, self.body)


@dataclass(frozen=True, slots=True)
class PageView:
    """Sections that are about the same thing: one is open at a time."""

    title: str
    shown: Sequence[PageSection]
    missing: Sequence[PageSection]

    @property
    def key(self) -> str:
        """Its name in the address."""
        return self.title.lower()

    @property
    def body(self) -> str:
        """Its sections; those without anything to show come last, folded into one line."""
        shown = "\n".join(section.drawn for section in self.shown)
        nothing = "".join(section.drawn for section in self.missing)
        if self.shown and len(self.missing) >= _FEW:
            titles = ", ".join(section.title for section in self.missing)
            nothing = (
                '<details class="nothing"><summary>Nothing to show here for '
                f"<span>{titles}</span></summary>{nothing}</details>"
            )
        return shown + nothing


def views(sections: Iterable[PageSection]) -> list[PageView]:
    """The views that have sections; the sections that no view names come before the last view.

    Args:
        sections: In any order.
    """
    by_key = {section.key: section for section in sections}
    named = {key for _, keys in GROUPS for key in keys}
    unnamed = tuple(key for key in by_key if key not in named)
    out = []
    for title, keys in (*GROUPS[:-1], ("More", unnamed), GROUPS[-1]):
        members = [by_key[key] for key in keys if key in by_key]
        if members:
            empty = [section for section in members if missing(section.body)]
            out.append(PageView(title, [section for section in members if section not in empty], empty))
    return out


def links(pages: Iterable[PageView]) -> str:
    """The side bar: the views; below the open one its sections."""
    out = []
    for view in pages:
        quiet = "" if view.shown else ' class="empty" title="Nothing was recorded for it"'
        inside = "".join(f'<a href="#{view.key}/{section.anchor}">{section.title}</a>' for section in view.shown)
        out.append(
            f'<a href="#{view.key}" data-view="{view.key}"{quiet}>{view.title}</a>'
            f'<div class="inside" data-of="{view.key}" hidden>{inside}</div>'
        )
    return "".join(out)


def templates(pages: Iterable[PageView]) -> str:
    """The views that are made when they are first opened."""
    return "\n".join(
        f'<template data-view="{view.key}"><h1 class="view-title">{view.title}</h1>{view.body}</template>'
        for view in pages
    )


def in_short(pages: Iterable[PageView]) -> str:
    """The main figure of every section of these views, with the way to it."""
    out = []
    for view in pages:
        lines = "".join(
            f'<li><a href="#{view.key}/{section.anchor}">{section.title}</a> {prose(section.sentence)}</li>'
            for section in view.shown
            if section.sentence
        )
        if lines:
            out.append(f"<div><h3>{view.title}</h3><ul>{lines}</ul></div>")
    if not out:
        return ""
    return standing("in-short", "In short", "What the other views say.", f'<div class="short">{"".join(out)}</div>')
