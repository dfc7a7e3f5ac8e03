"""Flight records: which rank the others wait for, from dumps as torch writes them; and of strangers nothing is run."""

from __future__ import annotations

import json
import os
import pickle
import re
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from support.waiting import until
from traceloom.agent.hangs.flight_recorder import FlightFindings, analyse_flight_files
from traceloom.analyze.stuck_jobs import FlightVerdict, find_late_ranks
from traceloom.errors import InputError
from traceloom.formats.flight_recorder import read_flight_record
from traceloom.trace.flight_record import FlightRecord

Row = dict[str, Any]


def entry(
    group: str, sequence: int, operation: str = "all_reduce", state: str = "completed", **more: Any
) -> Row:
    """As ProcessGroupNCCL of torch 2.13 writes it (version 2.10)."""
    title = "default_pg" if group == "0" else "undefined"
    return {
        "frames": [{"name": "train", "filename": "/job/train.py", "line": 12}],
        "record_id": sequence,
        "pg_id": int(group),
        "process_group": (group, title),
        "collective_seq_id": sequence,
        "p2p_seq_id": 0,
        "op_id": sequence,
        "profiling_name": f"nccl:{operation}",
        "time_created_ns": 1_000 + sequence,
        "input_sizes": [[4]],
        "input_dtypes": ["Float"],
        "output_sizes": [[4]],
        "output_dtypes": ["Float"],
        "state": state,
        "time_discovered_started_ns": None if state == "scheduled" else 1_001,
        "time_discovered_completed_ns": 1_002 if state == "completed" else None,
        "retired": state == "completed",
        "timeout_ms": 600_000,
        "is_p2p": False,
    } | more


def dump(entries: Sequence[Row], members: dict[str, str] | None = None) -> Row:
    status: dict[str, dict[str, int]] = {}
    for each in entries:
        if not each["is_p2p"]:
            status[str(each["pg_id"])] = {"last_enqueued_collective": each["collective_seq_id"]}
    return {
        "version": "2.10",
        "entries": list(entries),
        "pg_status": status,
        "nccl_comm_state": {},
        "pg_config": {
            name: {"name": name, "desc": "", "ranks": ranks}
            for name, ranks in (members or {}).items()
        },
    }


def verdict(*dumps: Row) -> FlightVerdict:
    return find_late_ranks(
        [read_flight_record(json.dumps(each).encode(), rank) for rank, each in enumerate(dumps)]
    )


DONE = [entry("0", number) for number in (1, 2, 3)]


def test_who_has_not_queued_the_oldest_open_collective_is_named() -> None:
    waiting = dump([*DONE, entry("0", 4, state="started"), entry("0", 5, state="scheduled")])
    result = verdict(waiting, waiting, dump(DONE), waiting)
    assert (result.kind, result.ranks, result.operation, result.sequence) == (
        "behind",
        (2,),
        "all_reduce",
        4,
    )
    assert result.sentence == (
        "rank 2 has not queued `all_reduce` number 4 of default_pg, in which ranks 0, 1, 3 wait; its last was number 3"
    )
    assert result.waits == {0: "all_reduce", 1: "all_reduce", 3: "all_reduce"}


def test_who_waits_in_another_group_is_not_to_blame() -> None:
    # 1 misses in the group of all, because it waits for 3 in its own group.
    groups = {"0": "[0, 1, 2, 3]", "1": "[1, 3]"}
    of_all = dump([*DONE, entry("0", 4, state="started")], groups)
    inner = [entry("1", 1, "broadcast")]
    stuck = dump([*DONE, *inner, entry("1", 2, "broadcast", "started")], groups)
    result = verdict(of_all, stuck, of_all, dump([*DONE, *inner], groups))
    assert result.ranks == (3,)
    # 1 and 3 miss in the group of all too; the oldest collective that does not end is where it began.
    assert result.sentence == (
        "rank 3 has not queued `broadcast` number 2 of group 1, in which rank 1 waits; its last was number 1"
    )


