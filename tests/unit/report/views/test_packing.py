"""The packed layout: exact for every integer, small for small ones."""

from __future__ import annotations

import base64
import json
import zlib

import numpy as np
import pytest
from hypothesis import given, strategies as st

from traceloom.report.views.page_table import encode_varints, encode_zigzag, pack


def decoded(body: bytes) -> list[int]:
    out, value, shift = [], 0, 0
    for byte in body:
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            out.append(value)
            value = shift = 0
    return out


@given(st.lists(st.integers(0, 2**62)))
def test_varints_give_back_every_integer(values: list[int]) -> None:
    assert decoded(encode_varints(np.array(values, dtype=np.int64))) == values


@given(st.lists(st.integers(-(2**61), 2**61)))
def test_zigzag_keeps_small_numbers_small_and_can_be_undone(values: list[int]) -> None:
    coded = encode_zigzag(np.array(values, dtype=np.int64)).tolist()
    assert [(c >> 1) ^ -(c & 1) for c in coded] == values
    assert all(c in (2 * abs(v), 2 * abs(v) - 1) for c, v in zip(coded, values, strict=True))


def test_a_varint_takes_one_byte_for_each_seven_bits() -> None:
    sizes = [
        len(encode_varints(np.array([v], dtype=np.int64)))
        for v in (0, 127, 128, 16_383, 16_384, 2**56)
    ]
    assert sizes == [1, 1, 2, 2, 3, 9]


def test_negative_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="non-negative"):
        encode_varints(np.array([-1]))


def test_the_header_lists_the_columns_in_order() -> None:
    payload = pack({"version": 1}, {"a": np.array([1, 300]), "b": np.array([], dtype=np.int64)})
    raw = zlib.decompress(base64.b64decode(payload))
    length = int.from_bytes(raw[:4], "little")
    assert json.loads(raw[4 : 4 + length]) == {"version": 1, "columns": [["a", 3, 2], ["b", 0, 0]]}
    assert raw[4 + length :] == b"\x01\xac\x02"
