"""Which files of captures and directories are linked, in any order, with what is said about those that are not."""

from __future__ import annotations

import json
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from traceloom.errors import InputError, UsageError
from traceloom.graph.inputs import Inputs, find_inputs
from traceloom.testing import HostTraceBuilder, TraceBuilder

BASE = 1_700_000_000 * 10**9


def device(path: Path, rank: int | None = 0, *, process: int = 1, world: int = 2) -> Path:
    made = TraceBuilder(rank, world, process=process, device_name=None, base_ns=BASE)
    return made.op("forward", 1, 5, thread=process).write(path)


def host(path: Path, *, process: int = 1) -> Path:
    made = HostTraceBuilder(process=process)
    made.op("forward", record_id=7)
    return made.write(path)


def capture(folder: Path, *entries: dict[str, Any], world: int = 2) -> Path:
    """A capture of these ranks; every file that they name is written."""
    folder.mkdir(exist_ok=True)
    listed = [{"world_size": world, "job": "job"} | entry for entry in entries]
    (folder / "capture.json").write_text(
        json.dumps({"format": "traceloom-capture", "version": 1, "ranks": listed})
    )
    for entry in entries:
        for window in (*entry.get("windows", [entry.get("window")]), entry.get("graph_step")):
            if isinstance(window, dict) and "file" in window:
                device(folder / window["file"], entry.get("rank"))
            if isinstance(window, dict) and "host_file" in window:
                host(folder / window["host_file"])
    return folder


def linked(inputs: Inputs) -> list[tuple[int, str, str | None, str | None]]:
    """Rank, device trace, host trace and graph step."""
    return [
        (
            each.rank,
            each.device.path.name,
            each.host and each.host.path.name,
            each.graph_step and each.graph_step.path.name,
        )
        for each in inputs.ranks
    ]


def notices(inputs: Inputs) -> dict[str, tuple[int, int | None]]:
    """Slug of each notice -> its count and rank."""
    return {notice.slug: (notice.count, notice.rank) for notice in inputs.notices}


def test_the_first_of_several_windows_is_linked_and_it_is_said(tmp_path: Path) -> None:
    entries = [
        {"rank": 1, "windows": [{"file": "b1.json"}, {"file": "b2.json"}, {"file": "b3.json"}]},
        {"rank": 0, "window": {"file": "a.json"}},
    ]
    inputs = find_inputs(capture(tmp_path / "run", *entries))
    assert linked(inputs) == [(0, "a.json", None, None), (1, "b1.json", None, None)]
    assert notices(inputs) == {"several-windows": (3, 1), "no-host-trace": (2, None)}


def test_a_restart_and_a_rank_without_a_window_are_left_out(tmp_path: Path) -> None:
    entries = [
        {"rank": 0, "window": {"file": "a.json"}},
        {"rank": 0, "window": {"file": "again.json"}},
        {"rank": 1, "window": {"file": "gone.json"}},
    ]
    folder = capture(tmp_path / "run", *entries, world=3)
    (folder / "gone.json").unlink()
    inputs = find_inputs(folder)
    assert linked(inputs) == [(0, "a.json", None, None)]
    assert notices(inputs) == {
        "several-windows": (1, 0),
        "missing-window": (1, 1),
        "missing-ranks": (2, None),
        "no-host-trace": (1, None),
    }
    assert next(
        notice.message for notice in inputs.notices if notice.slug == "missing-ranks"
    ).startswith("2 of 3 ranks are missing (1, 2); when they arrive")


def test_the_graph_step_is_linked_instead_of_or_beside_the_timed_window(tmp_path: Path) -> None:
    step = {"step": 4, "file": "g.json", "host_file": "h.json"}
    folder = capture(
        tmp_path / "run", {"rank": 0, "window": {"file": "a.json"}, "graph_step": step}, world=1
    )
    assert linked(find_inputs(folder)) == [(0, "a.json", "h.json", "g.json")]
    exact = find_inputs(folder, window="graph")
    assert linked(exact) == [(0, "g.json", "h.json", None)]
    assert notices(exact) == {"observer-cost": (1, None)}
    (folder / "h.json").unlink()  # half of it tells nothing of the timed window
    assert linked(find_inputs(folder)) == [(0, "a.json", None, None)]
    (folder / "g.json").unlink()
    with pytest.raises(InputError) as caught:
        find_inputs(folder, window="graph")
    assert caught.value.slug == "graph-step-missing"


def test_a_capture_of_two_runs_and_one_of_none_are_refused(tmp_path: Path) -> None:
    two = [{"rank": 0, "job": job, "window": {"file": f"{job}.json"}} for job in ("one", "two")]
    with pytest.raises(
        UsageError, match=r"the capture holds 2 runs .*one\.json; .*two\.json"
    ) as caught:
        find_inputs(capture(tmp_path / "two", *two))
    assert caught.value.slug == "several-runs"
    with pytest.raises(InputError) as refused:
        find_inputs(capture(tmp_path / "none", {"rank": 0}))
    assert refused.value.slug == "no-traces"


def test_a_directory_may_be_named_as_a_file_of_it_too(tmp_path: Path) -> None:
    folder = capture(tmp_path / "run", {"rank": 0, "window": {"file": "a.json"}}, world=1)
    for paths in ((folder,), (folder, folder / "a.json"), (folder / "capture.json",)):
        assert linked(find_inputs(*paths)) == [(0, "a.json", None, None)]


def test_any_order_of_plain_files_gives_the_same_pairs(tmp_path: Path) -> None:
    files = [
        device(tmp_path / f"d{rank}.json", rank, process=10 + rank, world=3) for rank in range(2)
    ]
    files += [host(tmp_path / f"h{rank}.json", process=10 + rank) for rank in range(2)]
    expected = [(0, "d0.json", "h0.json", None), (1, "d1.json", "h1.json", None)]
    for order in permutations(files):
        inputs = find_inputs(*order)
        assert linked(inputs) == expected
        assert notices(inputs) == {"missing-ranks": (1, None)}


def test_standard_input_is_read_alone(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        find_inputs("-", device(tmp_path / "a.json"))
    assert caught.value.slug == "stdin-among-files"


def test_a_directory_without_traces_and_one_of_broken_ones_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text('{"a": 1}')
    with pytest.raises(InputError) as nothing:
        find_inputs(tmp_path)
    assert (nothing.value.slug, nothing.value.where) == ("no-traces", str(tmp_path))
    with pytest.raises(InputError) as refused:
        find_inputs(tmp_path / "settings.json")
    assert refused.value.slug == "not-a-trace"


def test_two_runs_are_named_with_how_to_link_one(tmp_path: Path) -> None:
    for run, world in (("x", 2), ("y", 4)):
        (tmp_path / run).mkdir()
        for rank in range(2):
            device(tmp_path / run / f"rank{rank}.json", rank, process=50 + rank, world=world)
    with pytest.raises(UsageError, match="the inputs hold 2 runs, expected one") as caught:
        find_inputs(tmp_path / "x", tmp_path / "y")
    assert caught.value.slug == "several-runs"
    assert f"traceloom link {tmp_path / 'x' / 'rank0.json'} {tmp_path / 'x' / 'rank1.json'}" in str(
        caught.value.hint
    )
