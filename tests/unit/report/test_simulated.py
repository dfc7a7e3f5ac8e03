"""Pictures of a simulation: loads of links that carry the bytes, counters for Perfetto, a page that needs nothing."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import numpy as np
import pytest

from support import astra_sim
from support.jobs import ParallelRecipe, parallel_job
from traceloom.errors import UsageError
from traceloom.formats import load
from traceloom.graph import link_session
from traceloom.report import simulation, simulation as report
from traceloom.report.exports.perfetto import write_simulation
from traceloom.workload.simulate.astra_sim.run import simulate
from traceloom.workload.simulate.machine import Dimension, Machine
from traceloom.workload.simulate.native import run
from traceloom.workload.simulate.result import Simulation

BANDWIDTH = 20.0  # 10^9 B/s


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> Simulation:
    home = (
        parallel_job(ParallelRecipe(data=4, steps=2, sharded=True, seed=3))
        .run()
        .write(tmp_path_factory.mktemp("job") / "run")
    )
    graph = link_session(load(home))
    return run(graph, Machine((Dimension("switch", 4, BANDWIDTH, 500.0),), name="a <switch>"))


def test_the_load_of_a_link_over_time_is_what_it_carries(answer: Simulation) -> None:
    assert answer.load.height
    for link, carried in answer.links.select("link", "bytes").iter_rows():
        own = answer.load.filter(link=link)
        if own.height:
            assert own["time_ns"].is_sorted()
            assert own["share"].is_between(0, 1).all()
            assert own["share"][-1] == pytest.approx(0, abs=1e-9)
            moved = (
                own["share"].to_numpy()[:-1] * np.diff(own["time_ns"].to_numpy())
            ).sum() * BANDWIDTH
            assert moved == pytest.approx(carried, rel=0.02)


def test_perfetto_gets_a_counter_per_link(answer: Simulation) -> None:
    handle = io.BytesIO()
    write_simulation(answer, handle)
    events = json.loads(handle.getvalue())["traceEvents"]
    counters = [event for event in events if event["ph"] == "C"]
    assert len(counters) == answer.load.height
    assert {event["name"] for event in counters} <= set(answer.links["name"])
    processes = {event["pid"] for event in events if event["ph"] == "X"}
    assert {event["pid"] for event in counters}.isdisjoint(processes)


def test_the_page_holds_its_sections_and_escapes_names(answer: Simulation) -> None:
    page = simulation.render(report.build_simulation(answer), answer)
    for section in ("trust", "timeline", "ranks", "path", "collectives", "links"):
        assert f'<section id="{section}"' in page
    assert "a <switch>" not in page
    assert "a &lt;switch&gt;" in page
    assert "of its bandwidth from" in page
    assert "http://" not in page.replace("http://www.w3.org", "")


def test_labels_of_links_stand_beside_the_picture(answer: Simulation) -> None:
    page = simulation.render(report.build_simulation(answer), answer)
    (left,) = {
        float(x)
        for x in re.findall(
            r'<g transform="translate\(([0-9.]+) [0-9.]+\)" fill="var\(--bad\)">', page
        )
    }
    assert left >= 6 * max(map(len, answer.links["name"]))
    assert "But" not in re.findall(r"Not shown: [^<]*", page)[-1]


def test_a_mode_without_a_timeline_says_so(tmp_path: Path) -> None:
    read = astra_sim.one_collective(tmp_path / "set", "all_reduce", 4, 1 << 20)
    result = simulate(
        read,
        astra_sim.network("Switch", "4", "50", "500"),
        astra_sim.system(),
        congestion_aware=True,
    )
    page = simulation.render(report.build_simulation(result), result)
    assert "there is none of this mode" in page
    assert '<section id="links"' in page
    with pytest.raises(UsageError, match="has no timeline"):
        write_simulation(result, io.BytesIO())
