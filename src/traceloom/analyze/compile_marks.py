"""What `torch.compile` leaves in a trace: which events compile, look up, run compiled graphs, or wrap them.

Names are those of torch 2.0 to 2.13, read from recorded runs; docs/concepts/compile.md shows them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from traceloom.analyze.ancestry import forest
from traceloom.analyze.intervals import Bools, Ints
from traceloom.analyze.phases import meaning
from traceloom.analyze.remembered import per_trace
from traceloom.analyze.vocabulary import vocabulary
from traceloom.model import Trace
from traceloom.model.arrays import lookup

PARTS = ("compile", "lookup", "graph", "wrapper", "break", "outside", "unobserved")
COMPILE, LOOKUP, GRAPH, WRAPPER, BREAK, OUTSIDE, NOTHING = range(7)

REGION_NAME = r"^Torch-Compiled Region: (\d+)/(\d+)"
COMPILING = (
    r" \(dynamo_timed\)$"
    r"|^(dynamo|entire_(frame|backward)_compile|backend_compile|inductor_compile|fx_codegen_and_compile)$"
    r"|(^|/)torch/_dynamo/convert_frame\.py\(\d+\): (_compile|compile_inner)$"
)
LOOKING_UP = r"^TorchDynamo Cache Lookup"
RUNNING = r"^CompiledFunction(Backward)?$|^## Call CompiledFxGraph "
WRAPPING = r"^(Pregraph bytecode|AOTDispatcher Runtime Wrapper Prologue)$"


@dataclass(frozen=True, slots=True)
class Marks:
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
    named = {
        name: lookup(words.matching(pattern), code)
        for name, pattern in (
            ("region", REGION_NAME),
            ("compile", COMPILING),
            ("lookup", LOOKING_UP),
            ("graph", RUNNING),
            ("wrapper", WRAPPING),
        )
    }
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


def part_of(marks: Marks, owner: Ints) -> Ints:
    """The part of stretches by their innermost event; -1 is nothing recorded."""
    return np.append(marks.part, NOTHING)[owner]
