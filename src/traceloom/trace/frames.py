"""Schemas by column name, cached pattern matching, and `Result`.

The last word of a column's name determines its type: `wait_ns` is a time, `sent_bytes` an amount
and `before_name` a text everywhere. A schema is therefore a list of names in order; only
exceptions, such as enums, are written with their type.

A pattern with `(?i)` knows the case variants of all of Unicode and takes three times as long to
compile and to run. Nearly all of our patterns are plain ASCII, so they and the names are converted
to lower case instead.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import lru_cache
from html import escape
from typing import Any

import numpy as np
import polars as pl

_TYPE_WORDS: dict[pl.DataType, str] = {
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
_TYPE_BY_WORD = {word: kind for kind, words in _TYPE_WORDS.items() for word in words.split()}
"""The type of a column: by its name if that stands here, else, of a mean, by that word, else by its
last word.
"""


def build_schema(*columns: str | Mapping[str, pl.DataType | type[pl.DataType]]) -> pl.Schema:
    """Returns the columns of a frame, in order.

    Args:
        columns: Names, separated by spaces; schemas, whose columns are inserted here; and types of
            names that precede.

    Raises:
        ValueError: A name occurs twice, a type belongs to no column, or no word determines a
            column's type.

    Example:
        >>> build_schema("rank cause mean_wait_ns", {"cause": pl.Enum(["host", "device"])})
        Schema([('rank', Int32), ('cause', Enum(categories=['host', 'device'])), ('mean_wait_ns', Float64)])
    """
    types: dict[str, pl.DataType | type[pl.DataType] | None] = {}
    for part in columns:
        if isinstance(part, Mapping):
            if not isinstance(part, pl.Schema) and (unknown_columns := part.keys() - types):
                raise ValueError(f"no column is named {', '.join(sorted(unknown_columns))}")
            types |= part
            continue
        for name in part.split():
            if name in types:
                raise ValueError(f"the column `{name}` stands twice")
            word = "mean" if name.startswith("mean_") else name.rpartition("_")[2]
            types[name] = _TYPE_BY_WORD.get(name, _TYPE_BY_WORD.get(word))
    typed = {name: kind for name, kind in types.items() if kind is not None}
    if len(typed) < len(types):
        raise ValueError(
            f"no word says the type of {', '.join(name for name in types if name not in typed)}"
        )
    return pl.Schema(typed)


def cast_to_schema(
    frame: pl.DataFrame, columns: Mapping[str, pl.DataType | type[pl.DataType]]
) -> pl.DataFrame:
    """Selects the columns of a schema, in its order and with its types; drops all others."""
    declared = frame[list(columns)]
    for index, (present, kind) in enumerate(zip(declared.dtypes, columns.values(), strict=True)):
        if present != kind:  # one by one: a query takes five times as long
            declared.replace_column(index, declared.to_series(index).cast(kind))
    return declared


def to_rows(frame: pl.DataFrame) -> list[Any]:
    """Returns the rows of a frame as dictionaries, typed as rows of the document that they go
    into.
    """
    return frame.to_dicts()


class Result:
    """Base of the frozen dataclasses that analyses return: frames and plain values, with an HTML
    view and conversion to JSON.
    """

    def to_dict(self) -> dict[str, Any]:
        """Returns plain lists, dicts, numbers and strings, as in JSON; a frame becomes a list of
        rows.
        """
        assert is_dataclass(self)
        return {f.name: _convert_to_json(getattr(self, f.name)) for f in fields(self)}

    def _repr_html_(self) -> str:
        assert is_dataclass(self)
        parts = [f"<h4>{escape(type(self).__name__)}</h4>"]
        for f in fields(self):
            value = getattr(self, f.name)
            rendered = (
                value._repr_html_() if isinstance(value, pl.DataFrame) else escape(str(value))
            )
            parts.append(f"<div><b>{escape(f.name)}</b> {rendered}</div>")
        return "".join(parts)


def _convert_to_json(value: Any) -> Any:
    if isinstance(value, pl.DataFrame):
        return value.to_dicts()
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if isinstance(value, dict):
        return {str(key): _convert_to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_convert_to_json(item) for item in value]
    return value


_IGNORE_CASE_FLAG = "(?i)"
# Patterns whose meaning does not change in lower case: no escape followed by a capital or a code
# point, no group with flags or a name, only the usual ranges (and no `[:upper:]`).
_SIMPLE_PATTERN = re.compile(
    r"(?:\\[^A-Zaceg-rtuvx-z0-9]|\(\?:|(?<!\()\?|[^\\?-]|(?<=a)-(?=z)|(?<=A)-(?=Z)|(?<=[0-9])-(?=[0-9]))*"
)

_matches_cache: dict[
    tuple[str, ...], list[tuple[pl.Series, list[pl.Series]]]
] = {}  # by patterns, the results for the last two lists of names
_lower_cache: list[pl.Series] = []  # the last names and their lower-case form


def _lower_case(names: pl.Series) -> pl.Series:
    if not _lower_cache or not _lower_cache[0].equals(names):
        _lower_cache[:] = names, names.str.to_lowercase().alias("lower")
    return _lower_cache[1]


@lru_cache(maxsize=256)
def lower_ascii(pattern: str) -> str | None:
    """Returns the pattern that matches lower-case names wherever `pattern` matches in any case;
    None if there is none.
    """
    is_simple = pattern.isascii() and "[:" not in pattern and _SIMPLE_PATTERN.fullmatch(pattern)
    return pattern.lower() if is_simple else None


def contains(names: pl.Series, pattern: str) -> pl.Series:
    """Returns which names match a regular expression, ignoring case if it begins with `(?i)`.

    Shape (names,).
    """
    return contains_any(names, [pattern])[0]


def contains_any(names: pl.Series, patterns: Sequence[str]) -> list[pl.Series]:
    """`contains` for several regular expressions.

    The results for the last two lists of names are cached: the next rank usually has the names of
    this one, or of the rank before if this one had extra names.
    """
    recent = _matches_cache.setdefault(tuple(patterns), [])
    for earlier, columns in recent:
        if earlier.equals(names):
            return columns
    frame = names.to_frame("name")
    if any(pattern.startswith(_IGNORE_CASE_FLAG) for pattern in patterns):
        frame = frame.hstack([_lower_case(names)])
    conditions = [
        pl.col("name" if low is None else "lower").str.contains(low or pattern).alias(str(index))
        for index, pattern in enumerate(patterns)
        for low in (
            lower_ascii(pattern.removeprefix(_IGNORE_CASE_FLAG))
            if pattern.startswith(_IGNORE_CASE_FLAG)
            else None,
        )
    ]
    columns = frame.select(conditions).get_columns() if conditions else []
    recent[:] = [(names, columns), *recent[:1]]
    return columns
