"""Every compilation of torch.compile in the recorded window, and where its time went."""

from __future__ import annotations

import numpy as np
import polars as pl

from traceloom.analyze.ancestry import Forest, forest
from traceloom.analyze.compile_marks import Marks
from traceloom.analyze.intervals import Ints
from traceloom.analyze.splitting import NO_STEP
from traceloom.analyze.vocabulary import vocabulary
from traceloom.model import Trace
from traceloom.model.arrays import column, lookup

_BACKWARD = r"^(entire_backward_compile|backward\._backward_impl)"

# Phases by the names the compiler gives them; code lies in Inductor, Inductor in the back end.
_PHASES = {
    "guards": r"^build_guards( |$)",
    "backend": r"^(backend_compile|OutputGraph\.call_user_compiler \(dynamo_timed\)|call_user_compiler)$|" + _BACKWARD,
    "inductor": r"^(inductor_compile|compile_fx_inner \(dynamo_timed\))$",
    "code": r"^(GraphLowering\.compile_to_(fn|module)|PyCodeCache\.load_by_key_path|async_compile\.wait)( |$)",
}
STAGES = ("dynamo_ns", "guards_ns", "autograd_ns", "inductor_ns", "code_ns")
_ID = r"compile_id=(?:!\d+/)?(\d+)/(\d+)"
COMPILATIONS = pl.Schema(
    {
        "event": pl.UInt32(),
        "region": pl.String(),
        "number": pl.Int64(),
        "recompile": pl.Boolean(),
        "direction": pl.Enum(["forward", "backward"]),
        "step": pl.Int32(),
        "lane": pl.UInt32(),
        "start_ns": pl.Int64(),
        "duration_ns": pl.Int64(),
        **{name: pl.Int64() for name in STAGES},
    }
)


def compilations(trace: Trace, marks: Marks) -> pl.DataFrame:
    """Tell every compilation, in time order.

    Columns: event; region (`frame/number`, null where the trace does not number compilations: torch before 2.6),
    number, recompile (a number above 0), direction (backward graphs are compiled when they are first run), step, lane,
    start_ns, duration_ns, and its stages, which add up to it: dynamo_ns (reading the bytecode, and all that is not told
    apart), guards_ns, autograd_ns (the back end before Inductor: tracing forward and backward), inductor_ns (lowering
    and scheduling), code_ns (writing, compiling and loading code).
    """
    tree = forest(trace)
    rows = np.flatnonzero(marks.compiling)
    rows = rows[np.argsort(tree.row[rows], kind="stable")]
    words = vocabulary(trace)
    code = words.code[tree.row]
    phases = {}
    for name, pattern in _PHASES.items():  # the time of its outermost events below (or at) each compilation
        outermost = tree.topmost(lookup(words.matching(pattern), code))
        phases[name] = tree.subtree_sums(np.where(outermost, tree.span_ns(), 0))[rows]
    stages = _stages(tree.span_ns()[rows], phases)
    numbers = _numbers(trace, tree, rows)
    direction = np.where(lookup(words.matching(_BACKWARD), code)[rows], "backward", "forward")
    frame = pl.DataFrame(
        {
            "event": tree.row[rows],
            "region": numbers["region"],
            "number": numbers["number"],
            "recompile": numbers["number"] > 0,
            "direction": pl.Series(direction.tolist(), dtype=pl.String),
            "step": pl.Series(column(trace, "step", int(NO_STEP))[tree.row[rows]]).replace(int(NO_STEP), None),
            "lane": tree.lane[rows],
            "start_ns": tree.start_ns[rows],
            "duration_ns": tree.span_ns()[rows],
            **stages,
        }
    )
    return frame.select(list(COMPILATIONS)).cast(COMPILATIONS)


def _stages(whole: Ints, phases: dict[str, Ints]) -> dict[str, Ints]:
    """Disjoint stages from phases that lie in each other; a phase that is not told belongs to the one around it."""
    code = phases["code"]
    inductor = np.maximum(phases["inductor"], code)
    backend = np.maximum(phases["backend"], inductor)
    guards = phases["guards"]
    return {
        "dynamo_ns": whole - backend - guards,
        "guards_ns": guards,
        "autograd_ns": backend - inductor,
        "inductor_ns": inductor - code,
        "code_ns": code,
    }


def _numbers(trace: Trace, tree: Forest, rows: Ints) -> pl.DataFrame:
    """Columns region and number of each compilation, by the first note inside it that names its id."""
    words = vocabulary(trace)
    noted = words.names.str.contains(_ID).to_numpy()
    notes = np.flatnonzero(lookup(noted, words.code[tree.row]))
    first = np.searchsorted(notes, rows)
    has = (first < notes.size) & (np.append(notes, tree.row.size)[first] < tree.stop[rows])
    note = np.append(notes, 0)[np.where(has, first, notes.size)]
    note_names = words.names.gather(words.code[tree.row[note]]) if rows.size else pl.Series([], dtype=pl.String)
    ids = pl.DataFrame({"said": note_names, "has": has}).select(
        frame=pl.when("has").then(pl.col("said").str.extract(_ID, 1)),
        number=pl.when("has").then(pl.col("said").str.extract(_ID, 2).cast(pl.Int64)),
    )
    return ids.select(pl.format("{}/{}", "frame", "number").alias("region"), "number")
