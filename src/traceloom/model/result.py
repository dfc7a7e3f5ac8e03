"""Result: what every analysis returns."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from html import escape
from typing import Any

import numpy as np
import polars as pl


class Result:
    """Base of the frozen dataclasses that analyses return: frames and plain values, shown nicely, printable as JSON."""

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, dicts, numbers and strings, as they stand in JSON; a frame is a list of rows."""
        assert is_dataclass(self)
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self)}

    def _repr_html_(self) -> str:
        assert is_dataclass(self)
        parts = [f"<h4>{escape(type(self).__name__)}</h4>"]
        for f in fields(self):
            value = getattr(self, f.name)
            shown = value._repr_html_() if isinstance(value, pl.DataFrame) else escape(str(value))
            parts.append(f"<div><b>{escape(f.name)}</b> {shown}</div>")
        return "".join(parts)


def _plain(value: Any) -> Any:
    if isinstance(value, pl.DataFrame):
        return value.to_dicts()
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
