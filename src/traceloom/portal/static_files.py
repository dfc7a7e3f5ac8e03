"""Styles and scripts of the pages: those of the reports, and few of their own; under names that change with them."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from traceloom.report.views.html.frame import asset as of_reports


class PortalAsset(NamedTuple):
    """A file that pages refer to."""

    content: bytes
    kind: str


@cache
def assets() -> dict[str, PortalAsset]:
    """Name -> file."""
    styles = [*map(of_reports, ("colours.css", "page.css", "views.css")), _own("portal.css"), _own("charts.css")]
    texts = {
        "portal.css": ("\n".join(styles), "text/css; charset=utf-8"),
        "theme.js": (of_reports("theme.js"), "text/javascript; charset=utf-8"),
        "portal.js": (_own("portal.js"), "text/javascript; charset=utf-8"),
    }
    return {name: PortalAsset(text.encode(), kind) for name, (text, kind) in texts.items()}


@cache
def address_of(name: str) -> str:
    """Where a file is served: for ever the same, as other content has another address."""
    return f"/static/{hashlib.sha256(assets()[name].content).hexdigest()[:16]}/{name}"


def _own(name: str) -> str:
    return files("traceloom.portal").joinpath("assets", name).read_text(encoding="utf-8")