def test_ranks_that_wait_for_each_other() -> None:
    groups = {"0": "[0, 1]", "1": "[0, 1]"}
    first = dump([entry("0", 1), entry("1", 1), entry("0", 2, state="started")], groups)
    second = dump([entry("0", 1), entry("1", 1), entry("1", 2, "all_gather", "started")], groups)
    result = verdict(first, second)
    assert (result.kind, result.ranks) == ("cycle", (0, 1))
    assert "rank 0 in `all_reduce` number 2 of default_pg" in result.sentence
    assert "rank 1 in `all_gather` number 2 of group 1" in result.sentence


def test_ranks_that_do_not_do_the_same() -> None:
    usual = dump([*DONE, entry("0", 4, state="started")])
    result = verdict(usual, dump([*DONE, entry("0", 4, "broadcast", "started")]), usual)
    assert (result.kind, result.ranks) == ("mismatch", (1,))
    assert result.sentence == (
        "under number 4 of default_pg ranks do not do the same: ranks 0, 2 in `all_reduce` of [[4]], rank 1 in `broadcast` of [[4]]"
    )


def test_a_device_that_has_not_begun() -> None:
    started = dump([*DONE, entry("0", 4, state="started")])
    result = verdict(started, started, dump([*DONE, entry("0", 4, state="scheduled")]))
    assert (result.kind, result.ranks) == ("device", (2,))
    assert (
        "rank 2 has queued `all_reduce` number 4 of default_pg, but the device has not begun it"
        in result.sentence
    )


def test_who_alone_has_not_finished_what_the_others_have() -> None:
    # Its device has failed: the host goes on queueing until it waits for its own device.
    stuck = [
        *DONE,
        *(entry("0", number, state="scheduled") for number in (4, 5, 6)),
    ]
    ahead = [*DONE, entry("0", 4), entry("0", 5), entry("0", 6, state="scheduled")]
    found = verdict(dump(stuck), dump(ahead), dump(ahead))
    assert (found.kind, found.ranks, found.sequence) == ("unfinished", (0,), 4)
    assert found.sentence == (
        "rank 0 has not finished `all_reduce` number 4 of default_pg, which ranks 1, 2 have finished"
    )


def test_the_root_of_a_broadcast_may_be_ahead() -> None:
    waiting = [*DONE, entry("0", 4, "broadcast", state="started")]
    assert verdict(dump(waiting), dump([*DONE, entry("0", 4, "broadcast")])).kind != "unfinished"


@pytest.mark.parametrize(
    ("name", "kind", "ranks"),
    [("gpu_error_1st", "unfinished", (12, 14)), ("lock_gil_1st", "behind", (9, 14))],
)
def test_the_culprits_of_real_jobs_are_named(
    shared_data: Path, name: str, kind: str, ranks: tuple[int, ...]
) -> None:
    folder = shared_data / "flight_recorder" / name
    truth = re.findall(r"Rank (\d+),", (folder / "fault_injection.log").read_text())
    assert tuple(sorted(map(int, truth))) == ranks
    records = [
        read_flight_record(path.read_bytes(), int(path.name.rpartition("_")[2]))
        for path in folder.glob("_dump_*")
    ]
    assert len(records) == 16
    found = find_late_ranks(records)
    assert (found.kind, found.ranks) == (kind, ranks)


def test_all_are_in_it() -> None:
    started = dump([*DONE, entry("0", 4, state="started")])
    result = verdict(started, started)
    assert (result.kind, result.ranks) == ("all-in", ())
    assert (
        result.sentence
        == "ranks 0, 1 have queued `all_reduce` number 4 of default_pg, and it does not end"
    )


