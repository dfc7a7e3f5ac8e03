"""Questions about history: what devices did becomes what jobs did, by their shares; counters are rates."""

from __future__ import annotations

import random
from array import array
from itertools import pairwise

import pytest

from traceloom.agent.history import (
    Points,
    compute_rate,
    evaluate_query,
    get_unit,
    resolve_metric_name,
)
from traceloom.errors import UsageError

S = 10**9


def _series(*labels: str, **values: float) -> Points:
    """Values by second: `_series("gpu0", s0=1.0, s10=2.0)`."""
    times = [int(name[1:]) * S for name in values]
    return Points(labels, array("q", times), array("d", values.values()))


def _info(process: str, job: str, rank: str) -> Points:
    return _series(
        process,
        process.split("@", maxsplit=1)[0],
        job,
        rank,
        "",
        "2",
        "ann",
        "",
        "",
        "",
        "",
        "pytorch",
        "python",
        s0=1.0,
        s10=1.0,
    )


HISTORY = {
    # gpu0 is shared 3:1 by two jobs, gpu1 is all of job-a, gpu2 nobody's
    "process_gpu_share_ratio": [
        _series("1@1", "gpu0", s0=0.75, s10=0.75),
        _series("2@1", "gpu0", s0=0.25, s10=0.25),
        _series("1@1", "gpu1", s0=1.0, s10=1.0),
    ],
    "process_info": [_info("1@1", "job-a", "0"), _info("2@1", "job-b", "")],
    "gpu_power_watts": [
        _series("gpu0", s0=400.0, s10=800.0),
        _series("gpu1", s0=100.0, s10=100.0),
        _series("gpu2", s0=70.0, s10=70.0),
    ],
    "gpu_busy_ratio": [_series("gpu0", s0=0.8), _series("gpu1", s0=0.1), _series("gpu2", s0=0.0)],
    "gpu_energy_joules_total": [
        _series("gpu0", s0=1000.0, s10=5000.0),
        _series("gpu1", s0=0.0, s10=1000.0),
    ],
    "process_memory_bytes": [_series("1@1", s0=10.0), _series("2@1", s0=32.0)],
    "host_network_bytes_total": [
        _series("eth0", "receive", s0=0.0, s10=100.0),
        _series("eth1", "receive", s0=0.0, s10=50.0),
    ],
}


def _rows(metric: str, **options: object) -> dict[tuple[str, ...], list[float]]:
    curves = evaluate_query(metric, lambda name: HISTORY.get(name, []), **options)  # type: ignore[arg-type]
    return {tuple(curve.of.values()): curve.values for curve in curves}


def test_without_parts_every_series_is_a_row() -> None:
    assert _rows("gpu_power_watts") == {
        ("gpu0",): [400, 800],
        ("gpu1",): [100, 100],
        ("gpu2",): [70, 70],
    }


def test_what_adds_up_is_split_by_share_and_still_adds_up() -> None:
    rows = _rows("gpu_power_watts", by=("job",))
    assert rows == {("job-a",): [300 + 100, 600 + 100], ("job-b",): [100, 200], ("",): [70, 70]}
    whole = [sum(values) for values in zip(*rows.values(), strict=True)]
    assert whole == [sum(values) for values in zip(*_rows("gpu_power_watts").values(), strict=True)]


def test_properties_are_averaged_over_the_devices_held() -> None:
    rows = _rows("gpu_busy_ratio", by=("job",))
    assert rows["job-a",] == pytest.approx([(0.8 * 0.75 + 0.1 * 1.0) / 1.75])
    assert rows["job-b",] == pytest.approx([0.8])


def test_who_has_nothing_of_a_device_has_none_of_its_properties() -> None:
    history = {
        "process_gpu_share_ratio": [
            _series("1@1", "gpu0", s0=1.0, s10=0.5, s20=1.0),
            _series("2@1", "gpu0", s0=0.0, s10=0.5, s20=0.0),
            _series("3@1", "gpu0", s0=0.0, s10=0.0, s20=0.0),
        ],
        "process_info": [
            _info("1@1", "job-a", "0"),
            _info("2@1", "job-b", ""),
            _info("3@1", "job-c", ""),
        ],
        "gpu_temperature_celsius": [_series("gpu0", "gpu", s0=60.0, s10=70.0, s20=80.0)],
        "gpu_power_watts": [_series("gpu0", s0=60.0, s10=70.0, s20=80.0)],
    }
    curves = evaluate_query(
        "gpu_temperature_celsius", lambda name: history.get(name, []), by=("job",)
    )
    assert {curve.of["job"]: (curve.times_ns, curve.values) for curve in curves} == {
        "job-a": ([0, 10 * S, 20 * S], [60.0, 70.0, 80.0]),
        "job-b": ([10 * S], [70.0]),  # not 0 degrees before and after
    }
    power = evaluate_query("gpu_power_watts", lambda name: history.get(name, []), by=("job",))
    assert {
        curve.of["job"]: curve.values for curve in power
    } == {  # what adds up is 0 of what nobody used
        "job-a": [60.0, 35.0, 80.0],
        "job-b": [0.0, 35.0, 0.0],
        "job-c": [0.0, 0.0, 0.0],
    }


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "by", [("job",), ("job", "rank"), ("process",), ("device",), ("user", "device")]
)
def test_a_random_history_is_summed_as_loops_do(seed: int, by: tuple[str, ...]) -> None:
    chance = random.Random(seed)
    times = range(0, 200, 10)
    processes = {
        f"{number}@1": (chance.choice(("job-a", "job-b")), str(number)) for number in range(4)
    }
    devices = ("gpu0", "gpu1", "gpu2")
    seen = {
        (process, device): {
            s: float(chance.randrange(5)) / 4 for s in times if chance.random() < 0.5
        }
        for process in processes
        for device in devices
        if chance.random() < 0.6
    }
    power = {
        device: {s: float(chance.randrange(100, 500)) for s in times if chance.random() < 0.9}
        for device in devices
    }
    info = [_info(process, job, rank) for process, (job, rank) in processes.items()]
    history = {
        "process_gpu_share_ratio": [
            _series(*key, **{f"s{s}": part for s, part in parts.items()})
            for key, parts in seen.items()
        ],
        "process_info": info,
        "gpu_power_watts": [
            _series(uuid, **{f"s{s}": w for s, w in of.items()}) for uuid, of in power.items()
        ],
    }
    expected: dict[tuple[str, ...], dict[int, float]] = {}
    for device, values in power.items():
        for at, watts in values.items():
            holders = []
            for (process, on), parts in seen.items():
                last = max((s for s in parts if s <= at), default=None)
                # By device alone nobody's part is asked for.
                if by != ("device",) and on == device and last is not None and at - last <= 60:
                    job, rank = processes[process]
                    holders.append(
                        ({"job": job, "rank": rank, "process": process, "user": "ann"}, parts[last])
                    )
            for facts, part in holders or [({}, 1.0)]:
                key = tuple((facts | {"device": device}).get(label, "") for label in by)
                expected.setdefault(key, {})[at * S] = (
                    expected.get(key, {}).get(at * S, 0.0) + watts * part
                )
    curves = evaluate_query("gpu_power_watts", lambda name: history.get(name, []), by=by)
    result = {
        tuple(curve.of[label] for label in by): dict(zip(curve.times_ns, curve.values, strict=True))
        for curve in curves
    }
    assert result.keys() == expected.keys()
    for key, values in expected.items():
        assert result[key] == pytest.approx(values)


