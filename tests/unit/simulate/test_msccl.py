"""Algorithms by MSCCL's XML: times by hand, as ASTRA-sim's own algorithm where they are the same, and wrong files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support import astra_sim
from support.workload import collective, node, write_set
from traceloom.errors import InputError, UsageError
from traceloom.simulate.astra_sim import simulate
from traceloom.simulate.astra_sim.msccl import read_msccl

NETWORK = astra_sim.network("Ring", "4", "50", "500")
HEAD = '<algo name="x" proto="Simple" nchannels="1" nchunksperloop="4" ngpus="2" coll="allreduce" inplace="1">'


def ring(ranks: int) -> str:
    """An all_reduce: every GPU hands chunks to the next one."""
    text = f'<algo name="ring" nchunksperloop="{ranks}" ngpus="{ranks}" coll="allreduce">'
    kinds = ["s", *["rrs"] * (ranks - 2), "rrcs", *["rcs"] * (ranks - 2), "r"]
    for gpu in range(ranks):
        text += f'<gpu id="{gpu}"><tb id="0" send="{(gpu + 1) % ranks}" recv="{(gpu - 1) % ranks}" chan="0">'
        for number, kind in enumerate(kinds):
            text += f'<step s="{number}" type="{kind}" cnt="1" depid="-1" deps="-1" hasdep="0"/>'
        text += "</tb></gpu>"
    return text + "</algo>"


def ends(home: Path, text: str, ranks: int = 4, size: int = 1 << 18, **more: Any) -> list[int]:
    home.mkdir()
    file = home / "algorithm.xml"
    file.write_text(text, encoding="utf-8")
    own = [node(1, us=1, is_cpu_op=False), collective(2, size=size, deps=[1], is_cpu_op=False)]
    network = astra_sim.network("Ring", str(ranks), "50", "500")
    read = astra_sim.workload(write_set(home / "set", *[own] * ranks))
    answer = simulate(read, network, astra_sim.system(**more), algorithms={"all_reduce": file})
    return answer.ranks["end_ns"].to_list()


def test_a_ring_by_hand(tmp_path: Path) -> None:
    """6 messages of 64 KiB, 1,720 ns each, and 3 reductions of 120 ns; twice the bytes are twice what is not latency."""
    assert ends(tmp_path / "a", ring(4)) == [1000 + 6 * 1720 + 3 * 120] * 4
    assert ends(tmp_path / "b", ring(4), size=1 << 19, splits=3) == [1000 + 6 * 2941 + 3 * 243] * 4


@pytest.mark.parametrize("ranks", [3, 4, 7])
def test_a_ring_takes_what_the_ring_takes(tmp_path: Path, ranks: int) -> None:
    own = [node(1, us=1, is_cpu_op=False), collective(2, size=ranks * 1000, deps=[1], is_cpu_op=False)]
    network = astra_sim.network("Ring", str(ranks), "50", "500")
    read = astra_sim.workload(write_set(tmp_path / "set", *[own] * ranks))
    as_ring = simulate(read, network, astra_sim.system(endpoint_delay=0)).ranks["end_ns"].to_list()
    assert ends(tmp_path / "xml", ring(ranks), ranks, ranks * 1000) == as_ring


def test_thread_blocks_wait_for_each_other(tmp_path: Path) -> None:
    """GPU 0 copies half its buffer (2 x 81 ns), then sends it; GPU 1 receives it in another thread block."""
    text = HEAD + (
        '<gpu id="0"><tb id="0" send="-1" recv="-1" chan="0"><step s="0" type="cpy" cnt="2" depid="-1" deps="-1"/></tb>'
        '<tb id="1" send="1" recv="-1" chan="0"><step s="0" type="nop" depid="0" deps="0"/>'
        '<step s="1" type="s" cnt="2" depid="-1" deps="-1"/></tb></gpu>'
        '<gpu id="1"><tb id="0" send="-1" recv="0" chan="0"><step s="0" type="r" cnt="2" depid="-1" deps="-1"/></tb>'
        '<tb id="1" send="-1" recv="-1" chan="0"><step s="0" type="re" cnt="1" depid="0" deps="0"/></tb></gpu></algo>'
    )
    sent = 1000 + 2 * 81
    there = sent + int(500 + (1 << 17) / (50 * 2**30 / 1e9))
    assert ends(tmp_path / "x", text, 2) == [there, there + 3 * int((1 << 16) / 1600e9 * 1e9)]


STEP = '<step s="0" type="{}" cnt="1" depid="{}" deps="{}"/>'
ONE = '<gpu id="0"><tb id="0" send="{}" recv="{}" chan="0">{}</tb></gpu>'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing", "it is no XML"),
        ("<!DOCTYPE a [<!ENTITY b 'c'>]><algo/>", "line 1: it declares a document type"),
        ("<other/>", "`other` has no meaning there"),
        ('<algo nchunksperloop="0"/>', "expected nchunksperloop to be a number from 1, got '0'"),
        ('<algo nchunksperloop="2"/>', "it has no GPUs"),
        (HEAD + ONE.format(1, 1, "") + "</algo>", "it has the GPUs 0, and says that there are 2"),
        (HEAD + ONE.format(1, 1, STEP.format("jump", -1, -1)) + "</algo>", "'jump' is no type of a step"),
        (HEAD + ONE.format(-1, 1, STEP.format("s", -1, -1)) + "</algo>", "without a GPU to do it with"),
        (HEAD + ONE.format(1, -1, STEP.format("s", -1, -1)) + '<gpu id="1"/></algo>', "GPU 0 sends 1 messages of 1"),
        (HEAD + ONE.format(7, -1, "") + '<gpu id="1"/></algo>', "a thread block with send=7"),
        (HEAD + ONE.format(-1, -1, STEP.format("nop", 3, 0)) + '<gpu id="1"/></algo>', "which is not there"),
        (HEAD + ONE.format(-1, -1, STEP.format("nop", 0, 0)) + '<gpu id="1"/></algo>', "waits in a circle"),
        (HEAD.replace("allreduce", "dance") + "</algo>", "it has no GPUs"),
        (HEAD.replace("allreduce", "dance") + '<gpu id="0"/><gpu id="1"/></algo>', "`dance` is no collective"),
        (HEAD + '<gpu id="0"/><gpu id="0"/></algo>', "GPU 0 is there twice"),
    ],
)
def test_wrong_files_are_refused_with_the_place(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "a.xml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=message) as error:
        read_msccl(path)
    assert error.value.slug == "bad-algorithm"
    assert error.value.where == str(path)


def test_what_an_algorithm_is_not_for_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="it is for 4 GPUs, the group has 3 ranks"):
        ends(tmp_path / "three", ring(4), 3)
    with pytest.raises(InputError, match="an algorithm for all_gather, not for all_reduce"):
        ends(tmp_path / "kind", ring(4).replace("allreduce", "allgather"))
    with pytest.raises(InputError, match="cannot be read: no such file"):
        read_msccl(tmp_path / "none.xml")
    read = astra_sim.workload(write_set(tmp_path / "set", *[[node(1)]] * 4))
    with pytest.raises(UsageError, match="`allreduce` is carried out by no algorithm") as error:
        simulate(read, NETWORK, astra_sim.system(), algorithms={"allreduce": "x"})
    assert "all_reduce" in error.value.hint
