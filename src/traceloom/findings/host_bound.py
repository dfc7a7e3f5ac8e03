"""The host cannot keep the device busy: launches, Python, many small kernels."""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from traceloom import analyze
from traceloom.findings.ground import Ground
from traceloom.findings.rule import Candidate, Rule, Said
from traceloom.model import units
from traceloom.model.finding import Abstention, Evidence
from traceloom.simulate.changes import Change
from traceloom.simulate.selection import Selection

_LEAST_GAP = 0.02  # of the window


def _gaps(ground: Ground) -> tuple[int, tuple[Evidence, ...]]:
    """Idle time of the devices in the step because launches came late, and the longest such gaps."""
    whole, shown = 0, []
    for trace in ground.traces:
        rows = analyze.idle(trace).gaps
        if ground.step is not None:
            rows = rows.filter(pl.col("step") == ground.step)
        late = rows.filter(pl.col("cause").cast(pl.String).str.starts_with("host_"))
        whole += int(late["duration_ns"].sum())
        for row in late.sort("duration_ns", descending=True).head(3).to_dicts():
            what = f"GPU idle: {row['host_activity'] or 'the host'}"
            shown.append(Evidence(what, trace.rank, row["start_ns"], row["duration_ns"]))
    return whole, tuple(sorted(shown, key=lambda one: -(one.duration_ns or 0))[:5])


def launch_bound(ground: Ground) -> Iterator[Said]:
    """Kernels wait for their launches."""
    if not ground.on_device:
        yield Abstention("launch-bound", "no GPU work was recorded")
        return
    idle, evidence = _gaps(ground)
    if idle < _LEAST_GAP * ground.whole_ns:
        return
    yield Candidate(
        title=f"the GPU waits for launches: {units.duration(idle)} idle in the step",
        changes=(Change("graph", Selection("gpu")),),
        confidence=0.6,
        advice="Submit the step with fewer, larger launches: torch.compile, CUDA graphs (torch.cuda.graphs, "
        "mode='reduce-overhead'), larger batches, fused operators.",
        evidence=evidence,
    )


def python_bound(ground: Ground) -> Iterator[Said]:
    """Python between operators holds up the step."""
    think = Selection("think")
    if not ground.kinds.is_in(["host"]).any():
        yield Abstention("python-bound", "no operators were recorded: nobody knows what the host did")
        return
    if not think.nodes(ground.graph).any():
        return
    time = ground.work_ns(think.nodes(ground.graph))
    yield Candidate(
        title=f"Python between operators takes {units.duration(time)} of the step",
        changes=(Change("scale", think, 0.3),),
        confidence=0.4,
        advice="Move work out of the step, or out of Python: vectorise loops over tensors, cache what does not change, "
        "compile the model, log less often.",
        evidence=_longest(ground, think),
    )


def _longest(ground: Ground, selection: Selection) -> tuple[Evidence, ...]:
    nodes = ground.graph.nodes.filter(pl.Series(selection.nodes(ground.graph))).sort("duration_ns", descending=True)
    return tuple(
        Evidence(row["name"] or "host time that nothing names", row["rank"], row["start_ns"] + ground.graph.epoch_ns,
                 row["duration_ns"])
        for row in nodes.head(5).to_dicts()
    )  # fmt: skip


def small_kernels(ground: Ground) -> Iterator[Said]:
    """Runs of elementwise kernels that one kernel could do."""
    chosen = Selection("kernels", r"elementwise|pointwise|triton_poi")
    mask = chosen.nodes(ground.graph)
    count = int(mask.sum())
    if count < 20:
        return
    yield Candidate(
        title=f"{units.count(count)} elementwise kernels in the step could be fused",
        changes=(Change("fuse", chosen),),
        confidence=0.6,
        advice="Let torch.compile fuse them, or use fused operators.",
        evidence=(Evidence("elementwise kernels", count=count, total_ns=ground.work_ns(mask)),),
    )


RULES = (
    Rule("launch-bound", "launches come too late for the GPU", launch_bound),
    Rule("python-bound", "Python between operators decides the step", python_bound),
    Rule("small-kernels", "many small kernels that could be one", small_kernels),
)
