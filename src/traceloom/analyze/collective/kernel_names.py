"""What the name of a communication kernel says of its algorithm and protocol, and what it does not say."""

from __future__ import annotations

from functools import lru_cache

import polars as pl

# NCCL and RCCL compile few kernels and let each run the other algorithms and protocols through a table of functions:
# `..._RING_LL` is launched for LL128 and SIMPLE too, and since 2.19 `RING` also for NVLS, CollNet and PAT.
_ENTRY = r"(?i)nccl(dev)?kernel_|nccl\w*(ring|tree|collnet)\w*kernel|rcclgenerickernel"
_SYMMETRIC = r"(?i)ncclSymk?DevKernel"

# First match wins; names in upper case.
_ALGORITHMS = (
    ("NVLS_TREE", r"NVLS_?TREE"),
    ("NVLS", r"NVLS|MULTIMEM|LDMC|STMC|MULTICAST"),
    ("COLLNET_CHAIN", r"COLLNET_?CHAIN"),
    ("COLLNET_DIRECT", r"COLLNET_?DIRECT"),
    ("COLLNET", r"COLLNET"),
    ("PAT", r"_PAT_"),
    ("TREE", r"TREE"),
    ("ONE_SHOT", r"ONE_?SHOT|CROSS_DEVICE_REDUCE_1STAGE"),
    ("TWO_SHOT", r"TWO_?SHOT|CROSS_DEVICE_REDUCE_2STAGE"),
    ("RING", r"RING"),
)
_PROTOCOLS = (
    ("LL128", r"(?:_|RING|TREE)LL128(?:[_K]|\b)"),
    ("LL", r"(?:_|RING|TREE)LL(?:[_K]|\b)"),
    ("SIMPLE", r"_?SIMPLE(?:_|\b)"),
    ("LAMPORT", r"LAMPORT"),
)
# Until 2.7 the simple protocol was not spelled: ncclAllReduceRingKernel_sum_f32.
_OLD_SIMPLE = r"(?i)^nccl[A-Za-z]+(ring|tree)kernel_"


def with_names(kernels: pl.DataFrame) -> pl.DataFrame:
    """Add `algorithm`, `protocol` and `name_certain` to rows with a column `name`.

    `name_certain` is False where the library launches a kernel of this name for other algorithms and protocols too,
    null where the name says neither.
    """
    parsed = _parsed(tuple(kernels["name"].unique().sort().to_list()))
    return kernels.join(parsed, on="name", how="left", maintain_order="left")


@lru_cache(maxsize=8)
def _parsed(kernel_names: tuple[str, ...]) -> pl.DataFrame:
    """name, algorithm, protocol, name_certain; remembered, since the next rank mostly runs the same kernels."""
    names = pl.DataFrame({"name": kernel_names}, schema={"name": pl.String})
    names = names.with_columns(pl.col("name").str.to_uppercase().alias("upper"))
    # Arguments of the function say nothing, and may hold any word.
    upper = pl.col("upper").str.replace(r"\(.*$", "")
    algorithm = _first(_ALGORITHMS, upper)
    protocol = pl.coalesce(
        _first(_PROTOCOLS, upper), pl.when(pl.col("name").str.contains(_OLD_SIMPLE)).then(pl.lit("SIMPLE"))
    )
    return names.select("name", algorithm.alias("algorithm"), protocol.alias("protocol")).with_columns(
        pl.when(pl.col("algorithm").is_not_null() | pl.col("protocol").is_not_null())
        .then(~pl.col("name").str.contains(_ENTRY) | pl.col("name").str.contains(_SYMMETRIC))
        .alias("name_certain")
    )


def _first(table: tuple[tuple[str, str], ...], text: pl.Expr) -> pl.Expr:
    return pl.coalesce(pl.when(text.str.contains(pattern)).then(pl.lit(word)) for word, pattern in table)


# What a backend is called, by the rule of the table of kernels that decided.
BACKENDS = {
    "nccl": "nccl",
    "rccl": "rccl",
    "hccl": "hccl",
    "oneccl": "oneccl",
    "mscclpp": "msccl++",
    "nvshmem": "nvshmem",
    "deep-ep": "deep_ep",
    "custom-all-reduce": "custom all-reduce",
    "symmetric-memory": "symmetric memory",
    "one-two-shot": "symmetric memory",
    "fused-all-reduce": "fused all-reduce",
    "quick-reduce": "quick reduce",
    "aiter": "aiter",
}


def backend_of(rule: str, *, amd: pl.Series) -> pl.Expr:
    """The backend by the column of the rule; NCCL's kernels on a device of AMD (shape (rows,)) are RCCL's."""
    named = pl.col(rule).replace_strict(BACKENDS, default=pl.col(rule), return_dtype=pl.String)
    return pl.when(amd & (named == "nccl")).then(pl.lit("rccl")).otherwise(named)