@pytest.mark.parametrize("seed", range(5))
def test_rates_give_back_what_was_counted(seed: int) -> None:
    chance = random.Random(seed)
    times, total, counted, points = 0, 0.0, 0.0, {}
    for _ in range(50):
        times += chance.randrange(1, 30)
        more = float(chance.randrange(1000))
        if chance.random() < 0.1 and total > more:
            total = 0.0  # it began anew, and has less than before: else nobody could tell
        total += more
        counted += more if points else 0.0
        points[f"s{times}"] = total
    rates = compute_rate(_series("eth0", "receive", **points))
    instants = [int(name[1:]) for name in points]
    spans = [after - before for before, after in pairwise(instants)]
    assert list(rates.times_ns) == [at * S for at in instants[1:]]
    assert sum(
        value * span for value, span in zip(rates.values, spans, strict=True)
    ) == pytest.approx(counted)


def test_rank_and_user_and_process() -> None:
    assert _rows("gpu_power_watts", by=("job", "rank"))["job-a", "0"] == [400, 700]
    assert _rows("gpu_power_watts", by=("user",)) == {("ann",): [500, 900], ("",): [70, 70]}
    assert _rows("gpu_power_watts", by=("process", "device"))["1@1", "gpu0"] == [300, 600]
    assert _rows("process_memory_bytes", by=("job",)) == {("job-a",): [10], ("job-b",): [32]}


def test_where_chooses() -> None:
    assert _rows("gpu_power_watts", where={"device": "gpu1"}) == {("gpu1",): [100, 100]}
    assert _rows("gpu_power_watts", where={"job": "job-b"}, by=("device",)) == {
        ("gpu0",): [100, 200]
    }
    assert _rows("gpu_power_watts", where={"job": "none"}, by=("device",)) == {}


def test_counters_are_rates() -> None:
    assert _rows("gpu_energy_joules_total", by=("job",)) == {
        ("job-a",): [300 + 100],
        ("job-b",): [100],
    }
    assert _rows("gpu_energy_joules_total", raw=True)["gpu0",] == [1000, 5000]
    assert _rows("host_network_bytes_total", by=("direction",)) == {("receive",): [15]}
    assert get_unit("gpu_energy_joules_total") == "joules/s"
    assert get_unit("gpu_energy_joules_total", raw=True) == "joules"


def test_a_counter_that_was_set_back_began_at_nothing() -> None:
    points = compute_rate(_series("gpu0", s0=100.0, s10=200.0, s20=50.0, s30=60.0))
    assert list(points.values) == [10.0, 5.0, 1.0]


def test_a_share_of_long_ago_holds_no_more() -> None:
    history = {**HISTORY, "gpu_power_watts": [_series("gpu0", s10=400.0, s500=400.0)]}
    rows = {
        curve.of["job"]: curve
        for curve in evaluate_query("gpu_power_watts", lambda name: history[name], by=("job",))
    }
    assert rows["job-a"].times_ns == [10 * S]
    assert rows[""].times_ns == [500 * S]


@pytest.mark.parametrize(
    ("call", "slug", "words"),
    [
        (lambda: resolve_metric_name("gpu_power_wats"), "no-such-metric", "`gpu_power_watts`"),
        (lambda: _rows("gpu_power_watts", by=("jb",)), "no-such-label", "`job`"),
        (lambda: _rows("host_network_bytes_total", by=("job",)), "no-such-label", "interface"),
    ],
)
def test_what_is_not_there_is_named(call: object, slug: str, words: str) -> None:
    with pytest.raises(UsageError) as raised:
        call()  # type: ignore[operator]
    assert raised.value.slug == slug
    assert words in str(raised.value)


def test_the_prefix_may_stand() -> None:
    assert resolve_metric_name("traceloom_gpu_power_watts") == "gpu_power_watts"
