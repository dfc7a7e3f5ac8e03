"""What runtime and driver calls do, by name: submit work, wait for it, record and await events, poll."""

from __future__ import annotations

import polars as pl

from traceloom.model.letter_case import contains

# cuda, cu, hip, ze, ur, pi, sycl and mtia spellings; matched with upper and lower case alike.
LAUNCHES = (
    r"(?i)launch|memcpy|memset|mem_?copy|mem_?fill|enqueue|append(memory|launch)|eventsbarrier|prefetchasync"
    r"|usmfill|usmcopy|graphexec"
)
NO_LAUNCH = r"(?i)configure|callconfiguration|hostfunc|getlast|attribute|occupancy|launchbounds|symboladdress"
# The call returns when the device, the stream or the event has been reached.
DEVICE_WAITS = r"(?i)(device|ctx|thread)_?synchronize|^synchronize$"
STREAM_WAITS = r"(?i)stream_?synchronize|synchronize_?stream|queue_?(finish|synchronize)|commandlisthostsynchronize"
EVENT_WAITS = r"(?i)event_?(host)?_?synchronize|^(ur|pi|ze|sycl)events?wait|fencehostsynchronize"
# Copies that return when they are done, whatever kind of memory.
BLOCKING_COPIES = (
    r"(?i)^(cuda|hip|mu)memcpy(2d|3d|peer|(to|from)(symbol|array))?(_ptsz?|_ptds)?$"
    r"|^cuMemcpy(htod|dtoh|dtod|htoa|atoh|2d|3d|peer)?(_v2)?(_ptds)?$|memcpywithstream"
)
RECORDS = r"(?i)event_?record|^record_?event"
STREAM_EVENT_WAITS = r"(?i)stream_?wait_?event|wait_?on_?event"
# Not a call: an annotation of a back end that communicates from the host itself.
HOST_BACKENDS = r"^(?:gloo|mpi|ucc):"
POLLS = r"(?i)(event|stream)_?query|eventgetinfo|eventquerystatus"


def named(names: pl.Series, pattern: str) -> pl.Series:
    """Which of the names match the pattern, looked at once per distinct name."""
    different = names.unique().drop_nulls()
    hits = different.filter(contains(different, pattern))
    if not hits.len():
        return pl.Series(names.name, [False], dtype=pl.Boolean).new_from_index(0, names.len())
    return names.is_in(hits.implode()).fill_null(value=False)
