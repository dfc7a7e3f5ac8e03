"""The frame that all pages stand in: one file with its styles and scripts, which loads nothing."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Sequence
from importlib.resources import files
from string import Template

from traceloom.report.views.html.text import text

# In the order of their imports: a script only uses what stands before it.
SCRIPTS = (
    "state.js", "units.js", "element.js", "inflate.js", "unpack.js", "levels.js", "events.js", "palette.js", "scale.js",
    "draw.js", "tracks.js", "rows.js", "overview.js", "pace.js", "path.js", "sides.js", "timeline.js", "gestures.js",
    "details.js", "search.js", "links.js", "cells.js", "tables.js", "icicle.js", "curve.js", "owners.js", "views.js",
    "lookup.js", "page.js", "main.js",
)  # fmt: skip
STYLES = ("colours.css", "page.css", "views.css", "timeline.css", "print.css")
_IMPORT = re.compile(r'^import [^;]*? from "\./[a-z]+\.js";\n', re.MULTILINE)
_MARGIN = re.compile(r"^(?: *//.*\n|[ \n]+)", re.MULTILINE)  # comments, indentation, empty lines
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|class|const|let) )", re.MULTILINE)


def framed(
    *,
    title: str,
    name: str,
    headline: str,
    links: str,
    sections: str,
    footer: str,
    ranks: str = "",
    numbers: str = "",
    data: str = "",
    more: str = "",
    window: str = "",
) -> str:
    """A page that needs nothing but itself. `title` and `name` are plain words, all else is HTML.

    Args:
        title: Of the browser's tab.
        name: Of the run.
        headline: The answer.
        links: What the side bar leads to.
        sections: Of the first view.
        footer: How the page was made.
        ranks: A choice of ranks.
        numbers: The key numbers.
        data: The packed events of the timeline.
        more: The other views, as templates: they are made when they are first opened.
        window: From-to in ns: what the timeline shows.
    """
    # All modules in one script: their imports and exports resolve to names of one shared scope.
    modules = [_MARGIN.sub("", _EXPORT.sub("", _IMPORT.sub("", asset(module)))) for module in SCRIPTS]
    script = '(() => {\n"use strict";\n' + "\n".join(modules) + "})();\n"
    theme = asset("theme.js")
    style = "\n".join(asset(stylesheet) for stylesheet in STYLES)
    page = Template(asset("page.html")).substitute(
        policy=policy([theme, script], style),
        title=text(title),
        theme=theme,
        style=style,
        name=text(name),
        ranks=ranks,
        headline=headline,
        numbers=numbers,
        links=links,
        sections=sections,
        more=more,
        window=window,
        footer=footer,
        data=data,
        script=script,
    )
    return page.encode("utf-8", "replace").decode("utf-8")  # names from JSON may hold halves of surrogate pairs


def one_after_the_other(sections: Iterable[tuple[str, str, str, str]]) -> dict[str, str]:
    """`links` and `sections` of a page whose sections (id, title, note, body) are not grouped."""
    all_sections = list(sections)
    return {
        "links": "".join(f'<a href="#{key}">{title}</a>' for key, title, _, _ in all_sections),
        "sections": "\n".join(standing(*section) for section in all_sections),
    }


def key_numbers(items: Iterable[tuple[str, str, str, str]]) -> str:
    """The numbers at the head of a page: label, value, exact value for hovering (empty: it is exact), what it is of."""
    shown = ""
    for label, value, exact, more in items:
        title = f' title="{text(exact)}"' if exact else ""
        shown += f"<div><dt>{text(label)}</dt><dd><b{title}>{text(value)}</b><span>{text(more)}</span></dd></div>"
    return f'<dl class="key">{shown}</dl>' if shown else ""


def rank_choice(names: Sequence[str]) -> str:
    """The choice between the ranks that are shown one by one; nothing for a single one."""
    options = "".join(f'<option value="{k}">{text(name)}</option>' for k, name in enumerate(names))
    label = f'<label class="rank">Show <select id="rank" aria-label="Rank">{options}</select></label>'
    return label if len(names) > 1 else ""


def asset(name: str) -> str:
    """A file of the page's own: a style, a script, a piece of HTML."""
    return files("traceloom.report.views.html").joinpath("assets", name).read_text(encoding="utf-8")


def policy(scripts: list[str], style: str) -> str:
    """Nothing may be loaded; only the scripts and the style of this page run, by their hashes."""

    def allowed(body: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()}'"

    return (
        f"default-src 'none'; script-src {' '.join(allowed(s) for s in scripts)}; style-src {allowed(style)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


def standing(identity: str, title: str, note: str, body: str) -> str:
    """A section of the page; one line where its body only says why it is missing."""
    is_missing = missing(body)
    look, beside = (' class="missing"', body) if is_missing else ("", f'<p class="quiet">{note}</p>')
    return (
        f'<section{look} id="{identity}" aria-labelledby="{identity}-title"><header><h2 id="{identity}-title">{title}'
        f"</h2>{beside}</header>{'' if is_missing else body}</section>"
    )


def missing(body: str) -> bool:
    """Whether a section is only one line that says why it is missing."""
    return body.startswith('<p class="quiet absent">') and body.count("<p") == 1