def test_a_rank_waits_for_a_message() -> None:
    message = {
        "is_p2p": True,
        "p2p_seq_id": 1,
        "collective_seq_id": 0,
        "profiling_name": "nccl:recv 1<-0",
    }
    result = verdict(dump(DONE), dump([*DONE, entry("0", 0, state="started", **message)]))
    assert (result.kind, result.ranks) == ("behind", (0,))
    assert result.sentence == (
        "rank 0 has not queued its side of `recv` number 1, in which rank 1 waits"
    )
    assert result.waits == {1: "recv"}
    other_side = message | {"profiling_name": "nccl:send 0->1"}
    both = verdict(
        dump([*DONE, entry("0", 0, state="started", **other_side)]),
        dump([*DONE, entry("0", 0, state="started", **message)]),
    )
    assert (both.kind, both.ranks) == ("all-in", ())
    # Nothing is said of the other side, which may be a rank without a record.
    assert both.sentence == "messages do not end: rank 0 waits in `send`, rank 1 waits in `recv`"


def test_a_chain_of_messages_is_followed_to_its_end() -> None:
    # 1 is missing in the collective of 0, because it waits for a message of 2, which does nothing.
    message = {"is_p2p": True, "p2p_seq_id": 4, "profiling_name": "nccl:recv 0<-1"}
    groups = {"1": "[0, 1]", "2": "[1, 2]"}
    sent = message | {"p2p_seq_id": 3, "profiling_name": "nccl:send 1->0"}
    found = verdict(
        dump([*DONE, entry("1", 1, state="started")], groups),
        dump([*DONE, entry("2", 0, state="started", **message)], groups),
        dump([*DONE, entry("2", 0, **sent)], groups),
    )
    assert (found.kind, found.ranks) == ("behind", (2,))
    assert found.sentence == (
        "rank 2 has not queued its side of `recv` number 4, in which rank 1 waits"
    )


def test_nothing_is_open() -> None:
    assert verdict(dump(DONE), dump(DONE)) == FlightVerdict(
        kind="nothing", sentence="no rank waits in a collective that is recorded"
    )


@pytest.mark.torch
def test_the_records_of_stock_torch_are_read_both_ways(tmp_path: Path) -> None:
    import torch
    import torch.distributed as dist
    from torch._C import _distributed_c10d as c10d

    dist.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{tmp_path}/store")
    try:
        for _ in range(3):
            dist.all_reduce(torch.ones(4))
        # The thread of the group notes that one is done just after who waits for it goes on.
        ways = [
            lambda: whole(read_flight_record(bytes(c10d._dump_fr_trace()), 0)),
            lambda: whole(read_flight_record(bytes(c10d._dump_fr_trace_json()), 0)),
        ]
        records = [until(way) for way in ways]
    finally:
        dist.destroy_process_group()
    for record in records:
        assert record is not None
        (of_all,) = [group for group in record.groups.values() if group.title == "default_pg"]
        assert of_all.queued >= 3
        assert {each.operation for each in record.entries[-3:]} == {"all_reduce"}


def whole(record: FlightRecord) -> FlightRecord | None:
    """A record all of whose collectives are done."""
    return record if all(each.done for each in record.entries) else None


