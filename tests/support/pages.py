"""What a page holds: the islands of data in it, and its tables row by row."""

from __future__ import annotations

import base64
import json
import re
import zlib
from typing import Any

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
        out[identity] = [{title: values[row] for title, values in columns.items()} for row in range(data["rows"])]
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
