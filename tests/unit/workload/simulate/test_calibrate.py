"""Planted latency and bandwidth of collectives come back, whoever is late and however times scatter."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from support.jobs import Clock, Job, Rank, Recipe, program as do, training_job
from traceloom.errors import InputError
from traceloom.trace.session import Session
from traceloom.workload.simulate.calibrate import Calibration, calibrate, fit_lines
from traceloom.workload.simulate.machine import MeasuredTime
from traceloom.workload.simulate.machine_file import machine_text, read_machine
from traceloom.workload.simulate.native import run as simulate

KERNELS = {
    "allreduce": "AllReduce_Sum",
    "_allgather_base": "AllGather",
    "_reduce_scatter_base": "ReduceScatter_Sum",
    "all_to_all": "SendRecv",
}
# Of a ring: bytes that each rank puts on the bus for a buffer of one byte, by the number of ranks.
ON_BUS: dict[str, Callable[[int], float]] = {
    "allreduce": lambda n: 2 * (n - 1) / n,
    "_allgather_base": lambda n: (n - 1) / n,
    "_reduce_scatter_base": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
}
Time = Callable[[float], float]
"""ns of so many bytes on the bus."""
SIZES = [1 << power for power in range(10, 27, 2)]


def line(alpha_ns: float, bandwidth: float) -> Time:
    return lambda on_bus: alpha_ns + on_bus / bandwidth


def job(
    planted: dict[tuple[str, tuple[int, ...]], Time],
    *,
    ranks: int,
    per_host: int = 8,
    late_us: float = 0.0,
    noise: float = 0.0,
    times: int = 8,
    sizes: list[int] = SIZES,
    seed: int = 0,
) -> Session:
    """Ranks that do nothing but communicate, one collective after the other, each time another one late.

    Args:
        planted: By kind and members, how long it takes from the last arrival.
        ranks: Of the job.
        per_host: Of them on each host; the clock of each host is another one.
        late_us: A rank in turn comes so much later.
        noise: Spread of the logarithm of the transfers.
        times: Collectives of each size.
        sizes: Bytes of the whole buffer.
        seed: Of chance.
    """
    chance = random.Random(seed)
    out: list[list[do.Instruction]] = [[] for _ in range(ranks)]
    for (kind, members), time in planted.items():
        count = len(members)
        for number, size in enumerate(size for _ in range(times) for size in sizes):
            transfer = round(time(size * ON_BUS[kind](count)) * chance.lognormvariate(0, noise))
            whole, part = size // 4, size // 4 // count  # fp32
            elements = part if kind == "_allgather_base" else whole
            results = part if kind == "_reduce_scatter_base" else whole
            for rank in members:
                if members[number % count] == rank:
                    out[rank].append(do.Work(round(1000 * late_us * chance.uniform(0.5, 1.5))))
                group = f"{kind} {members}"
                meeting = do.Meeting(kind, group, members, number, elements, transfer, results)
                name = f"ncclDevKernel_{KERNELS[kind]}_f32_RING_LL"
                out[rank] += [
                    do.Begin(f"c10d::{kind}"),
                    do.Work(2000),
                    do.Submit(name, "kernel", 20, 0, 4000, 6000, 1000, 7000, meeting=meeting),
                    do.End(),
                    do.Synchronize(do.DEVICE, 3000, 5000),
                ]
    clocks = [
        Clock(f"host{rank // per_host}", 70_000 * (rank // per_host)) for rank in range(ranks)
    ]
    run = Job(
        [
            Rank(rank, [thread], clock)
            for rank, (thread, clock) in enumerate(zip(out, clocks, strict=True))
        ]
    ).run()
    return Session(tuple(builder.build() for builder in run.traces()), "job")


def only(answer: Calibration, **values: object) -> dict[str, object]:
    return answer.transfers.filter(**values).row(0, named=True)  # type: ignore[arg-type]


def test_planted_times_come_back_by_kind_span_and_group() -> None:
    everybody, low, high = tuple(range(4)), (0, 1), (2, 3)
    planted = {
        ("allreduce", everybody): line(45_000, 40),
        ("allreduce", low): line(12_000, 210),
        ("_allgather_base", high): line(9_000, 180),
        ("_reduce_scatter_base", everybody): line(30_000, 45),
    }
    answer = calibrate([job(planted, ranks=4, per_host=2, late_us=900, noise=0.03)])
    for collective, span, ranks, alpha, bandwidth in (
        ("all_reduce", "between", 4, 45_000, 40),
        ("all_reduce", "inside", 2, 12_000, 210),
        ("all_gather", "inside", 2, 9_000, 180),
        ("reduce_scatter", "between", 4, 30_000, 45),
    ):
        row = only(answer, collective=collective, span=span, ranks=ranks)
        assert row["form"] == "line"
        assert row["whole"]
        assert (row["from_bytes"], row["to_bytes"], row["count"]) == (
            SIZES[0],
            SIZES[-1],
            8 * len(SIZES),
        )
        assert row["alpha_ns"] == pytest.approx(alpha, rel=0.05)
        assert row["bandwidth"] == pytest.approx(bandwidth, rel=0.05)
        assert -0.08 < row["residual_p10"] < row["residual_p50"] < row["residual_p90"] < 0.08  # type: ignore[operator]
    assert answer.transfers.height == 4
    assert [(dimension.name, dimension.size) for dimension in answer.machine.dimensions] == [
        ("inside", 2),
        ("between", 2),
    ]
    assert answer.machine.dimensions[0].bandwidth == pytest.approx(210, rel=0.05)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("late_us", [0, 4000])
def test_late_arrivals_and_noise_do_not_move_the_fit(late_us: float, noise: float) -> None:
    planted = {("allreduce", (0, 1, 2)): line(20_000, 90)}
    row = only(calibrate([job(planted, ranks=3, late_us=late_us, noise=noise, times=25, seed=3)]))
    assert row["alpha_ns"] == pytest.approx(20_000, rel=0.05)
    assert row["bandwidth"] == pytest.approx(90, rel=0.05)


def test_where_another_protocol_begins_another_line_does() -> None:
    def two_protocols(on_bus: float) -> float:
        return 8_000 + on_bus / 10 if on_bus < 1 << 18 else 24_000 + on_bus / 200

    rows = calibrate(
        [job({("allreduce", (0, 1)): two_protocols}, ranks=2, noise=0.02)]
    ).transfers.to_dicts()
    assert [(row["from_bytes"], row["to_bytes"]) for row in rows] == [
        (1 << 10, (1 << 18) - 1),
        (1 << 18, 1 << 26),
    ]
    assert [row["alpha_ns"] for row in rows] == pytest.approx([8_000, 24_000], rel=0.05)
    assert [row["bandwidth"] for row in rows] == pytest.approx([10, 200], rel=0.05)


@pytest.mark.parametrize(
    ("size", "form", "alpha", "bandwidth"),
    [(1 << 12, "latency", 20_205, None), (1 << 24, "bandwidth", 0, 80.95)],
)
def test_of_one_size_latency_or_bandwidth_is_told(
    size: int, form: str, alpha: float, bandwidth: float | None
) -> None:
    planted = {("allreduce", (0, 1)): line(20_000, 20 if size < 1 << 16 else 89.6)}
    row = only(calibrate([job(planted, ranks=2, sizes=[size])]))
    assert (row["form"], row["size_count"]) == (form, 1)
    assert row["alpha_ns"] == pytest.approx(alpha)
    assert row["bandwidth"] == (None if bandwidth is None else pytest.approx(bandwidth, rel=1e-3))


def test_of_one_recorded_rank_the_quickest_count_and_the_answer_says_so() -> None:
    whole = job({("allreduce", (0, 1)): line(20_000, 90)}, ranks=2, late_us=3000, times=12)
    answer = calibrate([Session(whole.traces[:1], "one of two")], ranks_per_host=2)
    row = only(answer)
    assert not row["whole"]
    assert row["bandwidth"] == pytest.approx(90, rel=0.1)  # of what waited for nobody
    assert "ranks-missing" in {notice.slug for notice in answer.notices}


def test_the_machine_reads_back_and_says_what_lies_outside_of_what_was_measured(
    tmp_path: Path,
) -> None:
    planted = {
        ("allreduce", (0, 1)): line(12_000, 200),
        ("allreduce", (0, 1, 2, 3)): line(50_000, 40),
    }
    machine = calibrate([job(planted, ranks=4, per_host=2)]).machine
    (tmp_path / "machine.toml").write_text(machine_text(machine))
    read = read_machine(tmp_path / "machine.toml")
    assert read == machine
    size = 1 << 20
    inside = read.transfer_of("all_reduce", "inside", 2, size)
    assert inside.flags == ()
    assert inside.time_ns == pytest.approx(12_000 + size / 200, rel=0.01)
    larger = read.transfer_of("all_reduce", "inside", 2, 1 << 30)
    assert larger.flags == ("size",)
    assert larger.time_ns == pytest.approx(12_000 + (1 << 30) / 200, rel=0.01)
    wider = read.transfer_of(
        "all_reduce", "between", 8, size
    )  # of 4: 3 steps there and 3 back; of 8: 7 and 7
    assert wider.flags == ("group",)
    assert wider.time_ns == pytest.approx(50_000 * 7 / 3 + size * 1.75 / 40, rel=0.01)
    assert read.transfer_of("all_gather", "inside", 2, size) == MeasuredTime(None, ("kind",))
    only_inside = read_machine(tmp_path / "machine.toml", ["transfer.0.span=inside"])
    assert only_inside.transfer_of("all_reduce", "between", 4, size) == MeasuredTime(
        None, ("span",)
    )


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(3))
def test_a_run_takes_as_long_on_the_machine_fitted_to_it(seed: int) -> None:
    late = {1: 600.0} if seed else {}
    run = training_job(
        Recipe(ranks=3, steps=3, layers=6, transfer_us=250, delay_us=late, seed=seed)
    ).run()
    session = Session(tuple(builder.build() for builder in run.traces()), "job")
    answer = simulate(session, calibrate([session]).machine)
    assert answer.after_ns == pytest.approx(run.window_ns, rel=0.02)


def test_hosts_that_no_trace_names_can_be_given() -> None:
    answer = calibrate(
        [job({("allreduce", (0, 1, 2, 3)): line(9_000, 50)}, ranks=4)], ranks_per_host=2
    )
    assert answer.transfers["span"].to_list() == ["between"]
    assert [dimension.size for dimension in answer.machine.dimensions] == [2, 2]


def test_a_run_without_collectives_tells_nothing() -> None:
    with pytest.raises(InputError) as error:
        calibrate([job({}, ranks=2)])
    assert error.value.slug == "nothing-to-calibrate"


@pytest.mark.parametrize("seed", range(6))
def test_lines_have_the_least_relative_deviation_of_all_lines(seed: int) -> None:
    """Against a search of all pairs of latency and bandwidth on a fine grid."""
    random_numbers = np.random.default_rng(seed)
    size = np.repeat(2.0 ** np.arange(10, 26, 3), 9)
    time = (10 ** random_numbers.uniform(3.5, 5) + size / random_numbers.uniform(5, 300)) * np.exp(
        0.02 * random_numbers.standard_normal(size.size)
    )
    ((places, fitted),) = fit_lines(size, time)
    assert places.size == size.size
    usual = np.sort(time.reshape(-1, 9), axis=1)[:, 2:7].mean(axis=1)  # the middle half
    distinct = size[::9]

    def deviation(alpha: float, slope: float) -> float:
        return float((((alpha + distinct * slope) / usual - 1) ** 2).sum())

    least = deviation(fitted.alpha_ns, fitted.ns_per_byte)
    grid = [
        deviation(fitted.alpha_ns * a, fitted.ns_per_byte * b)
        for a in np.linspace(0.8, 1.2, 41)
        for b in np.linspace(0.8, 1.2, 41)
    ]
    assert least <= min(grid) * 1.2


def seen_from(
    session: Session, ranks: Iterable[int], devices: int, hosts: dict[int, str] | None = None
) -> Session:
    """Some ranks of a run, each of which sees so many devices, on hosts of other names."""
    traces = []
    for trace in session.traces:
        if trace.rank in set(ranks):
            seen = pl.concat(
                [
                    trace.devices.with_columns(
                        pl.lit(k).cast(trace.devices["device"].dtype).alias("device")
                    )
                    for k in range(devices)
                ]
            )
            name = trace.meta.host if hosts is None else hosts[trace.rank or 0]
            traces.append(replace(trace, devices=seen, meta=replace(trace.meta, host=name)))
    return Session(tuple(traces), session.name)


EIGHT = {
    ("allreduce", tuple(range(8))): line(40_000, 30),
    ("allreduce", (0, 1, 2, 3)): line(8_000, 200),
    ("allreduce", (4, 5, 6, 7)): line(8_000, 200),
}


@pytest.fixture(scope="module")
def eight() -> Session:
    return job(EIGHT, ranks=8, per_host=4, sizes=[1 << 14, 1 << 18, 1 << 22], times=3)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ranks", [(0, 1, 2, 3, 4, 5, 6, 7), (0, 4), (1, 2, 6)])
def test_hosts_of_ranks_that_were_not_recorded_follow_from_the_devices_that_others_see(
    eight: Session, ranks: tuple[int, ...]
) -> None:
    """Launchers number ranks host by host: of one rank of each host the others' are known."""
    answer = calibrate([seen_from(eight, ranks, devices=4)])
    assert [(part.name, part.size) for part in answer.machine.dimensions] == [
        ("inside", 4),
        ("between", 2),
    ]
    assert set(answer.transfers.select("span", "ranks").rows()) == {("between", 8), ("inside", 4)}
    assert "hosts-unknown" not in {notice.slug for notice in answer.notices}
    assert (answer.samples["whole"].all()) == (len(ranks) == 8)


