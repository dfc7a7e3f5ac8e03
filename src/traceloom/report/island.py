"""JSON in a page: data that its scripts read, packed where there is much of it."""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any

_PLAIN = 1_000  # characters of JSON from which on packing is worth it


def island(value: Any) -> str:
    """A script element that holds a JSON object, safe whatever names it holds; `readIsland` of `unpack.js` reads it."""
    dumped = json.dumps(value, separators=(",", ":"))  # ASCII, so U+2028 and U+2029 are escaped already
    if len(dumped) < _PLAIN:
        body = dumped.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    else:
        body = base64.b64encode(zlib.compress(dumped.encode(), 9)).decode()
    return f'<script type="application/json">{body}</script>'
