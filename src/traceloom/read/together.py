"""One file decoded by several processes: this one has the first part of its text, forks have the others.

A part begins where an entry ends, near a byte that is agreed upon. What looks like such an end may stand in a text or a
list of an entry; whether it is one is known to who has the part before, if all of that is decoded. So each process
stops only where its own text proves that the next part can begin there, and parts are put together only where one
begins where the other stopped. Otherwise this process goes on alone.
"""

from __future__ import annotations

import os
import pickle
from pathlib import Path

from traceloom.read.columns import Columns
from traceloom.read.damage import Damage
from traceloom.read.decoding import Decoded, Step, decode
from traceloom.read.document import TextPart, keep
from traceloom.read.forks import Fork, ForkResult, cores
from traceloom.storage import spill

LEAST_TEXT = 1 << 23  # bytes of text that are worth a process
_HANDING = 7 << 20  # bytes of text that are decoded in the time that handing a part over takes
_MOST_PACKED = 4  # processes for one compressed file, since each has to unpack what is before its part
_MOST = 8
_MOST_EXPANSION = 250


class Helpers:
    """Forks that decode a file from a byte on.

    Args:
        path: The file.
        begins: Bytes of the text at which their parts begin; 0 if they have all of it.
        size: Bytes of the text.

    Raises:
        OSError: There are not so many processes to be had.

    Attributes:
        first: Byte at which the first part begins.
        share: Of how many times its own part this process decodes the whole.
    """

    def __init__(self, path: Path, begins: list[int], size: int) -> None:
        self.first = begins[0]
        self.share = size / max(1, self.first)
        self._forks: list[Fork] = []
        self._found: list[ForkResult] = []
        try:
            for begin, until in zip(begins, [*begins[1:], None], strict=True):
                self._forks.append(Fork(path, TextPart(begin, until)))
        except OSError:
            self.stop()
            raise

    def have(self, byte: int) -> bool:
        """Whether they decoded all that follows a byte; waits until they have."""
        at: int | None = byte
        for fork in self._forks:
            decoded = fork.found()
            if decoded is None or decoded.began != at:
                break
            self._found.append(decoded)
            if (at := decoded.left_at) is None:
                return True
        return False

    def join(self, own: Decoded) -> None:
        """Add what they have to what is before it.

        Raises:
            EOFError: One was ended from outside; `own` is of no use any more.
        """
        if self._found[-1].size >= spill.SPILL_BYTES and own.columns.spill is None:
            own.columns.spill = spill.Spill()
        for fork, decoded in zip(self._forks, self._found, strict=False):  # one may have gone to the end by itself
            own.columns.extend(decoded.known, fork.pieces())
            for key, value in decoded.metadata.items():
                keep(own.metadata, key, value, own.damage)
            own.damage.add(decoded.damage)
            own.size = decoded.size

    def stop(self) -> None:
        """End them all."""
        for fork in self._forks:
            fork.stop()


def helpers(path: Path, processes: int | None = None, lead: int = 0) -> Helpers | None:
    """Have a file decoded by as many processes as are worth it, this one among them; None where only this one is.

    Args:
        path: The file.
        processes: How many at most; all cores if None.
        lead: Bytes of text that helpers decode before this process can begin.

    Raises:
        OSError: The file cannot be read, or there are not so many processes to be had.
    """
    size, most = _text_size(path), _MOST_PACKED if _packed(path) else _MOST
    begins = parts(size, min(cores(), processes or most, most), lead)
    return Helpers(path, begins, size) if begins else None


def parts(size: int, processes: int, lead: int) -> list[int]:
    """Where the parts of the others begin, in bytes of the text; none where they are not worth it."""
    others = min(processes - 1, max(1, size // LEAST_TEXT - (lead == 0)))
    own = (size - others * (lead - _HANDING)) // (others + 1)
    if own < LEAST_TEXT:
        own = 0
    if others < 1 or (not own and not lead):
        return []
    return [own + (size - own) * number // others for number in range(others)]


def decode_with(helping: Helpers, path: str | Path, step: Step | None = None) -> Decoded:
    """Decode the first part here and take the rest from helpers, which are stopped afterwards.

    Raises:
        InputError: As of `decode`.
    """
    try:
        decoded = _mine(helping, path, step)
        if decoded is not None and (decoded.left_at is None or _joined(helping, decoded)):
            return decoded
    finally:
        helping.stop()
    return decode(path, step)


def _joined(helping: Helpers, decoded: Decoded) -> bool:
    """Add what the helpers have; False where one was ended meanwhile."""
    try:
        helping.join(decoded)
    except (EOFError, pickle.UnpicklingError):
        decoded.columns.close()
        return False
    except BaseException:
        decoded.columns.close()
        raise
    return True


def _mine(helping: Helpers, path: str | Path, step: Step | None) -> Decoded | None:
    """What is before the part of the first helper; all where they fail, None if that is theirs."""
    if not helping.first:
        damage = Damage()
        return Decoded(Columns(damage), {}, damage, 0, 0, 0) if helping.have(0) else None
    scaled = None if step is None else lambda read, text: step(int(read * helping.share), text)
    return decode(path, scaled, TextPart(until=helping.first), helping.have)


def _packed(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == b"\x1f\x8b"


def _text_size(path: Path) -> int:
    """Bytes of text of a file, roughly: gzip states it at its end, and may be wrong."""
    size = path.stat().st_size
    if size < 4 or not _packed(path):
        return size
    with path.open("rb") as file:
        file.seek(-4, os.SEEK_END)
        stated = int.from_bytes(file.read(4), "little")
    return min(max(stated, size), size * _MOST_EXPANSION)
