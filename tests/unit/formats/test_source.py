"""The text of a file: all of it, or its beginning alone."""

from __future__ import annotations

import codecs
import contextlib
import gzip
import random
import zlib
from pathlib import Path

import pytest

from traceloom.formats.resync import DamageLog
from traceloom.formats.text_stream import open_input, read_first_pieces, read_text_pieces

TEXT = b"".join(
    random.Random(3).choices([b'{"ts":', b'],"', b"0123", b"[{}, ", b"456789\n"], k=700_000)
)


@pytest.mark.parametrize("kind", ["plain", "gzip", "marked"])
def test_the_beginning_is_that_of_the_whole_text_and_no_more_is_read_for_it(
    tmp_path: Path, kind: str
) -> None:
    text = codecs.BOM_UTF8 + TEXT if kind == "marked" else TEXT
    stored = text if kind == "plain" else gzip.compress(text, 1)
    path = tmp_path / "trace.json"
    path.write_bytes(stored)
    seen: list[bytes] = []
    with open_input(path) as stream:
        pieces = read_first_pieces(stream, DamageLog(), seen.append)
        first = next(pieces)
        assert stream.tell() < len(stored) / 4
        assert seen == [first]
        assert 0 < len(first) < len(TEXT) / 4
        assert first + b"".join(pieces) == TEXT
    with open_input(path) as stream:
        assert b"".join(read_text_pieces(stream, DamageLog())) == TEXT


def test_a_corrupt_second_member_gives_all_its_text_before_the_fault(tmp_path: Path) -> None:
    first, second = TEXT[:500_000], gzip.compress(TEXT[500_000:1_500_000])
    stored = bytearray(gzip.compress(first) + second)
    stored[-len(second) // 2] ^= 0xFF
    path = tmp_path / "trace.json.gz"
    path.write_bytes(stored)
    damage = DamageLog()
    with open_input(path) as stream:
        text = b"".join(read_text_pieces(stream, damage))
    assert [notice.slug for notice in damage.notices()] == ["corrupt-gzip"]
    slow, expected = zlib.decompressobj(31), [first]
    with contextlib.suppress(zlib.error):
        for byte in stored[-len(second) :]:
            expected += [slow.decompress(bytes([byte]))]
    assert text == b"".join(expected)
