"""The report as one self-contained HTML page; what draws it is loaded when it is first used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from traceloom.lazy import lazy

if TYPE_CHECKING:
    from traceloom.report.views.html.page import render as render

lazy(__name__, {"render": ".page"})
