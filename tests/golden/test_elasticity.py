"""What moves when times change, on public traces: the edges, not the measured starts, must hold things in place."""

from __future__ import annotations

import numpy as np
import pytest

from support.public_traces import DATA
from traceloom.formats import read_kineto
from traceloom.graph import Plan, calibrate
from traceloom.graph.graph import Graph
from traceloom.graph.rank import link_rank

GPU = ["kernel", "copy", "fill", "collective", "send", "receive"]
HOST = ["host", "think", "launch", "block"]

pytestmark = [
    pytest.mark.data,
    pytest.mark.skipif(
        not DATA.is_dir(), reason="the public traces (../shared/data) are not on this machine"
    ),
]


def answer(name: str, kinds: list[str], factor: float) -> float:
    """The window, as a share of the measured one, with the work of some kinds of nodes scaled."""
    graph: Graph = calibrate(link_rank(read_kineto(DATA / name)))
    work = graph.nodes["work_ns"].to_numpy().copy()
    chosen = graph.nodes["kind"].is_in(kinds).to_numpy()
    work[chosen] = (work[chosen] * factor).astype(np.int64)
    times = graph.point_times()
    return float((Plan(graph).evaluate(work).max() - times[0]) / (times.max() - times[0]))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        # 98 % busy, launches that wait for room in the queue, a synchronisation at the end
        ("kineto/v100_ns_resolution.json.gz", 0.50, 0.55),
        # 99.6 % busy, and a host that looks at memory until dispatch kernels have written there
        ("kineto/h800_deepseek_train.json.gz", 0.50, 0.56),
        # 96 % busy, until the host takes longer than the halved GPU work
        ("diff/v100_test.json.gz", 0.55, 0.72),
        ("kineto/h100_qwen_0.5b.json.gz", 0.65, 0.85),
        # the GPU is hardly used
        ("kineto/a100_ddp_nccl.json.gz", 0.99, 1.0),
        ("kineto/h100_bert_small.json.gz", 0.97, 1.0),
        ("pairs/linear.kineto.json.gz", 0.98, 1.0),
    ],
)
def test_half_of_the_gpu_work(name, low, high):
    assert low <= answer(name, GPU, 0.5) <= high


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("kineto/v100_ns_resolution.json.gz", 0.97, 1.0),
        ("kineto/h800_deepseek_train.json.gz", 0.97, 1.0),
        ("kineto/a100_ddp_nccl.json.gz", 0.49, 0.53),
        ("kineto/h100_bert_small.json.gz", 0.49, 0.53),
        ("pairs/linear.kineto.json.gz", 0.49, 0.53),
    ],
)
def test_half_of_the_host_work(name, low, high):
    assert low <= answer(name, HOST, 0.5) <= high
