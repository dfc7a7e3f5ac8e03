"""What each job gets out of its devices: planted activity gives exact sums, and what is not known is not told."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from support.devices import values
from traceloom.agent.accelerators.backend import Device
from traceloom.agent.metrics import Reading
from traceloom.agent.ownership.model import Share
from traceloom.agent.snapshot import Snapshot
from traceloom.agent.topline import (
    JOB_RETENTION_S,
    JobAccounting,
    JobTick,
    MatrixTypes,
    TracedFacts,
    collect_matrix_types,
)

H100, A100 = "NVIDIA H100 80GB HBM3", "A100 SXM 80GB"
FASTER = 989.4 / 312  # H100 against the reference, in BF16


def board_with(*readings: tuple[str, tuple[str, ...], float], **devices: str) -> Snapshot:
    """Devices by name -> model, and their readings."""
    host_snapshot = Snapshot()
    host_snapshot.devices = {
        name: Device(uuid=name, index="0", vendor="nvidia", model=model)
        for name, model in devices.items()
    }
    host_snapshot.put("accelerators", [Reading(*reading) for reading in readings], 1)
    return host_snapshot


def parts(**of: dict[str, float]) -> dict[tuple[str, str], Share]:
    return {
        (device, process): Share(part, False)
        for device, keys in of.items()
        for process, part in keys.items()
    }


JOB = JobTick(job="j", processes=("1@1",), devices=("g",))
BUSY = board_with(
    ("gpu_busy_ratio", ("g",), 0.25),
    ("gpu_sm_active_ratio", ("g",), 0.2),
    ("gpu_power_watts", ("g",), 400.0),
    ("gpu_flop_utilization_ratio", ("g",), 0.1),
    ("gpu_flops", ("g", "ratio", "low"), 100e12),
    ("gpu_flops", ("g", "ratio", "high"), 200e12),
    g=H100,
)


def test_a_job_that_has_a_device_for_itself() -> None:
    topline = JobAccounting(A100)
    topline.readings(BUSY, 10.0, parts(g={"1@1": 1.0}), [JOB])
    readings = topline.readings(BUSY, 10.0, parts(g={"1@1": 1.0}), [JOB])
    told = {(reading.metric, *reading.labels[1:]): reading.value for reading in readings}
    assert told == {
        ("job_devices",): 1.0,
        ("job_device_seconds_total", "busy"): 5.0,
        ("job_device_seconds_total", "idle"): 15.0,
        ("job_device_seconds_total", "unknown"): 0.0,
        ("job_reference_device_seconds_total",): pytest.approx(5.0 * FASTER),
        ("job_energy_joules_total",): 8000.0,
        ("job_device_busy_ratio",): 0.25,
        ("job_sm_active_ratio",): 0.2,
        ("job_flop_utilization_ratio",): 0.1,
        ("job_power_watts",): 400.0,
        ("job_flops", "ratio", "low"): 100e12,
        ("job_flops", "ratio", "high"): 200e12,
    }
    Snapshot().put("topline", readings, 1)


def test_two_jobs_on_a_device_share_what_it_does_by_use_and_its_idle_time_equally() -> None:
    jobs = [
        JobTick(job="a", processes=("1@1", "2@1"), devices=("g",)),
        JobTick(job="b", processes=("3@1",), devices=("g",)),
    ]
    readings = JobAccounting(A100).readings(
        BUSY, 10.0, parts(g={"1@1": 0.5, "2@1": 0.1, "3@1": 0.4}), jobs
    )
    seconds = values(readings, "job_device_seconds_total")
    assert seconds["a", "busy"] == 1.5
    assert seconds["b", "busy"] == 1.0
    assert seconds["a", "idle"] == seconds["b", "idle"] == 3.75
    assert values(readings, "job_power_watts") == pytest.approx({("a",): 240.0, ("b",): 160.0})
    assert values(readings, "job_energy_joules_total") == pytest.approx(
        {("a",): 2400.0, ("b",): 1600.0}
    )
    assert values(readings, "job_flops")["b", "ratio", "high"] == pytest.approx(80e12)
    assert values(readings, "job_devices") == pytest.approx({("a",): 0.6, ("b",): 0.4})
    assert values(readings, "job_sm_active_ratio") == {("a",): 0.2, ("b",): 0.2}, (
        "a property that both see"
    )


@given(
    ticks=st.lists(
        st.tuples(
            st.floats(0.05, 20.0),
            st.one_of(st.none(), st.floats(0.0, 1.0)),
            st.lists(st.floats(0.0, 1.0), min_size=3, max_size=3),
        ),
        min_size=1,
        max_size=12,
    )
)
def test_the_times_of_jobs_add_up_to_the_time_of_the_device(ticks) -> None:
    jobs = [JobTick(job=f"j{n}", processes=(f"{n}@1",), devices=("g",)) for n in range(3)]
    topline = JobAccounting(A100)
    for seconds, busy, weights in ticks:
        host_snapshot = board_with(
            *([] if busy is None else [("gpu_busy_ratio", ("g",), busy)]), g=H100
        )
        total = sum(weights)
        topline.readings(
            host_snapshot,
            seconds,
            parts(g={f"{n}@1": w / total for n, w in enumerate(weights) if total}),
            jobs,
        )
    spent = sum(
        total.busy_ms + total.idle_ms + total.unknown_ms for total in topline.totals.values()
    )
    assert spent == round(sum(seconds for seconds, *_ in ticks) * 1000)


def test_devices_that_are_held_and_not_used_are_idle_but_allocated() -> None:
    host_snapshot = board_with(
        ("gpu_busy_ratio", ("g",), 0.0), ("gpu_busy_ratio", ("other",), 1.0), g=H100, other=H100
    )
    readings = JobAccounting(A100).readings(host_snapshot, 10.0, {}, [JOB])
    assert values(readings, "job_device_seconds_total") == {
        ("j", "busy"): 0.0,
        ("j", "idle"): 10.0,
        ("j", "unknown"): 0.0,
    }
    assert values(readings, "job_devices") == {("j",): 1.0}


def test_a_process_without_a_job_takes_its_part_from_nobody() -> None:
    readings = JobAccounting(A100).readings(BUSY, 10.0, parts(g={"1@1": 0.5, "9@": 0.5}), [JOB])
    seconds = values(readings, "job_device_seconds_total")
    assert (seconds["j", "busy"], seconds["j", "idle"]) == (1.25, 3.75)


def test_a_device_that_does_not_answer_gives_time_that_is_not_known() -> None:
    topline = JobAccounting(A100)
    topline.readings(BUSY, 10.0, parts(g={"1@1": 1.0}), [JOB])
    readings = topline.readings(board_with(g=H100), 10.0, parts(g={"1@1": 1.0}), [JOB])
    assert values(readings, "job_device_seconds_total") == {
        ("j", "busy"): 2.5,
        ("j", "idle"): 7.5,
        ("j", "unknown"): 10.0,
    }
    for metric in ("job_power_watts", "job_flops", "job_sm_active_ratio", "job_device_busy_ratio"):
        assert not values(readings, metric), metric


def test_partitions_that_tell_no_busy_time_have_that_of_their_engine() -> None:
    host_snapshot = board_with(("gpu_graphics_active_ratio", ("g",), 0.5), g=H100)
    host_snapshot.devices["g"] = Device(
        uuid="g", index="0:0", vendor="nvidia", model=H100, parent="whole", multiprocessors=33
    )
    readings = JobAccounting(A100).readings(host_snapshot, 10.0, parts(g={"1@1": 1.0}), [JOB])
    assert values(readings, "job_device_seconds_total")["j", "busy"] == 5.0
    reference = values(readings, "job_reference_device_seconds_total")["j",]
    assert reference == pytest.approx(5.0 * FASTER * 33 / 132), "a quarter of a device"


def test_the_energy_counter_is_taken_where_there_is_one() -> None:
    def energy(*ticks: float | None) -> float:
        topline = JobAccounting(A100)
        for joules in ticks:
            counter = [] if joules is None else [("gpu_energy_joules_total", ("g",), joules)]
            host_snapshot = board_with(
                ("gpu_busy_ratio", ("g",), 0.0), ("gpu_power_watts", ("g",), 7.0), *counter, g=H100
            )
            readings = topline.readings(host_snapshot, 10.0, parts(g={"1@1": 1.0}), [JOB])
        return values(readings, "job_energy_joules_total")["j",]

    assert energy(1000.0, 1500.0, 1800.0) == 70.0 + 800.0, "power until there are two counts"
    assert energy(1000.0, 20.0) == 140.0, "the driver was loaded anew"
    assert energy(None, None) == 140.0


def test_a_device_of_which_neither_power_nor_energy_is_known_leaves_the_sum_untold() -> None:
    host_snapshot = board_with(("gpu_busy_ratio", ("g",), 0.0), g=H100)
    topline = JobAccounting(A100)
    assert not values(topline.readings(host_snapshot, 10.0, {}, [JOB]), "job_energy_joules_total")
    assert not values(topline.readings(BUSY, 10.0, {}, [JOB]), "job_energy_joules_total"), (
        "for good: a part is missing"
    )
    assert topline.totals["j"].gaps == {"job_energy_joules_total": "the energy of g is not known"}


@pytest.mark.parametrize(
    ("reference", "model"), [("no such device", H100), (A100, "no such device")]
)
def test_without_peaks_there_are_no_reference_seconds(reference: str, model: str) -> None:
    host_snapshot = board_with(("gpu_busy_ratio", ("g",), 0.5), g=model)
    readings = JobAccounting(reference).readings(host_snapshot, 10.0, {}, [JOB])
    assert not values(readings, "job_reference_device_seconds_total")
    assert values(readings, "job_device_seconds_total")["j", "busy"] == 5.0


def _with(**facts) -> JobTick:
    return JobTick(
        job="j",
        processes=("1@1",),
        devices=("g",),
        steps=20,
        steps_per_second=2.0,
        facts=TracedFacts(**facts),
    )


def test_input_is_what_the_job_declares_else_what_its_trace_copies() -> None:
    declared = JobTick(
        job="j", steps=20, input_bytes_per_step=5.0, facts=TracedFacts(copied_bytes_per_step=7.0)
    )
    topline = JobAccounting(A100)
    assert values(topline.readings(BUSY, 10.0, {}, [declared]), "job_input_bytes_total") == {
        ("j", "declared"): 100.0
    }
    copied = values(
        topline.readings(BUSY, 10.0, {}, [_with(copied_bytes_per_step=7.0)]),
        "job_input_bytes_total",
    )
    assert copied == {("j", "declared"): 100.0, ("j", "copies"): 140.0}
    assert not values(
        JobAccounting(A100).readings(BUSY, 10.0, {}, [_with()]), "job_input_bytes_total"
    )
    silent = JobTick(job="j", input_bytes_per_step=5.0)
    assert not values(
        JobAccounting(A100).readings(BUSY, 10.0, {}, [silent]), "job_input_bytes_total"
    ), "no steps are told"


@pytest.mark.parametrize(("counted", "error"), [(40e12, 0.25), (75e12, 0.0), (125e12, -0.2)])
def test_the_estimate_is_compared_with_the_flops_of_the_jobs_own_trace(
    counted: float, error: float
) -> None:
    """2 steps a second of so many FLOPs each, against 100 to 200 TFLOP/s."""
    readings = JobAccounting(A100).readings(
        BUSY, 10.0, parts(g={"1@1": 1.0}), [_with(flops_per_step=counted)]
    )
    assert values(readings, "job_flops_error_ratio") == {("j",): pytest.approx(error)}


def test_what_only_a_trace_tells_is_absent_until_there_is_one() -> None:
    without = JobAccounting(A100).readings(BUSY, 10.0, parts(g={"1@1": 1.0}), [_with()])
    assert not values(without, "job_flops_error_ratio")
    assert not values(without, "job_roofline_ratio")
    after = JobAccounting(A100).readings(
        BUSY, 10.0, parts(g={"1@1": 1.0}), [_with(roofline_ratio=0.61)]
    )
    assert values(after, "job_roofline_ratio") == {("j",): 0.61}


def test_a_job_on_two_devices_is_known_as_well_as_the_lesser() -> None:
    host_snapshot = board_with(
        *(("gpu_flops", ("g", "declared", bound), 10.0) for bound in ("low", "high")),
        ("gpu_flops", ("h", "bounds", "low"), 1.0),
        ("gpu_flops", ("h", "bounds", "high"), 8.0),
        g=H100,
        h=H100,
    )
    job = JobTick(job="j", processes=("1@1",), devices=("g", "h"))
    readings = JobAccounting(A100).readings(
        host_snapshot, 10.0, parts(g={"1@1": 1.0}, h={"1@1": 1.0}), [job]
    )
    assert values(readings, "job_flops") == {
        ("j", "bounds", "low"): 11.0,
        ("j", "bounds", "high"): 18.0,
    }
    host_snapshot.put(
        "accelerators",
        [Reading("gpu_flops", ("g", "declared", bound), 1.0) for bound in ("low", "high")],
        2,
    )
    readings = JobAccounting(A100).readings(
        host_snapshot, 10.0, parts(g={"1@1": 1.0}, h={"1@1": 1.0}), [job]
    )
    assert not values(readings, "job_flops"), "a part of it would be too little"


def test_a_mean_over_devices_is_told_where_all_of_them_tell() -> None:
    job = JobTick(job="j", processes=("1@1",), devices=("g", "h"))
    use = [("gpu_sm_active_ratio", ("g",), 0.2), ("gpu_sm_active_ratio", ("h",), 0.6)]
    both = parts(g={"1@1": 1.0}, h={"1@1": 1.0})
    of_two = JobAccounting(A100).readings(board_with(*use, g=H100, h=H100), 10.0, both, [job])
    assert values(of_two, "job_sm_active_ratio") == {("j",): pytest.approx(0.4)}
    assert not values(
        JobAccounting(A100).readings(board_with(use[0], g=H100, h=H100), 10.0, both, [job]),
        "job_sm_active_ratio",
    )


def test_totals_of_a_job_stay_for_a_while_after_its_last_process() -> None:
    topline = JobAccounting(A100)
    topline.readings(BUSY, 10.0, parts(g={"1@1": 1.0}), [JOB])
    topline.readings(BUSY, JOB_RETENTION_S - 20, {}, [])
    readings = topline.readings(BUSY, 10.0, parts(g={"1@1": 1.0}), [JOB])
    assert values(readings, "job_device_seconds_total")["j", "busy"] == 5.0
    topline.readings(BUSY, JOB_RETENTION_S + 20, {}, [])
    assert topline.totals == {}


def test_a_device_has_the_types_of_all_its_jobs_or_of_none() -> None:
    bf16, fp8 = MatrixTypes({"bf16": 1.0}, "declared"), MatrixTypes({"fp8": 2.0}, "trace")
    jobs = [
        JobTick(
            job="a",
            devices=("g", "h"),
            declared_types=bf16,
            facts=TracedFacts(dtype_mix={"tf32": 1.0}),
        ),
        JobTick(job="b", devices=("h", "i"), facts=TracedFacts(dtype_mix={"fp8": 2.0})),
        JobTick(job="c", devices=("i",)),
    ]
    assert collect_matrix_types(jobs) == {"g": [bf16], "h": [bf16, fp8]}
