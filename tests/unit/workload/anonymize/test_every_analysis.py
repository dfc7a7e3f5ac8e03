"""Every analysis and the linked graph say of what is shared what they say of what is kept, in numbers, row for row."""

from __future__ import annotations

from collections import Counter
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import polars as pl
import pytest

from support.analyses import ALL, parts_of
from support.odd_traces import odd_builder
from traceloom.findings import findings
from traceloom.formats import read_kineto
from traceloom.graph.rank import link_rank
from traceloom.trace.session import Session
from traceloom.trace.trace import Trace
from traceloom.workload.anonymize.policy import Key, Policy
from traceloom.workload.anonymize.run import anonymize

POLICIES = {"default": Policy(), "exact": Policy(shapes="keep", scalars="keep", times="keep")}
NUMBERED_ANEW = {
    "lane",
    "parent",
    "node",
    "line",
}  # places of threads and frames, which are sorted by name
ROUNDED = {"bytes", "copied", "size"}  # words in the names of columns that tell sizes
SECRETS = ("train.py", "model.py", "loss", "acme", "quokka", "host0")


@cache
def before_and_after(seed: int, policy: str) -> tuple[Trace, Trace, bytes]:
    """A trace of names of its own, itself and as it is shared, with the bytes of the file."""
    made = odd_builder(seed)
    for number, name in enumerate(("acme::fused", "acme::fused", "aten::addmm", "Quokka::gate")):
        at, thread = 20.0 * number, 4000
        made.op(name, at, 15, thread=thread, shapes=[[700, 33], [33, 5]], sequence=number)
        made.annotation(f"acme forward block {number}", at + 1, 13, thread=thread)
        made.python(f"/home/acme/train.py({number}): acme_step", at + 2, 11, thread=thread)
        made.launch("cudaLaunchKernel", at + 3, 2, correlation=9_000 + number, thread=thread)
        made.kernel(
            "void acme::quokka_kernel<float, 4>(int)", at + 9, 8, correlation=9_000 + number
        )
    with TemporaryDirectory() as folder:
        source = made.write(Path(folder) / "in.json")
        output = anonymize(
            [source], Path(folder) / "out.json", POLICIES[policy], Key(b"a key of tests alone")
        ).output
        return read_kineto(source), read_kineto(output), output.read_bytes()


def numbers(frame: pl.DataFrame, *, sizes: bool) -> Counter[Any]:
    """The rows without texts, moments and numbers that sorting by name gives; how often each stands."""
    columns = [
        name
        for name, kind in frame.schema.items()
        if (kind.is_numeric() or kind == pl.Boolean or isinstance(kind, pl.Enum))
        and name not in NUMBERED_ANEW
        and (sizes or not ROUNDED & set(name.split("_")))
        and not (name in {"start_ns", "time_ns", "first_ns", "last_ns", "launch_ns"} and not sizes)
    ]
    return Counter(frame.select(columns).rows())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", [6])
def test_every_analysis_says_the_same_in_numbers(seed: int, policy: str) -> None:
    before, after, _ = before_and_after(seed, policy)
    differ = []
    for name, analysis in ALL.items():
        if (
            policy == "default" and name == "roofline"
        ):  # follows from shapes, which are rounded there
            continue
        first, other = parts_of(analysis(before)), parts_of(analysis(after))
        for part, value in first.items():
            if isinstance(value, pl.DataFrame):
                rows = [numbers(frame, sizes=policy != "default") for frame in (value, other[part])]
                differ += [(name, part)] * (rows[0] != rows[1])
            elif isinstance(value, (int, float)):
                differ += [(name, part)] * (other[part] != value)
    assert differ == []


@pytest.mark.parametrize("policy", POLICIES)
def test_no_name_of_its_own_is_in_the_file(policy: str) -> None:
    data = before_and_after(1, policy)[2].lower()
    assert [secret for secret in SECRETS if secret.encode() in data] == []


@pytest.mark.parametrize("seed", [0, 2])
def test_the_graph_of_what_is_shared_has_the_same_nodes_and_edges(seed: int) -> None:
    graphs = [link_rank(trace) for trace in before_and_after(seed, "exact")[:2]]
    columns = ["kind", "start_ns", "duration_ns", "work_ns", "bytes", "step"]
    rows = [Counter(graph.nodes.select(columns).rows()) for graph in graphs]
    assert rows[0] == rows[1]
    edges = []
    for graph in graphs:
        # nodes by their kind and times, since they are numbered thread by thread
        times = graph.nodes.select(*columns[:3]).rows()
        edges.append(
            Counter(
                (
                    times[row["source"]],
                    times[row["target"]],
                    row["kind"],
                    row["evidence"],
                    row["from_end"],
                    row["to_end"],
                )
                for row in graph.edges.to_dicts()
            )
        )
    assert edges[0] == edges[1]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", [1, 2])
def test_what_should_be_mended_is_the_same_with_the_same_savings(seed: int) -> None:
    ranked = [findings(Session((trace,), "run")) for trace in before_and_after(seed, "exact")[:2]]
    facts = [
        [
            (each.slug, each.severity, each.saving_ns, each.alone_ns, each.confidence)
            for each in (*result.time, *result.memory)
        ]
        for result in ranked
    ]
    assert facts[0] == facts[1]
    assert facts[0], "there is something to mend"
