"""What `torch.compile` leaves in a trace: marks of events, and every compilation with where its time went.

The marks say which events compile, look up, run compiled graphs, or wrap them. Names are those of torch 2.0 to 2.13,
read from recorded runs; docs/concepts/compile.md shows them.
"""

from __future__ import annotations

import numpy as np
import polars as pl
from msgspec import Struct

from traceloom.analyze.ancestry import forest
from traceloom.analyze.phases import meaning
from traceloom.analyze.remembered import per_trace
from traceloom.analyze.splitting import NO_STEP
from traceloom.analyze.vocabulary import vocabulary
from traceloom.array_types import Bools, Ints
from traceloom.model import Trace
from traceloom.model.arrays import column, lookup, nullable
from traceloom.model.frames import as_declared, schema

PARTS = ("compile", "lookup", "graph", "wrapper", "break", "outside", "unobserved")
COMPILE, LOOKUP, GRAPH, WRAPPER, BREAK, OUTSIDE, NOTHING = range(7)

REGION_NAME = r"^Torch-Compiled Region: ([0-9]{1,18})/([0-9]{1,18})(?:[^0-9]|$)"
_NAMES = {
    "region": REGION_NAME,
    "compile": r" \(dynamo_timed\)$"
    r"|^(dynamo|entire_(frame|backward)_compile|backend_compile|inductor_compile|fx_codegen_and_compile)$"
    r"|(^|/)torch/_dynamo/convert_frame\.py\(\d+\): (_compile|compile_inner)$",
    "lookup": r"^TorchDynamo Cache Lookup",
    "graph": r"^CompiledFunction(Backward)?$|^## Call CompiledFxGraph ",
    "wrapper": r"^(Pregraph bytecode|AOTDispatcher Runtime Wrapper Prologue)$",
}
COMPILED = f"{_NAMES['region']}|{_NAMES['graph']}"
"""What runs something compiled: regions, and graphs without one."""

_BACKWARD = r"^(entire_backward_compile|backward\._backward_impl)"

# Phases by the names the compiler gives them; code lies in Inductor, Inductor in the back end.
_PHASES = {
    "guards": r"^build_guards( |$)",
    "backend": r"^(backend_compile|OutputGraph\.call_user_compiler \(dynamo_timed\)|call_user_compiler)$|" + _BACKWARD,
    "inductor": r"^(inductor_compile|compile_fx_inner \(dynamo_timed\))$",
    "code": r"^(GraphLowering\.compile_to_(fn|module)|PyCodeCache\.load_by_key_path|async_compile\.wait)( |$)",
}
STAGES = ("dynamo_ns", "guards_ns", "autograd_ns", "inductor_ns", "code_ns")
_ID = r"compile_id=(?:!\d+/)?([0-9]{1,18})/([0-9]{1,18})(?:[^0-9]|$)"
COMPILATIONS = schema(
    "event region number recompile direction step lane start_ns duration_ns",
    *STAGES,
    {"direction": pl.Enum(["forward", "backward"])},
)


class Marks(Struct, frozen=True):
    """Arrays of shape (host events,), in the forest's order.

    Attributes:
        region: Events that are compiled regions.
        graph: Outermost events of compiled graphs, forward and backward; operators that stand for them, see `marks`.
        compiling: Outermost events of compilations.
        looking_up: Lookups in the cache of compiled code.
        within: The innermost region around each event (or itself); -1 outside regions.
        part: Index in PARTS.
        any: Whether the trace shows anything of torch.compile.
    """

    region: Bools
    graph: Bools
    compiling: Bools
    looking_up: Bools
    within: Ints
    part: Ints
    any: bool


