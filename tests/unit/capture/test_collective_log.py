"""The table of collectives: what a program calls in a job of four ranks, with bytes and peers worked out by hand."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from traceloom.capture.distributed import CollectiveLog, describe_groups, get_distributed  # noqa: E402

WORLD, RANK = 4, 1
ITEM = {
    "float32": ("Float", 4),
    "bfloat16": ("BFloat16", 2),
    "int64": ("Long", 8),
    "uint8": ("Byte", 1),
}


class Job(NamedTuple):
    """Process groups that nobody else is in: PyTorch's stand-in for a network answers at once."""

    distributed: Any
    pair: Any  # of the ranks 1 and 3


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    distributed = pytest.importorskip("torch.distributed")
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    distributed.init_process_group("fake", store=fake.FakeStore(), rank=RANK, world_size=WORLD)
    try:
        yield Job(distributed, distributed.new_group([1, 3]))
    finally:
        distributed.destroy_process_group()


class Call(NamedTuple):
    """A call, and what the table has to say of it."""

    make: Callable[[Job, Any, int], None]
    kind: str
    bytes_in: int  # times elements and their size
    bytes_out: int
    group: str = "all"
    peer: int | None = None
    typed: bool = True


def newest(job: Job, *names: str) -> Any:
    """The first of several spellings that this PyTorch has."""
    return next(getattr(job.distributed, name) for name in names if hasattr(job.distributed, name))


def tensor(kind: str, elements: int) -> Any:
    return torch.zeros(elements, dtype=getattr(torch, kind))


CALLS = {
    "all_reduce": Call(lambda j, k, n: j.distributed.all_reduce(tensor(k, n)), "all_reduce", 1, 1),
    "all_reduce of two": Call(
        lambda j, k, n: j.distributed.all_reduce(tensor(k, n), group=j.pair),
        "all_reduce",
        1,
        1,
        "pair",
    ),
    "all_gather": Call(
        lambda j, k, n: j.distributed.all_gather(
            [tensor(k, n) for _ in range(WORLD)], tensor(k, n)
        ),
        "all_gather",
        1,
        WORLD,
    ),
    "all_gather_into_tensor": Call(
        lambda j, k, n: newest(j, "all_gather_single", "all_gather_into_tensor")(
            tensor(k, WORLD * n), tensor(k, n)
        ),
        "all_gather",
        1,
        WORLD,
    ),
    "reduce_scatter_tensor": Call(
        lambda j, k, n: newest(j, "reduce_scatter_single", "reduce_scatter_tensor")(
            tensor(k, n), tensor(k, WORLD * n)
        ),
        "reduce_scatter",
        WORLD,
        1,
    ),
    "all_to_all_single": Call(
        lambda j, k, n: j.distributed.all_to_all_single(tensor(k, WORLD * n), tensor(k, WORLD * n)),
        "all_to_all",
        WORLD,
        WORLD,
    ),
    "broadcast": Call(
        lambda j, k, n: j.distributed.broadcast(tensor(k, n), src=2), "broadcast", 1, 1, peer=2
    ),
    "broadcast of two": Call(  # the ranks of a group are counted anew in it; the table has those of the job
        lambda j, k, n: j.distributed.broadcast(tensor(k, n), src=3, group=j.pair),
        "broadcast",
        1,
        1,
        "pair",
        3,
    ),
    "reduce": Call(
        lambda j, k, n: j.distributed.reduce(tensor(k, n), dst=0), "reduce", 1, 1, peer=0
    ),
    "scatter": Call(
        lambda j, k, n: j.distributed.scatter(tensor(k, n), src=3), "scatter", 0, 1, peer=3
    ),
    "scatter to all": Call(
        lambda j, k, n: j.distributed.scatter(
            tensor(k, n), [tensor(k, n) for _ in range(WORLD)], src=RANK
        ),
        "scatter",
        WORLD,
        1,
        peer=RANK,
    ),
    "send": Call(lambda j, k, n: j.distributed.send(tensor(k, n), dst=3), "send", 1, 1, peer=3),
    "recv": Call(lambda j, k, n: j.distributed.recv(tensor(k, n), src=0), "recv", 1, 1, peer=0),
    "send to the other of two": Call(
        lambda j, k, n: j.distributed.send(tensor(k, n), dst=3, group=j.pair),
        "send",
        1,
        1,
        "pair",
        3,
    ),
    "barrier": Call(lambda j, *_: j.distributed.barrier(), "barrier", 0, 0, typed=False),
}


def rows(table: dict[str, Any]) -> list[dict[str, Any]]:
    """The table by rows, with the words for their numbers."""
    legends = {"group": "groups", "kind": "kinds", "type": "types"}
    columns = [name for name in table if name not in legends.values()]
    assert len({len(table[name]) for name in columns}) == 1
    for legend in legends.values():
        assert len(set(table[legend])) == len(table[legend])
    return [
        {
            name: table[legends[name]][value] if name in legends else value
            for name, value in zip(columns, row, strict=True)
        }
        for row in zip(*(table[name] for name in columns), strict=True)
    ]


