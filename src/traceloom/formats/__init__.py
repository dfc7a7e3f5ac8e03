"""Readers that turn files from outside into traces and sessions.

Names are loaded when they are first used: decoding a file needs no Polars (see
`traceloom.formats.ahead`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from traceloom.system.lazy_import import lazy

if TYPE_CHECKING:
    from traceloom.formats.arguments import arguments as arguments
    from traceloom.formats.kineto import read_kineto as read_kineto
    from traceloom.formats.loading import (
        Loaded as Loaded,
        ReadProgress as ReadProgress,
        load as load,
        load_inputs as load_inputs,
        load_runs as load_runs,
    )
    from traceloom.trace.cache import Cache as Cache

lazy(
    __name__,
    {
        "Cache": "traceloom.trace.cache",
        "Loaded": ".loading",
        "ReadProgress": ".loading",
        "arguments": ".arguments",
        "load": ".loading",
        "load_inputs": ".loading",
        "load_runs": ".loading",
        "read_kineto": ".kineto",
    },
)
