"""What pairing and naming had to assume, and what the recording cannot have seen: notices with counts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from traceloom.analyze.allocations.blocks import EXISTED
from traceloom.analyze.allocations.named import Named
from traceloom.analyze.allocations.owners import Owners
from traceloom.analyze.intervals import Ints
from traceloom.model import Notice, units

_LOST = """blocks were never freed in the recording, and yet their address was given out again: they are taken to end
there (another thread freed them, or events were dropped)"""
_RESIZED = "frees say another size than their allocation: that of the allocation counts"
_UNSEEN = """storages ({size}) are alive at the end whose allocation was not recorded, and that were not there before:
other threads made them, or they are not PyTorch's own (NumPy arrays, mapped files); no figure holds them"""
_GONE = """storages ({size}) from before the recording were not found any more at its end, but no free of them was
recorded: they count until the end"""
_EARLY = """blocks ({size}) were freed whose allocation was not recorded: they are taken to be from before the
recording, where no other thread made them; nobody knows whose they are"""
_UNKNOWN = "backward nodes belong to no recorded forward operator: what they allocate is called backward.unknown"
_COMPILED = """allocations ({size}) were made in compiled code: they are charged to the scope that called it, because
modules and scopes inside it are gone"""


def remarks(named: Named, whose: Owners) -> tuple[Notice, ...]:
    """What to know about the blocks of one trace; empty where there is nothing.

    Args:
        named: Blocks with names.
        whose: What the censuses say.
    """
    blocks = named.blocks
    early = np.flatnonzero((blocks.start_ns == EXISTED) & (blocks.owner < 0))
    compiled = np.flatnonzero(np.append(named.places.compiled, False)[named.position])
    listed = whose.table["bytes"].to_numpy()
    none = early[:0]
    notices = (
        Notice("lost-frees", "warning", _line(_LOST, none), blocks.lost_frees),
        Notice("resized-frees", "warning", _line(_RESIZED, none), blocks.resized),
        Notice("unrecorded-allocations", "warning", _line(_UNSEEN, listed[whose.unseen]), whose.unseen.size),
        Notice("unrecorded-frees", "warning", _line(_GONE, blocks.bytes[whose.gone]), whose.gone.size),
        Notice("freed-from-before", "info", _line(_EARLY, blocks.bytes[early]), early.size),
        Notice("backward-without-forward", "info", _line(_UNKNOWN, none), named.places.unknown_backward),
        Notice("compiled-allocations", "info", _line(_COMPILED, blocks.bytes[compiled]), compiled.size),
    )
    counted = (notice for notice in notices if notice.count)
    return tuple(replace(notice, message=f"{units.count(notice.count)} {notice.message}") for notice in counted)


def _line(text: str, sizes: Ints) -> str:
    return text.replace("\n", " ").format(size=units.size(int(sizes.sum())))
