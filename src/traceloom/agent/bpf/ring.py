"""The buffer through which programs hand us records (Documentation/bpf/ringbuf.rst)."""

from __future__ import annotations

import mmap
import struct

from traceloom.agent.bpf.kernel import Map, MapKind

_BUSY = 1 << 31
_HEADER_BYTES = 8
_POSITION = struct.Struct("<Q")


class Ring:
    """A ring of records that all have the same size; one that finds it full is lost, which its program counts.

    Args:
        record_bytes: Of a record, a multiple of eight.
        size: Bytes of the ring, a power of two and of whole pages.

    Raises:
        OSError: The kernel has no such buffers (before 5.8), or does not let us.
    """

    def __init__(self, record_bytes: int, size: int) -> None:
        self._stride = _HEADER_BYTES + record_bytes
        self._size = size
        self.map = Map(MapKind.RING, 0, 0, size)
        page = mmap.PAGESIZE
        # One page for us to say how far we have read, one for the kernel to say how far it has written, and the data
        # twice in a row, so that no record is cut at the end.
        self._read_to = mmap.mmap(self.map.descriptor, page, mmap.MAP_SHARED)
        self._written = mmap.mmap(
            self.map.descriptor, page + 2 * size, mmap.MAP_SHARED, mmap.PROT_READ, offset=page
        )  # fmt: skip
        self._position = 0

    def take(self) -> bytes:
        """The records that are complete, one after the other, without what stands between them."""
        (written,) = _POSITION.unpack_from(self._written, 0)
        # The kernel marks a record as unfinished before it moves `written` on. Between the two reads here lie thousands
        # of instructions of the interpreter, more than any processor holds back: no barrier is needed.
        number = (written - self._position) // self._stride
        start = mmap.PAGESIZE + self._position % self._size
        view = memoryview(self._written)[start : start + number * self._stride]
        headers = view.cast("I")[:: self._stride // 4]
        done = next((position for position, header in enumerate(headers) if header & _BUSY), number)
        content = bytes(view[: done * self._stride])
        headers.release()
        view.release()
        self._position += len(content)
        _POSITION.pack_into(self._read_to, 0, self._position)
        return b"".join(
            content[position + _HEADER_BYTES : position + self._stride]
            for position in range(0, len(content), self._stride)
        )

    def close(self) -> None:
        """Let go of it."""
        self._read_to.close()
        self._written.close()
        self.map.close()
