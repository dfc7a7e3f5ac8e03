"""A page of HTML as a tree of elements, whose tables, links and forms are read without a browser."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from typing import NamedTuple

_VOID = frozenset({"br", "col", "hr", "img", "input", "link", "meta", "source", "wbr"})


class HtmlTree(HTMLParser):
    """The tree below `root`; a tag that is not closed in its place is an error."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.root = ET.Element("page")
        self._open = [self.root]
        self.feed(text)
        self.close()
        assert self._open == [self.root], f"<{self._open[-1].tag}> is never closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = ET.SubElement(self._open[-1], tag, {name: value or "" for name, value in attrs})
        if tag not in _VOID:
            self._open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        ET.SubElement(self._open[-1], tag, {name: value or "" for name, value in attrs})

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop().tag == tag, f"</{tag}> closes something else"

    def handle_data(self, data: str) -> None:
        inside = self._open[-1]
        if len(inside):
            inside[-1].tail = (inside[-1].tail or "") + data
        else:
            inside.text = (inside.text or "") + data

    def all(self, tag: str, inside: ET.Element | None = None) -> list[ET.Element]:
        """Every element of a tag, in order."""
        return list((self.root if inside is None else inside).iter(tag))

    def by_id(self, identity: str) -> ET.Element:
        """The one element with an id."""
        [element] = [element for element in self.root.iter() if element.get("id") == identity]
        return element

    def links(self) -> list[str]:
        """Every address that the page leads to or needs."""
        named = (("a", "href"), ("iframe", "src"), ("script", "src"), ("link", "href"))
        return [
            value
            for tag, name in named
            for of in self.all(tag)
            if (value := of.get(name)) is not None
        ]

    def tables(self) -> dict[str, ShownTable]:
        """The tables that can be sorted and downloaded, by their ids."""
        figures = [of for of in self.all("figure") if "table" in (of.get("class") or "").split()]
        return {str(of.get("id")): self._table(of) for of in figures}

    def _table(self, figure: ET.Element) -> ShownTable:
        head, body = next(figure.iter("thead")), next(figure.iter("tbody"))
        sorts = {
            words(of): link.get("href") or "" for of in head.iter("th") for link in of.iter("a")
        }
        rows = [list(row.iter("td")) for row in body.iter("tr")]
        downloads = {
            (of.text or "").lower(): of.get("href") or ""
            for of in figure.iter("a")
            if of.get("download")
        }
        return ShownTable(list(sorts), rows, sorts, downloads)


class ShownTable(NamedTuple):
    """A table of a page: its headings, the cells of each row, where each heading and each download leads."""

    heads: list[str]
    rows: list[list[ET.Element]]
    sorts: dict[str, str]
    downloads: dict[str, str]

    @property
    def texts(self) -> list[list[str]]:
        """What stands in the cells."""
        return [[words(cell) for cell in row] for row in self.rows]


def words(element: ET.Element) -> str:
    """All text of an element."""
    return "".join(element.itertext()).strip()