class Shell:
    """What a hostile pickle would run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_nothing_of_a_pickle_is_run(tmp_path: Path, protocol: int) -> None:
    mark = tmp_path / "mark"
    with pytest.raises(InputError) as caught:
        read_flight_record(pickle.dumps({"version": "2.10", "entries": [Shell(mark)]}, protocol), 0)
    # Of a pickle in text the first byte is none of a dump.
    slug = "pickle-with-code" if protocol >= 2 else "not-a-flight-record"
    assert caught.value.slug == slug
    assert not mark.exists()


HOSTILE = {
    "empty": b"",
    "text": b"version 2.10",
    "cut": pickle.dumps(dump(DONE), 2)[:-20],
    "no-end": b"\x80\x02}",
    "much-of-the-table": b"\x80\x02]r" + struct.pack("<I", 0xFFFFFFFF) + b".",
    "long-text": b"\x80\x02X" + struct.pack("<I", 0xFFFFFFFF) + b"x.",
    "long-bytes": b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b".",
    "long-number": b"\x80\x02\x8b" + struct.pack("<i", 0x7FFFFFFF) + b".",
    "persistent": b"\x80\x02Pname\n.",
    "class": b"\x80\x02cos\nsystem\n.",
    "extension": b"\x80\x02\x82\x01.",
    "unhashable": b"\x80\x02}]]s.",
    "empty-stack": b"\x80\x02s.",
    "not-utf-8": b"\x80\x02X\x02\x00\x00\x00\xff\xff.",
    "json-cut": b'{"version": "2.10", "entries": [',
    "json-deep": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "too-large": b"\x80\x02" + b"N0" * (9 << 20) + b"N.",
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE.keys())
def test_what_is_no_record_is_refused(data: bytes) -> None:
    with pytest.raises(InputError):
        read_flight_record(data, 0)


def test_depth_is_harmless() -> None:
    deep = b"\x80\x02" + b"]" * 50_000 + b"a" * 49_999 + b"."
    with pytest.raises(InputError):
        read_flight_record(deep, 0)


STRANGE: dict[str, Any] = {
    "entries-of-numbers": [1, None, "x", [], {}],
    "no-group": [entry("0", 1) | {"process_group": None}],
    "group-of-lists": [entry("0", 1) | {"process_group": ([], {})}],
    "sequence-of-text": [entry("0", 1) | {"collective_seq_id": "many"}],
    "huge-sequence": [entry("0", 1) | {"collective_seq_id": 1 << 63}],
    "frames-of-numbers": [entry("0", 1, state="started") | {"frames": [1, 2, {"line": "x"}]}],
    "operation-of-mapping": [entry("0", 1, state="started") | {"profiling_name": {}}],
}


@pytest.mark.parametrize("entries", STRANGE.values(), ids=STRANGE.keys())
def test_strange_entries_do_no_harm(entries: list[Any]) -> None:
    document = {
        "version": "2.10",
        "entries": entries,
        "pg_status": {"0": 7, 3: {}},
        "pg_config": {"0": {"ranks": 5}},
    }
    assert find_late_ranks([read_flight_record(json.dumps(document).encode(), 0)]).sentence


@pytest.mark.parametrize("group", [None, (), ("",), ("", ""), "0", 7, ["0"]], ids=repr)
def test_an_entry_of_no_group_blames_nobody(group: Any) -> None:
    waiting = [*DONE, entry("0", 4, state="started")]
    stray = entry("0", 1, "broadcast", state="started", time_created_ns=1) | {
        "process_group": group,
        "pg_id": 9,
    }
    expected = verdict(dump(waiting), dump(DONE))
    assert expected.ranks == (1,)
    assert verdict(dump([stray, *waiting]), dump(DONE)) == expected
    assert verdict(dump([stray]), dump([])).kind == "nothing"


def test_lists_that_are_shared_cost_no_more_than_their_bytes() -> None:
    # A few kB that would be 10^9 frames if every reference were followed.
    frames = [{"name": "f", "filename": "g", "line": 1}] * 30_000
    entries = [entry("0", 1, state="started") | {"frames": frames}] * 30_000
    data = pickle.dumps({"version": "2.10", "entries": entries}, 2)
    record = read_flight_record(data, 0)
    assert len(record.entries) == 20_000


def test_files_that_are_bad_cost_the_others_nothing(tmp_path: Path) -> None:
    waiting = tmp_path / "waiting"
    waiting.write_bytes(pickle.dumps(dump([*DONE, entry("0", 4, state="started")]), 2))
    missing = tmp_path / "missing.json"
    missing.write_text(json.dumps(dump(DONE)), encoding="utf-8")
    bad = tmp_path / "bad"
    bad.write_bytes(b"\x80\x02cos\nsystem\n.")
    files = {"0": str(waiting), "1": str(missing), "2": str(bad), "3": str(tmp_path / "absent")}
    findings = msgspec.convert(analyse_flight_files(files), FlightFindings, strict=False)
    assert findings.verdict.ranks == (1,)
    assert set(findings.bad) == {"2", "3"}
