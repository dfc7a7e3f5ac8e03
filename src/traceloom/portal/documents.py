"""Parts of pages of what operators write: a text in TOML, the form by which it is changed, and its versions."""

from __future__ import annotations

from htpy import Node, a, button, div, form, label, p, textarea
from markupsafe import Markup, escape

from traceloom.collect.questions.rules import DocumentAnswer, DocumentHistoryAnswer
from traceloom.portal.layout import folded
from traceloom.portal.page import ContentSection
from traceloom.portal.table import PageColumn, PageRow, PageTable, instant
from traceloom.portal.visit import Visit


def document_form(visit: Visit, words: str, file: str, text: str, about: Node) -> Node:
    """The form by which a document is changed: what would change is shown, or it is saved.

    Args:
        visit: Of the page; what its form holds is shown again.
        words: On the button that unfolds it.
        file: What the document is called.
        text: What it holds now.
        about: What may stand in it.
    """
    text = written_text(visit) or text
    # Ends of lines would be spelled out as other control characters are.
    lines = Markup(str(escape(text)).replace("\n", "&#10;").replace("\t", "&#9;"))  # noqa: S704  (escaped)
    inside = form(method="post", action=visit.address.path)[
        div(".field")[
            label(for_="text")[file],
            textarea(
                "#text", name="text", rows=max(10, min(30, text.count("\n") + 3)), spellcheck="false",
                autocomplete="off", aria_describedby="text-about",
            )[lines],
            p("#text-about.quiet")[about],
        ],
        div(".buttons")[
            button(type="submit", name="do", value="try")["Show what would change"],
            button(".primary", type="submit", name="do", value="save")["Save"],
        ],
    ]  # fmt: skip
    return folded("change", words, inside, is_open=bool(visit.form))


def written_text(visit: Visit) -> str:
    """What the form holds; browsers end its lines as HTTP does."""
    return visit.form.get("text", [""])[0].replace("\r\n", "\n")


def older_version(path: str, document: DocumentAnswer, history: DocumentHistoryAnswer) -> Node | None:
    """What a page says of a version that counts no more; None where it shows the last one, or none was written."""
    if document.version in {0, history.versions[0].version if history.versions else 0}:
        return None
    when, to_last = instant(document.at_ns or 0), a(href=path)["To the last"]
    return ["This is version ", str(document.version), ", of ", when, ". ", to_last, "."]


def versions_section(path: str, history: DocumentHistoryAnswer) -> ContentSection:
    """All versions of a document, each of which the page shows at its address."""
    columns = (
        PageColumn("version", "Version", "count", link=lambda row: f"{path}?version={row['version']}"),
        PageColumn("at_ns", "Since", "instant", "since when it counts"),
        PageColumn("who", "By"),
    )
    rows: list[PageRow] = [{"version": each.version, "at_ns": each.at_ns, "who": each.who} for each in history.versions]
    table = PageTable("versions", "Versions", columns, rows, "Nobody has written one yet.")
    return ContentSection("versions", "History", table, "every version is kept")
