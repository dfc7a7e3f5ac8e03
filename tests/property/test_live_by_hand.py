"""What is measured now, held against plain loops over what hosts said; and what watching pages make of the same."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, strategies as st

from traceloom.agent.fleet_link.protocol import Heartbeat, HostDevice, HostProcess
from traceloom.agent.traces.requests import TraceSpec
from traceloom.fleet.handlers.now import (
    By,
    LiveParameters,
    LiveRow,
    build_live_answer,
    count_states,
    list_devices,
    list_job_processes,
)
from traceloom.fleet.service.requests import (
    LastHeartbeat,
    select_processes,
    select_slowest_and_median,
)

NOW = 1_790_000_000 * 10**9
JOBS = ("", "llm", "llm-2", "k[1]", "K*")
UUIDS = ("a", "b", "c")
PATTERNS = ("", "*", "llm", "llm*", "?lm", "k[1]", "k[*", "*1*", "K*", "none")
some = st.sampled_from

devices = st.builds(
    HostDevice,
    uuid=some(UUIDS),
    model=some(("H100", "")),
    stale=some(("", "", "lost")),
    values=st.dictionaries(
        some(
            ("gpu_busy_ratio", "gpu_power_watts", "gpu_memory_used_bytes", "gpu_memory_limit_bytes")
        ),
        st.integers(0, 8).map(float),
        max_size=4,
    ),
)
processes = st.builds(
    HostProcess,
    key=some(("1@1", "2@1")),
    pid=st.integers(1, 9),
    uid=st.just(0),
    job=some(JOBS),
    rank=st.none() | st.integers(0, 5),
    devices=st.lists(some((*UUIDS, "gone")), max_size=3, unique=True).map(tuple),
    steps_per_second=st.none() | some((0.0, 0.25, 2.0, 8.0)),
)
heartbeats = st.builds(
    lambda devices, processes, ago: LastHeartbeat(
        heartbeat=Heartbeat(
            sent_ns=1, boot_id="b", version="1", devices=devices, processes=processes
        ),
        received_ns=NOW - ago,
    ),
    st.lists(devices, max_size=3, unique_by=lambda device: device.uuid),
    st.lists(processes, max_size=4),
    st.integers(0, 100),
)
fleets = st.dictionaries(some(("n1", "n2", "m1")), heartbeats, max_size=3)


def like(text: str, pattern: str) -> bool:
    """Whether a text is what a pattern says, in which `*` and `?` stand for any signs, one sign."""
    signs = {"*": ".*", "?": "."}
    return not pattern or bool(
        re.fullmatch("".join(signs.get(sign, re.escape(sign)) for sign in pattern), text, re.DOTALL)
    )


def by_hand(
    hosts: dict[str, LastHeartbeat], asked: LiveParameters
) -> dict[tuple[str, ...], dict[str, Any]]:
    """Key of a row -> what is measured for it, gathered one heartbeat after the other."""
    rows: dict[tuple[str, ...], dict[str, Any]] = {}
    for host, now in hosts.items():
        if not like(host, asked.host):
            continue
        for process in [*now.heartbeat.processes, None]:
            if process is None and asked.job:
                continue
            if process is not None and not like(process.job, asked.job):
                continue
            for device in (
                now.heartbeat.devices
                if process is None
                else [
                    next((device for device in now.heartbeat.devices if device.uuid == uuid), None)
                    for uuid in process.devices or ("",)
                ]
            ):
                job = "" if process is None else process.job
                key = {
                    "job": (job,),
                    "host": (host,),
                    "device": (host, "" if device is None else device.uuid),
                }[asked.by]
                if (asked.by == "job" and not job) or (asked.by == "device" and device is None):
                    continue
                row = rows.setdefault(key, {"devices": {}, "jobs": set(), "rates": [], "heard": []})
                row["heard"].append(now.received_ns)
                if device is not None:
                    row["devices"][host, device.uuid] = device
                row["jobs"] |= {job} - {""}
                if process is not None and process.steps_per_second is not None:
                    row["rates"].append(process.steps_per_second)
    return rows


def total(row: dict[str, Any], metric: str) -> float | None:
    """Of all devices, where each measures it now."""
    values = [
        None if device.stale else device.values.get(metric) for device in row["devices"].values()
    ]
    return None if not values or None in values else sum(values)


def key_of(row: LiveRow, by: By) -> tuple[str, ...]:
    return {"job": (row.job,), "host": (row.host,), "device": (row.host, row.device)}[by]


@given(
    hosts=fleets,
    by=some(("job", "host", "device")),
    job=some(PATTERNS),
    host=some(("", "n?", "n1", "[n]*")),
)
def test_rows_are_those_of_plain_loops(
    hosts: dict[str, LastHeartbeat], by: By, job: str, host: str
) -> None:
    asked = LiveParameters(by=by, job=job, host=host)
    answer, expected = build_live_answer(hosts, asked, NOW), by_hand(hosts, asked)
    assert (answer.at_ns, answer.more) == (NOW, False)
    assert [key_of(row, by) for row in answer.rows] == sorted(expected)
    for row in answer.rows:
        truth = expected[key_of(row, by)]
        busy = [
            d.values["gpu_busy_ratio"]
            for d in truth["devices"].values()
            if "gpu_busy_ratio" in d.values and not d.stale
        ]
        assert row.busy == (pytest.approx(sum(busy) / len(busy)) if busy else None)
        assert (row.devices, row.heard_ns) == (len(truth["devices"]), min(truth["heard"]))
        assert row.power_w == total(truth, "gpu_power_watts")
        assert row.memory_bytes == total(truth, "gpu_memory_used_bytes")
        assert row.memory_limit_bytes == total(truth, "gpu_memory_limit_bytes")
        assert row.steps_per_second == min(truth["rates"], default=None)
        assert row.step_s == (1 / row.steps_per_second if row.steps_per_second else None)
        if by == "job":
            assert row.host == ", ".join(sorted({host for host, _ in truth["devices"]}))
        else:
            assert row.job == ", ".join(sorted(truth["jobs"]))


@given(
    hosts=fleets,
    by=some(("job", "host", "device")),
    top=st.integers(1, 4),
    order=st.randoms(use_true_random=False),
)
def test_the_order_in_which_hosts_spoke_changes_nothing_and_a_page_is_the_beginning(
    hosts: dict[str, LastHeartbeat], by: By, top: int, order: Any
) -> None:
    every = build_live_answer(hosts, LiveParameters(by=by), NOW).rows
    names = list(hosts)
    order.shuffle(names)
    page = build_live_answer(
        {name: hosts[name] for name in names}, LiveParameters(by=by, top=top), NOW
    )
    assert page.rows == every[:top]
    assert page.more == (len(every) > top)


@given(hosts=fleets, lost=st.sets(some(("n1", "n2", "m1"))))
def test_a_device_is_in_one_state_and_lists_who_holds_it(
    hosts: dict[str, LastHeartbeat], lost: set[str]
) -> None:
    fresh = {host: now for host, now in hosts.items() if host not in lost}
    rows = list_devices(hosts, fresh)
    assert [row.host for row in rows] == sorted(row.host for row in rows)
    assert (
        sum(count_states(rows).values())
        == len(rows)
        == sum(len(now.heartbeat.devices) for now in hosts.values())
    )
    for row in rows:
        now = hosts[row.host].heartbeat
        [device] = [device for device in now.devices if device.uuid == row.device]
        holders = {
            process.job
            for process in now.processes
            if row.device in process.devices and process.job
        }
        assert row.jobs == sorted(holders)
        if row.host in lost or device.stale:
            assert row.state == "unreachable"
        elif not holders:
            assert row.state == "unallocated"
        else:  # what is not measured is taken as busy: somebody holds it
            assert row.state == (
                "idle-allocated" if device.values.get("gpu_busy_ratio") == 0 else "busy"
            )


@given(
    hosts=fleets,
    job=some(JOBS[1:]),
    ranks=st.sets(st.integers(0, 5)).map(sorted).map(tuple),
    host=some(("", "n1")),
)
def test_a_request_is_about_the_processes_that_it_names_and_the_slowest_of_them(
    hosts: dict[str, LastHeartbeat], job: str, ranks: tuple[int, ...], host: str
) -> None:
    matching = select_processes(hosts, TraceSpec(job=job, steps=3, ranks=ranks, host=host))
    pairs = [
        (name, process)
        for name, now in hosts.items()
        for process in now.heartbeat.processes
        if process.job == job
    ]
    wanted = [(n, p) for n, p in pairs if (not ranks or p.rank in ranks) and host in ("", n)]
    assert [(name, process) for name, chosen in matching.items() for process in chosen] == wanted
    assert all(matching.values())
    members = list_job_processes(hosts, job)
    assert sorted(map(repr, members)) == sorted(map(repr, pairs))
    numbered = [process.rank for _, process in members if process.rank is not None]
    assert numbered == sorted(numbered)
    assert all(process.rank is None for _, process in members[len(numbered) :])
    chosen = [process for each in select_slowest_and_median(matching).values() for process in each]
    paced = sorted(
        p.steps_per_second
        for _, p in wanted
        if p.steps_per_second is not None and p.rank is not None
    )
    assert sorted(process.steps_per_second or 0.0 for process in chosen) == (
        []
        if not paced
        else [paced[0]]
        if len(paced) == 1
        else sorted([paced[0], paced[len(paced) // 2]])
    )
