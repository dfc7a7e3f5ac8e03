"""What a page is: where, for whom, what it works out, and what of it is shown."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from htpy import Node

from traceloom.portal.table import PageTable
from traceloom.portal.visit import Visit
from traceloom.store.state import Role

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
