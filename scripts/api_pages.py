"""Writes docs/reference/api/*.md, one page per public package; with --check, says whether they are
up to date.

The pages name what is public; mkdocstrings puts signatures and docstrings there. What a function
returns follows it.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "reference" / "api"
PAGES = {
    "traceloom": ("traceloom",),
    "trace": ("traceloom.trace",),
    "analyze": ("traceloom.analyze", "traceloom.analyze.gate"),
    "graph": ("traceloom.graph",),
    "changes": ("traceloom.changes",),
    "simulate": ("traceloom.workload.simulate",),
    "testing": ("traceloom.testing",),
}


def page(packages: tuple[str, ...], elsewhere: set[str]) -> str:
    """The text of a page."""
    lines = ["<!-- Written by scripts/api_pages.py; do not edit. -->"]
    written: set[str] = set()
    for name in packages:
        package = importlib.import_module(name)
        about = (package.__doc__ or "").split("\n\n", maxsplit=1)[0]
        lines.append(f"# {name}\n\n{about}\n")
        for place in _places(package):
            if place not in written | (elsewhere if place not in _own(package) else set()):
                written.add(place)
                lines.append(f"::: {place}\n")
    return "\n".join(lines)


def _own(package: ModuleType) -> set[str]:
    values = [getattr(package, name) for name in package.__all__]
    return {f"{value.__module__}.{value.__qualname__}" for value in values if callable(value)}


def _places(package: ModuleType) -> Iterator[str]:
    for name in sorted(package.__all__, key=str.lower):
        value = getattr(package, name)
        if not callable(value):
            continue
        yield f"{value.__module__}.{value.__qualname__}"
        if inspect.isfunction(value):
            result = typing.get_type_hints(value).get("return")
            if inspect.isclass(result) and result.__module__.startswith("traceloom."):
                yield f"{result.__module__}.{result.__qualname__}"


def main() -> int:
    """Write the pages, or compare them."""
    every = {
        place
        for packages in PAGES.values()
        for name in packages
        for place in _own(importlib.import_module(name))
    }
    texts = {FOLDER / f"{name}.md": page(packages, every) for name, packages in PAGES.items()}
    if "--check" in sys.argv[1:]:
        stale = [
            path
            for path, text in texts.items()
            if not path.exists() or path.read_text(encoding="utf-8") != text
        ]
        sys.stdout.writelines(f"{path} is stale: run {Path(__file__).name}\n" for path in stale)
        return 1 if stale else 0
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
        sys.stdout.write(f"Wrote {path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
