"""Which kernels use matrix units (tensor cores, MFMA), told by their names.

The rules stand in one table, `matrix_rules.json` beside this file; the first that matches decides. Only matrix products
can use these units, so only kernels of the kinds gemm, attention and convolution are asked.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import polars as pl

from traceloom.analyze import rule_table
from traceloom.analyze.kind_rules import holding

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
    state = np.full(kernels.height, STATES.index("none"), dtype=np.uint32)
    eligible = np.flatnonzero(kernels["kind"].cast(pl.String).is_in(ELIGIBLE).to_numpy())
    if eligible.size:
        eligible = eligible[kernels["name"][eligible].arg_sort().to_numpy()]  # as the next rank will ask
        uses = [STATES.index(_STATE[rule["uses"]]) for rule in rules()]
        matches = holding(kernels["name"][eligible], [rule["pattern"] for rule in rules()])
        first = np.argmax([*matches, np.ones(eligible.size, dtype=np.bool_)], axis=0)
        state[eligible] = np.array([*uses, STATES.index("unknown")], dtype=np.uint32)[first]
    return pl.Series("matrix_units", STATES, dtype=StateType)[state]
