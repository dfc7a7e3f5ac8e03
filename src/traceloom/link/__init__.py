"""From traces to the graph: what each thing waited for, and how that is known.

Names are loaded when they are first used: who needs a table of this package does not load the linker.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from traceloom.link.linking import Linked as Linked
    from traceloom.link.linking import link as link
    from traceloom.link.session import link_session as link_session

_HOMES = {"Linked": "linking", "link": "linking", "link_session": "session"}

__all__ = ["Linked", "link", "link_session"]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
