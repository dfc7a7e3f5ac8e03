"""The columns of a frame, declared by their names: the last word of a name says what the column holds.

`wait_ns` is a time, `sent_bytes` an amount and `before_name` a text wherever they stand, so a table of columns is the
list of their names in order; only what differs from that, an enumeration say, is written with its type.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import polars as pl

_WORDS: dict[pl.DataType, str] = {
    pl.Int64(): """ns us mean_ns bytes flops count calls ops runs steps launches works threads samples ranges requests
        tokens meetings registers elements address id code stream pool instance chain follows number
        sequence row nth x y z flow correlation tag offset length period capacity range stretch matched
        recomputed""",
    pl.Float64(): """mean min max change value low high limit factor fraction rate s second bytes_per_step active drift
        scatter effect effect_size fragmentation efficiency fill error sm occupancy percent intensity mfu
        hfu base_count new_count""",
    pl.String(): """name kind kinds type types dtype group description category rule reason advice detail message
        meaning what label says host process thread op operator kernel module region function call
        framework file path stack site shapes strides splits concrete backend link algorithm protocol
        activity cause evidence state owner memory metric measure quantity counter condition verdict weight
        check deviation unpaired absent trace subject outcome peak arithmetic arrow resumed capability
        inputs outputs attributes schema key""",
    pl.Int32(): """rank ranks step device line size peer stage stage_count pipeline channels multiprocessors scope
        stride recorded receives_from sends_to""",
    pl.UInt32(): "event lane node parent example graph segment replay launch gap before after producer wait work like",
    pl.UInt16(): "depth",
    pl.Boolean(): """backward complete pageable by_kernel elementwise matrix same slow whole checked certain holds main
        sends bottleneck recompile relative used asynchronous end on_gpu along_edge""",
}
_TYPES = {word: kind for kind, words in _WORDS.items() for word in words.split()}
"""The type of a column: by its name if that stands here, else, of a mean, by that word, else by its last word."""


def schema(*columns: str | Mapping[str, pl.DataType | type[pl.DataType]]) -> pl.Schema:
    """The columns of a frame, in order.

    Args:
        columns: Names, separated by spaces; schemas, whose columns come here; and types of names that stand before.

    Raises:
        ValueError: a name stands twice, a type is of no column, or a column has no type: no word says what it holds.

    Example:
        >>> schema("rank cause mean_wait_ns", {"cause": pl.Enum(["host", "device"])})
        Schema({'rank': Int32, 'cause': Enum(categories=['host', 'device']), 'mean_wait_ns': Float64})
    """
    types: dict[str, pl.DataType | type[pl.DataType] | None] = {}
    for part in columns:
        if isinstance(part, Mapping):
            if not isinstance(part, pl.Schema) and (strange := part.keys() - types):
                raise ValueError(f"no column is named {', '.join(sorted(strange))}")
            types |= part
            continue
        for name in part.split():
            if name in types:
                raise ValueError(f"the column `{name}` stands twice")
            word = "mean" if name.startswith("mean_") else name.rpartition("_")[2]
            types[name] = _TYPES.get(name, _TYPES.get(word))
    typed = {name: kind for name, kind in types.items() if kind is not None}
    if len(typed) < len(types):
        raise ValueError(f"no word says the type of {', '.join(name for name in types if name not in typed)}")
    return pl.Schema(typed)


def as_declared(frame: pl.DataFrame, columns: Mapping[str, pl.DataType | type[pl.DataType]]) -> pl.DataFrame:
    """The columns of a schema, in its order and of its types; a frame's other columns are left out."""
    declared = frame[list(columns)]
    for at, (present, kind) in enumerate(zip(declared.dtypes, columns.values(), strict=True)):
        if present != kind:  # one by one, since a query takes five times as long
            declared.replace_column(at, declared.to_series(at).cast(kind))
    return declared


def rows(frame: pl.DataFrame) -> list[Any]:
    """The rows of a frame as dictionaries, of the type that the document has where they stand."""
    listed: list[Any] = frame.to_dicts()
    return listed
