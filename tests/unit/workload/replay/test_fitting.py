"""What is fitted to measured times: planted latency and bandwidth come back, and `simulate` predicts what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from support.documents import check_document
from traceloom.analyze.bandwidth import compute_bus_factor
from traceloom.cli import main
from traceloom.report import calibration as report
from traceloom.report.documents.predictions import CalibrationDocument
from traceloom.workload.replay.measure import fit_machine
from traceloom.workload.replay.measure_rank import (
    COLLECTIVES,
    FEWEST,
    MOST,
    Recorded,
    Series,
    Task,
    enough,
    half_width,
)
from traceloom.workload.simulate.machine_file import machine_text, read_machine

PLANTED = {  # latency in ns, bus bandwidth in 10^9 B/s
    kind: (20_000 + 7_000 * number, 3.0 + number) for number, kind in enumerate(COLLECTIVES)
}


def task(ranks: int = 2, per_host: int | None = None, *, max_bytes: int = 1 << 26) -> Task:
    return Task(ranks, per_host or ranks, "cpu", "gloo", max_bytes, 4, 0.03, 60.0, "env://")


def recorded(
    of: Task,
    noise: float = 0.05,
    times: int = 25,
    one_clock: bool = True,
    device: str = "A processor",
) -> Recorded:
    """What ranks would record on a machine with the planted figures; every 20th time is disturbed by 4 ms."""
    chance = np.random.default_rng(0)

    def repeated(time_ns: float) -> list[float]:
        disturbed = 4e6 * (chance.random(times) < 0.05)
        return (time_ns * chance.lognormal(0, noise, times) + disturbed).tolist()

    transfers = []
    for group in of.groups():
        count = len(group.ranks)
        for kind in group.kinds:
            latency, bandwidth = PLANTED[kind]
            for size in of.sizes:
                bus = size * compute_bus_factor(kind, count)
                times_ns = repeated(
                    latency * (1 if group.span == "inside" else 3) + bus / bandwidth
                )
                transfers.append(Series(kind, group.span, count, size, bus, times_ns))
    kernels = [Series("copy", "fp32", of.ranks, 1 << 28, 2 << 28, repeated(500 + (2 << 28) / 20))]
    kernels += [
        Series(
            "matrix_product",
            "bf16",
            of.ranks,
            rows,
            2 * rows**3,
            repeated(3_000 + 2 * rows**3 / 400),
        )
        for rows in (128, 256, 512, 1024)
    ]
    return Recorded(transfers, kernels, {}, device, one_clock)


def test_planted_latency_and_bandwidth_come_back() -> None:
    answer = fit_machine(task(), recorded(task()))
    assert answer.transfers["collective"].to_list() == sorted(COLLECTIVES)
    for row in answer.transfers.iter_rows(named=True):
        latency, bandwidth = PLANTED[row["collective"]]
        assert row["form"] == "line"
        assert row["alpha_ns"] == pytest.approx(latency, rel=0.05)
        assert row["bandwidth"] == pytest.approx(bandwidth, rel=0.05)
        assert row["residual_p10"] < 0 < row["residual_p90"]
    assert answer.machine.device is not None
    assert answer.machine.device.flops == {"bf16": pytest.approx(400e9, rel=0.1)}
    assert answer.machine.device.memory == pytest.approx(20e9, rel=0.05)


def test_the_machine_predicts_what_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = fit_machine(task(), recorded(task()))
    (tmp_path / "machine.toml").write_text(machine_text(answer.machine), encoding="utf-8")
    machine = read_machine(tmp_path / "machine.toml")
    keys = ("collective", "span", "ranks", "size_bytes")
    medians = answer.samples.group_by(keys, maintain_order=True).agg(pl.col("transfer_ns").median())
    assert medians.height == len(COLLECTIVES) * len(task().sizes)
    for *key, median in medians.rows():
        answered = machine.transfer_of(*key)
        assert answered.flags == ()
        assert answered.time_ns == pytest.approx(median, rel=0.1)
    for kind, size, own in (("all_reduce", 4 << 20, 4 << 20), ("all_gather", 16 << 20, 8 << 20)):
        workload = tmp_path / kind  # its files tell what each rank gives
        options = [
            "--collective",
            kind,
            "--ranks",
            "2",
            "--size",
            str(own),
            "-o",
            str(workload),
            "-q",
        ]
        assert main(["generate", "collective", *options]) == 0
        capsys.readouterr()
        assert (
            main(["simulate", str(workload), "--machine", str(tmp_path / "machine.toml"), "--json"])
            == 0
        )
        simulated = json.loads(capsys.readouterr().out)["after_ns"]
        fit = answer.transfers.filter(collective=kind).row(0, named=True)
        measured = medians.filter(collective=kind, size_bytes=size)["transfer_ns"].item()
        assert fit["residual_p10"] <= measured / simulated - 1 <= fit["residual_p90"]


def test_groups_lie_inside_hosts_and_between_them() -> None:
    assert [(group.span, group.ranks, len(group.kinds)) for group in task(4, 2).groups()] == [
        ("inside", (0, 1), 5),
        ("inside", (0, 1), 1),
        ("between", (0, 2), 5),
        ("between", (0, 2), 1),
        ("between", (0, 1, 2, 3), 5),
    ]
    assert [group.span for group in task(3, 1).groups()] == ["between", "between"]
    assert list(task(1).groups()) == []
    answer = fit_machine(task(4, 2), recorded(task(4, 2)))
    assert [(part.name, part.size) for part in answer.machine.dimensions] == [
        ("inside", 2),
        ("between", 2),
    ]
    assert (answer.machine.ranks, answer.machine.ranks_per_host) == (4, 2)
    rows = answer.transfers.filter(collective="all_reduce").select("span", "ranks").rows()
    assert sorted(rows) == [("between", 2), ("between", 4), ("inside", 2)]


def test_one_rank_has_a_device_and_no_network() -> None:
    answer = fit_machine(task(1), recorded(task(1)))
    assert answer.machine.dimensions == ()
    assert [notice.slug for notice in answer.notices] == ["transfers-not-measured"]
    document = report.build_calibration(answer)
    check_document(document, CalibrationDocument)
    text = " ".join(line.plain for line in report.render_calibration(document, 100))
    assert "not measured: the network: one rank has nobody to communicate with." in text
    assert "The device reached bf16" in text
    assert "Transfers" not in text


def test_what_a_library_cannot_do_is_said() -> None:
    lacking = recorded(task())._replace(omitted={"all_to_all of 2 ranks": "no such operation"})
    (notice,) = fit_machine(task(), lacking).notices
    assert (notice.slug, notice.count) == ("transfers-not-measured", 1)
    assert notice.message == "not measured: all_to_all of 2 ranks: no such operation"


def test_what_disturbs_and_what_is_assumed_is_said() -> None:
    of = task(2, 1)
    wild = recorded(of, noise=1.5, times=FEWEST, one_clock=False)
    assert {notice.slug for notice in fit_machine(of, wild).notices} == {
        "medians-unsure",
        "no-common-clock",
    }


def test_a_known_device_keeps_its_peaks() -> None:
    """Kernels scale by the ratio of peaks: those of one device have to be of one kind."""
    machine = fit_machine(task(), recorded(task(), device="NVIDIA H100 80GB HBM3")).machine
    assert machine.device is not None
    assert machine.device.name == "H100 SXM"
    assert machine.device.flops["bf16"] > 900e12


def test_the_terminal_shows_every_fit() -> None:
    document = report.build_calibration(fit_machine(task(4, 2), recorded(task(4, 2))))
    check_document(document, CalibrationDocument)
    text = "\n".join(line.plain for line in report.render_calibration(document, 120))
    assert all(kind in text for kind in COLLECTIVES)
    assert "4 in several" in text


def test_a_median_is_known_by_the_times_around_it() -> None:
    assert half_width(np.full(FEWEST, 7.0)) == 0
    few, many = (np.random.default_rng(1).normal(100, 10, count) for count in (10, 400))
    assert half_width(many) < half_width(few)
    inside = sum(
        abs(np.median(sample) - 100) <= half_width(sample) * np.median(sample) * 1.5
        for sample in np.random.default_rng(2).normal(100, 10, (200, 40))
    )
    assert inside > 180
    assert not enough(np.full(FEWEST - 1, 7.0), 0.03)
    assert enough(np.full(FEWEST, 7.0), 0.03)
    wild = np.tile([1.0, 100.0], MOST)
    assert not enough(wild[: MOST // 2], 0.03)
    assert enough(wild[:MOST], 0.03)
    assert enough(np.tile([1e8, 9e8], FEWEST), 0.03)  # enough time was spent
