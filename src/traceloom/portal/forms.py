"""Parts of forms, and what their fields hold."""

from __future__ import annotations

import re
from collections.abc import Sequence

from htpy import Node, button, details, div, fieldset, form, label, legend, p, summary
from htpy import input as input_

from traceloom.agent.http.answers import wrong_request

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
