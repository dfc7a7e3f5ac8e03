"""What names and shapes tell about a collective, where its arguments were not recorded."""

from __future__ import annotations

import json
from math import prod
from typing import Any

import polars as pl

from traceloom.model import Trace
from traceloom.model.category import ANNOTATION, COLLECTIVE

# First match wins; names in lower case: arguments (`_allgather_base`), annotations (`gloo:all_reduce`), kernels.
_KINDS = (
    ("reduce_scatter", r"reduce_?scatter"),
    ("all_reduce", r"all_?reduce|cross_device_reduce"),
    ("all_gather", r"all_?gather"),
    ("all_to_all", r"all_?to_?all|all2all"),
    ("broadcast", r"broadcast|bcast"),
    ("barrier", r"barrier"),
    ("send_recv", r"send_?recv"),
    ("send", r"(^|[:_ ]|\bi)send"),
    ("recv", r"(^|[:_ ]|\bi)recv"),
    ("gather", r"(^|:)i?gather"),
    ("scatter", r"(^|:)i?scatter"),
    ("reduce", r"(^|:)_?reduce"),
)
_KERNEL_KINDS = (
    *_KINDS[:7],
    ("notify", r"\bep::(\w+::)*\w*notify"),
    ("dispatch", r"\bep::(\w+::)*dispatch"),
    ("combine", r"\bep::(\w+::)*combine"),
    ("reduce", r"nccl(dev)?kernel_reduce_"),
)
_HOST_CALL = r"^(gloo|nccl|rccl|mpi|ucc|xccl|oneccl|ccl|hccl|cncl|eccl|smddp):"

# The names of C++ types in `Input type`, as PyTorch names element types elsewhere, with their bytes.
_TYPES = {
    "float": ("Float", 4),
    "double": ("Double", 8),
    "int": ("Int", 4),
    "long": ("Long", 8),
    "long int": ("Long", 8),
    "long long": ("Long", 8),
    "short": ("Short", 2),
    "short int": ("Short", 2),
    "signed char": ("Char", 1),
    "char": ("Char", 1),
    "unsigned char": ("Byte", 1),
    "bool": ("Bool", 1),
    "c10::Half": ("Half", 2),
    "c10::BFloat16": ("BFloat16", 2),
    "c10::Float8_e4m3fn": ("Float8_e4m3fn", 1),
    "c10::Float8_e5m2": ("Float8_e5m2", 1),
    "c10::complex<float>": ("ComplexFloat", 8),
    "c10::complex<double>": ("ComplexDouble", 16),
}
# Their output is larger than the tensor at hand by a factor that the call does not show.
_SIZE_UNSEEN = ("all_gather", "gather", "barrier")


def kind_of_name(column: str) -> pl.Expr:
    """Kind of a collective by its recorded name; a name that is not known stays as it is."""
    return pl.coalesce(_first(column, _KINDS), pl.col(column))


def kind_of_kernel(column: str) -> pl.Expr:
    """Kind of a collective by the name of its kernel; null where it does not tell."""
    return _first(column, _KERNEL_KINDS)


def _first(column: str, table: tuple[tuple[str, str], ...]) -> pl.Expr:
    lower = pl.col(column).str.to_lowercase()
    return pl.coalesce([pl.when(lower.str.contains(pattern)).then(pl.lit(kind)) for kind, pattern in table])


def _annotations(trace: Trace) -> pl.DataFrame:
    """What PyTorch's communication back ends put around each call: event, parent, named (the kind), times."""
    found = (
        trace.events.lazy()
        .filter(pl.col("category").is_in([ANNOTATION, COLLECTIVE]), pl.col("name").str.contains(_HOST_CALL))
        .with_columns((pl.col("start_ns") + pl.col("duration_ns").clip(lower_bound=0)).alias("end_ns"))
        .select("event", "name", "parent", "start_ns", "end_ns")
        .collect()
    )
    kinds = found.select("name").unique().with_columns(kind_of_name("name").alias("named"))
    kinds = kinds.with_columns(pl.col("named").str.replace(_HOST_CALL, ""))
    return found.join(kinds, on="name", how="left", maintain_order="left")


def host_calls(trace: Trace, said: pl.DataFrame) -> pl.DataFrame:
    """Calls of communication back ends on host threads, the outermost of nested ones.

    Args:
        trace: One process's trace.
        said: Recorded arguments: event, kind_said, group, group_size, element_type, bytes.

    Returns:
        Columns event, kind, group, group_size, element_type, bytes, start_ns, end_ns.
    """
    calls = _annotations(trace)
    calls = calls.filter(~pl.col("parent").is_in(calls["event"].implode()) | pl.col("parent").is_null())
    own = calls.join(said, on="event", how="left", maintain_order="left")
    above = calls.select("parent").join(said, left_on="parent", right_on="event", how="left", maintain_order="left")
    seen = calls.select("event").join(_seen(trace, calls["event"]), on="event", how="left", maintain_order="left")
    fields = [name for name in said.columns if name != "event"]
    merged = own.with_columns(pl.coalesce(pl.col(name), above[name]).alias(name) for name in fields)
    return merged.select(
        "event",
        pl.coalesce("kind_said", "named").alias("kind"),
        "group",
        "group_size",
        pl.coalesce(pl.col("element_type"), seen["element_type_seen"]).alias("element_type"),
        pl.coalesce(
            pl.col("bytes"), pl.when(~pl.col("named").is_in(_SIZE_UNSEEN)).then(seen["bytes_seen"])
        ).alias("bytes"),
        "start_ns",
        "end_ns",
    )  # fmt: skip


def _seen(trace: Trace, events: pl.Series) -> pl.DataFrame:
    """Element type and bytes of the tensors that the calls were given, where shapes were recorded."""
    rows = trace.tensors.filter(pl.col("event").is_in(events.implode())).select("event", "shapes", "types")
    pairs = rows.select("shapes", "types").unique()
    read = [_tensor_bytes(shapes, types) for shapes, types in pairs.iter_rows()]  # distinct texts, not events
    known = pairs.with_columns(
        pl.Series("element_type_seen", [r[0] for r in read], pl.String),
        pl.Series("bytes_seen", [r[1] for r in read], pl.Int64),
    )
    return (
        rows.join(known, on=["shapes", "types"], how="left", nulls_equal=True).drop("shapes", "types").unique("event")
    )


def _tensor_bytes(shapes: str | None, types: str | None) -> tuple[str | None, int | None]:
    """`[[1000]]`, `["float"]` -> Float, 4000; None for what is not plain tensors of one known type."""
    try:
        dims, names = json.loads(shapes or ""), json.loads(types or "")
    except json.JSONDecodeError:
        return None, None  # no shapes, or damaged ones: unknown
    if not (isinstance(dims, list) and isinstance(names, list) and len(dims) == len(names) == 1):
        return None, None
    known = _TYPES.get(names[0]) if isinstance(names[0], str) else None
    if known is None:
        return None, None
    return known[0], _elements(dims[0], known[1])


def _elements(dims: Any, width: int) -> int | None:
    if not isinstance(dims, list) or not all(isinstance(d, int) and d >= 0 for d in dims):
        return None
    return prod(dims) * width
