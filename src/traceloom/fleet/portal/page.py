"""Building blocks of pages: declaration, sections, forms, layout and static files.

Everything is made of elements that escape their text; there is no way to insert raw text. Invisible
and control characters (such as bidirectional marks) are spelled out in the whole document at the
end.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from itertools import groupby
from typing import Generic, NamedTuple, TypeVar
from urllib.parse import quote, urlsplit

from htpy import (
    Node,
    a,
    b,
    body,
    button,
    code,
    dd,
    details,
    div,
    dl,
    dt,
    fieldset,
    form,
    fragment,
    h1,
    h2,
    head,
    header,
    html,
    input as input_,
    label,
    legend,
    li,
    link,
    main,
    meta,
    nav,
    ol,
    p,
    progress,
    script,
    section,
    span,
    summary,
    title as title_,
    ul,
)
from markupsafe import Markup

from traceloom.fleet.handlers.captures import has_role
from traceloom.fleet.portal.page_request import PageRequest, PageUrl
from traceloom.fleet.portal.tables import PageTable
from traceloom.fleet.store.captures import Role, TokenRecord
from traceloom.report.views import read_asset as read_report_asset
from traceloom.server.problem import HttpError, make_bad_request
from traceloom.system.sanitize import sanitize


class PortalAsset(NamedTuple):
    """A static file of pages."""

    content: bytes
    kind: str


@cache
def load_assets() -> dict[str, PortalAsset]:
    """Returns the static files by name."""
    styles = [
        *map(read_report_asset, ("colours.css", "page.css", "views.css")),
        _read_asset("portal.css"),
        _read_asset("charts.css"),
    ]
    texts = {
        "portal.css": ("\n".join(styles), "text/css; charset=utf-8"),
        "theme.js": (read_report_asset("theme.js"), "text/javascript; charset=utf-8"),
        "portal.js": (_read_asset("portal.js"), "text/javascript; charset=utf-8"),
    }
    return {name: PortalAsset(text.encode(), kind) for name, (text, kind) in texts.items()}


@cache
def get_asset_url(name: str) -> str:
    """Returns the URL of a static file, which has the hash of its content and can be cached
    forever.
    """
    return f"/static/{hashlib.sha256(load_assets()[name].content).hexdigest()[:16]}/{name}"


def _read_asset(name: str) -> str:
    return files("traceloom.fleet.portal").joinpath("assets", name).read_text(encoding="utf-8")


T = TypeVar("T")


@dataclass(frozen=True)
class KeyFigure:
    """A number at the top of a page.

    Attributes:
        label: Label of the number.
        value: The number.
        about: What it refers to.
        grade: "bad" or "warn" if it needs attention.
        leads: Link to the details; "": they are on the page itself.
    """

    label: str
    value: Node
    about: Node = ""
    grade: str = ""
    leads: str = ""


@dataclass(frozen=True)
class ContentSection:
    """A part of a page under a heading.

    Attributes:
        key: Its id in the page.
        title: The heading.
        content: A table, or anything else.
        note: One sentence next to the heading.
    """

    key: str
    title: str
    content: PageTable | Node
    note: Node = ""


@dataclass(frozen=True)
class PageContent:
    """Content of a page, the same for everybody who may read it.

    Attributes:
        heading: Its subject, or the answer in a sentence.
        sections: Its parts.
        above: Breadcrumbs above the heading, as (name, URL).
        lead: Text below the heading.
        asking: The filter form.
        numbers: Key numbers.
        ended: The content is final.
    """

    heading: Node
    sections: Sequence[ContentSection] = ()
    above: Sequence[tuple[str, str]] = ()
    lead: Node = ""
    asking: Node = None
    numbers: Sequence[KeyFigure] = ()
    ended: bool = False


@dataclass(frozen=True)
class Page(Generic[T]):
    """A page.

    Attributes:
        path: Pattern of its route.
        title: Title in the menu and in the browser's tab.
        about: Its purpose, in the documentation.
        compute: Gets its data from the routes; the same for everybody who may read it.
        content: Builds its content from that data.
        controls: Forms and links for this reader, below the heading.
        role: Required role.
        act: Handles a submitted form; returns a URL to redirect to, or a notice to show on the
            page.
        live: Its content is sent again whenever it changes.
        menu: Its group in the menu; "": it is only linked from other pages.
    """

    path: str
    title: str
    about: str
    compute: Callable[[PageRequest], Awaitable[T]]
    content: Callable[[T], PageContent]
    controls: Callable[[PageRequest, T], Node] = field(default=lambda _visit, _data: None)
    role: Role = "viewer"
    act: Callable[[PageRequest], Awaitable[str | Node]] | None = None
    live: bool = False
    menu: str = ""

    async def shown(self, visit: PageRequest) -> PageContent:
        """Computes and builds its content.

        Raises:
            HttpError: A route refuses.
        """
        return self.content(await self.compute(visit))


ICON = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'%3E%3Cpath d='M1 4h10M4 8h11M2 "
    "12h7' stroke='%233566b8' stroke-width='2.6' stroke-linecap='round'/%3E%3C/svg%3E"
)
_SHORT_CHARS = 14  # max characters of a key number in large letters
_LOGO = Markup(
    '<svg viewBox="0 0 16 16" width="18" height="18" aria-hidden="true"><path d="M1 4h10M4 8h11M2 12h7"/></svg>'
)
_THEME_ICON = Markup(
    '<svg viewBox="0 0 16 16" width="15" height="15" aria-hidden="true"><circle cx="8" cy="8" r="6.2"/>'
    '<path d="M8 1.8a6.2 6.2 0 0 1 0 12.4z"/></svg>'
)


def build_head(content: PageContent) -> Node:
    """Builds the top of a page: breadcrumbs, heading, key numbers; sent again when it changes."""
    return header(".top")[
        nav(".trail", aria_label="Where this is")[
            ol[(li[a(href=href)[name]] for name, href in content.above)]
        ]
        if content.above
        else None,
        h1[content.heading],
        p(".lead")[content.lead] if content.lead else None,
        content.asking,
        dl(".key")[
            (
                div(class_=number.grade or None)[
                    dt[number.label],
                    dd[
                        b(class_="long" if len(str(number.value)) > _SHORT_CHARS else None)[
                            a(href=number.leads)[number.value] if number.leads else number.value
                        ],
                        span[number.about],
                    ],
                ]
                for number in content.numbers
            )
        ]
        if content.numbers
        else None,
    ]


def build_sections(content: PageContent, address: PageUrl) -> Node:
    """Builds the sections of a page; sent again when they change."""
    return fragment[
        (
            section(id=f"{part.key}-part", aria_labelledby=f"{part.key}-title")[
                header[
                    h2(id=f"{part.key}-title")[part.title],
                    p(".quiet")[part.note] if part.note else None,
                ],
                part.content.render(address)
                if isinstance(part.content, PageTable)
                else part.content,
            ]
            for part in content.sections
        ),
        span(".ended", hidden=True) if content.ended else None,
    ]


def render_document(
    *,
    title: str,
    content: Node,
    token: TokenRecord | None = None,
    pages: Sequence[Page[object]] = (),
    path: str = "",
) -> str:
    """Renders a whole page.

    Args:
        title: Title of the browser's tab.
        content: The main part.
        token: Token of the reader; None: nobody is signed in.
        pages: Pages of the menu.
        path: Path of this page.
    """
    document = html(lang="en", class_=None if token else "alone")[
        head[
            meta(charset="utf-8"),
            meta(name="viewport", content="width=device-width, initial-scale=1"),
            meta(name="color-scheme", content="light dark"),
            title_[f"{title} · Traceloom"],
            link(rel="icon", href=ICON),
            script(src=get_asset_url("theme.js")),
            link(rel="stylesheet", href=get_asset_url("portal.css")),
            script(src=get_asset_url("portal.js"), defer=True),
        ],
        body[
            a(".skip", href="#main")["Skip to the page"],
            _build_menu(token, pages, path) if token else None,
            main("#main", tabindex="-1")[content],
        ],
    ]
    return f"<!doctype html>{format_value(document).removeprefix('<!doctype html>')}"


def build_main(
    content: PageContent, address: PageUrl, controls: Node, notice: Node, *, live: bool
) -> Node:
    """Builds the main part of a page: notice about the last action, top, forms of the reader,
    sections.
    """
    return fragment[
        notice,
        div("#head", data_live="yes" if live and not content.ended else None)[build_head(content)],
        div("#controls")[controls] if controls else None,
        div("#parts")[build_sections(content, address)],
    ]


def build_problem_notice(error: HttpError) -> Node:
    return div(".notice.bad", role="alert")[
        p[_render_sentence(error.message)],
        p(".quiet")[_render_inline_code(error.hint)] if error.hint else None,
    ]


def build_error_page(error: HttpError) -> Node:
    """Builds a page that only shows an error."""
    return header(".top")[
        p(".eyebrow")[f"{error.status} · {error.slug}"],
        h1[_render_sentence(error.message)],
        p(".lead")[_render_inline_code(error.hint)] if error.hint else None,
        p[a(href="/")["To the overview"]],
    ]


def build_pending_page(title: str, seconds: float) -> Node:
    return header(".top")[
        h1[title],
        p(".lead")["The answer is being worked out; this page shows it as soon as it is there."],
        p(role="status")[
            progress(aria_label="The answer is being worked out"),
            f" {seconds:.0f} s so far. ",
            span(".quiet")["Less time, or a filter, is answered sooner."],
        ],
    ]


def build_sign_in_form(next_page: str, error: HttpError | None, *, expired: bool) -> Node:
    # For password managers.
    return div(".card")[
        p(".mark")[_LOGO, "Traceloom"],
        h1["Sign in"],
        build_problem_notice(error) if error else None,
        p(".quiet")["Your session has ended."] if expired and not error else None,
        form(method="post", action="/sign-in")[
            input_(type="hidden", name="next", value=next_page),
            input_(type="text", name="user", autocomplete="username", value="token", hidden=True),
            label(for_="token")["Token"],
            input_(
                type="password",
                id="token",
                name="token",
                required=True,
                autocomplete="current-password",
                autofocus=True,
                spellcheck="false",
                maxlength="500",
            ),
            button(".primary", type="submit")["Sign in"],
        ],
        p(".quiet")[
            "An administrator makes one: ",
            code["traceloom fleet token add NAME"],
            ". Whoever runs the service has theirs in ",
            code["~/.config/traceloom/fleet-token"],
            ".",
        ],
    ]


def restrict_to_local_path(address: str) -> str:
    """Returns the address if it is a path of this service, else "/" (against open redirects)."""
    parts = urlsplit(address)
    is_ours = (
        not parts.scheme
        and not parts.netloc
        and address.startswith("/")
        and not address.startswith(("//", "/\\"))
    )
    return address if is_ours and address.isprintable() else "/"


def format_value(node: Node) -> str:
    """Returns the HTML of elements, with invisible characters spelled out."""
    return sanitize(str(fragment[node]))


def build_fold_out(key: str, button_text: str, content: Node, *, is_open: bool) -> Node:
    return details(".fold-out", id=key, open=is_open or None)[
        summary(".primary")[button_text], div(".panel")[content]
    ]


def build_command(command: str) -> Node:
    return div(".command")[
        code[command], button(type="button", class_="copy", data_copy=command, hidden=True)["Copy"]
    ]


def _build_menu(token: TokenRecord, pages: Iterable[Page[object]], path: str) -> Node:
    menu_pages = (page for page in pages if page.menu and has_role(token, page.role))
    parts = groupby(menu_pages, key=lambda page: page.menu)
    # The current page, and those that link to it
    current_paths = {
        path,
        *(path[:index] for index, sign in enumerate(path) if sign == "/" and index),
    }
    return nav(aria_label="Pages")[
        p(".mark")[_LOGO, "Traceloom"],
        div(".links")[
            (
                div(".group")[
                    span(".group-name")[menu],
                    ul[
                        (
                            li[
                                a(
                                    href=page.path,
                                    aria_current="page" if page.path in current_paths else None,
                                )[page.title]
                            ]
                            for page in group
                        )
                    ],
                ]
                for menu, group in parts
            )
        ],
        div(".tools")[
            span(".reader")[b[token.name], span(".quiet")[token.role]],
            button(
                type="button", id="theme", aria_label="Switch the theme", title="Light or dark (t)"
            )[_THEME_ICON],
            form(method="post", action="/sign-out")[
                button(type="submit", class_="quiet-button")["Sign out"]
            ],
        ],
    ]


def _render_sentence(text: str) -> Node:
    return _render_inline_code(
        text[:1].upper() + text[1:] + ("" if text.endswith((".", "?")) else ".")
    )


def _render_inline_code(text: str) -> Node:
    return [code[part] if index % 2 else part for index, part in enumerate(text.split("`"))]


def build_job_url(job: str) -> str:
    return f"/jobs/{quote(job)}"


def build_host_url(host: str) -> str:
    return f"/hosts/{quote(host, safe='')}"


def build_request_url(request: str) -> str:
    return f"/requests/{quote(request, safe='')}"


def build_capture_url(capture: str) -> str:
    return f"/captures/{quote(capture, safe='')}"


MAX_RANKS = 65_536
_RANK_RANGE = re.compile(r"(\d{1,9})(?:\s*-\s*(\d{1,9}))?")


def build_text_field(
    name: str, title: str, hint: Node, *, value: str = "", kind: str = "text", **attributes: str
) -> Node:
    return div(".field")[
        label(for_=name)[title],
        input_(
            type=kind,
            id=name,
            name=name,
            value=value,
            autocomplete="off",
            aria_describedby=f"{name}-about",
            **attributes,
        ),
        p(".quiet", id=f"{name}-about")[hint],
    ]


def build_choices(
    name: str,
    title: str,
    options: Sequence[tuple[str, str]],
    selected: Sequence[str],
    *,
    several: bool = False,
    hint: Node = None,
) -> Node:
    """Builds radio buttons, or checkboxes for `several`, from (value, label)."""
    kind = "checkbox" if several else "radio"
    return fieldset[
        legend[title],
        div(class_=["choices", "column" if several else ""])[
            (
                label[
                    input_(type=kind, name=name, value=value, checked=value in selected or None),
                    option_label,
                ]
                for value, option_label in options
            )
        ],
        p(".quiet")[hint] if hint else None,
    ]


def build_confirm_button(button_text: str, question: Node, hidden: dict[str, str]) -> Node:
    """Builds a button that asks for confirmation, for what cannot be undone."""
    return details(".sure")[
        summary[f"{button_text} …"],
        form(method="post")[
            (input_(type="hidden", name=name, value=value) for name, value in hidden.items()),
            question,
            button(".danger", type="submit")[button_text],
        ],
    ]


def parse_ranks(text: str) -> tuple[int, ...]:
    """Parses ranks such as `0, 3, 8-11`; empty text gives (), which means all.

    Raises:
        HttpError: `wrong-request`.
    """
    ranks: set[int] = set()
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = _RANK_RANGE.fullmatch(part)
        if match is None:
            raise make_bad_request(f"`{part[:40]}` is no rank, as 0, 3, 8-11")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or len(ranks) + last - first >= MAX_RANKS:
            raise make_bad_request(f"`{part[:40]}` is no range of ranks, or too long a one")
        ranks.update(range(first, last + 1))
    return tuple(sorted(ranks))


def parse_positive_number(text: str, subject: str, kind: type[int | float]) -> float | None:
    """Parses a number above 0; None if the text is empty.

    Raises:
        HttpError: `wrong-request`.
    """
    if not text:
        return None
    try:
        number = kind(text)
    except ValueError:
        number = 0
    if not 0 < number < 1e9:
        raise make_bad_request(f"{subject} is no number above 0: `{text[:40]}`")
    return number