@per_trace
def marks(trace: Trace) -> Marks:
    """Read the names of the host events.

    Time belongs to the nearest mark above it, but all of a compilation is compilation. Operators directly in a region
    run uncompiled, unless the region holds no graph at all: then its back end runs graphs operator by operator.
    """
    tree = forest(trace)
    words = vocabulary(trace)
    code = words.code[tree.row]
    matches = words.matching_each(list(_NAMES.values()))
    named = {name: lookup(of_name, code) for name, of_name in zip(_NAMES, matches, strict=True)}
    compiling = tree.topmost(named["compile"])
    inside = tree.nearest_or_self(compiling) >= 0
    region, graph = named["region"] & ~inside, tree.topmost(named["graph"]) & ~inside
    looking_up = named["lookup"] & ~inside
    within = tree.nearest_or_self(region)
    marked_part = np.full(code.size, -1, like=tree.row)
    for number, mask in ((WRAPPER, region | (named["wrapper"] & ~inside)), (GRAPH, graph), (LOOKUP, looking_up)):
        marked_part[mask] = number
    nearest = tree.nearest_or_self(marked_part >= 0)
    part = np.append(marked_part, OUTSIDE)[nearest]
    is_op = meaning(trace).op & (marked_part < 0)
    loose = (tree.nearest_or_self(is_op) > nearest) & (part == WRAPPER)
    held = np.zeros(code.size + 1, dtype=np.bool_)
    held[within[graph]] = True
    part = np.where(loose, np.where(held[within], BREAK, GRAPH), part)
    graph |= tree.topmost(is_op & loose & ~held[within] & ~inside)
    part[inside] = COMPILE
    return Marks(region, graph, compiling, looking_up, within, part, any(bool(mask.any()) for mask in named.values()))


def compilations(trace: Trace, marks: Marks) -> pl.DataFrame:
    """Tell every compilation, in time order.

    Columns: event; region (`frame/number`, null where the trace does not number compilations: torch before 2.6),
    number, recompile (a number above 0), direction (backward graphs are compiled when they are first run), step, lane,
    start_ns, duration_ns, and its stages, which add up to it: dynamo_ns (reading the bytecode, and all that is not told
    apart), guards_ns, autograd_ns (the back end before Inductor: tracing forward and backward), inductor_ns (lowering
    and scheduling), code_ns (writing, compiling and loading code).
    """
    tree, words = forest(trace), vocabulary(trace)
    rows = np.flatnonzero(marks.compiling)
    rows = rows[np.argsort(tree.row[rows], kind="stable")]
    name_of = words.code[tree.row]
    # phases lie in each other; one that is not recorded belongs to the one around it, what lies in several to the last
    stage = np.zeros(tree.row.size, dtype=np.int64)
    for number, pattern in enumerate(_PHASES.values(), start=1):
        stage[tree.nearest_or_self(lookup(words.matching(pattern), name_of)) >= 0] = number
    own_ns = tree.self_ns(np.ones(tree.row.size, dtype=np.bool_), tree.parent)
    stages = [tree.subtree_sums(np.where(stage == number, own_ns, 0))[rows] for number in range(len(_PHASES) + 1)]
    # region and number by the first note inside the compilation that names its id
    notes = np.flatnonzero(lookup(words.names.str.contains(_ID).to_numpy(), name_of))
    first = np.searchsorted(notes, rows)
    has = (first < notes.size) & (np.append(notes, tree.row.size)[first] < tree.stop[rows])
    note = np.append(notes, 0)[np.where(has, first, notes.size)]
    note_names = words.names.gather(name_of[note]) if rows.size else pl.Series([], dtype=pl.String)
    frame = pl.DataFrame(
        {
            "event": tree.row[rows],
            "note": note_names,
            "has_note": has,
            "backward": lookup(words.matching(_BACKWARD), name_of)[rows],
            "step": nullable(column(trace, "step", int(NO_STEP))[tree.row[rows]], absent=int(NO_STEP)),
            "lane": tree.lane[rows],
            "start_ns": tree.start_ns[rows],
            "duration_ns": tree.span_ns()[rows],
            **dict(zip(STAGES, stages, strict=True)),
        }
    ).with_columns(
        frame=pl.when("has_note").then(pl.col("note").str.extract(_ID, 1)),
        number=pl.when("has_note").then(pl.col("note").str.extract(_ID, 2).cast(pl.Int64)),
        direction=pl.when("backward").then(pl.lit("backward")).otherwise(pl.lit("forward")),
    )
    frame = frame.with_columns(region=pl.format("{}/{}", "frame", "number"), recompile=pl.col("number") > 0)
    return frame.pipe(as_declared, COMPILATIONS)
