"""Questions about history: what devices did becomes what jobs did, by their shares; counters are rates."""

from __future__ import annotations

from array import array

import pytest

from traceloom.agent.history import Points
from traceloom.agent.query import answer, plain_name, rate, unit
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
        _series("1@1", "gpu0", s0=0.75, s10=0.75), _series("2@1", "gpu0", s0=0.25, s10=0.25), _series("1@1", "gpu1", s0=1.0, s10=1.0),
    ],
    "process_info": [_info("1@1", "job-a", "0"), _info("2@1", "job-b", "")],
    "gpu_power_watts": [_series("gpu0", s0=400.0, s10=800.0), _series("gpu1", s0=100.0, s10=100.0), _series("gpu2", s0=70.0, s10=70.0)],
    "gpu_busy_ratio": [_series("gpu0", s0=0.8), _series("gpu1", s0=0.1), _series("gpu2", s0=0.0)],
    "gpu_energy_joules_total": [_series("gpu0", s0=1000.0, s10=5000.0), _series("gpu1", s0=0.0, s10=1000.0)],
    "process_memory_bytes": [_series("1@1", s0=10.0), _series("2@1", s0=32.0)],
    "host_network_bytes_total": [_series("eth0", "receive", s0=0.0, s10=100.0), _series("eth1", "receive", s0=0.0, s10=50.0)],
}  # fmt: skip


def _rows(metric: str, **options: object) -> dict[tuple[str, ...], list[float]]:
    curves = answer(metric, lambda name: HISTORY.get(name, []), **options)  # type: ignore[arg-type]
    return {tuple(curve.of.values()): curve.values for curve in curves}


def test_without_parts_every_series_is_a_row() -> None:
    assert _rows("gpu_power_watts") == {("gpu0",): [400, 800], ("gpu1",): [100, 100], ("gpu2",): [70, 70]}


def test_what_adds_up_is_split_by_share_and_still_adds_up() -> None:
    rows = _rows("gpu_power_watts", by=("job",))
    assert rows == {("job-a",): [300 + 100, 600 + 100], ("job-b",): [100, 200], ("",): [70, 70]}
    whole = [sum(values) for values in zip(*rows.values(), strict=True)]
    assert whole == [sum(values) for values in zip(*_rows("gpu_power_watts").values(), strict=True)]


def test_properties_are_averaged_over_the_devices_held() -> None:
    rows = _rows("gpu_busy_ratio", by=("job",))
    assert rows["job-a",] == pytest.approx([(0.8 * 0.75 + 0.1 * 1.0) / 1.75])
    assert rows["job-b",] == pytest.approx([0.8])


def test_rank_and_user_and_process() -> None:
    assert _rows("gpu_power_watts", by=("job", "rank"))["job-a", "0"] == [400, 700]
    assert _rows("gpu_power_watts", by=("user",)) == {("ann",): [500, 900], ("",): [70, 70]}
    assert _rows("gpu_power_watts", by=("process", "device"))["1@1", "gpu0"] == [300, 600]
    assert _rows("process_memory_bytes", by=("job",)) == {("job-a",): [10], ("job-b",): [32]}


def test_where_chooses() -> None:
    assert _rows("gpu_power_watts", where={"device": "gpu1"}) == {("gpu1",): [100, 100]}
    assert _rows("gpu_power_watts", where={"job": "job-b"}, by=("device",)) == {("gpu0",): [100, 200]}
    assert _rows("gpu_power_watts", where={"job": "none"}, by=("device",)) == {}


def test_counters_are_rates() -> None:
    assert _rows("gpu_energy_joules_total", by=("job",)) == {("job-a",): [300 + 100], ("job-b",): [100]}
    assert _rows("gpu_energy_joules_total", raw=True)["gpu0",] == [1000, 5000]
    assert _rows("host_network_bytes_total", by=("direction",)) == {("receive",): [15]}
    assert unit("gpu_energy_joules_total") == "joules/s"
    assert unit("gpu_energy_joules_total", raw=True) == "joules"


def test_a_counter_that_was_set_back_began_at_nothing() -> None:
    points = rate(_series("gpu0", s0=100.0, s10=200.0, s20=50.0, s30=60.0))
    assert list(points.values) == [10.0, 5.0, 1.0]


def test_a_share_of_long_ago_holds_no_more() -> None:
    history = {**HISTORY, "gpu_power_watts": [_series("gpu0", s10=400.0, s500=400.0)]}
    rows = {curve.of["job"]: curve for curve in answer("gpu_power_watts", lambda name: history[name], by=("job",))}
    assert rows["job-a"].times_ns == [10 * S]
    assert rows[""].times_ns == [500 * S]


@pytest.mark.parametrize(
    ("call", "slug", "words"),
    [
        (lambda: plain_name("gpu_power_wats"), "no-such-metric", "`gpu_power_watts`"),
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
    assert plain_name("traceloom_gpu_power_watts") == "gpu_power_watts"
