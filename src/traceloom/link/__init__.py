"""From traces to the graph: what each thing waited for, and how that is known."""

from traceloom.link.linking import Linked, link
from traceloom.link.session import link_session

__all__ = ["Linked", "link", "link_session"]
