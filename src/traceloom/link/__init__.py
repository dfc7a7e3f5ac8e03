"""From traces to the graph: what each thing waited for, and how that is known."""

from traceloom.link.linking import Linked, link

__all__ = ["Linked", "link"]
