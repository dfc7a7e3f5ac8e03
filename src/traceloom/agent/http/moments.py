"""Times as people write them in a question."""

from __future__ import annotations

import re
from datetime import datetime, timezone

from traceloom.agent.http.answers import wrong_request

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_AGO = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_NUMBER = re.compile(r"-?\d+(?:\.\d*)?(?:[eE]\+?\d+)?")
_LATEST_NS = 2**62
"""What lies beyond, or before the epoch, is asked for as this, or as the epoch: databases hold no more."""


def moment(text: str, now_ns: int) -> int:
    """A time in ns since the epoch: `10m` ago, seconds since the epoch, or ISO 8601 (UTC where it says no zone).

    Raises:
        RequestError: `wrong-request`.
    """
    try:
        if match := _AGO.fullmatch(text):
            at_ns = now_ns - int(min(float(match[1]) * _UNITS_S[match[2]] * 1e9, _LATEST_NS))
        elif _NUMBER.fullmatch(text):
            at_ns = int(float(text) * 1e9)
        else:
            time_of = datetime.fromisoformat(text.replace("Z", "+00:00"))
            at_ns = int((time_of if time_of.tzinfo else time_of.replace(tzinfo=timezone.utc)).timestamp() * 1e9)
    except (ValueError, OverflowError) as error:
        raise wrong_request(f"`{text}` is no time, as 10m, 1700000000 or 2026-01-31T12:00") from error
    return min(max(at_ns, 0), _LATEST_NS)
