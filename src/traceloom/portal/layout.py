"""The document around every page: menu, who reads, heading, parts; written once, so that all pages are alike.

Everything is made of elements whose texts are escaped; there is no way to put text in unescaped. What is invisible or
steers (control characters, marks that turn the order of letters) is spelled out in the whole document at the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from urllib.parse import urlsplit

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
    form,
    fragment,
    h1,
    h2,
    head,
    header,
    html,
    label,
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
from htpy import (
    input as input_,
)
from htpy import (
    title as title_,
)
from markupsafe import Markup

from traceloom.agent.http.answers import RequestError
from traceloom.collect.routes import may
from traceloom.harmless import harmless
from traceloom.portal.page import Page, PageContent
from traceloom.portal.static_files import address_of
from traceloom.portal.table import PageTable
from traceloom.portal.visit import Address
from traceloom.store.state import TokenRecord

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
    return f"<!doctype html>{written(shown).removeprefix('<!doctype html>')}"


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


def written(node: Node) -> str:
    """HTML of elements, with nothing invisible in it."""
    return harmless(str(fragment[node]))


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
