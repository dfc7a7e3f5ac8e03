"""Page, section, form, layout.

Everything is made of elements whose texts are escaped; there is no way to put text in unescaped. What is invisible or
steers (control characters, marks that turn the order of letters) is spelled out in the whole document at the end.
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
    ul,
)
from htpy import input as input_
from htpy import title as title_
from markupsafe import Markup

from traceloom.fleet.handlers.captures import may
from traceloom.fleet.portal.page_request import Address, Visit
from traceloom.fleet.portal.tables import PageTable
from traceloom.fleet.store.captures import Role, TokenRecord
from traceloom.report.views.page import asset as of_reports
from traceloom.server.problem import RequestError, wrong_request
from traceloom.system.sanitize import sanitize


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
    return files("traceloom.fleet.portal").joinpath("assets", name).read_text(encoding="utf-8")


T = TypeVar("T")


@dataclass(frozen=True)
class KeyNumber:
    """A number at the head of a page.

    Attributes:
        label: What it is called.
        value: The number.
        about: What it is of.
        grade: "bad" or "warn" where it calls for attention.
        leads: To what is behind it; "": that stands on the page itself.
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
        note: One sentence beside the heading.
    """

    key: str
    title: str
    content: PageTable | Node
    note: Node = ""


@dataclass(frozen=True)
class PageContent:
    """What a page shows, the same for everybody who may read it.

    Attributes:
        heading: What it is about, or the answer in a sentence.
        sections: Its parts.
        above: What stands over the heading: the way from the menu to here, as (name, address).
        lead: What stands below the heading.
        asking: The form by which one asks another way.
        numbers: Key numbers.
        ended: Nothing on it changes any more.
    """

    heading: Node
    sections: Sequence[ContentSection] = ()
    above: Sequence[tuple[str, str]] = ()
    lead: Node = ""
    asking: Node = None
    numbers: Sequence[KeyNumber] = ()
    ended: bool = False


@dataclass(frozen=True)
class Page(Generic[T]):
    """A page.

    Attributes:
        path: Its pattern, as of a route.
        title: In the menu and in the browser's tab.
        about: What it is for, in the documentation.
        compute: Asks the routes for what it shows; for who may read it, that is the same.
        content: What of that is shown.
        controls: Forms and links for this reader, below the heading.
        role: Whoever reads it has to have.
        act: Does what a form of the page asks for; where to go then, or what to say on the page.
        live: Its content is sent again whenever it changes.
        menu: The part of the menu that it stands in; "": it is reached from others.
    """

    path: str
    title: str
    about: str
    compute: Callable[[Visit], Awaitable[T]]
    content: Callable[[T], PageContent]
    controls: Callable[[Visit, T], Node] = field(default=lambda _visit, _data: None)
    role: Role = "viewer"
    act: Callable[[Visit], Awaitable[str | Node]] | None = None
    live: bool = False
    menu: str = ""

    async def shown(self, visit: Visit) -> PageContent:
        """What it shows.

        Raises:
            RequestError: A route refuses.
        """
        return self.content(await self.compute(visit))


ICON = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'%3E%3Cpath d='M1 4h10M4 8h11M2 "
    "12h7' stroke='%233566b8' stroke-width='2.6' stroke-linecap='round'/%3E%3C/svg%3E"
)
_SHORT = 14  # characters of a key number that stand in large letters
_MARK = Markup(
    '<svg viewBox="0 0 16 16" width="18" height="18" aria-hidden="true"><path d="M1 4h10M4 8h11M2 12h7"/></svg>'
)
_THEME = Markup(
    '<svg viewBox="0 0 16 16" width="15" height="15" aria-hidden="true"><circle cx="8" cy="8" r="6.2"/>'
    '<path d="M8 1.8a6.2 6.2 0 0 1 0 12.4z"/></svg>'
)


def head_node(content: PageContent) -> Node:
    """The head of a page: where it stands, its heading, key numbers; sent again when it changes."""
    return header(".top")[
        nav(".trail", aria_label="Where this is")[ol[(li[a(href=href)[name]] for name, href in content.above)]]
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
                        b(class_="long" if len(str(number.value)) > _SHORT else None)[
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


def parts_node(content: PageContent, address: Address) -> Node:
    """The parts of a page; sent again when they change."""
    return fragment[
        (
            section(id=f"{part.key}-part", aria_labelledby=f"{part.key}-title")[
                header[h2(id=f"{part.key}-title")[part.title], p(".quiet")[part.note] if part.note else None],
                part.content.render(address) if isinstance(part.content, PageTable) else part.content,
            ]
            for part in content.sections
        ),
        span(".ended", hidden=True) if content.ended else None,
    ]


def document(
    *,
    title: str,
    inside: Node,
    token: TokenRecord | None = None,
    pages: Sequence[Page[object]] = (),
    path: str = "",
) -> str:
    """A whole page.

    Args:
        title: Of the browser's tab.
        inside: The main part.
        token: Of who reads; None: nobody is signed in.
        pages: Of the menu.
        path: Of this page.
    """
    shown = html(lang="en", class_=None if token else "alone")[
        head[
            meta(charset="utf-8"),
            meta(name="viewport", content="width=device-width, initial-scale=1"),
            meta(name="color-scheme", content="light dark"),
            title_[f"{title} · Traceloom"],
            link(rel="icon", href=ICON),
            script(src=address_of("theme.js")),
            link(rel="stylesheet", href=address_of("portal.css")),
            script(src=address_of("portal.js"), defer=True),
        ],
        body[
            a(".skip", href="#main")["Skip to the page"],
            _menu(token, pages, path) if token else None,
            main("#main", tabindex="-1")[inside],
        ],
    ]
    return f"<!doctype html>{format_value(shown).removeprefix('<!doctype html>')}"


def page_node(content: PageContent, address: Address, controls: Node, notice: Node, *, live: bool) -> Node:
    """The main part of a page: what is said of what was just done, its head, forms for this reader, its parts."""
    return fragment[
        notice,
        div("#head", data_live="yes" if live and not content.ended else None)[head_node(content)],
        div("#controls")[controls] if controls else None,
        div("#parts")[parts_node(content, address)],
    ]


def problem(error: RequestError) -> Node:
    """Why something is refused."""
    return div(".notice.bad", role="alert")[
        p[_sentence(error.message)], p(".quiet")[_prose(error.hint)] if error.hint else None
    ]


def refusal(error: RequestError) -> Node:
    """A page that only says why there is no other."""
    return header(".top")[
        p(".eyebrow")[f"{error.status} · {error.slug}"],
        h1[_sentence(error.message)],
        p(".lead")[_prose(error.hint)] if error.hint else None,
        p[a(href="/")["To the overview"]],
    ]


def still_working(title: str, seconds: float) -> Node:
    """A page whose answer is not there yet."""
    return header(".top")[
        h1[title],
        p(".lead")["The answer is being worked out; this page shows it as soon as it is there."],
        p(role="status")[
            progress(aria_label="The answer is being worked out"),
            f" {seconds:.0f} s so far. ",
            span(".quiet")["Less time, or a filter, is answered sooner."],
        ],
    ]


def sign_in(next_page: str, error: RequestError | None, *, expired: bool) -> Node:
    """The form by which one shows a token."""
    return div(".card")[
        p(".mark")[_MARK, "Traceloom"],
        h1["Sign in"],
        problem(error) if error else None,
        p(".quiet")["Your session has ended."] if expired and not error else None,
        form(method="post", action="/sign-in")[
            input_(type="hidden", name="next", value=next_page),
            input_(type="text", name="user", autocomplete="username", value="token", hidden=True),  # for their keepers
            label(for_="token")["Token"],
            input_(
                type="password", id="token", name="token", required=True, autocomplete="current-password",
                autofocus=True, spellcheck="false", maxlength="500",
            ),
            button(".primary", type="submit")["Sign in"],
        ],
        p(".quiet")[
            "An administrator makes one: ", code["traceloom fleet token add NAME"],
            ". Whoever runs the service has theirs in ", code["~/.config/traceloom/fleet-token"], ".",
        ],
    ]  # fmt: skip


def local_path(address: str) -> str:
    """An address of this service, without scheme and host; "/" for any other."""
    parts = urlsplit(address)
    is_ours = (
        not parts.scheme and not parts.netloc and address.startswith("/") and not address.startswith(("//", "/\\"))
    )
    return address if is_ours and address.isprintable() else "/"


def format_value(node: Node) -> str:
    """HTML of elements, with nothing invisible in it."""
    return sanitize(str(fragment[node]))


def folded(key: str, words: str, inside: Node, *, is_open: bool) -> Node:
    """A button that unfolds a form."""
    return details(".fold-out", id=key, open=is_open or None)[summary(".primary")[words], div(".panel")[inside]]


def command(words: str) -> Node:
    """A command to be copied."""
    return div(".command")[code[words], button(type="button", class_="copy", data_copy=words, hidden=True)["Copy"]]


def _menu(token: TokenRecord, pages: Iterable[Page[object]], path: str) -> Node:
    shown = (page for page in pages if page.menu and may(token, page.role))
    parts = groupby(shown, key=lambda page: page.menu)
    # The page at the address, and those from which it is reached
    here = {path, *(path[:at] for at, sign in enumerate(path) if sign == "/" and at)}
    return nav(aria_label="Pages")[
        p(".mark")[_MARK, "Traceloom"],
        div(".links")[
            (
                div(".group")[
                    span(".group-name")[menu],
                    ul[
                        (
                            li[a(href=page.path, aria_current="page" if page.path in here else None)[page.title]]
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
            )[_THEME],
            form(method="post", action="/sign-out")[button(type="submit", class_="quiet-button")["Sign out"]],
        ],
    ]  # fmt: skip


def _sentence(text: str) -> Node:
    return _prose(text[:1].upper() + text[1:] + ("" if text.endswith((".", "?")) else "."))


def _prose(text: str) -> Node:
    """Text in which what stands between backticks is code."""
    return [code[part] if at % 2 else part for at, part in enumerate(text.split("`"))]


def to_job(job: str) -> str:
    """Of a job."""
    return f"/jobs/{quote(job)}"


def to_host(host: str) -> str:
    """Of a host."""
    return f"/hosts/{quote(host, safe='')}"


def to_request(request: str) -> str:
    """Of a request."""
    return f"/requests/{quote(request, safe='')}"


def to_capture(capture: str) -> str:
    """Of a capture."""
    return f"/captures/{quote(capture, safe='')}"


MOST_RANKS = 65_536
_RANKS = re.compile(r"(\d{1,9})(?:\s*-\s*(\d{1,9}))?")


def text_field(name: str, title: str, about: Node, *, value: str = "", kind: str = "text", **attributes: str) -> Node:
    """A field with its name and what belongs into it."""
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
        p(".quiet", id=f"{name}-about")[about],
    ]


def choices(
    name: str,
    title: str,
    options: Sequence[tuple[str, str]],
    chosen: Sequence[str],
    *,
    several: bool = False,
    about: Node = None,
) -> Node:
    """Some of few: one, or several; (value, what it is called)."""
    kind = "checkbox" if several else "radio"
    return fieldset[
        legend[title],
        div(class_=["choices", "column" if several else ""])[
            (
                label[input_(type=kind, name=name, value=value, checked=value in chosen or None), shown]
                for value, shown in options
            )
        ],
        p(".quiet")[about] if about else None,
    ]


def sure(words: str, question: Node, hidden: dict[str, str]) -> Node:
    """A button for what cannot be taken back: it asks once more."""
    return details(".sure")[
        summary[f"{words} …"],
        form(method="post")[
            (input_(type="hidden", name=name, value=value) for name, value in hidden.items()),
            question,
            button(".danger", type="submit")[words],
        ],
    ]


def ranks_of(text: str) -> tuple[int, ...]:
    """`0, 3, 8-11` as ranks; all where it is empty: ().

    Raises:
        RequestError: `wrong-request`.
    """
    ranks: set[int] = set()
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = _RANKS.fullmatch(part)
        if match is None:
            raise wrong_request(f"`{part[:40]}` is no rank, as 0, 3, 8-11")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or len(ranks) + last - first >= MOST_RANKS:
            raise wrong_request(f"`{part[:40]}` is no range of ranks, or too long a one")
        ranks.update(range(first, last + 1))
    return tuple(sorted(ranks))


def number_of(text: str, what: str, kind: type[int | float]) -> float | None:
    """A number above 0; None where there is none.

    Raises:
        RequestError: `wrong-request`.
    """
    if not text:
        return None
    try:
        number = kind(text)
    except ValueError:
        number = 0
    if not 0 < number < 1e9:
        raise wrong_request(f"{what} is no number above 0: `{text[:40]}`")
    return number
