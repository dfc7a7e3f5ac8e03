"""What is simulated: which files go together, who is in a group, one side of a recorded run, and generated pipelines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.jobs import ParallelRecipe, parallel_job
from support.workload import collective, node, write_set
from traceloom.errors import InputError, UsageError
from traceloom.formats import load
from traceloom.graph import link_session
from traceloom.workload.chakra.generate import PipelineOptions, generate_pipeline, write_generated
from traceloom.workload.simulate.inputs import open_input
from traceloom.workload.simulate.machine import Dimension, Machine
from traceloom.workload.simulate.machine_file import read_machine
from traceloom.workload.simulate.native import run

PAIR = [[node(1, us=2), collective(2, size=8_000, deps=[1], pg_name="7")]] * 2
MACHINE = Machine((Dimension("fully-connected", 2, 8.0, 100.0),))


def test_a_group_file_elsewhere_goes_before_the_one_beside_the_files(tmp_path: Path) -> None:
    home = write_set(tmp_path / "set", *PAIR, groups={"7": [0, 1, 5]})
    with pytest.raises(InputError, match="names rank 5"):
        run(home)
    other = tmp_path / "groups.json"
    other.write_text(json.dumps({"7": [1, 0]}), encoding="utf-8")
    for path in (other, str(other)):
        answer = run(home, MACHINE, groups=path)
        assert answer.after_ns == 2_000 + answer.collectives["transfer_ns"][0]
        assert answer.collectives["ranks"].to_list() == [2]
        assert not answer.notices


def test_without_a_group_file_those_that_use_a_group_are_its_members(tmp_path: Path) -> None:
    answer = run(write_set(tmp_path / "set", *PAIR, [node(1, us=1)]))
    assert answer.collectives["ranks"].to_list() == [2]
    assert [notice.slug for notice in answer.notices] == ["groups-assumed"]


@pytest.mark.parametrize(
    "text", ["", "[]", '{"7": 3}', '{"7": [0, "x"]}', '{"7": [0, -1]}', "no json"]
)
def test_a_group_file_that_is_none_is_named(text: str, tmp_path: Path) -> None:
    home = write_set(tmp_path / "set", *PAIR)
    path = tmp_path / "groups.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError) as refused:
        run(home, groups=path)
    assert refused.value.slug == "not-a-group-file"
    assert refused.value.where == str(path)


def test_what_does_not_go_together_is_a_wrong_call(tmp_path: Path) -> None:
    home = write_set(tmp_path / "set", *PAIR)
    folder = parallel_job(ParallelRecipe(data=2, steps=1)).run().write(tmp_path / "run")
    link_session(load(folder)).save(tmp_path / "job.graph")
    for paths in ([home, folder], [folder, tmp_path / "job.graph"], [home, home]):
        with pytest.raises(
            UsageError, match=r"one directory of \.et files, or one graph"
        ) as refused:
            open_input(paths)
        assert refused.value.slug == "wrong-usage"
    for path in (folder, tmp_path / "job.graph"):
        with pytest.raises(UsageError, match=r"--groups is of \.et files"):
            open_input(path, groups=tmp_path / "groups.json")
    for path in (home, tmp_path / "job.graph"):
        with pytest.raises(UsageError, match="--step is of recorded runs"):
            open_input(path, step=0)
    opened = open_input(folder)
    assert open_input(opened) is opened
    assert (opened.measured, opened.serial, opened.session is None) == (True, False, False)


def test_one_side_of_a_recorded_run_goes_on_the_devices_and_links_of_a_machine(
    tmp_path: Path,
) -> None:
    """Compute alone knows no network, communication alone no device; a recorded run of one device is put on another."""
    session = load(
        parallel_job(ParallelRecipe(data=2, steps=1, layers=1)).run().write(tmp_path / "run")
    )
    device = read_machine("dgx-a100").device
    assert device is not None
    recorded, named = (
        run(session, device=name, only="compute").after_ns for name in (None, device.name)
    )
    slower = ["network.0.bandwidth=1"]
    on_machine = [run(session, "dgx-a100", overrides=more, only="compute") for more in ([], slower)]
    assert recorded < named == on_machine[0].after_ns == on_machine[1].after_ns
    assert run(session, "dgx-h100", only="compute").after_ns == recorded
    communication = [
        run(session, "dgx-h100", device=name, only="communication") for name in (None, device.name)
    ]
    assert communication[0].after_ns == communication[1].after_ns
    assert communication[0].ranks["compute_ns"].to_list() == [0] * 2
    slow = run(session, "dgx-h100", overrides=slower, only="communication")
    assert slow.after_ns > communication[0].after_ns


def test_there_are_two_sides(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="`storage` is no side of a workload") as refused:
        run(write_set(tmp_path / "set", *PAIR), only="storage")
    assert refused.value.slug == "wrong-usage"
    assert "communication or compute" in (refused.value.hint or "")


def order_of(schedule: str, stage: int, stages: int, count: int) -> list[tuple[str, int]]:
    """What a stage does: all forward and all backward, or forward ahead by the stages behind it and then in turns."""
    ahead = count if schedule == "gpipe" else min(stages - stage, count)
    order = [("forward", k) for k in range(ahead)]
    for k in range(count):
        order.append(("backward", k))
        if ahead + k < count:
            order.append(("forward", ahead + k))
    return order


@pytest.mark.sampled(3)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("stages", "count"), [(2, 1), (2, 5), (4, 3), (4, 8)])
@pytest.mark.parametrize(("size", "latency"), [(0, 0), (80_000, 500), (8_000_000, 20_000)])
def test_a_pipeline_waits_for_its_messages(
    schedule: str, stages: int, count: int, size: int, latency: int, tmp_path: Path
) -> None:
    """Stage by stage and message by message: a receive waits for the one before it in its direction."""
    options = PipelineOptions(stages, count, schedule, size)
    made = generate_pipeline(options)
    write_generated(made, tmp_path / "set")
    machine = Machine((Dimension("fully-connected", stages, 8.0, float(latency)),))
    answer = run(tmp_path / "set", machine)
    took = {"forward": 100_000, "backward": 200_000}
    orders = [order_of(schedule, stage, stages, count) for stage in range(stages)]
    ends: dict[tuple[str, int, int], int] = {}  # direction, stage, micro-batch
    arrived: dict[tuple[str, int], int] = {}  # the last message of a direction at a stage
    free, turn = [0] * stages, [0] * stages
    while any(at < 2 * count for at in turn):
        for stage in range(stages):
            while turn[stage] < 2 * count:
                direction, number = orders[stage][turn[stage]]
                before = stage - 1 if direction == "forward" else stage + 1
                begin = free[stage]
                if 0 <= before < stages:
                    sent = ends.get((direction, before, number))
                    if sent is None:
                        break
                    there = max(sent, arrived.get((direction, stage), 0)) + latency + size // 8
                    arrived[direction, stage] = there
                    begin = max(begin, there)
                free[stage] = ends[direction, stage, number] = begin + took[direction]
                turn[stage] += 1
    assert answer.after_ns == max(ends.values())
    assert answer.ranks["compute_ns"].to_list() == [count * 300_000] * stages
    if not latency and not size:
        assert answer.after_ns == (count + stages - 1) * 300_000 == 1000 * made.totals["step_us"]
