"""What a page holds: its elements and words, the islands of data in it, and its tables row by row."""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections import Counter
from html.parser import HTMLParser
from typing import Any

from markdown_it import MarkdownIt

_ISLAND = re.compile(r'<script type="application/json">(.*?)</script>', re.DOTALL)
_TABLE = re.compile(r'<figure class="table" id="([^"]*)">' + _ISLAND.pattern, re.DOTALL)


def islands(page: str) -> list[Any]:
    """All data in the page, unpacked."""
    return [_read(body) for body in _ISLAND.findall(page)]


def tables(page: str, by: str = "title") -> dict[str, list[dict[str, Any]]]:
    """The rows of each table by its id: values by the title (or `key`) of their column, names as they are shown."""
    out = {}
    for identity, body in _TABLE.findall(page):
        data = _read(body)
        columns = {column[by]: _values(column) for column in data["columns"]}
        out[identity] = [
            {title: values[row] for title, values in columns.items()} for row in range(data["rows"])
        ]
    return out


def words(page: str) -> str:
    """The page and, behind it, the data in it as text."""
    return page + "\n".join(json.dumps(island, ensure_ascii=False) for island in islands(page))


def _read(body: str) -> Any:
    return json.loads(body if body.startswith("{") else zlib.decompress(base64.b64decode(body)))


def _values(column: dict[str, Any]) -> list[Any]:
    if "values" in column:
        return list(column["values"])
    return [None if at < 0 else column["texts"][at] for at in column["at"]]


class Elements(HTMLParser):
    """The tags of a page, and whether each that is opened is closed in its place."""

    VOID = frozenset({"br", "col", "hr", "img", "input", "link", "meta", "source", "wbr"})
    SHAPES = frozenset({"circle", "line", "path", "polyline", "polygon", "rect", "use"})

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str | None]] = []
        self.open: list[str] = []
        self.shown = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("script", "style"):
            self.shown += data


def of_markdown(text: str) -> Elements:
    """What a page shows of Markdown with tables, in which HTML is HTML."""
    return Elements(MarkdownIt("commonmark", {"html": True}).enable("table").render(text))
