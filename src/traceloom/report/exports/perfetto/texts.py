"""Pieces of the JSON that Perfetto reads: times, names, slices with their arrows."""

from __future__ import annotations

import json

import numpy as np
import polars as pl

from traceloom.harmless import harmless


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


def encoded(names: pl.Series) -> pl.DataFrame:
    """Every different name with its JSON text."""
    unique = names.unique()
    texts = [json.dumps(harmless(name), ensure_ascii=False) for name in unique.to_list()]
    return pl.DataFrame({"name": unique, "quoted": texts}, schema={"name": pl.String, "quoted": pl.String})


def with_arrows(slices: pl.DataFrame, arrows: pl.DataFrame) -> str:
    """The slices, each followed by its arrows, so that Perfetto binds them to it.

    Args:
        slices: number, place (process, track and start as JSON text), text.
        arrows: source and target (numbers of slices), arrow (its name), id.
    """
    for end, opening in (("source", '{"ph":"s",'), ("target", '{"ph":"f","bp":"e",')):
        arrow = pl.concat_str(
            pl.lit(opening), "place", pl.lit(',"name":"'), "arrow", pl.lit('","cat":"'), "arrow", pl.lit('","id":'),
            "id", pl.lit("}"),
        )  # fmt: skip
        own = (
            arrows.select(pl.col(end).alias("number"), "arrow", "id")
            .join(slices.select("number", "place"), on="number")
            .select("number", arrow.alias(end))
            .group_by("number", maintain_order=True)
            .agg(pl.col(end).str.join(",\n"))
        )
        slices = slices.join(own, on="number", how="left", maintain_order="left")
    whole = slices.select(pl.concat_str("text", "source", "target", separator=",\n", ignore_nulls=True))
    return str(whole.to_series().str.join(",\n").item())
