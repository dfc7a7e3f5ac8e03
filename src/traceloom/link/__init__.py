"""From traces to the graph: what each thing waited for, and how that is known."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from traceloom.link.linking import Linked, link

if TYPE_CHECKING:
    from traceloom.link.session import link_session as link_session

__all__ = ["Linked", "link", "link_session"]


def __getattr__(name: str) -> Any:
    """`link_session` is loaded when it is first used: a pair of traces that is refused needs nothing of it."""
    if name != "link_session":
        raise AttributeError(f"module 'traceloom.link' has no attribute {name!r}")
    from traceloom.link.session import link_session

    return link_session
