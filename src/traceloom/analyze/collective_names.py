"""Names of communication kernels and calls: algorithm, protocol, back end, kind, and the
description of each collective.
"""

from collections.abc import Sequence
from functools import lru_cache

import polars as pl

from traceloom.graph.communication import parse_number_list
from traceloom.trace.batch import TRACE_COLUMN, concatenate_by_trace, gather_event_column
from traceloom.trace.trace import Trace
from traceloom.trace.vocabulary import ANNOTATION, COLLECTIVE

# NCCL and RCCL compile few kernels and let each run the other algorithms and protocols through a
# table of functions: `..._RING_LL` is launched for LL128 and SIMPLE too, and since 2.19 `RING` also
# for NVLS, CollNet and PAT.
_ENTRY_KERNEL = r"(?i)nccl(dev)?kernel_|nccl\w*(ring|tree|collnet)\w*kernel|rcclgenerickernel"
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


def add_algorithms(kernels: pl.DataFrame) -> pl.DataFrame:
    """Adds `algorithm`, `protocol` and `name_certain` to rows with a column `name`.

    `name_certain` is False where the library launches a kernel of this name for other algorithms
    and protocols too, null where the name states neither.
    """
    parsed = _parse_kernel_names(tuple(kernels["name"].unique().sort().to_list()))
    return kernels.join(parsed, on="name", how="left", maintain_order="left")


@lru_cache(maxsize=8)
def _parse_kernel_names(kernel_names: tuple[str, ...]) -> pl.DataFrame:
    """Returns name, algorithm, protocol, name_certain; cached, since the next rank mostly runs the
    same kernels.
    """
    names = pl.DataFrame({"name": kernel_names}, schema={"name": pl.String})
    names = names.with_columns(pl.col("name").str.to_uppercase().alias("upper"))
    # Arguments of the function carry no information, and may contain any word.
    upper = pl.col("upper").str.replace(r"\(.*$", "")
    algorithm = _match_first(_ALGORITHMS, upper)
    protocol = pl.coalesce(
        _match_first(_PROTOCOLS, upper),
        pl.when(pl.col("name").str.contains(_OLD_SIMPLE)).then(pl.lit("SIMPLE")),
    )
    return names.select(
        "name", algorithm.alias("algorithm"), protocol.alias("protocol")
    ).with_columns(
        pl.when(pl.col("algorithm").is_not_null() | pl.col("protocol").is_not_null())
        .then(~pl.col("name").str.contains(_ENTRY_KERNEL) | pl.col("name").str.contains(_SYMMETRIC))
        .alias("name_certain")
    )


def _match_first(table: tuple[tuple[str, str], ...], text: pl.Expr) -> pl.Expr:
    return pl.coalesce(
        pl.when(text.str.contains(pattern)).then(pl.lit(word)) for word, pattern in table
    )


# Name of the back end, by the rule of the table of kernels that decided.
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


def derive_backend(rule: str, *, amd: pl.Series) -> pl.Expr:
    """Returns the back end by the column of the rule; NCCL kernels on an AMD device (shape (rows,))
    are RCCL's.
    """
    backend = pl.col(rule).replace_strict(BACKENDS, default=pl.col(rule), return_dtype=pl.String)
    return pl.when(amd & (backend == "nccl")).then(pl.lit("rccl")).otherwise(backend)


# First match wins; kernel names in lower case. NCCL names a kernel after the first operation of its
# group, so the name is only a hint.
KERNEL_KINDS = (
    ("layout", r"(\b|_)ep::(\w+::)*get_dispatch_layout"),
    ("notify", r"(\b|_)ep::(\w+::)*\w*notify"),
    ("dispatch", r"(\b|_)ep::(\w+::)*dispatch"),
    ("combine", r"(\b|_)ep::(\w+::)*combine"),
    ("reduce_scatter", r"reduce_?scatter"),
    ("all_reduce", r"all_?reduce|cross_device_reduce"),
    ("all_gather", r"all_?gather"),
    ("all_to_all", r"all_?to_?all|all2all"),
    ("broadcast", r"broadcast"),
    ("send_recv", r"send_?recv"),
    ("reduce", r"nccl(dev)?kernel_reduce_"),
    ("barrier", r"nvshmem\w*(barrier|sync)|rocshmem\w*barrier"),
    ("put", r"(nv|roc)shmem\w*_(put|p_)"),
    ("get", r"(nv|roc)shmem\w*_(get|g_)"),
)