def test_without_a_job_there_is_no_table() -> None:
    if get_distributed() is not None:
        pytest.skip("another test's job is still there")
    log = CollectiveLog()
    log.start()
    assert log.stop() is None
    assert describe_groups() == []


def test_a_job_that_begins_and_ends_meanwhile_is_in_the_table() -> None:
    if get_distributed() is not None:
        pytest.skip("another test's job is still there")
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    log = CollectiveLog()
    log.start()
    torch.distributed.init_process_group("fake", store=fake.FakeStore(), rank=0, world_size=2)
    (group,) = describe_groups()
    torch.distributed.broadcast(torch.zeros(7), src=1)
    torch.distributed.destroy_process_group()
    table = log.stop()
    assert table is not None
    assert [(row["group"], row["kind"], row["peer"], row["bytes_in"]) for row in rows(table)] == [
        (group["name"], "broadcast", 1, 28)
    ]


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    made=st.lists(
        st.tuples(
            st.sampled_from(sorted(CALLS)), st.sampled_from(sorted(ITEM)), st.integers(1, 50)
        ),
        min_size=1,
        max_size=12,
    )
)
def test_the_table_has_every_call_with_its_bytes_and_peers(
    job: Job, made: list[tuple[str, str, int]]
) -> None:
    names = {str(group["description"] or group["name"]): group for group in describe_groups()}
    assert sorted(tuple(group["ranks"]) for group in names.values()) == [(0, 1, 2, 3), (1, 3)]
    of_ranks = {tuple(group["ranks"]): group["name"] for group in names.values()}
    log, begun_ns = CollectiveLog(), time.time_ns()
    log.start()
    for name, kind, elements in made:
        CALLS[name].make(job, kind, elements)
    table = log.stop()
    assert table is not None
    told = rows(table)
    assert [(row["kind"], row["bytes_in"], row["bytes_out"], row["peer"]) for row in told] == [
        (
            call.kind,
            call.bytes_in * elements * ITEM[kind][1],
            call.bytes_out * elements * ITEM[kind][1],
            call.peer,
        )
        for name, kind, elements in made
        for call in [CALLS[name]]
    ]
    expected = {"all": of_ranks[0, 1, 2, 3], "pair": of_ranks[1, 3]}
    assert [row["group"] for row in told] == [expected[CALLS[name].group] for name, _, _ in made]
    typed = [
        (row["type"], kind)
        for row, (name, kind, _) in zip(told, made, strict=True)
        if CALLS[name].typed
    ]
    assert [of for of, _ in typed] == [ITEM[kind][0] for _, kind in typed]
    times = [row["start_ns"] for row in told]
    assert begun_ns <= min(times)
    assert times == sorted(times)
    assert {row["thread"] for row in told} == {threading.get_native_id()}


def test_nothing_is_left_of_it_and_what_is_called_outside_is_not_in_it(job: Job) -> None:
    kinds = sys.modules["torch._C._distributed_c10d"].ProcessGroup
    before = dict(kinds.__dict__)
    log = CollectiveLog()
    job.distributed.all_reduce(tensor("float32", 1))
    log.start()
    log.start()  # once more changes nothing
    job.distributed.all_reduce(tensor("float32", 3))
    table = log.stop()
    job.distributed.all_reduce(tensor("float32", 5))
    assert {
        name: value for name, value in kinds.__dict__.items() if before.get(name) is not value
    } == {}
    assert table is not None
    assert table["bytes_in"] == [12]
    log.start()
    assert log.stop() is None  # nothing was called
    log.start()
    job.distributed.barrier()
    again = log.stop()
    assert again is not None
    assert again["kinds"] == ["barrier"]


def test_a_call_that_fails_fails_as_it_does_without_and_is_in_the_table(job: Job) -> None:
    def fail() -> str:
        with pytest.raises(Exception) as raised:
            job.distributed.distributed_c10d._get_default_group().allreduce("no tensors")
        return f"{type(raised.value).__name__}: {raised.value}"

    log = CollectiveLog()
    expected = fail()
    log.start()
    told = fail()
    job.distributed.all_reduce(tensor("float32", 2))
    table = log.stop()
    assert told == expected
    assert table is not None
    assert [table["kinds"][kind] for kind in table["kind"]] == ["all_reduce"] * 2
    assert table["bytes_in"] == [0, 8]


def test_threads_are_told_apart(job: Job) -> None:
    log, threads = CollectiveLog(), []
    log.start()

    def reduce() -> None:
        threads.append(threading.get_native_id())
        job.distributed.all_reduce(tensor("float32", 4))

    reduce()
    other = threading.Thread(target=reduce)
    other.start()
    other.join()
    table = log.stop()
    assert table is not None
    assert table["thread"] == threads
