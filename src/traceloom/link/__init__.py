"""From traces to the graph: what each thing waited for, and how that is known.

Names are loaded when they are first used: who needs a table of this package does not load the linker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from traceloom.lazy import lazy

if TYPE_CHECKING:
    from traceloom.link.linking import Linked as Linked
    from traceloom.link.linking import link as link
    from traceloom.link.session import link_session as link_session

lazy(__name__, {"Linked": ".linking", "link": ".linking", "link_session": ".session"})