# C++ types, as annotations have them, with the names that recorded arguments use.
_TYPE_NAMES = {
    "float": "Float",
    "double": "Double",
    "int": "Int",
    "long": "Long",
    "long int": "Long",
    "long long": "Long",
    "short": "Short",
    "short int": "Short",
    "signed char": "Char",
    "char": "Char",
    "unsigned char": "Byte",
    "bool": "Bool",
}

# The recorded tensor is smaller than the message by a factor that the call does not show.
_KINDS_WITHOUT_SIZE = ("all_gather", "gather")


@lru_cache(maxsize=8)
def derive_collective_kinds(kernel_names: tuple[str, ...]) -> pl.DataFrame:
    """Returns name, kind: that of a collective by the name of its kernel, null where the name does
    not show it.

    Cached, since the next rank mostly runs the same kernels.
    """
    lower = pl.col("name").str.to_lowercase()
    kind = pl.coalesce(
        pl.when(lower.str.contains(pattern)).then(pl.lit(kind)) for kind, pattern in KERNEL_KINDS
    )
    return pl.DataFrame({"name": kernel_names}, schema={"name": pl.String}).with_columns(
        kind.alias("kind")
    )


def describe_collectives(traces: Sequence[Trace]) -> pl.DataFrame:
    """Returns the recorded description of each collective: trace, event, kind, group, group_size,
    members, sequence, element_type, in_bytes, out_bytes, peer, in_splits, out_splits, bytes.

    `members` (global ranks) is null where the file truncates the list. `bytes` is the larger of
    what goes in and what comes out; null where that is not known.
    """
    incoming, outgoing = pl.col("in_bytes"), pl.col("out_bytes")
    fallback_bytes = pl.when(~pl.col("kind").is_in(_KINDS_WITHOUT_SIZE)).then(incoming)
    larger = pl.when(incoming.is_not_null() & outgoing.is_not_null()).then(
        pl.max_horizontal(incoming, outgoing)
    )
    return (
        concatenate_by_trace(trace.collectives for trace in traces)
        .select(
            TRACE_COLUMN,
            "event",
            "kind",
            "group",
            "group_size",
            parse_number_list("ranks", pl.Int32).alias("members"),
            "sequence",
            pl.col("element_type").str.strip_prefix("c10::").replace(_TYPE_NAMES),
            "in_bytes",
            "out_bytes",
            "peer",
            parse_number_list("in_splits", pl.Int64),
            parse_number_list("out_splits", pl.Int64),
            pl.coalesce(larger, outgoing, fallback_bytes).alias("bytes"),
        )
        .unique([TRACE_COLUMN, "event"], keep="first", maintain_order=True)
    )


def find_host_calls(traces: Sequence[Trace], arguments: pl.DataFrame) -> pl.DataFrame:
    """Returns calls of communication back ends on host threads (`gloo:all_reduce`), the outermost
    of nested ones.

    Args:
        traces: Traces.
        arguments: The result of `describe_collectives`.

    Returns:
        The columns of `arguments` (fields that the call itself lacks come from the op around it),
        start_ns, end_ns.
    """
    spans = [
        gather_event_column(traces, arguments, "event", name)
        for name in ("category", "parent", "start_ns", "duration_ns")
    ]
    host_calls = arguments.hstack(spans).filter(pl.col("category").is_in([ANNOTATION, COLLECTIVE]))
    outer = host_calls.select(TRACE_COLUMN, parent="event")
    host_calls = host_calls.join(
        outer, on=[TRACE_COLUMN, "parent"], how="anti", maintain_order="left"
    )
    keys = [TRACE_COLUMN, "event"]
    parents = host_calls[[TRACE_COLUMN, "parent"]].join(
        arguments,
        left_on=[TRACE_COLUMN, "parent"],
        right_on=keys,
        how="left",
        maintain_order="left",
    )
    fields = [name for name in arguments.columns if name not in keys]
    return host_calls.select(
        *keys,
        *(pl.coalesce(pl.col(name), parents[name]).alias(name) for name in fields),
        "start_ns",
        (pl.col("start_ns") + pl.col("duration_ns").clip(lower_bound=0)).alias("end_ns"),
    )
