"""Which of the user's files are host traces and which are device traces, told from their first part only."""

from __future__ import annotations

from msgspec import Struct

from traceloom.errors import InputError
from traceloom.read.damage import Damage
from traceloom.read.host_text import HostText
from traceloom.read.inputs import Input
from traceloom.read.metadata import find_rank, whole
from traceloom.read.runs import Peek
from traceloom.read.source import first_pieces, open_input
from traceloom.read.sources import source_of


class HostPeek(Struct, frozen=True):
    """What the first part of a host trace tells.

    Attributes:
        source: The file.
        rank: From capture.json or the file name.
        process: Process id.
    """

    source: Input
    rank: int | None
    process: int | None


def told(source: Input) -> Peek | HostPeek:
    """Look into a file.

    Raises:
        InputError: It is neither a host trace nor a Kineto trace, or cannot be read.
    """
    envelope = None if str(source.path) == "-" else _envelope(source)
    if envelope is None:
        return source_of(source.path).peek(source)
    rank, _, _ = find_rank({}, None, str(source.path), source.entry)
    return HostPeek(source, rank, whole(envelope.get("pid")))


def _envelope(source: Input) -> dict[str, object] | None:
    """What stands before the nodes of a host trace; None for anything else."""
    damage = Damage(entry="node", list_key="nodes")
    with open_input(source.path) as stream:
        text = HostText(first_pieces(stream, damage), damage, str(source.path))
        try:
            text.open()
        except InputError:
            return None  # what it is instead is said by the reader of device traces
    return text.envelope
