"""Rows on their way to the tables: they come back as they were, and nothing else is taken for them."""

from __future__ import annotations

import io
import zipfile
from datetime import date

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from traceloom.fleet.store.schema import SCHEMAS
from traceloom.fleet.store.tables import pack_rows, unpack_rows

DAY = date(2026, 11, 26)
ROWS = pl.DataFrame(
    {"day": [DAY, DAY], "capture": ["c1", "c1"], "kernel": ["gemm", "µ"], "count": [1, None]}
)


def test_rows_come_back_with_all_columns_of_their_table() -> None:
    rows = unpack_rows(pack_rows({"kernels": ROWS, "findings": SCHEMAS["findings"].empty()}), "c1")
    assert set(rows) == {"kernels", "findings"}
    assert rows["kernels"].schema == SCHEMAS["kernels"].types
    assert_frame_equal(rows["kernels"].select(ROWS.columns), ROWS, check_dtypes=False)
    assert rows["findings"].height == 0


def archive(**files: bytes) -> bytes:
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w", zipfile.ZIP_DEFLATED) as written:
        for name, content in files.items():
            written.writestr(f"{name}.arrow", content)
    return whole.getvalue()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "cannot be read"),
        (b"\x80\x04}.", "cannot be read"),
        (pack_rows({"kernels": ROWS})[:-30], "cannot be read"),
        (archive(kernels=b"no table"), "cannot be read"),
        (pack_rows({"audit": ROWS}), "no rows in `audit`"),
        (pack_rows({"usage_minute": SCHEMAS["usage_minute"].empty()}), "no rows in `usage_minute`"),
        (pack_rows({"kernels": ROWS.with_columns(more=1)}), "no column more"),
        (pack_rows({"kernels": ROWS.with_columns(count=pl.lit("many"))}), "cannot be read"),
        (
            pack_rows({"kernels": ROWS.with_columns(capture=pl.Series(["c1", "c2"]))}),
            "of another capture",
        ),
        (
            pack_rows({"kernels": ROWS.with_columns(capture=pl.lit(None, pl.String))}),
            "of another capture",
        ),
        (pack_rows({"kernels": ROWS.with_columns(day=pl.Series([DAY, None]))}), "of no day"),
    ],
    ids=range(11),
)
def test_anything_else_is_refused(content: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        unpack_rows(content, "c1")


def test_what_would_fill_the_memory_is_not_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("traceloom.fleet.store.tables.MAX_ROWS_BYTES", 1 << 20)
    with pytest.raises(ValueError, match="more than 1 MiB"):
        unpack_rows(archive(kernels=bytes(2 << 20)), "c1")
