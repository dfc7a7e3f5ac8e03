"""Reading: from files of strangers to traces and sessions.

Names are loaded when they are first used: decoding a file needs no Polars (see `traceloom.read.ahead`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from traceloom.lazy import lazy

if TYPE_CHECKING:
    from traceloom.read.again import arguments as arguments
    from traceloom.read.kineto import read_kineto as read_kineto
    from traceloom.read.loading import Loaded as Loaded
    from traceloom.read.loading import load as load
    from traceloom.read.loading import load_inputs as load_inputs
    from traceloom.read.loading import load_runs as load_runs
    from traceloom.read.ranks import ReadProgress as ReadProgress
    from traceloom.storage.cache import Cache as Cache

lazy(
    __name__,
    {
        "Cache": "traceloom.storage.cache",
        "Loaded": ".loading",
        "ReadProgress": ".ranks",
        "arguments": ".again",
        "load": ".loading",
        "load_inputs": ".loading",
        "load_runs": ".loading",
        "read_kineto": ".kineto",
    },
)
