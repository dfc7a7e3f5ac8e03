"""What is said of a hang, from states, stacks and flight records, and how it is written down."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import pickle
import subprocess
import sys
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from traceloom.agent.hangs import bundle
from traceloom.agent.hangs.bundle import (
    HangContext,
    HangEvent,
    HangReport,
    HungDevice,
    render_bundle_page,
    write_bundle,
)
from traceloom.agent.hangs.detector import Hang, HungProcess
from traceloom.agent.hangs.stacks import group_stacks
from traceloom.agent.ownership.model import Owner, Process
from traceloom.agent.profilers.py_spy import StackDump, ThreadStack
from traceloom.analyze.stuck_jobs import FlightVerdict
from traceloom.system.python_frames import Frame

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the agent is for Linux")
TORCH = "/usr/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"
REDUCING = (Frame("train", "/job/train.py", 20), Frame("all_reduce", TORCH, 9))
LOADING = (Frame("train", "/job/train.py", 12), Frame("load_batch", "/job/data.py", 31))
SECOND = 10**9


def process(rank: int, world: int = 2) -> Process:
    """None that runs."""
    pid = 4_000_000 + rank
    return Process(
        key=f"{pid}@1",
        pid=pid,
        start_ticks=1,
        started_ns=0,
        parent_pid=1,
        uid=os.geteuid(),
        command="python train.py",
        owner=Owner(job="j", rank=rank, world_size=world),
    )


def hang(*processes: Process, **more: object) -> Hang:
    members = tuple(
        HungProcess(key=each.key, pid=each.pid, rank=each.owner.rank, steps=9) for each in processes
    )
    fields = {"since_ns": 0, "seen_ns": 61 * SECOND, "median_s": 0.5, **more}
    return msgspec.convert({"job": "j", "uid": os.geteuid(), "processes": members, **fields}, Hang)


def judged(
    *stacks: tuple[Frame, ...], flight: FlightVerdict | None = None, world: int = 2
) -> tuple[str, tuple[int, ...], list[str]]:
    processes = [process(rank, world) for rank in range(len(stacks))]
    dumps = {
        each.pid: StackDump(
            time_ns=1,
            pid=each.pid,
            rank=each.owner.rank,
            native=False,
            threads=(ThreadStack(id=each.pid, name="MainThread", active=False, frames=frames),),
        )
        for each, frames in zip(processes, stacks, strict=True)
    }
    groups = group_stacks(processes, dumps, {})
    sentence, ranks, witnesses = bundle._find_blocking_ranks(
        hang(*processes), processes, groups, groups, flight
    )
    assert sentence.startswith("job j: no step for 61.0 s, where one took 500 ms: ")
    return sentence.partition("500 ms: ")[2], ranks, [witness.source for witness in witnesses]


def test_stacks_alone() -> None:
    sentence, ranks, witnesses = judged(REDUCING, LOADING)
    assert sentence == "rank 1 is in `load_batch` (data.py:31); rank 0 waits in `all_reduce`"
    assert (ranks, witnesses) == ((1,), ["stacks"])


def test_where_both_witnesses_agree_nothing_more_is_said() -> None:
    flight = FlightVerdict(kind="behind", sentence="rank 1 has not queued it", ranks=(1,))
    sentence, ranks, witnesses = judged(REDUCING, LOADING, flight=flight)
    assert sentence.endswith(
        "waits in `all_reduce`; by the flight recorder, rank 1 has not queued it"
    )
    assert (ranks, witnesses) == ((1,), ["stacks", "flight recorder"])


def test_where_they_disagree_it_is_said() -> None:
    flight = FlightVerdict(kind="behind", sentence="rank 0 has not queued it", ranks=(0,))
    sentence, ranks, _ = judged(REDUCING, LOADING, flight=flight)
    assert sentence.endswith("; the two disagree: stacks name rank 1, the flight recorder rank 0")
    assert ranks == (0,)


@pytest.mark.parametrize(
    ("world", "ending"),
    [
        (2, "; all ranks wait, none is elsewhere"),
        (8, "; all 2 ranks of this host wait: who is elsewhere is among the 6 of other hosts"),
    ],
    ids=["all-here", "others-elsewhere"],
)
def test_all_wait_alike(world: int, ending: str) -> None:
    sentence, ranks, _ = judged(REDUCING, REDUCING, world=world)
    assert sentence == f"ranks 0, 1 wait in `all_reduce`{ending}"
    assert ranks == ()


def test_a_job_that_works_too_long_is_told_as_that() -> None:
    processes = [process(0)]
    groups = group_stacks(
        processes, {}, {processes[0].pid: "py-spy is not installed beside the agent"}
    )
    sentence, _, _ = bundle._find_blocking_ranks(
        hang(*processes, busy=True), processes, groups, groups, None
    )
    assert sentence == (
        "job j: its processes work, but no step for 61.0 s, where one took 500 ms: "
        "rank 0 is not seen: py-spy is not installed beside the agent"
    )


@contextmanager
def napping(rank: int) -> Iterator[Process]:
    child = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import time\ndef nap(): time.sleep(3600)\nprint('up', flush=True)\nnap()",
        ],
        stdout=subprocess.PIPE,
    )
    assert child.stdout is not None
    child.stdout.readline()
    ticks = int(
        Path(f"/proc/{child.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[19]
    )
    yield msgspec.structs.replace(
        process(rank), pid=child.pid, key=f"{child.pid}@{ticks}", start_ticks=ticks
    )
    child.kill()
    child.communicate()


@pytest.fixture
def sleeping() -> Iterator[Process]:
    with napping(0) as each:
        yield each


def scene(of: Process, host: str = "node-1") -> HangContext:
    series = {("gpu_power_watts", ("GPU-a",)): (array("q", [1, 2]), array("d", [300.0, 90.0]))}
    return HangContext(
        host=host,
        processes=(of,),
        series=series,
        devices=(
            HungDevice(
                uuid="GPU-a", index="0", model="H100", values={"traceloom_gpu_busy_ratio": 1.0}
            ),
        ),
        events=(
            HangEvent(
                at_ns=51 * SECOND,
                device="GPU-a",
                kind="xid",
                text="Xid 79: fallen off the bus",
                code=79,
            ),
        ),
    )


def test_a_bundle_has_all_of_it(sleeping: Process, tmp_path: Path) -> None:
    report = asyncio.run(write_bundle(hang(sleeping), scene(sleeping), tmp_path, 10**8))
    assert (
        {path.name for path in tmp_path.iterdir()}
        == set(report.files)
        == {
            "hang.json",
            "hang.md",
            "stacks.json",
            "rank0.dump.json",
            "node-1.telemetry.json.gz",
        }
    )
    assert msgspec.json.decode((tmp_path / "hang.json").read_bytes(), type=HangReport) == report
    (series,) = json.loads(gzip.decompress((tmp_path / "node-1.telemetry.json.gz").read_bytes()))[
        "series"
    ]
    assert (series["metric"], series["values"]) == ("traceloom_gpu_power_watts", [300.0, 90.0])
    assert "rank 0 is in `nap` (<string>:2)" in report.sentence
    text = (tmp_path / "hang.md").read_text(encoding="utf-8")
    assert "traceloom_gpu_busy_ratio = 1" in text
    assert "10.0 s before: xid 79 Xid 79: fallen off the bus" in text
    (member,) = report.members
    assert (member.steps, member.flight) == (9, "it was not started for that")


def nccl_dump(last: int) -> bytes:
    """As the watchdog of ProcessGroupNCCL writes it: three collectives are done, those after are not."""
    entries = [
        {
            "pg_id": 0,
            "process_group": ("0", "default_pg"),
            "collective_seq_id": number,
            "p2p_seq_id": 0,
            "profiling_name": "nccl:all_reduce",
            "state": "completed" if number < 4 else "started",
            "is_p2p": False,
            "retired": number < 4,
            "time_created_ns": number,
            "time_discovered_started_ns": 1,
            "time_discovered_completed_ns": 2 if number < 4 else None,
            "frames": [],
        }
        for number in range(1, last + 1)
    ]
    return pickle.dumps(
        {"version": "2.10", "entries": entries, "pg_status": {}, "pg_config": {}}, 2
    )


@pytest.mark.parametrize("hostile", [False, True], ids=["sound", "hostile"])
def test_what_the_watchdogs_of_nccl_have_written_is_kept_and_judged(
    tmp_path: Path, hostile: bool
) -> None:
    (tmp_path / "dump0").write_bytes(nccl_dump(4))
    (tmp_path / "dump1").write_bytes(
        b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R." if hostile else nccl_dump(3)
    )
    (tmp_path / "bundle").mkdir()
    with napping(0) as first, napping(1) as second:
        processes = tuple(
            msgspec.structs.replace(
                each, declared={"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": f"{tmp_path}/dump"}
            )
            for each in (first, second)
        )
        both = msgspec.structs.replace(scene(first), processes=processes)
        report = asyncio.run(write_bundle(hang(*processes), both, tmp_path / "bundle", 10**8))
    assert (tmp_path / "bundle" / "flight_rank_0").read_bytes() == nccl_dump(4)
    notes = {member.rank: member.flight for member in report.members}
    assert notes[0] == "its watchdog has written it"
    if hostile:
        assert "the pickle asks for code (os.system)" in notes[1]
        assert "flight_rank_1" not in report.files
        assert (
            "rank 0 has queued `all_reduce` number 4 of default_pg, and it does not end"
            in report.sentence
        )
        assert report.ranks == (1,)  # by its stack alone
    else:
        assert report.ranks == (1,)
        assert (
            "by the flight recorder, rank 1 has not queued `all_reduce` number 4" in report.sentence
        )
        assert (
            "rank 0 waits in `all_reduce`" in report.sentence
        )  # which its stack, in `nap`, does not show


def test_a_bundle_is_no_larger_than_it_may_be(sleeping: Process, tmp_path: Path) -> None:
    report = asyncio.run(write_bundle(hang(sleeping), scene(sleeping), tmp_path, 10))
    assert (
        set(report.files) == {"hang.json", "hang.md"} == {path.name for path in tmp_path.iterdir()}
    )
    assert set(report.omitted) == {"stacks.json", "rank0.dump.json", "node-1.telemetry.json.gz"}


def test_the_name_of_a_host_is_no_path(sleeping: Process, tmp_path: Path) -> None:
    (tmp_path / "bundle").mkdir()
    asyncio.run(
        write_bundle(hang(sleeping), scene(sleeping, "../../etc/x"), tmp_path / "bundle", 10**8)
    )
    assert (tmp_path / "bundle" / "_.._etc_x.telemetry.json.gz").is_file()


def test_names_of_strangers_are_no_markup() -> None:
    bad = "a```\n# title <script>alert(1)</script>\x1b[2J"
    frames = (Frame(bad, bad, 1),)
    processes = [process(0)]
    dump = StackDump(
        time_ns=1,
        pid=processes[0].pid,
        rank=0,
        native=False,
        threads=(ThreadStack(id=processes[0].pid, name=bad, active=False, frames=frames),),
    )
    groups = group_stacks(processes, {processes[0].pid: dump}, {})
    report = HangReport(
        host="h",
        job=bad,
        uid=1,
        since_ns=0,
        seen_ns=1,
        median_step_seconds=1.0,
        sentence=f"job {bad}",
        ranks=(),
        witnesses=(bundle.Witness(source="stacks", sentence=bad),),
        members=(),
        devices=(HungDevice(uuid=bad, index=bad, model=bad),),
        events=(),
        files=("hang.md",),
        omitted={"x": bad},
    )
    text = render_bundle_page(report, groups)
    assert "\x1b" not in text
    fences = [line for line in text.splitlines() if "```" in line]
    assert set(fences) == {"```text", "```"}
    assert fences[::2] == ["```text"] * (len(fences) // 2)
    outside = [block.rpartition("\n```")[2] for block in text.split("```text\n")]
    assert not any("<script>" in part for part in outside)
