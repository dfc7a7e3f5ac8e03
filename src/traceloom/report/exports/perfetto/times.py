"""Times as Perfetto reads them back to the nanosecond."""

from __future__ import annotations

import numpy as np
import polars as pl


def microseconds(ns: pl.Series) -> pl.Series:
    """Nanoseconds >= 0 as the text of microseconds with three decimals.

    Perfetto multiplies the number by 1000 as a double and cuts off the rest, which can be one nanosecond short; such a
    number gets a fourth decimal, so that it comes out right there and wherever it is rounded.
    """
    exact = ns.to_numpy()
    short = pl.Series(
        (exact / 1000.0 * 1000.0).astype(np.int64) != exact
    )  # by NumPy: correctly rounded, as a parser is
    text = pl.concat_str(
        pl.lit(ns // 1000),
        pl.lit("."),
        pl.lit(ns % 1000).cast(pl.String).str.zfill(3),
        pl.when(pl.lit(short)).then(pl.lit("2")).otherwise(pl.lit("")),
    )
    return pl.select(text.alias(ns.name)).to_series() if ns.len() else pl.Series(ns.name, [], pl.String)
