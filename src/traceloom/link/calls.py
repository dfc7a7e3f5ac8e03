"""What runtime and driver calls do, by name: submit work, wait for it, record and await events, poll."""

from __future__ import annotations

import polars as pl

from traceloom.array_types import Array, Bools
from traceloom.model.arrays import coded
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


AUTOGRAD = r"^autograd::engine::evaluate_function"
PLAIN_OP = r"^(?:aten|c10d)::"  # does its work itself, or hands it over and goes on
COLLECTIVE = r"^c10d::"
OF_HOST = (
    LAUNCHES, NO_LAUNCH, DEVICE_WAITS, STREAM_WAITS, EVENT_WAITS, BLOCKING_COPIES, RECORDS, STREAM_EVENT_WAITS,
    HOST_BACKENDS, AUTOGRAD, PLAIN_OP, COLLECTIVE,
)  # fmt: skip
"""What is asked of the names of host events: of all together, which takes less than one by one."""


def words_of(names: pl.Series) -> tuple[pl.Series, Array]:
    """The distinct names, and for each name the index of it there, shape (names,); no name is an empty one."""
    return coded(names.fill_null("") if names.null_count() else names)


def named(names: pl.Series, pattern: str) -> Bools:
    """Which of the names match the pattern, looked at once per distinct name; shape (names,)."""
    words, word = words_of(names)
    matches: Bools = contains(words, pattern).to_numpy()[word]
    return matches