@pytest.mark.parametrize(
    ("ranks", "devices", "hosts"),
    [
        ((0, 4), 1, None),  # a rank that sees one device says nothing of its neighbours
        ((0, 1, 4), 4, {0: "a", 1: "b", 4: "c"}),  # numbered otherwise than host by host
    ],
    ids=["one device", "other numbers"],
)
def test_where_hosts_do_not_follow_no_host_is_made_up(
    eight: Session, ranks: tuple[int, ...], devices: int, hosts: dict[int, str] | None
) -> None:
    answer = calibrate([seen_from(eight, ranks, devices, hosts)])
    assert "hosts-unknown" in {notice.slug for notice in answer.notices}
    assert [part.size for part in answer.machine.dimensions] == [8]
    assert set(answer.transfers["span"]) == {
        "between"
    }  # where two of them are on different hosts, that is known


def test_two_blocks_of_ranks_on_a_host_of_one_name_are_not_told_apart(eight: Session) -> None:
    with pytest.raises(InputError) as error:
        calibrate([seen_from(eight, (0, 4), 4, {0: "a", 4: "a"})])
    assert error.value.slug == "nothing-to-calibrate"


def test_a_job_with_no_more_ranks_than_devices_is_on_one_host(eight: Session) -> None:
    answer = calibrate([seen_from(eight, range(8), 8, dict.fromkeys(range(8), "a"))])
    assert [part.size for part in answer.machine.dimensions] == [8]
    assert set(answer.transfers["span"]) == {"inside"}
    alone = calibrate([seen_from(eight, (3,), 8)])
    assert set(alone.transfers["span"]) == {"inside"}
