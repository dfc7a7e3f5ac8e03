"""Views that draw documents."""

import importlib.resources


def read_asset(name: str) -> str:
    """Reads an asset of the pages: a style sheet, a script, a piece of HTML."""
    return importlib.resources.files(__name__).joinpath("assets", name).read_text(encoding="utf-8")
