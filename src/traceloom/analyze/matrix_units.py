"""Which kernels use matrix units (tensor cores, MFMA), told by their names.

The rules stand in one table, `matrix_rules.json` beside this file; the first that matches decides. Only matrix products
can use these units, so only kernels of the kinds gemm, attention and convolution are asked.
"""

from __future__ import annotations

from functools import lru_cache

import polars as pl

from traceloom.analyze import rule_table

ELIGIBLE = ("gemm", "attention", "convolution")
STATES = ("used", "unused", "unknown", "none")
StateType = pl.Enum(STATES)
_STATE = {"yes": "used", "no": "unused", "none": "none"}


@lru_cache(maxsize=1)
def rules() -> tuple[dict[str, str], ...]:
    """The table: rule, uses (yes, no, none: no matrix product), pattern, example, why."""
    return tuple(rule_table.built_in("matrix_rules.json"))


def matrix_units(kernels: pl.DataFrame) -> pl.Series:
    """Whether kernels use matrix units; shape (kernels,).

    Args:
        kernels: Columns `name` and `kind` (see `kernel_kinds`); give unique pairs, not events.

    Returns:
        `used`; `unused`: a matrix product on scalar or vector units; `unknown`: a matrix product whose name does not
        tell; `none`: no matrix product.
    """
    decided = pl.coalesce(
        *(
            pl.when(pl.col("name").str.contains(f"(?i){rule['pattern']}")).then(pl.lit(_STATE[rule["uses"]]))
            for rule in rules()
        ),
        pl.lit("unknown"),
    )
    eligible = pl.col("kind").cast(pl.String).is_in(ELIGIBLE)
    return kernels.select(pl.when(eligible).then(decided).otherwise(pl.lit("none")).cast(StateType)).to_series()
