"""Dashboards for Grafana 10 and later, from a table of panels."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from typing import NamedTuple, TypeAlias

_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_COLUMNS, _HEIGHT = 24, 8  # of Grafana's grid

Json: TypeAlias = "dict[str, Json] | list[Json] | str | int | bool | None"


class Panel(NamedTuple):
    """One panel: its unit as Grafana names it, legend -> query, what it means, and its width of 24
    columns.
    """

    title: str
    unit: str
    queries: dict[str, str]
    text: str = ""
    kind: str = "timeseries"
    width: int = 8


class Board(NamedTuple):
    """A dashboard: rows of panels by title.

    `long`: what queries abbreviate -> what it stands for, applied in order.
    """

    title: str
    uid: str
    text: str
    tags: tuple[str, ...]
    variables: tuple[dict[str, Json], ...]
    rows: Mapping[str, tuple[Panel, ...]]
    long: Mapping[str, str]

    def drawn(self) -> dict[str, Json]:
        """All of it, as Grafana reads it."""
        panels: list[Json] = []
        numbers = count(1)
        y = 0
        for title, row in self.rows.items():
            panels.append(
                {
                    "id": next(numbers),
                    "type": "row",
                    "title": title,
                    "gridPos": {"h": 1, "w": _COLUMNS, "x": 0, "y": y},
                }
            )
            x, y = 0, y + 1
            height = _HEIGHT // 2 if row[0].kind == "stat" else _HEIGHT
            for panel in row:
                if x + panel.width > _COLUMNS:
                    x, y = 0, y + height
                where: dict[str, Json] = {"h": height, "w": panel.width, "x": x, "y": y}
                panels.append({"id": next(numbers), "gridPos": where, **self._drawn(panel)})
                x += panel.width
            y += height
        source: dict[str, Json] = {
            "name": "datasource",
            "type": "datasource",
            "query": "prometheus",
            "label": "Prometheus",
        }
        return {
            "title": self.title,
            "uid": self.uid,
            "description": self.text,
            "tags": list(self.tags),
            "schemaVersion": 38,
            "editable": True,
            "refresh": "30s",
            "time": {"from": "now-1h", "to": "now"},
            "templating": {
                "list": [
                    source,
                    *(
                        {**each, "query": self._spelled_out(str(each["query"]))}
                        for each in self.variables
                    ),
                ]
            },
            "panels": panels,
        }

    def _drawn(self, panel: Panel) -> dict[str, Json]:
        targets: list[Json] = [
            {
                "refId": chr(ord("A") + number),
                "datasource": _SOURCE,
                "expr": self._spelled_out(query),
                "legendFormat": legend,
                **({"instant": True, "format": "table"} if panel.kind == "table" else {}),
            }
            for number, (legend, query) in enumerate(panel.queries.items())
        ]
        drawn: dict[str, Json] = {
            "type": panel.kind,
            "title": panel.title,
            "description": panel.text,
            "datasource": _SOURCE,
            "targets": targets,
            "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        }
        if panel.kind == "timeseries":
            drawn["options"] = {
                "tooltip": {"mode": "multi", "sort": "desc"},
                "legend": {"displayMode": "list"},
            }
        if panel.kind == "table":  # Prometheus's own labels say nothing here
            hidden: dict[str, Json] = {"Time": True, "__name__": True, "job": True}
            drawn["transformations"] = [{"id": "organize", "options": {"excludeByName": hidden}}]
        return drawn

    def _spelled_out(self, query: str) -> str:
        for short, long in self.long.items():
            query = query.replace(short, long)
        return query


def variable(name: str, label: str, query: str) -> dict[str, Json]:
    """A choice above the panels, of the values that a query has."""
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": _SOURCE,
        "query": query,
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }
